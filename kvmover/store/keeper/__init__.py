"""A page store in the memory of a keeper, a process that outlives its host's engines and grants them slabs to fill."""
