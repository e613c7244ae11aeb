"""The conversion kernel turns bf16 or fp16 rows into fp8 e4m3 with a scale a row, and back, while it moves them.

Bit for bit what `quant_reference` defines, which also states the error. All regions of a call go in one launch. A tile
is whole rows of one plane and head, from as many units as it takes: each row has an offset of its own, and is read
once, because its largest element must be known before the first is converted. Where a row is no power of two wide, its
tail has registers of its own: 576 elements are 512 and 64.

A warp holds whole rows of up to 512 elements and needs no other: no shared memory, no barrier. Wide moves in 16-byte
accesses, fp8 in 16-byte stores and 8-byte loads, where the addresses allow.

From sm_90 on the hardware converts, two elements an instruction. Before, it cannot (sm_80), or Triton 3.6 goes through
fp16 and rounds twice (sm_89): there, and in Triton's interpreter, the same numbers come from integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from .launch import Prepared, Program, RowConfig, one_device
from .quant_reference import FP8_MAX_INVERSE, SCALE_BYTES, SCALE_FLOOR, WIDE_BYTES, QuantRegion
from .region import RegionError
from .table import (
    SEVERAL_UNITS,
    SHAPE,
    SIDE_WORDS,
    SIDES,
    Counts,
    Launch,
    Table,
    find_region,
    kind_of_units,
    plane_and_head,
    plane_start,
    rows_of,
    token_stride,
    unit_start,
)

#: Where a region's sides are described, and how many words describe it.
WIDE_SIDE = SIDES
NARROW_SIDE = tl.constexpr(SIDES.value + SIDE_WORDS.value)
SCALE_SIDE = tl.constexpr(SIDES.value + 2 * SIDE_WORDS.value)
REGION_WORDS = tl.constexpr(SIDES.value + 3 * SIDE_WORDS.value)

INVERSE, FLOOR = tl.constexpr(FP8_MAX_INVERSE), tl.constexpr(SCALE_FLOOR)

#: The scale of the largest number of each wide dtype.
LARGEST_BF16, LARGEST_FP16 = (
    tl.constexpr(float(np.float32(torch.finfo(dtype).max) * np.float32(FP8_MAX_INVERSE)))
    for dtype in (torch.bfloat16, torch.float16)
)

#: Where the kernel finds each field of a QuantShape.
OF_BFLOAT16, OF_DIM, OF_PART, OF_ROWS, OF_WIDE_VEC, OF_NARROW_VEC, OF_WIDE_KIND, OF_NARROW_KIND, OF_SCALE_KIND = map(
    tl.constexpr, range(9)
)


@triton.jit
def _row_pointers(
    table, side, plane, head, unit, token, live, ELEMENT: tl.constexpr, VEC: tl.constexpr, KIND: tl.constexpr
):
    """Where each row starts on a side: [row]. Everything but planes is in elements."""
    base = plane_start(table, side, plane, head, ELEMENT, VEC)
    return base + (unit_start(table, side, unit, live, KIND, VEC) + token * token_stride(side, VEC))


@triton.jit
def _as_float(x, WIDE: tl.constexpr):
    """16-bit words as the float32 they stand for. bf16 is its upper half."""
    if WIDE.is_bf16():
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _to_fp8(y, CASTS: tl.constexpr):
    """float32 to e4m3 as int8, to nearest even, 448 beyond it, 0x7F for NaN: what `cvt.rn.satfinite` does."""
    if CASTS:
        return y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Near 2**14 float32 has the step of e4m3's subnormal numbers, 2**-9: the addition rounds to it.
    stepped = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = stepped.to(tl.int32, bitcast=True) - 0x46800000
    q = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2**-6
    return tl.where(y == y, q, 0x7F).to(tl.int8)


@triton.jit
def _from_fp8(q, CASTS: tl.constexpr):
    """e4m3 in int8 as float32, exactly."""
    if CASTS:
        return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = q.to(tl.int32)
    # The bits seven places up, in float32's exponent and mantissa, are the number times 2**-120, subnormal or not.
    magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    signed = (magnitude.to(tl.int32, bitcast=True) | (wide & 0x80) << 24).to(tl.float32, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), signed)


@triton.jit
def _to_words(p, WIDE: tl.constexpr, CASTS: tl.constexpr):
    """float32 to `WIDE` as int16, to nearest even, 0x7FFF for NaN, as the hardware has it."""
    if CASTS:
        return p.to(WIDE).to(tl.int16, bitcast=True)
    if WIDE.is_bf16():
        bits = p.to(tl.int32, bitcast=True)
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        words = p.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(p == p, words, 0x7FFF).to(tl.int16)


@triton.jit
def _magnitude(x, CASTS: tl.constexpr):
    """Of which a maximum leaves NaN out."""
    magnitude = tl.abs(x)
    if not CASTS:  # the GPU's max takes the number where one of two is none; numpy's complains
        magnitude = tl.where(x == x, magnitude, 0.0)
    return magnitude


@triton.jit
def _store_scales(scales, scale, live, WIDTH: tl.constexpr):
    """With a column for every thread that holds a row, one of them live: so laid out, nothing crosses shared memory."""
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(scales[:, None] + column, scale[:, None] + column * 0.0, mask=live[:, None] & (column == 0))


@triton.jit
def _tile(table, at, tile, SHAPES: tl.constexpr, I: tl.constexpr, PACK: tl.constexpr, CASTS: tl.constexpr):
    """Convert one tile of the region described at `at`, whose rows have shape `I`."""
    OF: tl.constexpr = SHAPES[I]
    WIDE: tl.constexpr = tl.bfloat16 if OF[OF_BFLOAT16] else tl.float16  # pyright: ignore
    DIM: tl.constexpr = OF[OF_DIM]
    PART: tl.constexpr = OF[OF_PART]
    WIDE_VEC: tl.constexpr = OF[OF_WIDE_VEC]
    # Unpacking, a thread takes the fp8 that make one access of wide: twice as many would cross shared memory.
    NARROW_VEC: tl.constexpr = OF[OF_NARROW_VEC] if PACK or OF[OF_NARROW_VEC] < 8 else 8  # pyright: ignore
    plane, head, piece = plane_and_head(at, tile)
    unit, token, _, live = rows_of(at, piece, OF[OF_ROWS], 1, SEVERAL_UNITS)
    side = at + WIDE_SIDE
    wide = _row_pointers(table, side, plane, head, unit, token, live, tl.int16, WIDE_VEC, OF[OF_WIDE_KIND])[:, None]
    side = at + NARROW_SIDE
    narrow = _row_pointers(table, side, plane, head, unit, token, live, tl.int8, NARROW_VEC, OF[OF_NARROW_KIND])[
        :, None
    ]
    scales = _row_pointers(table, at + SCALE_SIDE, plane, head, unit, token, live, tl.float32, 1, OF[OF_SCALE_KIND])
    body = tl.arange(0, PART)[None, :]
    tail = PART + body
    here = live[:, None]
    tail_here = here & (tail < DIM)
    if PACK:
        x = _as_float(tl.load(wide + body, mask=here, other=0, eviction_policy="evict_first"), WIDE)
        magnitude = _magnitude(x, CASTS)
        if DIM > PART:
            x_tail = _as_float(tl.load(wide + tail, mask=tail_here, other=0, eviction_policy="evict_first"), WIDE)
            magnitude = tl.maximum(magnitude, _magnitude(x_tail, CASTS))
        # In this order NaN, of a row of nothing else, becomes the floor, and infinity the scale of the largest number.
        scale = tl.minimum(
            tl.maximum(tl.max(magnitude, 1) * INVERSE, FLOOR), LARGEST_BF16 if OF[OF_BFLOAT16] else LARGEST_FP16
        )
        _store_scales(scales, scale, live, max(1, PART // max(WIDE_VEC, OF[OF_NARROW_VEC])))
        inverse = tl.div_rn(1.0, scale)[:, None]
        tl.store(narrow + body, _to_fp8(x * inverse, CASTS), mask=here)
        if DIM > PART:
            tl.store(narrow + tail, _to_fp8(x_tail * inverse, CASTS), mask=tail_here)
    else:
        scale = tl.load(scales, mask=live, other=0.0)[:, None]
        q = tl.load(narrow + body, mask=here, other=0, eviction_policy="evict_first")
        if DIM > PART:
            q_tail = tl.load(narrow + tail, mask=tail_here, other=0, eviction_policy="evict_first")
        tl.store(wide + body, _to_words(_from_fp8(q, CASTS) * scale, WIDE, CASTS), mask=here)
        if DIM > PART:
            tl.store(wide + tail, _to_words(_from_fp8(q_tail, CASTS) * scale, WIDE, CASTS), mask=tail_here)


@triton.jit(do_not_specialize=["regions", "tiles"])
def quant_kernel(table, regions, tiles, SHAPES: tl.constexpr, PACK: tl.constexpr, CASTS: tl.constexpr):
    """Persistent over all tiles of all regions; the grid is the SM budget.

    `table`: see `describe`. `CASTS`: the hardware converts.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, REGION_WORDS)
        shape = tl.load(at + SHAPE).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, local, SHAPES, i, PACK, CASTS)


