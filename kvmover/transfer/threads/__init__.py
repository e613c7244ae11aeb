"""A mover driven by a thread of its own, for callers in any thread or in asyncio."""
