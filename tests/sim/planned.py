"""Planning, kept: it is pure, takes a quarter of a schedule, and is done alike by both sides, and again for a retry."""

from __future__ import annotations

from functools import lru_cache

from kvmover.transfer.protocol.chunks import Lane

#: What one schedule plans, and not much more: other schedules plan something else.
KEPT = 128


def keep() -> None:
    """From now on, in this process."""
    if not hasattr(Lane.between, "cache_info"):
        Lane.between = lru_cache(KEPT)(Lane.between)
