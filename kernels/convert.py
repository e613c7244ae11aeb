"""The conversion kernel converts rows while it moves them: bfloat16 to fp8, NVFP4 or MX forms, and back.

Results are those of `convert_reference`, bit for bit. An overlap is the numbers that a part of the source's form shares
with a part of the destination's; its rows are cut into grains, powers of two that hold whole blocks. A tile is some
grains of one plane and head, from as many units as it takes: a scale is known where its block is read, and no tile
waits for another. All overlaps of a call go in one launch, and each kind of overlap has its own code. The same launch
digests one end's rows, whose words it has in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from . import digest_reference
from .convert_elements import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    ELEMENTS,
    F32,
    SCALES,
    as_float,
    in_words,
    to_e5m2,
    to_fp4,
    to_fp8,
    to_power,
    to_words,
)
from .convert_reference import LARGEST, POWER_FLOOR, SCALE_FLOOR, Conversion, RowForm, borders, element_size
from .digest import coordinate_words, key_of, sum_of
from .digest_reference import End, Logical
from .launch import RULES, Kernel, Prepared, Program, RowConfig, RowKind, choose, one_device
from .region import Planes, Region, RegionError, Side
from .table import (
    ADDRESSES,
    LISTED,
    SEVERAL_UNITS,
    SHAPE,
    SIDE_WORDS,
    SIDES,
    TOKEN_STRIDE,
    WIDEST,
    Counts,
    Launch,
    Table,
    find_region,
    kind_in,
    kind_of_units,
    plane_and_head,
    plane_start,
    rows_of,
    token_stride,
    unit_start,
)

FLOOR, LEAST_OF_BLOCK = tl.constexpr(SCALE_FLOOR), tl.constexpr(POWER_FLOOR)
LARGEST_E4M3, LARGEST_E2M1 = (tl.constexpr(LARGEST[name]) for name in ("float8_e4m3fn", "float4_e2m1fn_x2"))

#: Word offsets of a region's streams, each as a side: elements and block scales read, then written; of the places of
#: the plane scales of source and destination; and the number of words.
SRC, SRC_SCALES, DST, DST_SCALES = (tl.constexpr(SIDES.value + i * SIDE_WORDS.value) for i in range(4))
SRC_PLANES, DST_PLANES, WORDS = (tl.constexpr(DST_SCALES.value + SIDE_WORDS.value + i) for i in range(3))

#: Further words for a digest: the coordinates, as `digest` has them, and the numbers, in a row's words, of the first
#: element and the first block scale.
LOGICAL = WORDS
FIRST_WORD, FIRST_SCALE_WORD, DIGEST_WORDS = (tl.constexpr(LOGICAL.value + SIDE_WORDS.value + 1 + i) for i in range(3))

#: The end of the conversion that a kernel digests, as its `DIGESTS`.
NEITHER, DIGESTS_SRC, DIGESTS_DST = map(tl.constexpr, range(3))

#: Index of each ColumnShape field in the kernel's `OF`.
(
    OF_SRC_ELEMENT,
    OF_DST_ELEMENT,
    OF_SRC_BLOCK,
    OF_DST_BLOCK,
    OF_SRC_SCALE,
    OF_DST_SCALE,
    OF_VALUES,
    OF_LARGEST,
    OF_WIDTH,
    OF_ROWS,
    OF_SRC_VEC,
    OF_DST_VEC,
    OF_SRC_KIND,
    OF_DST_KIND,
) = map(tl.constexpr, range(14))


@triton.jit
def _starts(table, side, plane, head, unit, token, live, ELEMENT: tl.constexpr, VEC: tl.constexpr, KIND: tl.constexpr):
    """Return pointers to each row's start in a stream: [row, 1]."""
    start = unit_start(table, side, unit, live, KIND, VEC) + token * token_stride(side, VEC)
    return (plane_start(table, side, plane, head, ELEMENT, VEC) + start)[:, None]


