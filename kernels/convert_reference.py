"""The reference conversion defines in torch how rows change form, and converts rows in CPU memory.

A row is its parts, one after the other (see `RowForm`). In float32 throughout, every operation rounded once, to nearest
even, a number of a part is read as

    x = element * s        with s = its plane's scale, its block's scale, or their product block * plane; or no s

and written, with amax the largest magnitude of its block, as

    no block:          element = round(clamp(x / plane))            plain elements: round(x)
    e4m3, float32:     scale = max(amax / 448, 2**-126)             element = round(clamp(x / scale))
    e2m1, e4m3:        scale = round(clamp((amax / 6) / plane))     element = round(clamp(x / (scale * plane)))
    e4m3 or e2m1, e8m0:  scale = 2**ceil(log2(max(amax, 1e-30) / largest))   element = round(clamp(x / scale))

clamp is to the largest number of the element, 448, 57,344 in e5m2 or 6, and of a scale in e4m3 to 448. These are the
forms of SGLang and vLLM: e4m3 and e5m2 by a scale a tensor; DeepSeek-V3.2's 512 e4m3 with four float32 scales and 64
bfloat16; NVFP4; MXFP8 with SGLang's floor of a block's scale, and MXFP4.

Not finite: before any division, infinity counts as bfloat16's largest number, or as float16's if the numbers stand for
float16; bfloat16, float16 and float32 store infinity unchanged. NaN does not count in amax and stays NaN: 0x7F in e4m3
and e5m2, 0x7FFF in 16 bits, 0x7FFFFFFF in 32. e2m1 has no NaN: its block's scale becomes 0x7F, in e8m0 0xFF, so the
whole block is NaN. A block whose scale is 0 in e4m3 is zeros, each with its number's sign.

Error of a finite x, not clipped, of a part with scale s, where x' is read in float32:

    e4m3, e5m2:        |x' - x| <= max(|x| / 16, s / 1000), max(|x| / 8, s / 100,000)
    e4m3 by blocks:    |x' - x| <= 0.036 amax + 2**-135
    e2m1 by blocks:    |x' - x| <= 0.177 amax                       where amax >= 3 * 2**-5 plane
                       |x' - x| <= max(amax / 5, plane / 160)       below
    powers of two:     |x' - x| <= amax / 16 in e4m3, amax / 4 in e2m1      where amax >= 1e-30

e4m3 clips at 448 * plane, NVFP4 at 2,688 * plane. Rounding x' back to bfloat16 adds 2**-8 of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from . import reference
from .region import Region, RegionError, Side

FP8_MAX, FP4_MAX = 448.0, 6.0

#: The largest number of each element that has scales.
LARGEST = {"float8_e4m3fn": FP8_MAX, "float8_e5m2": 57344.0, "float4_e2m1fn_x2": FP4_MAX}

#: A block's least largest number where its scale is a power of two.
POWER_FLOOR = 1e-30

#: Float32's smallest normal number, the least scale: a block of zeros can be divided by its scale.
SCALE_FLOOR = 2.0**-126

FP8_NAN, POWER_NAN = 0x7F, 0xFF

Scales = npt.NDArray[np.float32]


class RowPart(Protocol):
    """A part of a row: elements, then a scale for each `block` numbers (0: no scales). Dtypes by torch's names."""

    @property
    def values(self) -> int:
        """Count of numbers."""
        ...

    @property
    def element(self) -> str:
        """Dtype of an element."""
        ...

    @property
    def block(self) -> int:
        """Numbers that share a scale of the row; 0: no such scales."""
        ...

    @property
    def scale(self) -> str:
        """Dtype of those scales."""
        ...

    @property
    def element_bytes(self) -> int:
        """Bytes of all elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales."""
        ...

    @property
    def is_scaled(self) -> bool:
        """True if its planes have a scale beside the pages."""
        ...


