"""Authors of a store test it with this kit."""
