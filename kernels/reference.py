"""Every move in plain torch: the definition, the oracle of the tests, and the path that serves CPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .region import Region, Side

#: Rows are copied through a temporary of about this size where neither side is dense, so that it stays in the L2 cache.
TEMPORARY_BYTES = 1 << 20


def move(regions: Sequence[Region]) -> None:
    """Copy every row of every region, in order. Raises RegionError before the first byte is written."""
    for region in regions:
        region.check()
    for region in regions:
        if region.nbytes:
            _copy(_longest_rows(region))


def _longest_rows(region: Region) -> Region:
    """The same bytes in longer rows, where tokens or heads follow each other on both sides."""
    src, dst, heads, tokens, row = region.src, region.dst, region.heads, region.tokens, region.row_bytes
    if tokens == 1 or src.token_bytes == dst.token_bytes == row:
        row, tokens = row * tokens, 1
        if src.head_bytes == dst.head_bytes == row:
            row, heads = row * heads, 1
    return Region(src, dst, heads, tokens, row)


def _copy(region: Region) -> None:
    """Row by row, by index: one index_select and one index_copy_ for all planes that share both allocations."""
    pairs = np.stack([region.src.allocation, region.dst.allocation])
    for source, target in np.unique(pairs, axis=1).T.tolist():
        planes = np.flatnonzero((pairs[0] == source) & (pairs[1] == target))
        src = _Rows.of(region, region.src, planes, source)
        dst = _Rows.of(region, region.dst, planes, target)
        width = int(np.gcd(src.granule, dst.granule))
        _copy_rows(src.cut(width), dst.cut(width), src.index(width), dst.index(width))


class _Rows:
    """One side's rows inside one allocation: their byte offsets, and the granule that divides them all."""

    def __init__(self, memory: torch.Tensor, starts: np.ndarray, row_bytes: int) -> None:
        self.memory, self.starts, self.row_bytes = memory, starts, row_bytes
        self.granule = int(np.gcd(np.gcd.reduce(starts), row_bytes))

    @classmethod
    def of(cls, region: Region, side: Side, planes: np.ndarray, allocation: int) -> _Rows:
        unit = side.units[:, None, None, None]
        head = (np.arange(region.heads) * side.head_bytes)[None, :, None, None]
        plane = side.offset[planes][None, None, :, None]
        token = (np.arange(region.tokens) * side.token_bytes)[None, None, None, :]
        return cls(side.memory[allocation], (unit + head + plane + token).reshape(-1), region.row_bytes)

    def cut(self, width: int) -> torch.Tensor:
        """The allocation as [row, width], in the widest element that divides `width`."""
        flat = self.memory[: self.memory.numel() // width * width]
        size = int(np.gcd(width, 8))
        aligned = flat.data_ptr() % size == 0
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size if aligned else 1]
        return flat.view(dtype).view(-1, width // dtype.itemsize)

    def index(self, width: int) -> torch.Tensor:
        first = self.starts // width
        pieces = self.row_bytes // width
        rows = first if pieces == 1 else (first[:, None] + np.arange(pieces)).reshape(-1)
        return torch.from_numpy(rows)


def _copy_rows(src: torch.Tensor, dst: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor) -> None:
    if src.dtype != dst.dtype:
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    first, count = int(writes[0]), len(writes)
    if int(writes[-1]) == first + count - 1 and bool((writes[1:] > writes[:-1]).all()):
        torch.index_select(src, 0, reads, out=dst[first : first + count])
        return
    if int(reads[-1]) == int(reads[0]) + count - 1 and bool((reads[1:] > reads[:-1]).all()):
        dst.index_copy_(0, writes, src[int(reads[0]) : int(reads[0]) + count])
        return
    step = max(1, TEMPORARY_BYTES // (src.shape[1] * src.element_size()))
    for begin in range(0, count, step):
        part = torch.index_select(src, 0, reads[begin : begin + step])
        dst.index_copy_(0, writes[begin : begin + step], part)
