"""A page store in an object store: sealed segments, written whole, listed, and read by range."""
