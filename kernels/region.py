"""A Region is a box of rows with the memory at both ends; it is checked, alone and with others, and cut into runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE

if TYPE_CHECKING:
    import torch


Offsets = npt.NDArray[np.int64]

#: Up to so many offsets are compared as a set in 2 us, where sorting takes 5.
FEW = 64


class RegionError(ValueError):
    """A region that reads or writes outside its memory, or with sides that disagree. No byte was moved."""


def is_table(given: object) -> bool:
    """Returns True for a one-dimensional array of int64 on the host; lists and fractions of bytes are refused."""
    return isinstance(given, np.ndarray) and given.dtype == np.int64 and given.ndim == 1


def least_and_most_in_python(offsets: Offsets) -> tuple[int, int]:
    """Returns the smallest and the largest of some offsets. Raises ValueError if there are none."""
    return int(offsets.min()), int(offsets.max())


def least_and_most(offsets: Offsets) -> tuple[int, int]:
    """Returns what `least_and_most_in_python` does, in C where it was built: in 0.4 us, not 5."""
    if NATIVE is not None and offsets.flags.c_contiguous:
        return NATIVE.least_and_most(offsets)
    return least_and_most_in_python(offsets)


def even_distance(offsets: Offsets) -> int | None:
    """Returns the distance between evenly spaced offsets, which need no table; 0 for a single one; None if uneven.

    >>> even_distance(np.array([0, 64, 128])), even_distance(np.array([64, 0, 128]))
    (64, None)
    """
    gaps = len(offsets) - 1
    if gaps < 1:
        return 0
    step = int(offsets[1] - offsets[0])
    if int(offsets[-1] - offsets[0]) != step * gaps:  # true of nearly all uneven offsets
        return None
    return step if gaps == 1 or np.count_nonzero(offsets[1:] - offsets[:-1] == step) == gaps else None


def first_twice(offsets: Offsets) -> int | None:
    """Return the least offset that occurs more than once, or None.

    64 offsets take 3 us, as do any even ones; 2,048 in any order take 34.
    """
    if len(offsets) < 2:
        return None
    if len(offsets) <= FEW:
        listed = offsets.tolist()
        if len({*listed}) == len(listed):
            return None
    elif even_distance(offsets):
        return None
    ordered = np.sort(offsets)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    return int(ordered[twice[0]]) if twice.size else None


@dataclass(frozen=True, eq=False)
class Planes:
    """The start of each plane: `offset[p]` bytes into `memory[allocation[p]]`.

    `memory`: flat uint8 tensors on one device, owned by the caller. `allocation`, `offset` [plane]: int64 on the host.
    Pools never move, so values that every copy needs are cached.
    """

    memory: tuple[torch.Tensor, ...]
    allocation: Offsets
    offset: Offsets

    def __len__(self) -> int:
        return len(self.offset)

    @cached_property
    def addresses(self) -> Offsets:
        """Absolute address of each plane [plane]."""
        bases = np.array([tensor.data_ptr() for tensor in self.memory], np.int64)
        return bases[self.allocation] + self.offset

    @cached_property
    def address_bits(self) -> int:
        """All addresses, or-ed: the low zero bits give their alignment."""
        return int(np.bitwise_or.reduce(self.addresses, initial=0))

    @cached_property
    def fault(self) -> str | None:
        """The fault of the memory or its tables, or None."""
        if not self.memory:
            return "has no memory"
        for tensor in self.memory:
            flat = tensor.element_size() == tensor.dim() == 1 and tensor.is_contiguous()
            if not flat or tensor.device != self.memory[0].device:
                return f"memory must be flat uint8 on one device, got {tensor.dtype} {tensor.device}"
        for name, table in (("allocations", self.allocation), ("offsets", self.offset)):
            if not is_table(table):
                return f"has {name} {table!r:.80}; they are int64 on the host, one a plane"
        if len(self.allocation) != len(self.offset):
            return f"has {len(self.allocation)} allocations for {len(self.offset)} planes"
        if len(self) and (self.allocation.min() < 0 or self.allocation.max() >= len(self.memory)):
            return f"names allocation {self.allocation.max()} of {len(self.memory)}"
        return None

    @cached_property
    def twice(self) -> int | None:
        """An address at which two planes begin, or None."""
        return first_twice(self.addresses)

    @cached_property
    def sizes(self) -> Offsets:
        """Bytes of the allocation of each plane [plane]."""
        return np.array([tensor.numel() for tensor in self.memory], np.int64)[self.allocation]

    @cached_property
    def room(self) -> tuple[int, int]:
        """Bytes, from a plane's start, of memory that every plane has: the first, and one past the last."""
        return -int(self.offset.min()), int((self.sizes - self.offset).min())

    @cached_property
    def extents(self) -> tuple[Offsets, Offsets]:
        """First address of each allocation, ascending, and the furthest end so far."""
        first = np.array([tensor.data_ptr() for tensor in self.memory], np.int64)
        order = np.argsort(first)
        stop = first + np.array([tensor.numel() for tensor in self.memory], np.int64)
        return first[order], np.maximum.accumulate(stop[order])

    @cached_property
    def begins(self) -> list[int]:
        """The first addresses of `extents`, for bisection."""
        return self.extents[0].tolist()

    @cached_property
    def span(self) -> tuple[int, int]:
        """First address of any allocation, and the furthest end."""
        return int(self.extents[0][0]), int(self.extents[1][-1])

    def meets(self, other: Planes) -> bool:
        """Return True if any allocation of these overlaps any of `other`."""
        (first, stop), (other_first, other_stop) = self.span, other.span
        if stop <= other_first or other_stop <= first:
            return False
        few, many = sorted((self, other), key=lambda each: len(each.memory))
        if len(few.memory) == 1:  # an arena, for each chunk: numpy would cost more
            first, stop = few.span
            before = bisect_left(many.begins, stop) - 1
            return before >= 0 and int(many.extents[1][before]) > first
        return _first_overlap(self.extents, other.extents) is not None

    def window(self, first: int, nbytes: int) -> Planes:
        """Return the same planes `first` bytes further, inside `nbytes` of the one allocation that holds them."""
        (memory,) = self.memory
        moved = Planes((memory[first : first + nbytes],), self.allocation, self.offset)
        if self.fault is None and len(self):
            # Cached values are shifted; the rest are computed when used.
            (base, _), (below, _) = self.span, self.room
            moved.__dict__.update(
                fault=None,
                addresses=self.addresses + first,
                address_bits=self.address_bits | first,
                twice=None if self.twice is None else self.twice + first,
                room=(below, nbytes - self._furthest),
                span=(base + first, base + first + nbytes),
            )
        return moved

    @cached_property
    def _furthest(self) -> int:
        return int(self.offset.max())


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The rows of one side in memory.

    Row (plane, unit, head, token) starts `units[unit] + head * head_bytes + token * token_bytes` bytes from its plane's
    start. `units` [unit] is int64 on the host. Raises RegionError for other units.

    `whole`: the list of which `units` are a part, if launches of several parts share a table; see `launch.Shift`.
    """

    planes: Planes
    units: Offsets
    head_bytes: int
    token_bytes: int
    whole: Offsets | None = None

    def __post_init__(self) -> None:
        if not is_table(self.units):
            raise RegionError(f"units = {self.units!r:.80}; they are int64 on the host, one a unit")

    @classmethod
    def of(
        cls,
        memory: tuple[torch.Tensor, ...],
        allocation: Offsets,
        offset: Offsets,
        units: Offsets,
        head_bytes: int,
        token_bytes: int,
    ) -> Side:
        """Build a side with planes that begin `offset[plane]` bytes into `memory[allocation[plane]]`: see `Planes`."""
        return cls(Planes(memory, allocation, offset), units, head_bytes, token_bytes)

    @property
    def listed(self) -> Offsets:
        """The units that a launch's table has: the whole list, or `units`."""
        return self.units if self.whole is None else self.whole

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Flat uint8 tensors on one device, owned by the caller."""
        return self.planes.memory

    @property
    def allocation(self) -> Offsets:
        """Index of each plane's tensor in `memory` [plane]."""
        return self.planes.allocation

    @property
    def offset(self) -> Offsets:
        """Bytes into its tensor where each plane begins [plane]."""
        return self.planes.offset

    @property
    def device(self) -> torch.device:
        """Device of all of its memory."""
        return self.planes.memory[0].device

    def addresses(self) -> Offsets:
        """Absolute address of each plane [plane]."""
        return self.planes.addresses

    def some_planes(self, chosen: slice) -> Side:
        """Return the same rows of the `chosen` planes."""
        return Side.of(
            self.memory, self.allocation[chosen], self.offset[chosen], self.units, self.head_bytes, self.token_bytes
        )

    def check(self, name: str, reach: int) -> None:
        """Raise RegionError unless rows that end `reach` bytes after their unit begins lie inside the memory."""
        if self.planes.fault is not None:
            raise RegionError(f"{name} {self.planes.fault}")
        if self.head_bytes < 0 or self.token_bytes < 0:
            raise RegionError(f"{name} strides {self.head_bytes}, {self.token_bytes} are negative")
        if not len(self.units) or not len(self.planes.offset):
            return
        least, most = least_and_most(self.units)
        most += reach
        below, room = self.planes.room
        if least < below or most > room:
            first, last = self.offset + least, self.offset + most
            plane = int(np.flatnonzero((first < 0) | (last > self.planes.sizes))[0])
            size = self.planes.sizes[plane]
            raise RegionError(
                f"{name} plane {plane} spans bytes {first[plane]}..{last[plane]} of an allocation of {size}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A box of planes x units x heads x tokens rows of `row_bytes`, copied from `src` to `dst`. Dtype-blind.

    `filled`: a unit of `dst` may occur again, for the same bytes: tables of windows and states are filled up with one
    of their pages. Raises RegionError for less than one head, token or byte.
    """

    src: Side
    dst: Side
    heads: int
    tokens: int
    row_bytes: int
    filled: bool = False

    def __post_init__(self) -> None:
        if not (self.heads >= 1 and self.tokens >= 1 and self.row_bytes >= 1):
            raise RegionError(f"region of {self.heads} heads x {self.tokens} tokens x {self.row_bytes} bytes")

    @property
    def planes(self) -> int:
        """Number of planes (layer, kv), the same at both ends."""
        return len(self.src.planes)

    @property
    def units(self) -> int:
        """Number of units in a plane, the same at both ends."""
        return len(self.src.units)

    @property
    def nbytes(self) -> int:
        """Payload bytes: planes x units x heads x tokens x row_bytes."""
        return len(self.src.planes.offset) * len(self.src.units) * self.heads * self.tokens * self.row_bytes

    def check(self) -> None:
        """Raise RegionError unless both sides have the same planes and units and lie inside their memory."""
        src, dst = self.src, self.dst
        if len(src.planes.offset) != len(dst.planes.offset) or len(src.units) != len(dst.units):
            raise RegionError(
                f"source has {self.planes} planes x {self.units} units,"
                f" destination {len(dst.planes)} x {len(dst.units)}"
            )
        for name, side in (("source", src), ("destination", dst)):
            side.check(name, self.reach(side))
        if src.planes.memory[0].device != dst.planes.memory[0].device:
            raise RegionError(f"source on {src.device}, destination on {dst.device}")

    def reach(self, side: Side) -> int:
        """Return the bytes from the first row of a unit to the end of its last."""
        return (self.heads - 1) * side.head_bytes + (self.tokens - 1) * side.token_bytes + self.row_bytes

    def alignment(self) -> int:
        """Return the largest of 16, 8, 4, 2, 1 bytes that divides every row's address at both ends, and the row."""
        bits = 16 | self.row_bytes
        for side in (self.src, self.dst):
            bits |= side.planes.address_bits | int(np.bitwise_or.reduce(side.listed, initial=0))
            bits |= side.head_bytes * (self.heads > 1) | side.token_bytes * (self.tokens > 1)
        return bits & -bits


def at_end(region: Region, end: Literal["src", "dst"]) -> Region:
    """Return a region with the rows of one end on both sides, to be read only."""
    side = region.src if end == "src" else region.dst
    return replace(region, src=side, dst=side)


#: Gives first and one-past-last addresses of pieces of a side.
Extents = Callable[[Region, Side], tuple[Offsets, Offsets]]


def check_apart(regions: Sequence[Region]) -> None:
    """Raise RegionError if a source of the call overlaps a destination, or a destination is written twice.

    For the latter see `check_written_once`. Separate memory on each side, the usual case, is settled by allocations;
    pages of one pool by the bytes from a unit's first row to its last; row by row only if units interleave, as heads of
    a page.
    """
    check_written_once(regions)
    read = {id(region.src.planes): region.src.planes for region in regions}
    written = {id(region.dst.planes): region.dst.planes for region in regions}
    if not [source for source in read.values() for target in written.values() if source.meets(target)]:
        return
    sources, targets = (list(zip(regions, sides, strict=True)) for sides in _sides(regions))
    for extents in (_units, _rows):
        shared = _first_overlap(_gather(sources, extents), _gather(targets, extents))
        if shared is None:
            return
    raise RegionError(f"source and destination share the byte at address {shared}")


def check_written_once(regions: Sequence[Region]) -> None:
    """Raise RegionError if rows of a region overlap, or begin at one address in one region or two.

    The last writer would be chance. Starts of units are compared, not their reach. A region takes 3 us, 34 with 2,048
    units in any order; two regions of 64 planes take 27, four 44.
    """
    for region in regions:
        dst, planes = region.dst, region.dst.planes
        for name, count, step in (("tokens", region.tokens, dst.token_bytes), ("heads", region.heads, dst.head_bytes)):
            if count > 1 and step < region.row_bytes:
                raise RegionError(f"destination {name} of {region.row_bytes} bytes are {step} bytes apart")
        if planes.twice is not None:
            raise RegionError(f"two planes of a destination begin at address {planes.twice}")
        if not region.filled and (twice := first_twice(dst.units)) is not None:
            raise RegionError(f"two units of a destination begin {twice} bytes into their planes")
    if len(regions) < 2:
        return
    owners: dict[int, list[int]] = {}
    for number, region in enumerate(regions):
        for address in () if region.filled else region.dst.addresses().tolist():
            owners.setdefault(address, []).append(number)
    for shared in {tuple(numbers) for numbers in owners.values() if len(numbers) > 1}:
        twice = first_twice(np.concatenate([regions[number].dst.units for number in shared]))
        if twice is not None:
            raise RegionError(f"two regions are written to {twice} bytes into planes that begin at one address")


def _sides(regions: Sequence[Region]) -> tuple[list[Side], list[Side]]:
    return [region.src for region in regions], [region.dst for region in regions]


def _gather(sides: Sequence[tuple[Region, Side]], extents: Extents) -> tuple[Offsets, Offsets]:
    parts = [extents(region, side) for region, side in sides]
    return np.concatenate([first for first, _ in parts]), np.concatenate([stop for _, stop in parts])


def _units(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    first = (side.addresses()[:, None] + side.units).reshape(-1)
    return first, first + region.reach(side)


def _rows(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    units, _ = _units(region, side)
    heads = np.arange(region.heads, dtype=np.int64) * side.head_bytes
    tokens = np.arange(region.tokens, dtype=np.int64) * side.token_bytes
    first = (units[:, None, None] + heads[:, None] + tokens).reshape(-1)
    return first, first + region.row_bytes


def _first_overlap(read: tuple[Offsets, Offsets], written: tuple[Offsets, Offsets]) -> int | None:
    """Return an address inside an interval of both lists, or None."""
    order = np.argsort(written[0])
    first, furthest = written[0][order], np.maximum.accumulate(written[1][order])
    before = np.searchsorted(first, read[1]) - 1  # the last interval that begins before ours ends
    found = np.flatnonzero((before >= 0) & (furthest[before] > read[0]))
    return int(np.maximum(read[0], first[before])[found[0]]) if found.size else None


def merged(region: Region) -> Region:
    """Return the same bytes in the longest rows contiguous on both sides: tokens, heads, planes and units joined."""
    while True:
        longer = _joined(region)
        if longer is region:
            return region
        region = longer


def _joined(region: Region) -> Region:
    """Return `region` with one of its loops joined into the row, or itself."""
    run, sides = region.row_bytes, (region.src, region.dst)
    if region.tokens > 1 and all(side.token_bytes == run for side in sides):
        return replace(region, tokens=1, row_bytes=run * region.tokens)
    if region.heads > 1 and all(side.head_bytes == run for side in sides):
        return replace(region, heads=1, row_bytes=run * region.heads)
    if region.planes > 1 and all(_follow(side.offset, run) and not np.ptp(side.allocation) for side in sides):
        src, dst = (side.some_planes(slice(1)) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.planes)
    if region.units > 1 and all(_follow(side.units, run) for side in sides):
        src, dst = (replace(side, units=side.units[:1]) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.units)
    return region


def _follow(offsets: Offsets, run: int) -> bool:
    return bool((np.diff(offsets) == run).all())


def mean_copy(region: Region) -> float:
    """Return the mean bytes of the `copies` of a merged region, without listing them."""
    run = region.row_bytes
    if region.heads * region.tokens > 1 or not region.units:
        return run
    breaks = (np.diff(region.src.units) != run) | (np.diff(region.dst.units) != run)
    return run * region.units / (1 + np.count_nonzero(breaks))


def copies(region: Region) -> tuple[Offsets, Offsets, Offsets]:
    """Return source addresses, destination addresses and sizes in bytes [copy] of a region.

    Adjacent units are one copy. No copy spans two allocations, also where they touch.
    """
    region = merged(region)
    run, inside = region.row_bytes, region.heads * region.tokens * region.units
    src, dst = _starts(region, region.src), _starts(region, region.dst)
    first = np.ones(len(src), bool)
    first[1:] = (np.diff(src) != run) | (np.diff(dst) != run)
    first[:: max(inside, 1)] = True
    at = np.flatnonzero(first)
    return src[at], dst[at], np.diff(np.append(at, len(src))) * run


def _starts(region: Region, side: Side) -> Offsets:
    """Return the addresses of all runs, in the order plane, head, token, unit."""
    heads, tokens = np.arange(region.heads) * side.head_bytes, np.arange(region.tokens) * side.token_bytes
    inside = (heads[:, None, None] + tokens[:, None] + side.units).reshape(-1)
    return (side.addresses()[:, None] + inside).reshape(-1)
