"""A Region is a box of rows with the memory at both ends. It is checked, also against others, and cut into runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


Offsets = npt.NDArray[np.int64]


class RegionError(ValueError):
    """A region that reads or writes outside its memory, or whose two sides disagree. Nothing was moved."""


def even_distance(offsets: Offsets) -> int | None:
    """Between offsets that follow each other evenly, 0 for a single one, or None: what is even needs no table.

    >>> even_distance(np.array([0, 64, 128])), even_distance(np.array([64, 0, 128]))
    (64, None)
    """
    if len(offsets) < 2:
        return 0
    steps = np.diff(offsets)
    return int(steps[0]) if (steps == steps[0]).all() else None


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Rows in memory: row (plane, unit, head, token) starts `offset[plane] + units[unit] + head * head_bytes +
    token * token_bytes` bytes into `memory[allocation[plane]]`.

    `memory`: flat uint8 tensors on one device, owned by the caller. `allocation`, `offset` [plane] and `units` [unit]
    are int64 on the host.
    """

    memory: tuple[torch.Tensor, ...]
    allocation: Offsets
    offset: Offsets
    units: Offsets
    head_bytes: int
    token_bytes: int

    def addresses(self) -> Offsets:
        """Absolute address of each plane [plane]."""
        bases = np.array([tensor.data_ptr() for tensor in self.memory], np.int64)
        return bases[self.allocation] + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """planes x units x heads x tokens rows of `row_bytes`, copied from `src` to `dst`. Dtype-blind."""

    src: Side
    dst: Side
    heads: int
    tokens: int
    row_bytes: int

    @property
    def planes(self) -> int:
        """Number of planes (layer, kv), the same at both ends."""
        return len(self.src.offset)

    @property
    def units(self) -> int:
        """Number of units in a plane, the same at both ends."""
        return len(self.src.units)

    @property
    def nbytes(self) -> int:
        """Payload bytes: planes x units x heads x tokens x row_bytes."""
        return self.planes * self.units * self.heads * self.tokens * self.row_bytes

    def check(self) -> None:
        """Raise RegionError unless both sides have the same planes and units and lie inside their memory."""
        if min(self.heads, self.tokens, self.row_bytes) < 1:
            raise RegionError(f"region of {self.heads} heads x {self.tokens} tokens x {self.row_bytes} bytes")
        if self.planes != len(self.dst.offset) or self.units != len(self.dst.units):
            raise RegionError(
                f"source has {self.planes} planes x {self.units} units,"
                f" destination {len(self.dst.offset)} x {len(self.dst.units)}"
            )
        for name, side in (("source", self.src), ("destination", self.dst)):
            self._check_side(name, side)
        if self.src.memory[0].device != self.dst.memory[0].device:
            raise RegionError(f"source on {self.src.memory[0].device}, destination on {self.dst.memory[0].device}")

    def _check_side(self, name: str, side: Side) -> None:
        if not side.memory:
            raise RegionError(f"{name} has no memory")
        for tensor in side.memory:
            flat = tensor.element_size() == tensor.dim() == 1 and tensor.is_contiguous()
            if not flat or tensor.device != side.memory[0].device:
                raise RegionError(f"{name} memory must be flat uint8 on one device, got {tensor.dtype} {tensor.device}")
        if len(side.allocation) != len(side.offset):
            raise RegionError(f"{name} has {len(side.allocation)} allocations for {len(side.offset)} planes")
        if side.head_bytes < 0 or side.token_bytes < 0:
            raise RegionError(f"{name} strides {side.head_bytes}, {side.token_bytes} are negative")
        if not self.units or not self.planes:
            return
        if side.allocation.min() < 0 or side.allocation.max() >= len(side.memory):
            raise RegionError(f"{name} names allocation {side.allocation.max()} of {len(side.memory)}")
        sizes = np.array([tensor.numel() for tensor in side.memory], np.int64)[side.allocation]
        reach = (self.heads - 1) * side.head_bytes + (self.tokens - 1) * side.token_bytes + self.row_bytes
        first = side.offset + side.units.min()
        last = side.offset + side.units.max() + reach
        if (first < 0).any() or (last > sizes).any():
            plane = int(np.flatnonzero((first < 0) | (last > sizes))[0])
            raise RegionError(
                f"{name} plane {plane} spans bytes {first[plane]}..{last[plane]} of an allocation of {sizes[plane]}"
            )

    def alignment(self) -> int:
        """The largest of 16, 8, 4, 2, 1 bytes that divides every row's address at both ends, and the row."""
        parts = [self.row_bytes]
        for side in (self.src, self.dst):
            parts += [int(np.gcd.reduce(side.addresses(), initial=0)), int(np.gcd.reduce(side.units, initial=0))]
            parts += [side.head_bytes] * (self.heads > 1) + [side.token_bytes] * (self.tokens > 1)
        return int(np.gcd.reduce([*parts, 16]))


