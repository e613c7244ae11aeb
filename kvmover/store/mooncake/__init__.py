"""A page store in a Mooncake Store, memory pooled by machines: one object for each box of a page."""
