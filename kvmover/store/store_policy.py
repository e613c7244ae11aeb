"""A Policy limits the size and age of a page store. Imports no store, so that settings can import it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvmover.errors import StoreError
from kvmover.fields import settle


class PageEviction(StrEnum):
    """The page that goes first, by the names of the prefix tree's policies: the least recently used one; or, in
    directories, the one least likely to be read again, as this process has learnt from its reads and writes, in 300
    bytes a page.
    """

    LRU = "lru"
    HAZARD = "hazard"


@dataclass(frozen=True, slots=True)
class Policy:
    """The size and age limits of a namespace. Raises StoreError for a value below its minimum.

    `quota_bytes`: payload on disk, enforced by every writing process. `ttl_s`: a page unused for so long expires.
    `segment_bytes`: approximate size of a data file. `stamp_s`: precision of the shared last-use times. `eviction`:
    which page goes first.
    """

    quota_bytes: int | None = None
    ttl_s: float | None = None
    segment_bytes: int = 256 << 20
    stamp_s: int = 60
    eviction: PageEviction = PageEviction.LRU

    def __post_init__(self) -> None:
        settle(self, "policy", StoreError, eviction=PageEviction)
        for name, least in (("quota_bytes", 1), ("ttl_s", 0), ("segment_bytes", 1), ("stamp_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise StoreError(f"policy has {name} = {value}; it must be at least {least}")
