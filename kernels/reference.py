"""Every move in plain torch: the definition, the oracle of the tests, and the path that serves CPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .apart import check_apart
from .region import Region, Side

#: Rows are copied through a temporary of about this size where neither side is dense, so that it stays in the L2 cache.
TEMPORARY_BYTES = 1 << 19

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def move(regions: Sequence[Region]) -> None:
    """Copy every row of every region, in no promised order. Raises RegionError before the first byte is written."""
    for region in regions:
        region.check()
    work = [region for region in regions if region.nbytes]
    if work:
        check_apart(work)
    for region in work:
        _copy(region)


def _copy(region: Region) -> None:
    """All planes that share both allocations at once: by index, row by row."""
    pairs = np.stack([region.src.allocation, region.dst.allocation])
    part: torch.Tensor | None = None
    for source, target in np.unique(pairs, axis=1).T.tolist():
        planes = np.flatnonzero((pairs[0] == source) & (pairs[1] == target))
        src = _Rows.of(region, region.src, planes, source)
        dst = _Rows.of(region, region.dst, planes, target)
        dtype = _WORDS[min(src.word_bytes, dst.word_bytes)]
        # torch refuses an output in the storage of its input, even where the rows do not meet: within one pool.
        apart = src.memory.untyped_storage().data_ptr() != dst.memory.untyped_storage().data_ptr()
        if apart and dst.dense:
            torch.index_select(src.rows(dtype), 0, src.index(), out=_cut(dst.bytes(), src.width, dtype))
        elif apart and src.dense:
            dst.rows(dtype).index_copy_(0, dst.index(), _cut(src.bytes(), dst.width, dtype))
        else:
            # One for all groups: fresh memory costs a page fault every 4 KiB, three times what the copy takes.
            part = torch.empty(TEMPORARY_BYTES, dtype=torch.uint8) if part is None else part
            _copy_in_parts(src, dst, part, dtype)


def _copy_in_parts(src: _Rows, dst: _Rows, part: torch.Tensor, dtype: torch.dtype) -> None:
    """Through `part`, which stays in the cache: each side in rows as long as it has them."""
    reads, writes = src.index(), dst.index()
    step = int(np.lcm(src.width, dst.width))
    step *= max(1, part.numel() // step)
    if step > part.numel():
        part = torch.empty(step, dtype=torch.uint8)
    for first in range(0, src.nbytes, step):
        here = part[: min(step, src.nbytes - first)]
        stop = first + here.numel()
        chosen = reads[first // src.width : stop // src.width]
        torch.index_select(src.rows(dtype), 0, chosen, out=_cut(here, src.width, dtype))
        chosen = writes[first // dst.width : stop // dst.width]
        dst.rows(dtype).index_copy_(0, chosen, _cut(here, dst.width, dtype))


def _cut(flat: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat bytes as [row, element], rows of `width` bytes."""
    return flat.view(dtype).view(-1, width // dtype.itemsize)


class _Rows:
    """One side's rows inside one allocation, in the order unit, head, plane, token, merged where they touch.

    `starts` are byte offsets of runs of `run_bytes`; `width` divides both, and is what an index counts.
    """

    def __init__(self, memory: torch.Tensor, starts: npt.NDArray[np.int64], run_bytes: int) -> None:
        self.memory, self.starts, self.run_bytes = memory, starts, run_bytes
        self.width = int(np.gcd(np.gcd.reduce(starts), run_bytes))
        self.word_bytes = int(np.gcd.reduce([self.width, memory.data_ptr(), memory.storage_offset(), 8]))
        self.dense = bool((np.diff(starts) == run_bytes).all())

    @classmethod
    def of(cls, region: Region, side: Side, planes: npt.NDArray[np.int64], allocation: int) -> _Rows:
        """The rows of `planes`, which lie in `allocation`."""
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

    @property
    def nbytes(self) -> int:
        return len(self.starts) * self.run_bytes

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The allocation as [row, element], rows of `width` bytes."""
        return _cut(self.memory[: self.memory.numel() // self.width * self.width], self.width, dtype)

    def index(self) -> torch.Tensor:
        """Row numbers of all runs, in order."""
        first, pieces = self.starts // self.width, self.run_bytes // self.width
        return torch.from_numpy(first if pieces == 1 else (first[:, None] + np.arange(pieces)).reshape(-1))

    def bytes(self) -> torch.Tensor:
        """The bytes of dense rows."""
        first = int(self.starts[0])
        return self.memory[first : first + self.nbytes]
