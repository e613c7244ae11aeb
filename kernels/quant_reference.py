"""Conversion to fp8 e4m3 with one scale a row, and back, is defined here in plain torch: also the path for CPU memory.

Lossy, and halves the wire: opt-in. With amax the largest finite magnitude of a row, in float32 throughout:

    scale = max(amax * (1 / 448), 2**-126)        q  = e4m3(clamp(x * (1 / scale), -448, 448))        to nearest even
    x' = bf16(q * scale), or fp16                                                                     to nearest even

448 is e4m3's largest number; 1 / 448 and 1 / scale are rounded before they multiply. The floor is float32's smallest
normal number: rows of zeros get a scale that can be inverted, and no scale is a subnormal number of few bits.

Not finite: infinity counts as the largest finite number of the row's dtype, in the scale and as an element. NaN does
not count in the scale and stays NaN: 0x7F in fp8, 0x7FFF in bf16 and fp16, whatever its bits were.

Error bound, for every finite x of a row:

    |x' - x| <= e + u * (|x| + e) + h        with e = max(|x| / 16, scale / 1024)

e4m3 has 3 bits of mantissa, so rounding x / scale to a normal q is off by at most a 17th of it (v / (1 + v), v = 2**-4:
Jeannerod and Rump, "On relative errors of floating-point operations", 2018), and to a subnormal one, |x| < scale / 64,
by half its step of 2**-9. Rounding back adds u = 2**-8 for bf16 or 2**-11 for fp16, and h, half the smallest subnormal:
2**-134 or 2**-25. The float32 roundings, 2**-24 each, fit between 1/17 and 1/16, and between u / (1 + u) and u.
So no element is off by more than 0.0667 amax in bf16 or 0.0631 amax in fp16, plus h, and 2**-135 where the floor holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from . import reference
from .region import Region, RegionError, Side

FP8_MAX = 448.0
#: Of float32: what the kernel multiplies by is the same number.
FP8_MAX_INVERSE = float(np.float32(1) / np.float32(FP8_MAX))
SCALE_FLOOR = 2.0**-126

FP8_NAN = 0x7F
WIDE_NAN = 0x7FFF

SCALE_BYTES = 4
WIDE_BYTES = 2
WIDE_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class QuantRegion:
    """planes x units x heads x tokens rows of `dim` elements, a scale each: `wide` packs to, or unpacks from, the rest.

    `wide`: rows of `dim` elements of `dtype`, bfloat16 or float16. `narrow`: rows of `dim` bytes of e4m3. `scales`: one
    float32 a row. A row is one token of one head. Each side has its own layout and pages; the sides may lie in one
    allocation, fp8 and scale of a row side by side too, but their rows must not meet: that is not checked.
    """

    wide: Side
    narrow: Side
    scales: Side
    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype

    @property
    def sides(self) -> tuple[tuple[str, Side, int], ...]:
        """Name, place and row bytes of each side."""
        return (
            ("wide", self.wide, WIDE_BYTES * self.dim),
            ("fp8", self.narrow, self.dim),
            ("scale", self.scales, SCALE_BYTES),
        )

    @property
    def planes(self) -> int:
        """Number of planes (layer, kv)."""
        return len(self.wide.offset)

    @property
    def units(self) -> int:
        """Number of units in a plane."""
        return len(self.wide.units)

    @property
    def rows(self) -> int:
        """Number of rows: planes x units x heads x tokens."""
        return self.planes * self.units * self.heads * self.tokens

    @property
    def device(self) -> torch.device:
        """Where all three sides lie."""
        return self.wide.memory[0].device

    def check(self) -> None:
        """Raise RegionError unless all sides agree, lie inside their memory, and hold whole elements."""
        if self.dtype not in WIDE_DTYPES:
            raise RegionError(f"rows of {self.dtype}; fp8 is packed from bfloat16 and float16")
        for name, side, row_bytes in self.sides:
            region = Region(side, side, self.heads, self.tokens, row_bytes)
            try:
                region.check()
            except RegionError as error:
                raise RegionError(f"{name} rows: {error}") from error
            if (region.planes, region.units) != (self.planes, self.units):
                shape = f"{region.planes} planes x {region.units} units"
                raise RegionError(f"{name} rows: {shape}, wide rows {self.planes} x {self.units}")
            if side.memory[0].device != self.device:
                raise RegionError(f"{name} rows on {side.memory[0].device}, wide rows on {self.device}")
        for name, side, element in (("wide", self.wide, WIDE_BYTES), ("scale", self.scales, SCALE_BYTES)):
            if self.alignment(side) % element:
                raise RegionError(f"{name} rows lie off a multiple of {element} bytes, their element")

    def alignment(self, side: Side) -> int:
        """The largest of 16, 8, 4, 2, 1 bytes that divides the address of every row on one side."""
        return Region(side, side, self.heads, self.tokens, 16).alignment()


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` [row, dim] of bfloat16 or float16 as e4m3 [row, dim], in uint8, and scales [row] in float32."""
    wide, largest = rows.float(), torch.finfo(rows.dtype).max
    finite = wide.abs().nan_to_num(nan=0.0, posinf=largest)
    scales = (finite.amax(1) * FP8_MAX_INVERSE).clamp(min=SCALE_FLOOR)
    # Not reciprocal(), which need not be rounded correctly on every CPU.
    inverse = torch.ones_like(scales) / scales
    scaled = (wide * inverse[:, None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill_(scaled.isnan(), FP8_NAN), scales


def dequantize(fp8: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 `fp8` [row, dim], in uint8, times `scales` [row], as [row, dim] of `dtype`."""
    product = fp8.view(torch.float8_e4m3fn).float() * scales[:, None]
    return product.to(dtype).view(torch.int16).masked_fill_(product.isnan(), WIDE_NAN).view(dtype)


def pack(regions: Sequence[QuantRegion]) -> None:
    """Quantise every wide row, in order. On the CPU. Raises RegionError before the first byte is written."""
    for plane in _planes(regions):
        wide = _dense(plane, WIDE_BYTES * plane.dim)
        reference.move([_join(plane, plane.wide, wide, WIDE_BYTES * plane.dim)])
        fp8, scales = quantize(wide.memory[0].view(plane.dtype).view(-1, plane.dim))
        narrow, factors = _dense(plane, plane.dim, fp8), _dense(plane, SCALE_BYTES, scales)
        reference.move([_join(plane, narrow, plane.narrow, plane.dim)])
        reference.move([_join(plane, factors, plane.scales, SCALE_BYTES)])


def unpack(regions: Sequence[QuantRegion]) -> None:
    """Bring every wide row back from fp8 and scale, in order. On the CPU. Raises as `pack` does."""
    for plane in _planes(regions):
        narrow, factors = _dense(plane, plane.dim), _dense(plane, SCALE_BYTES)
        reference.move([_join(plane, plane.narrow, narrow, plane.dim)])
        reference.move([_join(plane, plane.scales, factors, SCALE_BYTES)])
        fp8, scales = narrow.memory[0].view(-1, plane.dim), factors.memory[0].view(torch.float32)
        wide = _dense(plane, WIDE_BYTES * plane.dim, dequantize(fp8, scales, plane.dtype))
        reference.move([_join(plane, wide, plane.wide, WIDE_BYTES * plane.dim)])


def _planes(regions: Sequence[QuantRegion]) -> Iterator[QuantRegion]:
    """Plane by plane, so that a copy of a plane is all the memory that a call takes."""
    for region in regions:
        region.check()
    for region in regions:
        for plane in range(region.planes if region.rows else 0):
            yield replace(
                region, **{name: _plane(getattr(region, name), plane) for name in ("wide", "narrow", "scales")}
            )


def _plane(side: Side, plane: int) -> Side:
    return side.some_planes(slice(plane, plane + 1))


def _dense(plane: QuantRegion, row_bytes: int, rows: torch.Tensor | None = None) -> Side:
    """The rows of one plane in memory of their own: `rows`, or room for them."""
    memory = torch.empty(plane.rows * row_bytes, dtype=torch.uint8)
    memory = memory if rows is None else rows.view(torch.uint8).view(-1)
    zero, units = np.zeros(1, np.int64), np.arange(plane.units) * (plane.heads * plane.tokens * row_bytes)
    return Side.of((memory,), zero, zero, units, plane.tokens * row_bytes, row_bytes)


def _join(plane: QuantRegion, src: Side, dst: Side, row_bytes: int) -> Region:
    return Region(src, dst, plane.heads, plane.tokens, row_bytes)
