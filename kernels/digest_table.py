"""The digest kernel takes row shapes to compile for, and a table of regions and coordinates; both are made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import triton.language as tl

from .digest_reference import Logical
from .region import Offsets, Region, RegionError, even_distance
from .rows import FULL_TILE, ONE_UNIT, TOKEN_UNITS, UNITS, WIDEST, recut

#: int64 words that describe a region to the kernel: see `describe`.
FIELDS = tl.constexpr(24)


@dataclass(frozen=True, slots=True)
class DigestShape:
    """What the kernel is compiled for: rows of `grains` x `grain` words that hold `heads` heads of `head_bytes`.

    `element_bytes`: 4, or 1 where rows move byte by byte; `vec` words make the widest access. `recut`: 1 where rows are
    cut without regard to tokens. `span`: how a tile takes units. `listed`: of source, destination and positions, 0
    where units follow each other at one distance.
    """

    element_bytes: int
    vec: int
    grains: int
    grain: int
    head_bytes: int
    heads: int
    recut: int
    span: int
    listed: tuple[int, int, int]

    @property
    def constexpr(self) -> tuple[object, ...]:
        """The shape as Triton's compile-time arguments."""
        element = tl.int32 if self.element_bytes == 4 else tl.int8
        row = self.vec, self.grains, self.grain, self.head_bytes, self.heads, self.recut, self.span
        return element, *row, *self.listed

    @classmethod
    def of(cls, region: Region, logical: Logical, block_bytes: int) -> tuple[DigestShape, Region]:
        """The widest access that every address allows and the grain that wastes least of a tile; and the rows."""
        head_bytes = region.row_bytes // logical.heads_in_row
        cut = recut(region) if region.row_bytes % WIDEST.value and head_bytes % 4 == 0 else region
        cut = cut if cut.alignment() > region.alignment() >= 4 else region
        wide = cut.alignment() >= 4 and head_bytes % 4 == 0
        vec = cut.alignment() // 4 if wide else 1
        words = cut.row_bytes // 4 if wide else -(-head_bytes // 4) * logical.heads_in_row
        block_words = block_bytes // WIDEST.value * vec
        in_unit = cut.tokens * words
        several = cut.units > 1 and in_unit < FULL_TILE * -(-in_unit // block_words) * block_words
        span = (TOKEN_UNITS if cut.tokens == 1 else UNITS) if several else ONE_UNIT
        head_words = -(-head_bytes // 4)
        grain = vec if several or not wide else max(vec, min(head_words & -head_words, block_words))
        listed = tuple(int(even_distance(units) is None) for units in (cut.src.units, cut.dst.units, logical.positions))
        row = words // grain, grain, head_bytes, logical.heads_in_row
        return cls(4 if wide else 1, vec, *row, int(cut is not region), span.value, listed), cut


@dataclass(frozen=True, slots=True, eq=False)
class DigestLaunch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the row shapes to compile for."""

    table: npt.NDArray[np.int64]
    regions: int
    tiles: int
    shapes: tuple[DigestShape, ...]


def describe(
    regions: Sequence[Region], logicals: Sequence[Logical], outs: Sequence[int], block_bytes: int
) -> DigestLaunch:
    """Lay regions and their coordinates out as the kernel reads them; region i adds to element `outs[i]` of the result.

    `table` int64: FIELDS words a region, then its plane addresses and keys, and listed offsets and positions.
    """
    header = np.zeros((len(regions), FIELDS.value), np.int64)
    parts: list[Offsets] = [header.reshape(-1)]
    shapes: dict[DigestShape, int] = {}
    tiles = 0
    for fields, region, logical, out in zip(header, regions, logicals, outs, strict=True):
        shape, cut = DigestShape.of(region, logical, block_bytes)
        per_tile = block_bytes // WIDEST.value * shape.vec // shape.grain
        grains = cut.tokens * shape.grains * (cut.units if shape.span else 1)
        pieces = -(-grains // per_tile)
        if pieces * per_tile >= 1 << 31 or shape.grain * shape.grains * cut.tokens >= 1 << 31:
            raise RegionError(f"{region.nbytes} bytes; the kernel counts their words in 32 bits")
        fields[:5] = tiles, cut.units, cut.planes, cut.heads, cut.tokens
        for field, planes in enumerate((cut.src.addresses(), cut.dst.addresses(), logical.plane_keys()), 5):
            fields[field] = _append(parts, planes)
        units = (cut.src.units, shape.element_bytes), (cut.dst.units, shape.element_bytes), (logical.positions, 1)
        for number, (values, element) in enumerate(units):
            distance = even_distance(values)
            fields[8 + 2 * number] = _append(parts, values // element) if distance is None else values[0] // element
            fields[9 + 2 * number] = (distance or 0) // element
        strides = cut.src.head_bytes, cut.src.token_bytes, cut.dst.head_bytes, cut.dst.token_bytes
        fields[14:18] = np.array(strides) // shape.element_bytes
        number = shapes.setdefault(shape, len(shapes))
        fields[18:] = logical.position_step, logical.first_head, logical.head_step, pieces, number, out
        tiles += pieces * cut.planes * cut.heads * (1 if shape.span else cut.units)
    if tiles >= 1 << 31:
        raise RegionError(f"{tiles} tiles in one launch; the kernel counts them in 32 bits")
    return DigestLaunch(np.concatenate(parts), len(regions), tiles, tuple(shapes))


def _append(parts: list[Offsets], values: Offsets) -> int:
    """Append `values` to the table, and return where they begin."""
    parts.append(np.asarray(values, np.int64))
    return sum(map(len, parts[:-1]))
