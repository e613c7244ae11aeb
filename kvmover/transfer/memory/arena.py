"""The Arena leases regions of staging memory, which is divided into slabs that are registered anew one by one.

Integers only; the memory itself belongs to the mover.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, ItemsView
from dataclasses import dataclass, field
from itertools import pairwise

from kvmover.errors import LayoutError
from kvmover.transport.base import Revocation

#: Alignment of regions, so that packed chunks keep the widest words and whole cache lines.
ALIGN_BYTES = 256


@dataclass(slots=True)
class Arena:
    """First-fit leases over `nbytes` bytes; released neighbours merge.

    It is no ring: a long lease blocks only its own region. A quarantined region is one that a peer may still write; it
    stays leased until `release`.

    Each region lies within one slab of `slab_bytes` bytes (0: the arena is one slab), which is registered by itself.
    Slabs in `shut` take no leases.
    """

    nbytes: int
    slab_bytes: int = 0
    shut: frozenset[int] = field(init=False, default=frozenset())
    _registrations: list[int] = field(init=False)
    _free: list[tuple[int, int]] = field(init=False)
    _leased: dict[int, int] = field(init=False, default_factory=dict[int, int])
    _owners: dict[int, str] = field(init=False, default_factory=dict[int, str])
    _held: Counter[str] = field(init=False, default_factory=Counter[str])
    _quarantined: set[int] = field(init=False, default_factory=set[int])

    def __post_init__(self) -> None:
        if self.nbytes < ALIGN_BYTES:
            raise LayoutError(f"arena of {self.nbytes} bytes is below {ALIGN_BYTES}")
        self.slab_bytes = self.slab_bytes or self.nbytes
        self._registrations = [0] * self.slabs
        self._free = [(slab * self.slab_bytes, self.slab_bytes) for slab in range(self.slabs)]

    @property
    def slabs(self) -> int:
        """The number of slabs; bytes after the last one are unused."""
        return self.nbytes // self.slab_bytes

    def slab_of(self, offset: int) -> int:
        """Returns the number of the slab that a region is in."""
        return offset // self.slab_bytes

    def fits(self, nbytes: int) -> bool:
        """Returns True if `nbytes` bytes fit an empty slab. Regions are multiples of ALIGN_BYTES."""
        return region_bytes(nbytes) <= self.slab_bytes

    def lease(self, nbytes: int, owner: str = "") -> int | None:
        """Lease a region of at least `nbytes` bytes. Returns its offset, or None while it doesn't fit. Raises
        LayoutError for more than a slab.

        `owner`: the account of `leased_by`.
        """
        size = region_bytes(nbytes)
        if size > self.slab_bytes:
            what = "an arena" if self.slabs == 1 else "a slab"
            raise LayoutError(f"region of {nbytes} bytes does not fit {what} of {self.slab_bytes}")
        for i, (offset, room) in enumerate(self._free):
            if room >= size and not (self.shut and self.slab_of(offset) in self.shut):
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self._leased[offset] = size
                self._owners[offset] = owner
                self._held[owner] += size
                return offset
        return None

    def release(self, offset: int) -> None:
        """Release a leased region; its free neighbours in the slab merge with it."""
        size = self._leased.pop(offset)
        owner = self._owners.pop(offset)
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
        self._quarantined.discard(offset)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + size == self._free[at][0] and (offset + size) % self.slab_bytes:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset and offset % self.slab_bytes:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (offset, size))

    def quarantine(self, offset: int) -> None:
        """Mark a leased region as one that a one-sided write may still reach. Raises LayoutError for an offset without
        a lease.
        """
        if offset not in self._leased:
            raise LayoutError(f"no region is leased at {offset}")
        self._quarantined.add(offset)

    def renew(self, slab: int) -> list[int]:
        """Release all regions of a slab that was registered anew, so that no peer reaches them. Returns their offsets.
        Raises LayoutError if one is leased and not quarantined.
        """
        freed = [offset for offset in self._leased if self.slab_of(offset) == slab]
        if healthy := [offset for offset in freed if offset not in self._quarantined]:
            raise LayoutError(f"slab {slab} is renewed under the regions at {healthy}, which are in use")
        for offset in freed:
            self.release(offset)
        self._registrations[slab] = self.registration + 1
        return freed

    @property
    def registration(self) -> int:
        """The number of renewals so far."""
        return max(self._registrations)

    def registration_of(self, offset: int) -> int:
        """Returns the renewal that a peer must know to reach a region; 0: not renewed."""
        return self._registrations[self.slab_of(offset)]

    def leased(self) -> ItemsView[int, int]:
        """Returns (offset, bytes) of each leased region."""
        return self._leased.items()

    def leased_by(self, owner: str) -> int:
        """Returns the bytes leased by an owner, quarantined ones included."""
        return self._held[owner]

    @property
    def free_bytes(self) -> int:
        """The bytes without a lease, in regions that may be too small."""
        return self.nbytes - self.leased_bytes

    @property
    def leased_bytes(self) -> int:
        """The bytes of all leases, quarantined ones included."""
        return self._held.total()

    @property
    def quarantined_bytes(self) -> int:
        """The bytes that peers may still write after their request ended."""
        return sum(self._leased[offset] for offset in self._quarantined)

    def check(self) -> None:
        """Check that regions don't overlap, straddle slabs or leak, in O(regions). Raises AssertionError."""
        spans = sorted([*self._free, *self._leased.items()])
        assert all(offset + size <= after for (offset, size), (after, _) in pairwise(spans)), f"overlap: {spans}"
        assert sum(size for _, size in spans) == self.slabs * self.slab_bytes, f"a region is forgotten: {spans}"
        straddling = [offset for offset, size in spans if self.slab_of(offset) != self.slab_of(offset + size - 1)]
        assert not straddling, f"regions at {straddling} straddle slabs of {self.slab_bytes} bytes"
        assert self._quarantined <= self._leased.keys(), "a region is quarantined that nobody has leased"


