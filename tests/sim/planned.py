"""Planning, kept: it is pure, takes a quarter of a schedule, and is done alike by both sides, and again for a retry."""

from __future__ import annotations

from functools import lru_cache

from kvmover.plan import lower
from kvmover.transfer.protocol import lane
from kvmover.transfer.protocol.lane import Lane

#: What one schedule plans, and not much more: other schedules plan something else.
KEPT = 128


def keep() -> None:
    """From now on, in this process."""
    if not hasattr(lower.units_of, "cache_info"):
        lower.units_of = lane.units_of = lru_cache(KEPT)(lower.units_of)
        Lane.direct_runs = lru_cache(KEPT)(Lane.direct_runs)
        Lane.between = lru_cache(KEPT)(Lane.between)
