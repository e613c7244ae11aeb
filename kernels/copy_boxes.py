"""A region as boxes, rows of a pitch in layers of rows, of which the copy engine takes thousands in a call and no SM.

A head slice of an NHD page is one box, where it is a run a token. `cuMemcpy3DBatchAsync` came with CUDA 12.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cuda_driver import ORDER_STREAM, OVERLAP_BYTES
from .region import Offsets, Region, even_distance, merged

#: `CUmemcpy3DOperand` of a pointer: its type, where it begins, bytes from a row to the next, and rows from a layer to
#: the next; then a location, of managed memory only.
OPERAND = np.dtype(
    [("type", "i4"), ("unused", "i4"), ("address", "i8"), ("pitch", "u8"), ("layer_rows", "u8"), ("location", "i4", 2)]
)

#: `CUDA_MEMCPY3D_BATCH_OP`. Its extent is bytes, rows and layers.
BOX = np.dtype([("src", OPERAND), ("dst", OPERAND), ("extent", "u8", 3), ("order", "i4"), ("flags", "u4")])

#: `CU_MEMCPY_OPERAND_TYPE_POINTER`.
POINTER = 1

#: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every GPU so far.
MOST_PITCH = (1 << 31) - 1

#: Bytes from a step of a loop to the next: at the source, at the destination.
Steps = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """A loop of a region: where its steps begin at both ends [step]. `steps`: their distance; None: of several."""

    src: Offsets
    dst: Offsets
    steps: Steps | None

    @classmethod
    def of(cls, src: Offsets, dst: Offsets) -> _Axis:
        """Of a loop whose steps are listed."""
        distances = even_distance(src), even_distance(dst)
        return cls(src, dst, None if None in distances else distances)  # pyright: ignore

    @classmethod
    def once(cls, src_step: int, dst_step: int) -> _Axis:
        """A loop of one step."""
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, (src_step, dst_step))

    @property
    def first(self) -> _Axis:
        """Its first step alone."""
        return _Axis(self.src[:1], self.dst[:1], self.steps)


def boxes(region: Region) -> npt.NDArray[np.void]:
    """A region's boxes, BOX [box]: the longest loop that can be is rows, the longest other that then can be layers."""
    region = merged(region)
    run, axes = region.row_bytes, _axes(region)
    rows = _longest(axes, lambda steps: run <= min(steps) and max(steps) <= MOST_PITCH) or _Axis.once(run, run)
    assert rows.steps is not None
    height, pitches = len(rows.src), rows.steps
    others = [axis for axis in axes if axis is not rows]

    def hold(steps: Steps) -> bool:
        pairs = zip(steps, pitches, strict=True)
        return all(step % pitch == 0 and step // pitch >= height for step, pitch in pairs)

    layers = _longest(others, hold) or _Axis.once(*(pitch * height for pitch in pitches))
    assert layers.steps is not None
    outside = [axis.first if axis in (rows, layers) else axis for axis in axes]
    found = np.zeros(int(np.prod([len(axis.src) for axis in outside])), BOX)
    for name, starts, pitch, step in zip(("src", "dst"), _starts(outside), pitches, layers.steps, strict=True):
        side = found[name]
        side["type"], side["address"], side["pitch"], side["layer_rows"] = POINTER, starts, pitch, step // pitch
    found["extent"] = run, height, len(layers.src)
    found["order"], found["flags"] = ORDER_STREAM, run * height * len(layers.src) <= OVERLAP_BYTES
    return found


def _axes(region: Region) -> list[_Axis]:
    """Planes, units, heads and tokens. Planes of several allocations are at no one distance, also where they touch."""
    planes = _Axis.of(region.src.addresses(), region.dst.addresses())
    if any(np.ptp(side.allocation) for side in (region.src, region.dst) if len(side.allocation)):
        planes = _Axis(planes.src, planes.dst, None)
    units = _Axis.of(region.src.units, region.dst.units)
    heads, tokens = np.arange(region.heads), np.arange(region.tokens)
    return [
        planes,
        units,
        _Axis.of(heads * region.src.head_bytes, heads * region.dst.head_bytes),
        _Axis.of(tokens * region.src.token_bytes, tokens * region.dst.token_bytes),
    ]


def _longest(axes: Sequence[_Axis], fits: Callable[[Steps], bool]) -> _Axis | None:
    """Of several steps at one distance that fits."""
    found = [axis for axis in axes if len(axis.src) > 1 and axis.steps is not None and fits(axis.steps)]
    return max(found, key=lambda axis: len(axis.src), default=None)


def _starts(axes: Sequence[_Axis]) -> tuple[Offsets, Offsets]:
    """Addresses where boxes begin at either end, in one order."""
    src = dst = np.zeros(1, np.int64)
    for axis in axes:
        src = (src[:, None] + axis.src).reshape(-1)
        dst = (dst[:, None] + axis.dst).reshape(-1)
    return src, dst
