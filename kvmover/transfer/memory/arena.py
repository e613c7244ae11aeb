"""Arena: who has which part of the staging memory. Integers only; the memory itself belongs to the mover."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from kvmover.errors import LayoutError

#: Regions start at multiples of this, so that packed chunks keep the widest words and whole cache lines.
ALIGN_BYTES = 256


@dataclass(slots=True)
class Arena:
    """First-fit leases over `nbytes` bytes, neighbours merged when they come back.

    No ring: a long-lived lease blocks nobody but itself. A quarantined region is one that a peer may still write; it
    stays out of circulation until `release` is told that this is over.
    """

    nbytes: int
    _free: list[tuple[int, int]] = field(init=False)
    _leased: dict[int, int] = field(init=False, default_factory=dict[int, int])
    _owners: dict[int, str] = field(init=False, default_factory=dict[int, str])
    _held: Counter[str] = field(init=False, default_factory=Counter[str])
    _quarantined: set[int] = field(init=False, default_factory=set[int])

    def __post_init__(self) -> None:
        if self.nbytes < ALIGN_BYTES:
            raise LayoutError(f"arena of {self.nbytes} bytes is below {ALIGN_BYTES}")
        self._free = [(0, self.nbytes)]

    def fits(self, nbytes: int) -> bool:
        """Whether there is ever room for `nbytes` bytes: a region takes whole multiples of ALIGN_BYTES."""
        return region_bytes(nbytes) <= self.nbytes

    def lease(self, nbytes: int, owner: str = "") -> int | None:
        """Offset of a region of at least `nbytes` bytes, or None while there is no room. Raises when there never is.

        `owner`: for whose sake, which `leased_by` counts by.
        """
        size = region_bytes(nbytes)
        if size > self.nbytes:
            raise LayoutError(f"region of {nbytes} bytes does not fit an arena of {self.nbytes}")
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self._leased[offset] = size
                self._owners[offset] = owner
                self._held[owner] += size
                return offset
        return None

    def release(self, offset: int) -> None:
        """Give a region back; its neighbours merge with it."""
        size = self._leased.pop(offset)
        owner = self._owners.pop(offset)
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
        self._quarantined.discard(offset)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + size == self._free[at][0]:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (offset, size))

    def quarantine(self, offset: int) -> None:
        """Keep a leased region out of use: a one-sided write may still land in it."""
        if offset not in self._leased:
            raise LayoutError(f"no region is leased at {offset}")
        self._quarantined.add(offset)

    def leased_by(self, owner: str) -> int:
        """Bytes of its regions, the quarantined ones included."""
        return self._held[owner]

    @property
    def free_bytes(self) -> int:
        return self.nbytes - self.leased_bytes

    @property
    def leased_bytes(self) -> int:
        return self._held.total()

    @property
    def quarantined_bytes(self) -> int:
        return sum(self._leased[offset] for offset in self._quarantined)


def region_bytes(nbytes: int) -> int:
    """What a region of `nbytes` bytes takes."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