def region_bytes(nbytes: int) -> int:
    """Returns the size of a region for `nbytes` bytes."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


#: Most slabs of an arena. More slabs free less at a time, and each adds a registration to every peer's metadata.
MAX_SLABS = 8


def slab_bytes(arena_bytes: int, chunk_bytes: int, revocation: Revocation) -> int:
    """Returns the bytes of each slab: an eighth of the arena, but at least a chunk; the whole arena if slabs can't be
    renewed.

    64 MiB with chunks of 8 MiB are 8 slabs of 8 MiB; with chunks of 32 MiB, 2 of 32 MiB.
    """
    count = min(MAX_SLABS, arena_bytes // region_bytes(chunk_bytes))
    if revocation is Revocation.UNPROVEN or count <= 1:
        return arena_bytes
    return arena_bytes // count // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Renewal:
    """The slabs to renew in an arena in which lost peers may write some regions.

    `now`: slabs whose regions only lost peers may write: registered anew, they are free. `next`: the slab that gets
    there soonest if it takes no more leases; None if no slab waits, or the arena is one slab.
    """

    now: tuple[int, ...] = ()
    next: int | None = None


def renewal(arena: Arena, lost: Collection[int]) -> Renewal:
    """Returns the slabs to renew. `lost`: offsets of quarantined regions whose writers are lost. O(leased regions)."""
    healthy = dict.fromkeys(map(arena.slab_of, lost), 0)
    for offset, nbytes in arena.leased():
        slab = arena.slab_of(offset)
        if slab in healthy and offset not in lost:
            healthy[slab] += nbytes
    now = tuple(sorted(slab for slab, nbytes in healthy.items() if not nbytes))
    waiting = [slab for slab in sorted(healthy) if healthy[slab] and arena.slabs > 1]
    return Renewal(now, min(waiting, key=healthy.__getitem__, default=None))
