"""A Policy limits the size and age of a page store. Imports no store, so that settings can import it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.errors import StoreError

#: Values of `eviction`, by the names of the prefix tree's policies.
EVICTIONS = ("lru", "hazard")


@dataclass(frozen=True, slots=True)
class Policy:
    """The size and age limits of a namespace. Raises StoreError for a value below its minimum.

    `quota_bytes`: payload on disk, enforced by every writing process. `ttl_s`: a page unused for so long expires.
    `segment_bytes`: approximate size of a data file. `stamp_s`: precision of the shared last-use times. `eviction`:
    which page goes first, `lru`; or, in directories, `hazard`: the page least likely to be read again, as this process
    has learnt from its reads and writes, in 300 bytes a page.
    """

    quota_bytes: int | None = None
    ttl_s: float | None = None
    segment_bytes: int = 256 << 20
    stamp_s: int = 60
    eviction: str = "lru"

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise StoreError(f"policy has eviction = {self.eviction!r}; it must be one of {', '.join(EVICTIONS)}")
        for name, least in (("quota_bytes", 1), ("ttl_s", 0), ("segment_bytes", 1), ("stamp_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise StoreError(f"policy has {name} = {value}; it must be at least {least}")