#: One 16-byte store of fp8 a thread and part, as the row mover's rule: many small programs, or one that fills an SM.
CONFIG = RowConfig(block_bytes=4096, warps=4)
BUDGET_CONFIG = RowConfig(block_bytes=32768, warps=32)

#: A product and a sum in one rounding would be other bits.
OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedQuant:
    """A launch whose table is on the device: either verb, any number of times, CUDA graphs included."""

    prepared: Prepared

    def pack(self) -> None:
        """Launch the packing on the current stream."""
        self.prepared.run(PACK=1)

    def unpack(self) -> None:
        """Launch the unpacking on the current stream."""
        self.prepared.run(PACK=0)


def prepare(
    regions: Sequence[QuantRegion], config: RowConfig | None = None, sms: int | None = None
) -> PreparedQuant | None:
    """What `pack` and `unpack` do before they launch; None when there are no rows."""
    for region in regions:
        region.check()
    work = [region for region in regions if region.rows]
    if not work:
        return None
    device = one_device(region.device for region in work)
    config = config or (CONFIG if sms is None else BUDGET_CONFIG)
    launch = describe(work, config)
    program = Program(quant_kernel, launch.shapes, config, (("CASTS", casts(device)), *OPTIONS.items()))
    return PreparedQuant(Prepared.of(program, launch, device, sms))


