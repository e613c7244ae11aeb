"""Pages in the memory of a keeper, a process that outlives the engines of its host and hands them slabs to fill."""
