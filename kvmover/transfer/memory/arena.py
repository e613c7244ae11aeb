"""The Arena reserves regions of staging memory, which is divided into slabs that are registered anew one by one.

Integers only; the memory itself belongs to the mover.
"""

from __future__ import annotations

from bisect import bisect_left
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
    """First-fit reservations over `nbytes` bytes; released neighbours merge.

    It is no ring: a long reservation blocks only its own region. A quarantined region is one that a peer may still
    write; it stays reserved until `release`.

    Each region lies within one slab of `slab_bytes` bytes (0: the arena is one slab), which is registered by itself.
    Slabs in `shut` take no reservations.
    """

    nbytes: int
    slab_bytes: int = 0
    shut: frozenset[int] = field(init=False, default=frozenset())
    _registrations: list[int] = field(init=False)
    _free: list[tuple[int, int]] = field(init=False)
    _reserved: dict[int, int] = field(init=False, default_factory=dict[int, int])
    _owners: dict[int, str] = field(init=False, default_factory=dict[int, str])
    _owned: Counter[str] = field(init=False, default_factory=Counter[str])
    _quarantined: set[int] = field(init=False, default_factory=set[int])

    def __post_init__(self) -> None:
        if self.nbytes < ALIGN_BYTES:
            raise LayoutError(f"arena of {self.nbytes} bytes is below {ALIGN_BYTES}")
        self.slab_bytes = self.slab_bytes or self.nbytes
        self._registrations = [0] * self.slabs
        self._free = [(slab * self.slab_bytes, self.slab_bytes) for slab in range(self.slabs)]

    @property
    def slabs(self) -> int:
        """Returns the number of slabs; bytes after the last one are unused."""
        return self.nbytes // self.slab_bytes

    def slab_of(self, offset: int) -> int:
        """Returns the number of the slab that a region is in."""
        return offset // self.slab_bytes

    def fits(self, nbytes: int) -> bool:
        """Returns True if `nbytes` bytes fit an empty slab. Regions are multiples of ALIGN_BYTES."""
        return region_bytes(nbytes) <= self.slab_bytes

    def reserve(self, nbytes: int, owner: str = "") -> int | None:
        """Reserve a region of at least `nbytes` bytes. Returns its offset, or None while it doesn't fit. Raises
        LayoutError for more than a slab.

        `owner`: the account of `reserved_by`.
        """
        size = region_bytes(nbytes)
        if size > self.slab_bytes:
            what = "an arena" if self.slabs == 1 else "a slab"
            raise LayoutError(f"region of {nbytes} bytes does not fit {what} of {self.slab_bytes}")
        assert size > 0, f"a region of {nbytes} bytes"
        for i, (offset, room) in enumerate(self._free):
            if room >= size and not (self.shut and self.slab_of(offset) in self.shut):
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                assert offset not in self._reserved, f"the region at {offset} is reserved twice"
                assert self.slab_of(offset) == self.slab_of(offset + size - 1), f"{size} bytes at {offset} straddle"
                self._reserved[offset] = size
                self._owners[offset] = owner
                self._owned[owner] += size
                return offset
        return None

    def release(self, offset: int) -> None:
        """Release a reserved region; its free neighbours in the slab merge with it. Raises LayoutError for a free
        offset.
        """
        if offset not in self._reserved:
            raise LayoutError(f"no region is reserved at {offset}")
        size = self._reserved.pop(offset)
        owner = self._owners.pop(offset)
        self._owned[owner] -= size
        if not self._owned[owner]:
            del self._owned[owner]
        self._quarantined.discard(offset)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + size == self._free[at][0] and (offset + size) % self.slab_bytes:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset and offset % self.slab_bytes:
            at -= 1
            offset, before = self._free.pop(at)
            size += before
        self._free.insert(at, (offset, size))
        for (first, room), (after, _) in pairwise(self._free[max(0, at - 1) : at + 2]):
            assert first + room < after or (first + room == after and after % self.slab_bytes == 0), (
                f"{room} free bytes at {first} overlap those at {after}, or were not merged"
            )

    def quarantine(self, offset: int) -> None:
        """Mark a reserved region as one that a one-sided write may still reach. Raises LayoutError for a free
        offset.
        """
        if offset not in self._reserved:
            raise LayoutError(f"no region is reserved at {offset}")
        self._quarantined.add(offset)
        assert offset in self._reserved, f"the quarantined region at {offset} is free"

    def renew(self, slab: int) -> list[int]:
        """Release all regions of a slab that was registered anew, so that no peer reaches them. Returns their offsets.
        Raises LayoutError if one is reserved and not quarantined.
        """
        freed = [offset for offset in self._reserved if self.slab_of(offset) == slab]
        if healthy := [offset for offset in freed if offset not in self._quarantined]:
            raise LayoutError(f"slab {slab} is renewed under the regions at {healthy}, which are in use")
        for offset in freed:
            self.release(offset)
        start, before = slab * self.slab_bytes, self.registration
        self._registrations[slab] = before + 1
        assert (start, self.slab_bytes) in self._free, f"slab {slab} is renewed and not free as a whole"
        assert self.registration_of(start) == self.registration > before, f"slab {slab} keeps its registration"
        return freed

    @property
    def registration(self) -> int:
        """Returns the number of renewals so far."""
        return max(self._registrations)

    def registration_of(self, offset: int) -> int:
        """Returns the renewal that a peer must know to reach a region; 0: not renewed."""
        return self._registrations[self.slab_of(offset)]

    def reserved(self) -> ItemsView[int, int]:
        """Returns (offset, bytes) of each reserved region."""
        return self._reserved.items()

    def reserved_by(self, owner: str) -> int:
        """Returns the bytes reserved by an owner, quarantined ones included."""
        return self._owned[owner]

    @property
    def free_bytes(self) -> int:
        """Returns the free bytes, in regions that may be too small."""
        return self.nbytes - self.reserved_bytes

    @property
    def reserved_bytes(self) -> int:
        """Returns the bytes of all reserved regions, quarantined ones included."""
        return self._owned.total()

    @property
    def quarantined_bytes(self) -> int:
        """Returns the bytes that peers may still write after their request ended."""
        return sum(self._reserved[offset] for offset in self._quarantined)

    def check(self) -> None:
        """Check that regions don't overlap, straddle slabs or leak, in O(regions). Raises AssertionError."""
        spans = sorted([*self._free, *self._reserved.items()])
        assert all(offset + size <= after for (offset, size), (after, _) in pairwise(spans)), f"overlap: {spans}"
        assert sum(size for _, size in spans) == self.slabs * self.slab_bytes, f"a region is forgotten: {spans}"
        straddling = [offset for offset, size in spans if self.slab_of(offset) != self.slab_of(offset + size - 1)]
        assert not straddling, f"regions at {straddling} straddle slabs of {self.slab_bytes} bytes"
        assert self._quarantined <= self._reserved.keys(), "a region is quarantined that is free"


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
    there soonest if it takes no more reservations; None if no slab waits, or the arena is one slab.
    """

    now: tuple[int, ...] = ()
    next: int | None = None


def renewal(arena: Arena, lost: Collection[int]) -> Renewal:
    """Returns the slabs to renew, in O(reserved regions). `lost`: offsets of quarantined regions whose writers are
    lost.
    """
    healthy = dict.fromkeys(map(arena.slab_of, lost), 0)
    for offset, nbytes in arena.reserved():
        slab = arena.slab_of(offset)
        if slab in healthy and offset not in lost:
            healthy[slab] += nbytes
    now = tuple(sorted(slab for slab, nbytes in healthy.items() if not nbytes))
    waiting = [slab for slab in sorted(healthy) if healthy[slab] and arena.slabs > 1]
    return Renewal(now, min(waiting, key=healthy.__getitem__, default=None))