class RowForm(Protocol):
    """A stored form of a row; `layout.Codec` is one."""

    @property
    def values(self) -> str:
        """Dtype that the numbers stand for."""
        ...

    @property
    def parts(self) -> Sequence[RowPart]:
        """Parts of a row, in order."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """First byte of each part in a row."""
        ...

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        ...

    @property
    def scales(self) -> int:
        """Number of parts with plane scales."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A set of planes x units x heads x tokens rows, read at `src` as `reads` and written at `dst` as `writes`.

    `src_scales`, `dst_scales` [plane, scaled part] float32. The rows of both sides must not overlap: that is not
    checked.
    """

    src: Side
    dst: Side
    heads: int
    tokens: int
    reads: RowForm
    writes: RowForm
    src_scales: Scales
    dst_scales: Scales

    @property
    def planes(self) -> int:
        """Number of planes (layer, kv)."""
        return len(self.src.offset)

    @property
    def rows(self) -> int:
        """Number of rows: planes x units x heads x tokens."""
        return self.planes * len(self.src.units) * self.heads * self.tokens

    @property
    def device(self) -> torch.device:
        """Device of both sides."""
        return self.src.memory[0].device

    def at(self, end: Literal["src", "dst"]) -> Region:
        """Return one end's rows as a region with that end on both sides."""
        side, form = (self.src, self.reads) if end == "src" else (self.dst, self.writes)
        return Region(side, side, self.heads, self.tokens, form.row_bytes)

    def check(self) -> None:
        """Raise RegionError unless both sides agree, lie inside their memory, and hold whole elements and blocks."""
        for name, end, form in (("source", "src", self.reads), ("destination", "dst", self.writes)):
            region = self.at(end)
            try:
                region.check()
            except RegionError as error:
                raise RegionError(f"{name} rows: {str(error).removeprefix('source ')}") from error
            size = max(element_size(each) for part in form.parts for each in (part.element, part.scale) if each)
            if region.alignment() % size:
                raise RegionError(f"{name} rows lie off a multiple of {size} bytes, an element of theirs")
        if (len(self.dst.offset), len(self.dst.units)) != (self.planes, len(self.src.units)):
            there = f"{len(self.dst.offset)} x {len(self.dst.units)}"
            raise RegionError(f"source has {self.planes} planes x {len(self.src.units)} units, destination {there}")
        if self.reads.dim != self.writes.dim:
            raise RegionError(f"rows of {self.reads.dim} numbers do not become rows of {self.writes.dim}")
        edges = borders(self.reads, self.writes)
        for form in (self.reads, self.writes):
            if cut := _cut_block(form, edges):
                raise RegionError(f"number {cut} of a row cuts a block of the other side's")
        if self.dst.memory[0].device != self.device:
            raise RegionError(f"source on {self.device}, destination on {self.dst.memory[0].device}")
        for name, scales, form in (("source", self.src_scales, self.reads), ("dest", self.dst_scales, self.writes)):
            if scales.shape != (self.planes, form.scales) or scales.dtype != np.float32:
                raise RegionError(f"{name} scales are {scales.dtype} {scales.shape}, not of {self.planes} planes")


def borders(reads: RowForm, writes: RowForm) -> list[int]:
    """Return the numbers of a row at which a part of either form begins, and the row's count, ascending."""
    sums = (accumulate(part.values for part in form.parts) for form in (reads, writes))
    return sorted({0, *(number for each in sums for number in each)})


def _cut_block(form: RowForm, edges: Sequence[int]) -> int | None:
    """Return the first edge inside a block of `form`, or between two float4 of a byte, or None."""
    begun = 0
    for part in form.parts:
        whole = part.block or (2 if part.element == "float4_e2m1fn_x2" else 1)
        for edge in edges:
            if begun < edge < begun + part.values and (edge - begun) % whole:
                return edge
        begun += part.values
    return None


def element_size(name: str) -> int:
    """Return the bytes of an element by torch's name: 1 for the pair of two float4."""
    return getattr(torch, name).itemsize