@triton.jit
def _plane_scale(table, planes, plane):
    """Return a plane's scale, stored as float32 in the low half of a word."""
    return tl.load(table + tl.load(planes) + plane).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key(table, at, plane, head, unit, token, live):
    """Return each row's key for the digest: [row, 1]."""
    side = at + LOGICAL
    position = unit_start(table, side, unit, live, LISTED, 1) + token * tl.load(side + TOKEN_STRIDE)
    return key_of(side, tl.load(table + tl.load(side + ADDRESSES) + plane), head, position)[:, None]


@triton.jit
def _sum(q, key, live, first, grain, ROWS: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr):
    """Return the summed terms of a tile of one stream. `q` [row, element]: `COUNT` elements of each grain, of `ALL` in
    a row. `first`: number of the row's first word.
    """
    BITS: tl.constexpr = q.dtype.primitive_bitwidth
    EACH: tl.constexpr = (COUNT * BITS + 31) // 32
    word = grain * EACH + tl.arange(0, EACH)[None, :]
    here = live[:, None] & (word < (ALL * BITS + 31) // 32)
    return sum_of(in_words(q, ROWS, COUNT), here, key, first + grain * EACH, tl.arange(0, EACH)[None, :])


@triton.jit
def _by_block(x, factors, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """Multiply numbers [row, column] by the factor of their block [row, block], or divide them if `DIVIDE`."""
    blocks = tl.reshape(x, [ROWS, WIDTH // BLOCK, BLOCK])
    each = factors[:, :, None]
    if DIVIDE:
        blocks, each = tl.broadcast(blocks, each)
        done = tl.div_rn(blocks, each)
    else:
        done = blocks * each
    return tl.reshape(done, [ROWS, WIDTH])


@triton.jit
def _read(
    table, at, plane, head, unit, token, live, grain, key, OF: tl.constexpr, CASTS: tl.constexpr, SUM: tl.constexpr
):
    """Return the numbers of a tile in float32, [row, number], and the sum of its words if `SUM`, else 0.

    `grain`, `key` [row, 1]: the grain's number in its row, and the row's key.
    """
    KIND: tl.constexpr = OF[OF_SRC_ELEMENT]
    WIDTH: tl.constexpr = OF[OF_WIDTH]
    BLOCK: tl.constexpr = OF[OF_SRC_BLOCK]
    VALUES: tl.constexpr = OF[OF_VALUES]
    UNITS: tl.constexpr = OF[OF_SRC_KIND]
    SCALE: tl.constexpr = OF[OF_SRC_SCALE]
    WORD: tl.constexpr = tl.float32 if KIND == F32 else (tl.int16 if KIND <= BF16 else tl.int8)  # pyright: ignore
    FACTOR: tl.constexpr = tl.float32 if SCALE == F32 else tl.int8  # pyright: ignore
    total = tl.full([], 0, tl.int64)
    rows = _starts(table, at + SRC, plane, head, unit, token, live, WORD, OF[OF_SRC_VEC], UNITS)
    here = live[:, None]
    if KIND == E2M1:
        pair = grain * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        if VALUES % WIDTH:
            here = here & (pair * 2 < VALUES)
        pairs = tl.load(rows + pair, mask=here, other=0, eviction_policy="evict_first")
        if SUM:
            total += _sum(pairs, key, live, tl.load(at + FIRST_WORD), grain, OF[OF_ROWS], WIDTH // 2, VALUES // 2)
        q = tl.interleave(pairs & 0xF, (pairs >> 4) & 0xF)
    else:
        number = grain * WIDTH + tl.arange(0, WIDTH)[None, :]
        if VALUES % WIDTH:
            here = here & (number < VALUES)
        q = tl.load(rows + number, mask=here, other=0, eviction_policy="evict_first")
        if SUM:
            total += _sum(q, key, live, tl.load(at + FIRST_WORD), grain, OF[OF_ROWS], WIDTH, VALUES)
    x = as_float(q, KIND, CASTS)
    if BLOCK > 0:
        block = grain * (WIDTH // BLOCK) + tl.arange(0, WIDTH // BLOCK)[None, :]
        here = live[:, None] & (block * BLOCK < VALUES)
        scales = _starts(table, at + SRC_SCALES, plane, head, unit, token, live, FACTOR, 1, UNITS)
        factors = tl.load(scales + block, mask=here, other=0)
        if SUM:
            first = tl.load(at + FIRST_SCALE_WORD)
            total += _sum(factors, key, live, first, grain, OF[OF_ROWS], WIDTH // BLOCK, VALUES // BLOCK)
        factors = as_float(factors, SCALE, CASTS)
        if SCALE == E4M3:
            factors *= _plane_scale(table, at + SRC_PLANES, plane)
        x = _by_block(x, factors, OF[OF_ROWS], WIDTH, BLOCK, 0)
    elif KIND >= E4M3 and KIND != E2M1:
        x = x * _plane_scale(table, at + SRC_PLANES, plane)
    return x, total


@triton.jit
def _block_scales(table, at, plane, amax, odd, KIND: tl.constexpr, SCALE: tl.constexpr, CASTS: tl.constexpr):
    """Return the scales of blocks as stored, and as the factors of their numbers. `amax`, `odd` [row, block]: the
    largest magnitude, and 1 where a number is NaN.
    """
    largest = tl.full(amax.shape, LARGEST_E2M1 if KIND == E2M1 else LARGEST_E4M3, tl.float32)
    if SCALE == F32:
        stored = tl.maximum(tl.div_rn(amax, largest), FLOOR)
        factors = stored
    elif SCALE == E8M0:
        stored = to_power(tl.div_rn(tl.maximum(amax, LEAST_OF_BLOCK), largest))
        if KIND == E2M1:
            stored = tl.where(odd == 1.0, -1, stored).to(tl.int8)
        factors = as_float(stored, E8M0, CASTS)
    else:
        own = tl.full(amax.shape, 1.0, tl.float32) * _plane_scale(table, at + DST_PLANES, plane)
        stored = to_fp8(tl.div_rn(tl.div_rn(amax, largest), own), CASTS)
        stored = tl.where(odd == 1.0, 0x7F, stored).to(tl.int8)
        factors = as_float(stored, E4M3, CASTS) * own
        factors = tl.where(factors == 0.0, float("inf"), factors)
    return stored, factors


@triton.jit
def _write(
    table, at, plane, head, unit, token, live, grain, key, x, OF: tl.constexpr, CASTS: tl.constexpr, SUM: tl.constexpr
):
    """Store numbers [row, number] in the destination's form, with their block scales. Returns the sum of the words
    stored if `SUM`, else 0.
    """
    KIND: tl.constexpr = OF[OF_DST_ELEMENT]
    WIDTH: tl.constexpr = OF[OF_WIDTH]
    ROWS: tl.constexpr = OF[OF_ROWS]
    BLOCK: tl.constexpr = OF[OF_DST_BLOCK]
    VALUES: tl.constexpr = OF[OF_VALUES]
    UNITS: tl.constexpr = OF[OF_DST_KIND]
    SCALE: tl.constexpr = OF[OF_DST_SCALE]
    WORD: tl.constexpr = tl.float32 if KIND == F32 else (tl.int16 if KIND <= BF16 else tl.int8)  # pyright: ignore
    FACTOR: tl.constexpr = tl.float32 if SCALE == F32 else tl.int8  # pyright: ignore
    total = tl.full([], 0, tl.int64)
    rows = _starts(table, at + DST, plane, head, unit, token, live, WORD, OF[OF_DST_VEC], UNITS)
    number = grain * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = live[:, None]
    if VALUES % WIDTH:
        here = here & (number < VALUES)
    if KIND <= BF16:
        q = to_words(x, KIND, CASTS)
        tl.store(rows + number, q, mask=here)
    else:
        largest = OF[OF_LARGEST]
        x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))  # NaN stays
        if BLOCK == 0:
            own = tl.full([ROWS, WIDTH], 1.0, tl.float32) * _plane_scale(table, at + DST_PLANES, plane)
            y = tl.div_rn(x, own)
            q = to_e5m2(y) if KIND == E5M2 else to_fp8(y, CASTS)
            tl.store(rows + number, q, mask=here)
        else:
            BLOCKS: tl.constexpr = WIDTH // BLOCK
            blocks = tl.reshape(x, [ROWS, BLOCKS, BLOCK])
            amax = tl.max(tl.where(blocks == blocks, tl.abs(blocks), 0.0), 2)
            odd = amax
            if KIND == E2M1:
                odd = tl.max(tl.where(blocks == blocks, 0.0, 1.0), 2)
            block = grain * BLOCKS + tl.arange(0, BLOCKS)[None, :]
            held = live[:, None] & (block * BLOCK < VALUES)
            scales = _starts(table, at + DST_SCALES, plane, head, unit, token, live, FACTOR, 1, UNITS) + block
            stored, factors = _block_scales(table, at, plane, amax, odd, KIND, SCALE, CASTS)
            tl.store(scales, stored, mask=held)
            if SUM:
                stored = tl.where(held, stored, 0).to(FACTOR)
                first = tl.load(at + FIRST_SCALE_WORD)
                total += _sum(stored, key, live, first, grain, ROWS, BLOCKS, VALUES // BLOCK)
            y = _by_block(x, factors, ROWS, WIDTH, BLOCK, 1)
            if KIND == E4M3:
                q = to_fp8(y, CASTS)
                tl.store(rows + number, q, mask=here)
            else:
                low, high = tl.split(tl.reshape(to_fp4(tl.where(y == y, y, 0.0)), [ROWS, WIDTH // 2, 2]))
                pair = grain * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
                whole = live[:, None]
                if VALUES % WIDTH:
                    whole = whole & (pair * 2 < VALUES)
                q = low | (high << 4)
                tl.store(rows + pair, q, mask=whole)
    if SUM:
        HALF: tl.constexpr = 2 if KIND == E2M1 else 1  # pyright: ignore
        if VALUES % WIDTH:
            element = grain * (WIDTH // HALF) + tl.arange(0, WIDTH // HALF)[None, :]
            q = tl.where(element * HALF < VALUES, q, 0).to(q.dtype)
        total += _sum(q, key, live, tl.load(at + FIRST_WORD), grain, ROWS, WIDTH // HALF, VALUES // HALF)
    return total


@triton.jit
def _tile(table, at, out, tile, SHAPES: tl.constexpr, I: tl.constexpr, CASTS: tl.constexpr, DIGESTS: tl.constexpr):
    """Convert one tile of the region described at `at`, whose rows are served by shape `I`; add its sum to `out`."""
    OF: tl.constexpr = SHAPES[I]
    COUNT: tl.constexpr = (OF[OF_VALUES] + OF[OF_WIDTH] - 1) // OF[OF_WIDTH]
    plane, head, piece = plane_and_head(at, tile)
    unit, token, grain, live = rows_of(at, piece, OF[OF_ROWS], COUNT, SEVERAL_UNITS)
    grain = grain.to(tl.int32)[:, None]
    key = grain
    if DIGESTS != NEITHER:
        key = _key(table, at, plane, head, unit, token, live)
    x, read = _read(table, at, plane, head, unit, token, live, grain, key, OF, CASTS, DIGESTS == DIGESTS_SRC)
    wrote = _write(table, at, plane, head, unit, token, live, grain, key, x, OF, CASTS, DIGESTS == DIGESTS_DST)
    if DIGESTS != NEITHER:
        tl.atomic_add(out, read + wrote, sem="relaxed")


@triton.jit
def _tiles(table, out, regions, tiles, SHAPES: tl.constexpr, CASTS: tl.constexpr, DIGESTS: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, WORDS if DIGESTS == NEITHER else DIGEST_WORDS)
        shape = tl.load(at + SHAPE).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, out, local, SHAPES, i, CASTS, DIGESTS)


@triton.jit(do_not_specialize=["regions", "tiles"])
def convert_kernel(table, regions, tiles, SHAPES: tl.constexpr, CASTS: tl.constexpr):
    """Convert all tiles of all regions; the grid is the SM budget, or every tile without one.

    `table`: see `describe`. `CASTS`: see `casts`.
    """
    _tiles(table, table, regions, tiles, SHAPES, CASTS, NEITHER)


@triton.jit(do_not_specialize=["regions", "tiles"], do_not_specialize_on_alignment=["out"])
def convert_and_digest_kernel(
    table, out, regions, tiles, SHAPES: tl.constexpr, CASTS: tl.constexpr, DIGESTS: tl.constexpr
):
    """Convert all tiles as `convert_kernel`, and add the digest of the rows of one end, `DIGESTS`, to `out`."""
    _tiles(table, out, regions, tiles, SHAPES, CASTS, DIGESTS)


#: Configurations of untuned GPUs, without and with an SM budget.
CONFIG, BUDGET_CONFIG = RULES[Kernel.CONVERT]


def widest(conversions: Sequence[Conversion]) -> Region:
    """Return the end with the most bytes of any conversion, as a region."""
    return max((each.at(end) for each in conversions for end in ("src", "dst")), key=lambda region: region.nbytes)


def kind_of_most(conversions: Sequence[Conversion]) -> RowKind:
    """Return the row kind that selects their launch configuration."""
    wide = widest(conversions)
    return RowKind(wide.row_bytes, wide.tokens * wide.row_bytes)


def configured(conversions: Sequence[Conversion], sms: int | None) -> RowConfig:
    """Return their launch configuration, measured for their kind, or by rule."""
    return choose(kind_of_most(conversions), sms, conversions[0].device, Kernel.CONVERT)


#: Most numbers of a grain: wider grains make no access wider.
MOST_COLUMNS = 128

#: Most grains of a tile: more, of few numbers each, would read offsets instead of payload.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class OverlapEnd:
    """One end of an overlap: each row's first element, and first block scale if there are blocks.

    `size`, `scale_size`: bytes of an element and of a block scale. `first_byte`, `first_scale_byte`: of the first ones
    in a row. `planes`: plane scales [plane], or ones.
    """

    element: str
    block: int
    scale: str
    elements: Side
    size: int
    first_byte: int
    scales: Side
    scale_size: int
    first_scale_byte: int
    planes: npt.NDArray[np.float32]

    @classmethod
    def of(cls, side: Side, form: RowForm, scales: npt.NDArray[np.float32], first: int) -> OverlapEnd:
        """Build the end for rows in `form`, from number `first` of a row on. `scales` [plane, scaled part].

        Raises RegionError if a row has no number `first`.
        """
        own = begun = 0
        for part, start in zip(form.parts, form.starts, strict=True):
            if first < begun + part.values:
                within, size = first - begun, element_size(part.element)
                width = element_size(part.scale) if part.block else 0
                firsts = within * part.element_bytes // part.values, within // max(part.block, 1) * width
                first_byte, first_scale_byte = start + firsts[0], start + part.element_bytes + firsts[1]
                elements, factors = _from_byte(side, first_byte), _from_byte(side, first_scale_byte)
                found = scales[:, own] if part.is_scaled else np.ones(len(side.planes), np.float32)
                streams = elements, size, first_byte, factors, width, first_scale_byte
                return cls(part.element, part.block, part.scale, *streams, found)
            begun, own = begun + part.values, own + part.is_scaled
        raise RegionError(f"number {first} of a row of {form.dim}")

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Plane scales as the kernel reads them: float32 in the low half of a word [plane]."""
        return np.ascontiguousarray(self.planes).view(np.int32).astype(np.int64)

    def streams(self, values: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield elements, then block scales: the first byte in a row, and the bytes of `values` numbers and of a grain
        of `width`.
        """
        together = 2 if self.element == "float4_e2m1fn_x2" else 1
        yield self.first_byte, values * self.size // together, width * self.size // together
        if self.block:
            yield (
                self.first_scale_byte,
                -(-values // self.block) * self.scale_size,
                width // self.block * self.scale_size,
            )

    def describe(self, table: Table, kind: int) -> list[int]:
        """Add both streams to `table`, and return their words. `kind`: see `Table.side`."""
        scales = table.side(self.scales, self.scale_size, kind) if self.block else [0] * SIDE_WORDS.value
        return [*table.side(self.elements, self.size, kind), *scales]


def _from_byte(side: Side, first: int) -> Side:
    """Return `side` with each row starting `first` bytes later."""
    return replace(side, planes=Planes(side.memory, side.allocation, side.offset + first)) if first else side


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """The `values` numbers of every row of a conversion that lie in one part of each form."""

    of: Conversion
    values: int
    src: OverlapEnd
    dst: OverlapEnd

    @property
    def width(self) -> int:
        """Numbers of a grain: a power of two."""
        return max(2, min(MOST_COLUMNS, 1 << (self.values - 1).bit_length()), self.src.block, self.dst.block)


def overlaps(of: Conversion) -> Iterator[Overlap]:
    """Yield the overlaps of a conversion, in the order of a row."""
    for first, stop in pairwise(borders(of.reads, of.writes)):
        src = OverlapEnd.of(of.src, of.reads, of.src_scales, first)
        dst = OverlapEnd.of(of.dst, of.writes, of.dst_scales, first)
        yield Overlap(of, stop - first, src, dst)


class ColumnShape(NamedTuple):
    """The parameters a kernel is compiled for: `values` numbers a row, and the elements and blocks of both ends.

    `src_element`, `dst_element`: numbers of ELEMENTS. `src_block`, `dst_block`: numbers that share a scale; 0: no
    blocks. `src_scale`, `dst_scale`: numbers of SCALES. `largest`: the number that infinity counts as. A tile is `rows`
    grains of `width` numbers. `src_vec`, `dst_vec`: rows start at multiples of so many elements. `src_kind`,
    `dst_kind`: whether a side's units are listed, or follow each other at one distance, as on the wire, without a
    table.
    """

    src_element: int
    dst_element: int
    src_block: int
    dst_block: int
    src_scale: int
    dst_scale: int
    values: int
    largest: float
    width: int
    rows: int
    src_vec: int
    dst_vec: int
    src_kind: int
    dst_kind: int

    @property
    def columns(self) -> int:
        """Number of grains a row."""
        return -(-self.values // self.width)

    def serves(self, own: ColumnShape) -> bool:
        """Return True if tiles of this shape can convert an overlap of best shape `own`."""
        accesses = {"rows": 0, "src_vec": 0, "dst_vec": 0, "src_kind": 0, "dst_kind": 0}
        if self._replace(**accesses) != own._replace(**accesses):
            return False
        narrower = self.src_vec <= own.src_vec and self.dst_vec <= own.dst_vec
        return narrower and self.src_kind >= own.src_kind and self.dst_kind >= own.dst_kind

    @classmethod
    def of(cls, overlap: Overlap, block_bytes: int) -> ColumnShape:
        """Return the best shape: as many rows as fill a tile, and the widest accesses that the addresses allow."""
        of, src, dst = overlap.of, overlap.src, overlap.dst
        width = overlap.width
        # A thread reads as many narrow elements as make one wide access: twice as many would cross shared memory.
        most = 16 // dst.size if src.element != "float4_e2m1fn_x2" else 16
        vecs = min(most, _vec(of, src, of.reads)), _vec(of, dst, of.writes)
        # A thread makes as many narrow accesses as wide ones, not as many bytes: else addresses fill its registers.
        tile = block_bytes // WIDEST.value * min(WIDEST.value // max(src.size, dst.size), *vecs)
        half = of.writes.values == "float16"
        largest = torch.finfo(torch.float16 if half else torch.bfloat16).max
        forms = ELEMENTS[src.element], ELEMENTS[dst.element], src.block, dst.block, SCALES[src.scale], SCALES[dst.scale]
        kinds = kind_of_units(of.src.units), kind_of_units(of.dst.units)
        return cls(*forms, overlap.values, largest, width, max(1, min(MOST_ROWS, tile // width)), *vecs, *kinds)


def _vec(of: Conversion, end: OverlapEnd, form: RowForm) -> int:
    """Return the number of elements of which every row's start is a multiple."""
    aligned = Region(end.elements, end.elements, of.heads, of.tokens, form.row_bytes).alignment()
    return max(1, aligned // end.size)


def _owns(conversions: Sequence[Conversion], block_bytes: int) -> list[tuple[ColumnShape, Overlap]]:
    """Return all overlaps, each with the shape that suits it best."""
    found = (overlap for each in conversions for overlap in overlaps(each))
    return [(ColumnShape.of(overlap, block_bytes), overlap) for overlap in found]


def can_digest(of: Conversion, logical: Logical, end: End) -> bool:
    """Returns True if `prepare_with_digest` serves a conversion: no word of the rows at `end` lies in two streams or
    grains. So it is unless the other form has parts that end within such a word.
    """
    forms = of.reads, of.writes, end
    if forms not in _in_words:
        _in_words[forms] = _has_whole_words(of, end)
    return _in_words[forms] and logical.heads_in_row == 1


#: Whether `prepare_with_digest` serves two forms, by forms and digested end.
_in_words: dict[tuple[RowForm, RowForm, End], bool] = {}


def _has_whole_words(of: Conversion, end: End) -> bool:
    row_bytes, nbytes = of.at(end).row_bytes, 0
    for overlap in overlaps(of):
        side: OverlapEnd = getattr(overlap, end)
        for first, whole, grain in side.streams(overlap.values, overlap.width):
            nbytes += whole
            if first % 4 or (grain % 4 and whole > grain) or (whole % 4 and first + whole < row_bytes):
                return False
    return nbytes == row_bytes


def describe(
    conversions: Sequence[Conversion],
    block_bytes: int,
    shapes: tuple[ColumnShape, ...] = (),
    digests: tuple[Sequence[Logical], End] | None = None,
) -> Launch:
    """Lay the overlaps out as the kernel reads them, compiled for `shapes`, then for overlaps these do not serve.

    The first shape that can serve an overlap does. `digests`: the coordinates of each conversion, and the end that is
    digested. Raises RegionError if a count reaches 2^31: the kernel has 32 bits.
    """
    owns = _owns(conversions, block_bytes)
    further = {own for own, _ in owns if not any(shape.serves(own) for shape in shapes)}
    shapes = (*shapes, *sorted(further, reverse=True))
    table = Table(len(owns), (WORDS if digests is None else DIGEST_WORDS).value)
    logicals = {} if digests is None else dict(zip(conversions, digests[0], strict=True))
    for own, overlap in owns:
        number = next(i for i, shape in enumerate(shapes) if shape.serves(own))
        of, shape = overlap.of, shapes[number]
        counts = Counts(len(of.src.units), of.planes, of.heads, of.tokens)
        pieces = -(-counts.units * counts.tokens * shape.columns // shape.rows)
        if pieces * shape.rows >= 1 << 31:
            raise RegionError(f"{counts.units} units of {counts.tokens} tokens; the kernel counts them in 32 bits")
        src = overlap.src.describe(table, kind_in(shape.src_kind, own.src_kind))
        dst = overlap.dst.describe(table, kind_in(shape.dst_kind, own.dst_kind))
        scales = table.append(overlap.src.words), table.append(overlap.dst.words)
        further = [*src, *dst, *scales]
        if digests is not None:
            end: OverlapEnd = getattr(overlap, digests[1])
            further += coordinate_words(table, logicals[of], LISTED.value)
            further += [end.first_byte // 4, end.first_scale_byte // 4]
        table.region(number, counts, pieces, shape.columns, SEVERAL_UNITS.value, further)
    return table.launch(shapes)


def program(
    shapes: tuple[ColumnShape, ...], config: RowConfig, device: torch.device, digests: End | None = None
) -> Program:
    """Return the kernel for these shapes on this kind of device, which digests the rows at an end, or neither's."""
    # Rounding a product and a sum at once would change bits.
    constants = ("CASTS", casts(device)), ("enable_fp_fusion", False)
    if digests is None:
        return Program(convert_kernel, shapes, config, constants)
    end = DIGESTS_SRC if digests == "src" else DIGESTS_DST
    return Program(convert_and_digest_kernel, shapes, config, (*constants, ("DIGESTS", end.value)), outputs=1)


def standing_program(
    conversions: Sequence[Conversion], kinds: tuple[int, int], sms: int | None, digests: End | None = None
) -> Program:
    """Return the one kernel for conversions like these; see `rows.standing_program` and `program`."""
    config = configured(conversions, sms)
    given = dict(zip(("src_kind", "dst_kind"), kinds, strict=True))
    shapes = {own._replace(**given) for own, _ in _owns(conversions, config.block_bytes)}
    return program(tuple(sorted(shapes, reverse=True)), config, conversions[0].device, digests)


def prepare(
    conversions: Sequence[Conversion],
    config: RowConfig | None = None,
    sms: int | None = None,
    using: Program | None = None,
) -> Prepared | None:
    """Check the conversions and upload their table. Returns None without rows. Raises RegionError as `convert`."""
    for each in conversions:
        each.check()
    work = [each for each in conversions if each.rows]
    if not work:
        return None
    device = one_device(each.device for each in work)
    config = using.config if using is not None else config or configured(work, sms)
    launch = describe(work, config.block_bytes, () if using is None else using.shapes)
    return Prepared.of(program(launch.shapes, config, device), launch, device, sms)


def prepare_with_digest(
    conversions: Sequence[Conversion],
    logicals: Sequence[Logical],
    end: End,
    out: torch.Tensor,
    config: RowConfig | None = None,
    sms: int | None = None,
    using: Program | None = None,
) -> Prepared | None:
    """Prepare as `prepare` does; the launch also adds the digest of the rows at `end` to `out`, int64 [1] on their
    device, which is `digest_reference`'s modulo 2^64.

    Raises RegionError, too, for a conversion that `can_digest` does not serve.
    """
    digest_reference.check([each.at(end) for each in conversions], logicals)
    for each, logical in zip(conversions, logicals, strict=True):
        each.check()
        if not can_digest(each, logical, end):
            raise RegionError(f"rows of {each.at(end).row_bytes} bytes are not whole words of the streams they are of")
    work = [(each, logical) for each, logical in zip(conversions, logicals, strict=True) if each.rows]
    if not work:
        return None
    moved, coordinates = [each for each, _ in work], [logical for _, logical in work]
    device = one_device([*(each.device for each in moved), out.device])
    config = using.config if using is not None else config or configured(moved, sms)
    launch = describe(moved, config.block_bytes, () if using is None else using.shapes, (coordinates, end))
    return Prepared.of(program(launch.shapes, config, device, end), launch, device, sms, out)


def convert(
    conversions: Sequence[Conversion],
    config: RowConfig | None = None,
    sms: int | None = None,
    using: Program | None = None,
) -> None:
    """Convert every row in one launch on the current stream of their device, without a synchronise.

    All conversions must be on one device. `sms`: SM budget (None: no budget). `using`: see `rows.move`. The memory must
    stay allocated until the stream has passed the launch. Conversions without rows are skipped. Raises RegionError
    before anything is launched.
    """
    launch = prepare(conversions, config, sms, using)
    if launch is not None:
        launch.run()


def casts(device: torch.device) -> int:
    """Return 1 if the hardware converts float32 to e4m3 in one rounding, as Triton uses it: from sm_90 on."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))
