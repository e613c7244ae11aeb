"""Pages in memory that machines pool: objects of a Mooncake Store, one for each box of a page."""