def decode(form: RowForm, rows: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Return the numbers [row, dim], in float32, of uint8 `rows` [row, row_bytes]. `scales`: one plane's."""
    found: list[torch.Tensor] = []
    own = iter(scales)
    for part, start in zip(form.parts, form.starts, strict=True):
        plane = next(own) if part.is_scaled else None
        cut = start + part.element_bytes
        numbers = _numbers(part.element, rows[:, start:cut])
        if part.block:
            blocks = _numbers(part.scale, rows[:, cut : start + part.nbytes])
            factors = (blocks if plane is None else blocks * plane).repeat_interleave(part.block, 1)
            numbers = numbers * factors
        elif plane is not None:
            numbers = numbers * plane
        found.append(numbers)
    return torch.cat(found, 1)


def encode(form: RowForm, numbers: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Return uint8 rows [row, row_bytes] of float32 `numbers` [row, dim]. `scales`: one plane's."""
    found: list[torch.Tensor] = []
    largest = torch.finfo(torch.float16 if form.values == "float16" else torch.bfloat16).max
    own, at = iter(scales), 0
    for part in form.parts:
        plane = torch.tensor(next(own) if part.is_scaled else 1.0, dtype=torch.float32)
        x, at = numbers[:, at : at + part.values], at + part.values
        if part.element in ("float32", "float16", "bfloat16"):
            found.append(_plain(x, part.element))
            continue
        x = x.clamp(-largest, largest)  # leaves NaN as it is
        if not part.block:
            found.append(_fp8(x / plane, part.element))
            continue
        blocks = x.unflatten(1, (-1, part.block))
        amax = blocks.abs().nan_to_num(nan=0.0).amax(2)
        if part.scale == "float32":
            factors = (amax / FP8_MAX).clamp(min=SCALE_FLOOR)
            found += [_fp8((blocks / factors[:, :, None]).flatten(1)), factors.contiguous().view(torch.uint8)]
            continue
        is_power = part.scale == "float8_e8m0fnu"
        if is_power:
            stored = _power(amax.clamp(min=POWER_FLOOR) / LARGEST[part.element])
        else:
            stored = _fp8(amax / FP4_MAX / plane)
        if part.element == "float4_e2m1fn_x2":
            stored.masked_fill_(blocks.isnan().any(2), POWER_NAN if is_power else FP8_NAN)
        factors = _numbers(part.scale, stored) * plane
        scaled = (blocks / factors.masked_fill(factors == 0, torch.inf)[:, :, None]).flatten(1)
        elements = _fp8(scaled) if part.element == "float8_e4m3fn" else _fp4(scaled.masked_fill_(scaled.isnan(), 0.0))
        found += [elements, stored]
    return torch.cat(found, 1)


def _numbers(element: str, stored: torch.Tensor) -> torch.Tensor:
    """Return elements, uint8 [row, byte], as float32 [row, value], exactly."""
    if element == "float4_e2m1fn_x2":
        codes = torch.stack([stored & 0xF, stored >> 4], 2).flatten(1)
        return _FP4[codes.long()]
    return stored.contiguous().view(getattr(torch, element)).float()


#: Values of the e2m1 codes.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat([_FP4, -_FP4])


def _plain(x: torch.Tensor, element: str) -> torch.Tensor:
    """Round to `element`, in uint8 [row, byte], with NaN as hardware writes it."""
    kind = getattr(torch, element)
    words, nan = (torch.int32, 0x7FFFFFFF) if kind.itemsize == 4 else (torch.int16, 0x7FFF)
    return x.to(kind, copy=True).contiguous().view(words).masked_fill_(x.isnan(), nan).view(torch.uint8)


def _fp8(x: torch.Tensor, element: str = "float8_e4m3fn") -> torch.Tensor:
    largest = LARGEST[element]
    return x.clamp(-largest, largest).to(getattr(torch, element)).view(torch.uint8).masked_fill_(x.isnan(), FP8_NAN)


def _power(x: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is at least `x`, as e8m0. `x`: normal, and at most 2**127."""
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


#: Midpoints of neighbours in e2m1; a number on one goes to the even code.
_FP4_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def _fp4(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1, two in a byte, to nearest even."""
    magnitude = x.abs()
    above = torch.bucketize(magnitude, _FP4_BORDERS)  # borders below it
    on = torch.bucketize(magnitude, _FP4_BORDERS, right=True) > above
    codes = above + (on & (above % 2 == 1)) + 8 * torch.signbit(x)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def convert(conversions: Sequence[Conversion]) -> None:
    """Convert every row, in order, on the CPU. Raises RegionError before the first byte is written."""
    for each in conversions:
        each.check()
    for plane in _planes(conversions):
        rows = _dense(plane, plane.reads.row_bytes)
        reference.move([replace(plane.at("src"), dst=rows)])
        numbers = decode(plane.reads, rows.memory[0].view(-1, plane.reads.row_bytes), plane.src_scales[0].tolist())
        stored = encode(plane.writes, numbers, plane.dst_scales[0].tolist())
        reference.move([replace(plane.at("dst"), src=_dense(plane, plane.writes.row_bytes, stored))])


def _planes(conversions: Sequence[Conversion]) -> Iterator[Conversion]:
    """Yield the conversions plane by plane, so that a call takes the memory of a few copies of a plane."""
    for each in conversions:
        for number in range(each.planes if each.rows else 0):
            one = slice(number, number + 1)
            src, dst = (side.some_planes(one) for side in (each.src, each.dst))
            scales = {"src_scales": each.src_scales[one], "dst_scales": each.dst_scales[one]}
            yield replace(each, src=src, dst=dst, **scales)


def _dense(plane: Conversion, row_bytes: int, rows: torch.Tensor | None = None) -> Side:
    """Return the rows of one plane as a side in dense memory: `rows`, or newly allocated."""
    memory = torch.empty(plane.rows * row_bytes, dtype=torch.uint8) if rows is None else rows.contiguous().view(-1)
    units = np.arange(len(plane.src.units), dtype=np.int64) * (plane.heads * plane.tokens * row_bytes)
    zero = np.zeros(1, np.int64)
    return Side.of((memory,), zero, zero, units, plane.tokens * row_bytes, row_bytes)