#: First and one-past-last address of pieces of a side.
Extents = Callable[[Region, Side], tuple[Offsets, Offsets]]


def check_apart(regions: Sequence[Region]) -> None:
    """Raise RegionError where any source of the call overlaps any destination of it.

    Memory of its own on each side, which is the rule, is settled by comparing allocations; pages of one pool by the
    bytes from a unit's first row to its last; only where those interleave, as heads of one page do, row by row.
    """
    sources, targets = ([(region, getattr(region, side)) for region in regions] for side in ("src", "dst"))
    for extents in (_allocations, _units, _rows):
        shared = _first_overlap(_gather(sources, extents), _gather(targets, extents))
        if shared is None:
            return
    raise RegionError(f"source and destination share the byte at address {shared}")


def _gather(sides: Sequence[tuple[Region, Side]], extents: Extents) -> tuple[Offsets, Offsets]:
    parts = [extents(region, side) for region, side in sides]
    return np.concatenate([first for first, _ in parts]), np.concatenate([stop for _, stop in parts])


def _allocations(_: Region, side: Side) -> tuple[Offsets, Offsets]:
    first = np.array([tensor.data_ptr() for tensor in side.memory], np.int64)
    return first, first + np.array([tensor.numel() for tensor in side.memory], np.int64)


def _units(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    first = (side.addresses()[:, None] + side.units).reshape(-1)
    reach = (region.heads - 1) * side.head_bytes + (region.tokens - 1) * side.token_bytes + region.row_bytes
    return first, first + reach


def _rows(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    units, _ = _units(region, side)
    heads = np.arange(region.heads, dtype=np.int64) * side.head_bytes
    tokens = np.arange(region.tokens, dtype=np.int64) * side.token_bytes
    first = (units[:, None, None] + heads[:, None] + tokens).reshape(-1)
    return first, first + region.row_bytes


def _first_overlap(read: tuple[Offsets, Offsets], written: tuple[Offsets, Offsets]) -> int | None:
    """An address inside an interval of both, or None."""
    order = np.argsort(written[0])
    first, furthest = written[0][order], np.maximum.accumulate(written[1][order])
    before = np.searchsorted(first, read[1]) - 1  # the last interval that begins before ours ends
    found = np.flatnonzero((before >= 0) & (furthest[before] > read[0]))
    return int(np.maximum(read[0], first[before])[found[0]]) if found.size else None


def merged(region: Region) -> Region:
    """The same bytes in the longest rows that are contiguous on both sides: tokens, heads, planes and units joined."""
    while True:
        longer = _joined(region)
        if longer is region:
            return region
        region = longer


def _joined(region: Region) -> Region:
    """`region` with one of its loops joined into the row, or itself."""
    run, sides = region.row_bytes, (region.src, region.dst)
    if region.tokens > 1 and all(side.token_bytes == run for side in sides):
        return replace(region, tokens=1, row_bytes=run * region.tokens)
    if region.heads > 1 and all(side.head_bytes == run for side in sides):
        return replace(region, heads=1, row_bytes=run * region.heads)
    if region.planes > 1 and all(_follow(side.offset, run) and not np.ptp(side.allocation) for side in sides):
        src, dst = (replace(side, allocation=side.allocation[:1], offset=side.offset[:1]) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.planes)
    if region.units > 1 and all(_follow(side.units, run) for side in sides):
        src, dst = (replace(side, units=side.units[:1]) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.units)
    return region


def _follow(offsets: Offsets, run: int) -> bool:
    return bool((np.diff(offsets) == run).all())


def mean_copy(region: Region) -> float:
    """Mean bytes of the `copies` of a merged region, without the list of them."""
    run = region.row_bytes
    if region.heads * region.tokens > 1 or not region.units:
        return run
    breaks = (np.diff(region.src.units) != run) | (np.diff(region.dst.units) != run)
    return run * region.units / (1 + np.count_nonzero(breaks))


def copies(region: Region) -> tuple[Offsets, Offsets, Offsets]:
    """Source addresses, destination addresses and sizes [copy] of a region: units that follow each other are one copy.

    No copy spans two allocations, also where they touch.
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
    """Addresses of all runs, in the order plane, head, token, unit."""
    heads, tokens = np.arange(region.heads) * side.head_bytes, np.arange(region.tokens) * side.token_bytes
    inside = (heads[:, None, None] + tokens[:, None] + side.units).reshape(-1)
    return (side.addresses()[:, None] + inside).reshape(-1)