def pack(regions: Sequence[QuantRegion], config: RowConfig | None = None, sms: int | None = None) -> None:
    """Quantise every wide row into its fp8 row and scale, in one launch on the current stream, without a synchronise.

    All regions on one device. `sms` is the SM budget (None: no budget). The regions' memory must stay allocated until
    the stream has passed the launch. Raises RegionError before anything is launched; regions without rows are skipped.
    """
    prepared = prepare(regions, config, sms)
    if prepared is not None:
        prepared.pack()


def unpack(regions: Sequence[QuantRegion], config: RowConfig | None = None, sms: int | None = None) -> None:
    """Bring every wide row back from its fp8 row and scale. As `pack` in all else."""
    prepared = prepare(regions, config, sms)
    if prepared is not None:
        prepared.unpack()


def casts(device: torch.device) -> int:
    """1 where the hardware converts float32 to e4m3 in one rounding, as Triton uses it: from sm_90 on."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


#: Of rows with few elements: a tile of more would read offsets instead of payload.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class QuantShape:
    """What the kernel is compiled for: `rows` rows a tile of `dim` elements, in one or two parts of `part`.

    `wide_vec`, `narrow_vec`: the elements of which every row starts at a multiple. The kinds of sides: whether units
    are listed, or follow each other at one distance, as on the wire, and need no table.
    """

    bfloat16: int
    dim: int
    part: int
    rows: int
    wide_vec: int
    narrow_vec: int
    wide_kind: int
    narrow_kind: int
    scale_kind: int

    @classmethod
    def of(cls, region: QuantRegion, config: RowConfig) -> QuantShape:
        """As many rows as fill a tile, and the widest accesses that the addresses allow."""
        part = 1 << (region.dim.bit_length() - 1)
        vecs = region.alignment(region.wide) // WIDE_BYTES, region.alignment(region.narrow)
        # Narrower accesses, of which a thread has as many: more would each be of another row, with its own addresses.
        share = max(vecs[0], vecs[1] // 2, 1)
        rows = max(1, min(MOST_ROWS, config.block_bytes * share // (16 * part)))
        kinds = (kind_of_units(side.units) for _, side, _ in region.sides)
        return cls(int(region.dtype == torch.bfloat16), region.dim, part, rows, *vecs, *kinds)


def describe(regions: Sequence[QuantRegion], config: RowConfig) -> Launch:
    """Lay the regions out as the kernel reads them: wide, fp8 and scales of each."""
    table, shapes = Table(len(regions), REGION_WORDS.value), dict[QuantShape, int]()
    for region in regions:
        shape = QuantShape.of(region, config)
        pieces = -(-region.units * region.tokens // shape.rows)
        if pieces * shape.rows >= 1 << 31:
            raise RegionError(f"{region.units} units of {region.tokens} tokens; the kernel counts them in 32 bits")
        kinds = (WIDE_BYTES, shape.wide_kind), (1, shape.narrow_kind), (SCALE_BYTES, shape.scale_kind)
        sides = [
            word for (_, side, _), kind in zip(region.sides, kinds, strict=True) for word in table.side(side, *kind)
        ]
        counts = Counts(region.units, region.planes, region.heads, region.tokens)
        table.region(shapes.setdefault(shape, len(shapes)), counts, pieces, 1, SEVERAL_UNITS.value, sides)
    return table.launch(tuple(shapes))
