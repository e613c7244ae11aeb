"""The conversion kernel takes a table of regions, and row shapes to compile for; both are made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from .config import RowConfig
from .quant_reference import FP8_MAX_INVERSE, SCALE_BYTES, WIDE_BYTES, QuantRegion
from .region import RegionError, Side, even_distance

#: int64 words that describe a region to the kernel: see `describe`.
FIELDS = tl.constexpr(24)

#: Of rows with few elements: a tile of more would read offsets instead of payload.
MOST_ROWS = 256

WORDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class QuantShape:
    """What the kernel is compiled for: `rows` rows a tile of `dim` elements, in one or two parts of `part`.

    For wide, fp8 and scales: `vecs`, the elements of which every row starts at a multiple, and `listed`, 0 where units
    follow each other at one distance, as on the wire, and need no table.
    """

    dtype: torch.dtype
    dim: int
    part: int
    rows: int
    vecs: tuple[int, int, int]
    listed: tuple[int, int, int]

    @property
    def constexpr(self) -> tuple[object, ...]:
        """As the kernel takes it; last the largest scale."""
        largest = float(np.float32(torch.finfo(self.dtype).max) * np.float32(FP8_MAX_INVERSE))
        return WORDS[self.dtype], self.dim, self.part, self.rows, *self.vecs, *self.listed, largest

    @classmethod
    def of(cls, region: QuantRegion, config: RowConfig) -> QuantShape:
        """As many rows as fill a tile, and the widest accesses that the addresses allow."""
        part = 1 << (region.dim.bit_length() - 1)
        vecs = (region.alignment(region.wide) // WIDE_BYTES, region.alignment(region.narrow), 1)
        # Narrower accesses, of which a thread has as many: more would each be of another row, with its own addresses.
        share = max(vecs[0], vecs[1] // 2, 1)
        rows = max(1, min(MOST_ROWS, config.block_bytes * share // (16 * part)))
        listed = tuple(int(even_distance(side.units) is None) for _, side, _ in region.sides)
        return cls(region.dtype, region.dim, part, rows, vecs, listed)


@dataclass(frozen=True, slots=True, eq=False)
class QuantLaunch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the row shapes to compile for."""

    table: npt.NDArray[np.int64]
    regions: int
    tiles: int
    shapes: tuple[QuantShape, ...]


def describe(regions: Sequence[QuantRegion], config: RowConfig) -> QuantLaunch:
    """Lay the regions out as the kernel reads them: FIELDS words a region, then its planes and listed units."""
    header = np.zeros((len(regions), FIELDS.value), np.int64)
    parts = [header.reshape(-1)]
    shapes: dict[QuantShape, int] = {}
    tiles = 0
    for fields, region in zip(header, regions, strict=True):
        shape = QuantShape.of(region, config)
        fields[:5] = tiles, region.units, region.planes, region.heads, region.tokens
        elements = (WIDE_BYTES, 1, SCALE_BYTES)
        for number, ((_, side, _), element) in enumerate(zip(region.sides, elements, strict=True)):
            _describe_side(parts, fields, number, side, element)
        fields[20] = shapes.setdefault(shape, len(shapes))
        pieces = -(-region.units * region.tokens // shape.rows)
        if pieces * shape.rows >= 1 << 31:
            raise RegionError(f"{region.units} units of {region.tokens} tokens; the kernel counts them in 32 bits")
        tiles += pieces * region.planes * region.heads
    if tiles >= 1 << 31:
        raise RegionError(f"{tiles} tiles in one launch; the kernel counts them in 32 bits")
    return QuantLaunch(np.concatenate(parts), len(regions), tiles, tuple(shapes))


def _describe_side(
    parts: list[npt.NDArray[np.int64]], fields: npt.NDArray[np.int64], number: int, side: Side, element: int
) -> None:
    """Fill in side `number` (0 wide, 1 fp8, 2 scales), and append its tables to `parts`."""
    fields[5 + number] = sum(map(len, parts))
    parts.append(side.addresses())
    distance = even_distance(side.units)
    if distance is None:
        fields[8 + number] = sum(map(len, parts))
        parts.append(side.units // element)
    else:
        fields[8 + number], fields[11 + number] = side.units[0] // element, distance // element
    fields[14 + number], fields[17 + number] = side.head_bytes // element, side.token_bytes // element
