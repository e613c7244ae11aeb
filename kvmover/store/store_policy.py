"""A Policy says how much a page store may hold, and for how long. Imports nothing of a store, so that settings may."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.errors import StoreError


@dataclass(frozen=True, slots=True)
class Policy:
    """How much a namespace may hold, and for how long.

    `quota_bytes`: of payload on disk, kept by every process that writes. `ttl_s`: a page unused for so long is gone.
    `segment_bytes`: about the size of a data file. `stamp_s`: how exactly the time of a read is told to others.
    """

    quota_bytes: int | None = None
    ttl_s: float | None = None
    segment_bytes: int = 256 << 20
    stamp_s: int = 60

    def __post_init__(self) -> None:
        for name, least in (("quota_bytes", 1), ("ttl_s", 0), ("segment_bytes", 1), ("stamp_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise StoreError(f"policy has {name} = {value}; it must be at least {least}")
