"""Arena: who has which part of the staging memory, and how that is divided into slabs that are registered anew.

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

#: Regions start at multiples of this, so that packed chunks keep the widest words and whole cache lines.
ALIGN_BYTES = 256


@dataclass(slots=True)
class Arena:
    """First-fit leases over `nbytes` bytes, neighbours merged when they come back.

    No ring: a long-lived lease blocks nobody but itself. A quarantined region is one that a peer may still write; it
    stays out of circulation until `release` is told that this is over.

    No region straddles two slabs of `slab_bytes` bytes (0: the arena is one), each of which is registered by itself.
    Slabs that are `shut` take no leases.
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
        """How many; what is left behind them is of no use."""
        return self.nbytes // self.slab_bytes

    def slab_of(self, offset: int) -> int:
        """The number of the slab that a region is in."""
        return offset // self.slab_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether there is ever room for `nbytes` bytes: a region takes whole multiples of ALIGN_BYTES."""
        return region_bytes(nbytes) <= self.slab_bytes

    def lease(self, nbytes: int, owner: str = "") -> int | None:
        """Offset of a region of at least `nbytes` bytes, or None while there is no room. Raises when there never is.

        `owner`: for whose sake, which `leased_by` counts by.
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
        """Give a region back; its neighbours in the slab merge with it."""
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
        """Keep a leased region out of use: a one-sided write may still land in it."""
        if offset not in self._leased:
            raise LayoutError(f"no region is leased at {offset}")
        self._quarantined.add(offset)

    def renew(self, slab: int) -> list[int]:
        """The slab was registered anew: no peer reaches its regions. Returns their offsets, now free."""
        freed = [offset for offset in self._leased if self.slab_of(offset) == slab]
        if healthy := [offset for offset in freed if offset not in self._quarantined]:
            raise LayoutError(f"slab {slab} is renewed under the regions at {healthy}, which are in use")
        for offset in freed:
            self.release(offset)
        self._registrations[slab] = self.registration + 1
        return freed

    @property
    def registration(self) -> int:
        """How often slabs were renewed."""
        return max(self._registrations)

    def registration_of(self, offset: int) -> int:
        """The renewal that a peer must know of to reach a region; 0: none."""
        return self._registrations[self.slab_of(offset)]

    def leased(self) -> ItemsView[int, int]:
        """Offset and bytes of each region."""
        return self._leased.items()

    def leased_by(self, owner: str) -> int:
        """Bytes of its regions, the quarantined ones included."""
        return self._held[owner]

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody leases, in regions that may be too small."""
        return self.nbytes - self.leased_bytes

    @property
    def leased_bytes(self) -> int:
        """Bytes of all leases, those in quarantine too."""
        return self._held.total()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that a peer may still write though their request is over."""
        return sum(self._leased[offset] for offset in self._quarantined)

    def check(self) -> None:
        """Raise AssertionError where regions overlap, straddle slabs or are forgotten. O(regions)."""
        spans = sorted([*self._free, *self._leased.items()])
        assert all(offset + size <= after for (offset, size), (after, _) in pairwise(spans)), f"overlap: {spans}"
        assert sum(size for _, size in spans) == self.slabs * self.slab_bytes, f"a region is forgotten: {spans}"
        straddling = [offset for offset, size in spans if self.slab_of(offset) != self.slab_of(offset + size - 1)]
        assert not straddling, f"regions at {straddling} straddle slabs of {self.slab_bytes} bytes"
        assert self._quarantined <= self._leased.keys(), "a region is quarantined that nobody has leased"


def region_bytes(nbytes: int) -> int:
    """What a region of `nbytes` bytes takes."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


#: More slabs free less at a time, and each is one registration more in everybody's metadata.
MAX_SLABS = 8


def slab_bytes(arena_bytes: int, chunk_bytes: int, revocation: Revocation) -> int:
    """Bytes of each slab: an eighth of the arena, but no less than a chunk; all of it where no slab is ever renewed.

    64 MiB with chunks of 8 MiB are 8 slabs of 8 MiB; with chunks of 32 MiB, 2 of 32 MiB.
    """
    count = min(MAX_SLABS, arena_bytes // region_bytes(chunk_bytes))
    if revocation is Revocation.UNPROVEN or count <= 1:
        return arena_bytes
    return arena_bytes // count // ALIGN_BYTES * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Renewal:
    """What to do with an arena of which peers that are lost may write some regions.

    `now`: slabs that nobody else has a region of: deregistered and registered anew, they are free. `next`: the slab
    that gets there soonest if nobody is given more of it; None where none waits, or where there is no other slab.
    """

    now: tuple[int, ...] = ()
    next: int | None = None


def renewal(arena: Arena, lost: Collection[int]) -> Renewal:
    """`lost`: offsets of quarantined regions whose writers are lost. O(leased regions)."""
    healthy = dict.fromkeys(map(arena.slab_of, lost), 0)
    for offset, nbytes in arena.leased():
        slab = arena.slab_of(offset)
        if slab in healthy and offset not in lost:
            healthy[slab] += nbytes
    now = tuple(sorted(slab for slab, nbytes in healthy.items() if not nbytes))
    waiting = [slab for slab in sorted(healthy) if healthy[slab] and arena.slabs > 1]
    return Renewal(now, min(waiting, key=healthy.__getitem__, default=None))
