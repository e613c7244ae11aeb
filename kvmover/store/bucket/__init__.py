"""Pages in an object store: sealed segments that are written whole, listed, and read by range."""
