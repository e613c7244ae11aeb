"""A Region is a box of rows with the memory at both ends. Every move is made of Regions, checked before it begins."""

from __future__ import annotations

from dataclasses import dataclass
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
