"""The reference move, in plain numpy, is the tests' oracle and serves CPU memory without the C core.

Rows are taken and put as opaque elements of their whole width: each is one memcpy, whatever its alignment. On rows of
512 B in the cache, take reached 46 GB/s and put 13, torch's index_select 31 and index_copy_ 6; on 32 KiB 54 and 43,
against 53 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .region import Offsets, Region, Side, check_apart, even_distance

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

#: Bytes, about, of the temporary for rows that are dense on neither side, so that it stays in the L2 cache.
TEMPORARY_BYTES = 1 << 19

#: Least bytes of boxes to be copied one by one: twice as fast as through a temporary, on 512-byte rows in memory 6 GB/s
#: against 3. A box takes 2 us beside its bytes.
LEAST_BOX_BYTES = 16 << 10


def move(regions: Sequence[Region]) -> None:
    """Copy every row of every region, in no promised order. Raises RegionError before the first byte is written."""
    for region in checked(regions):
        _copy(region)


def checked(regions: Sequence[Region]) -> list[Region]:
    """Return the regions with bytes to move. Raises RegionError unless all regions can be moved together."""
    for region in regions:
        region.check()
    work = [region for region in regions if region.nbytes]
    if work:
        check_apart(work)
    return work


def _copy(region: Region) -> None:
    """Copy together all planes that share both allocations."""
    groups: dict[tuple[int, int], list[int]] = {}
    for plane, ends in enumerate(zip(region.src.allocation.tolist(), region.dst.allocation.tolist(), strict=True)):
        groups.setdefault(ends, []).append(plane)
    part: Bytes | None = None
    for (source, target), members in groups.items():
        planes = np.array(members)
        src = _Rows.of(region, region.src, planes, source)
        dst = _Rows.of(region, region.dst, planes, target)
        # numpy copies an input that may share memory with the output, even if rows of one pool do not overlap.
        apart = not np.may_share_memory(src.memory, dst.memory)
        if apart and dst.dense:
            _take(src, src.index(), dst.bytes())
        elif apart and src.dense:
            _put(dst, dst.index(), src.bytes())
        elif apart and (boxes := _Boxes.of(region, planes)) is not None:
            boxes.copy(src.memory, dst.memory)
        else:
            # One temporary for all groups: fresh memory costs a page fault every 4 KiB, three times the copy.
            part = np.empty(TEMPORARY_BYTES, np.uint8) if part is None else part
            _copy_in_parts(src, dst, part)


@dataclass(frozen=True, slots=True)
class _Boxes:
    """A region as boxes laid out alike: each end of a box is an array of rows with even distances.

    `shape` and the `strides` of both ends, in bytes, are those of a box [plane, head, token]; `starts` [box]: bytes. A
    box is a unit, or a plane of a unit if planes are at uneven distances.
    """

    row_bytes: int
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    starts: tuple[Offsets, Offsets]

    @classmethod
    def of(cls, region: Region, planes: Offsets) -> _Boxes | None:
        """Return the boxes, or None if they are so small that copying by index is faster."""
        ends = region.src, region.dst
        steps = [even_distance(end.offset[planes]) for end in ends]
        box = region.heads * region.tokens * region.row_bytes
        shape = (region.heads, region.tokens)
        strides = [(end.head_bytes, end.token_bytes) for end in ends]
        if steps[0] is not None and steps[1] is not None:
            starts = [end.offset[planes[0]] + end.units for end in ends]
            shape, box = (len(planes), *shape), len(planes) * box
            strides = [(step, *stride) for step, stride in zip(steps, strides, strict=True)]
        else:
            starts = [(end.offset[planes, None] + end.units).reshape(-1) for end in ends]
        if box < LEAST_BOX_BYTES:
            return None
        return cls(region.row_bytes, shape, (strides[0], strides[1]), (starts[0], starts[1]))

    def copy(self, source: Bytes, target: Bytes) -> None:
        """Copy every row from `source` to `target` memory."""
        row = f"V{self.row_bytes}"
        for src, dst in zip(*(starts.tolist() for starts in self.starts), strict=True):
            rows = np.ndarray(self.shape, row, source.data, src, self.strides[0])
            np.ndarray(self.shape, row, target.data, dst, self.strides[1])[...] = rows


def _copy_in_parts(src: _Rows, dst: _Rows, part: Bytes) -> None:
    """Copy through `part`, which stays in the cache; each side in rows as long as it has them."""
    reads, writes = src.index(), dst.index()
    step = int(np.lcm(src.width, dst.width))
    step *= max(1, len(part) // step)
    if step > len(part):
        part = np.empty(step, np.uint8)
    for first in range(0, src.nbytes, step):
        here = part[: min(step, src.nbytes - first)]
        stop = first + len(here)
        _take(src, reads[first // src.width : stop // src.width], here)
        _put(dst, writes[first // dst.width : stop // dst.width], here)


def _take(rows: _Rows, index: Offsets, into: Bytes) -> None:
    """Gather rows. Checked offsets are never clipped; numpy buffers the output in the mode that would raise."""
    np.take(rows.elements(), index, out=_cut(into, rows.width), mode="clip")


def _put(rows: _Rows, index: Offsets, out_of: Bytes) -> None:
    np.put(rows.elements(), index, _cut(out_of, rows.width), mode="clip")


def _cut(flat: Bytes, width: int) -> npt.NDArray[np.void]:
    """View flat bytes as opaque elements of `width` bytes."""
    return flat.view(f"V{width}")


class _Rows:
    """One side's rows inside one allocation, in the order unit, head, plane, token, merged where they touch.

    `starts` are byte offsets of runs of `run_bytes`; `width` divides both, and is the unit of an index.
    """

    def __init__(self, memory: torch.Tensor, starts: Offsets, run_bytes: int) -> None:
        self.memory: Bytes = memory.numpy()
        self.starts, self.run_bytes = starts, run_bytes
        self.dense = bool((np.diff(starts) == run_bytes).all())

    @classmethod
    def of(cls, region: Region, side: Side, planes: Offsets, allocation: int) -> _Rows:
        """Return the rows of `planes`, which lie in `allocation`."""
        loops = [
            (region.tokens, np.arange(region.tokens) * side.token_bytes),
            (len(planes), side.offset[planes]),
            (region.heads, np.arange(region.heads) * side.head_bytes),
            (len(side.units), side.units),
        ]
        run_bytes = region.row_bytes
        while loops and (np.diff(loops[0][1]) == run_bytes).all():
            count, offsets = loops.pop(0)
            run_bytes, base = run_bytes * count, offsets[0]
            if not loops:
                return cls(side.memory[allocation], np.array([base]), run_bytes)
            loops[0] = (loops[0][0], loops[0][1] + base)
        starts = np.zeros(1, np.int64)
        for _, offsets in loops:
            starts = (offsets[:, None] + starts).reshape(-1)
        return cls(side.memory[allocation], starts, run_bytes)

    @cached_property
    def width(self) -> int:
        return int(np.gcd(np.gcd.reduce(self.starts), self.run_bytes))

    @property
    def nbytes(self) -> int:
        return len(self.starts) * self.run_bytes

    def elements(self) -> npt.NDArray[np.void]:
        """Return the allocation as rows of `width` bytes."""
        return _cut(self.memory[: len(self.memory) // self.width * self.width], self.width)

    def index(self) -> Offsets:
        """Return the row numbers of all runs, in order."""
        first, pieces = self.starts // self.width, self.run_bytes // self.width
        return first if pieces == 1 else (first[:, None] + np.arange(pieces)).reshape(-1)

    def bytes(self) -> Bytes:
        """Return the bytes of dense rows."""
        first = int(self.starts[0])
        return self.memory[first : first + self.nbytes]
