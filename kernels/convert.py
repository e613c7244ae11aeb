"""The conversion kernel converts rows while it moves them: bfloat16 to fp8, NVFP4 or MX forms, and back.

Results are those of `convert_reference`, bit for bit. An overlap is the numbers that a part of the source's form shares
with a part of the destination's; its rows are cut into grains, powers of two that hold whole blocks. A tile is some
grains of one plane and head, from as many units as it takes: a scale is known where its block is read, and no tile
waits for another. All overlaps of a call go in one launch, and each kind of overlap has its own code. The same launch
digests one end's rows, whose words it has in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    F32,
    as_float,
    in_words,
    to_e5m2,
    to_fp4,
    to_fp8,
    to_power,
    to_words,
)
from .convert_overlaps import ColumnShape, OverlapEnd, best_shapes, can_digest
from .convert_reference import LARGEST, POWER_FLOOR, SCALE_FLOOR, Conversion
from .digest import coordinate_words, key_of, sum_of
from .digest_reference import End, Logical
from .launch import RULES, Kernel, Prepared, Program, RowConfig, RowKind, choose, one_device
from .region import Region, RegionError
from .table import (
    ADDRESSES,
    LISTED,
    SEVERAL_UNITS,
    SHAPE,
    SIDE_WORDS,
    SIDES,
    TOKEN_STRIDE,
    UNSPECIALIZED,
    Counts,
    Launch,
    Table,
    find_region,
    kind_in,
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
def _starts(table, side, moved, row, ELEMENT: tl.constexpr, VEC: tl.constexpr, KIND: tl.constexpr):
    """Return pointers to each row's start in a stream, `moved` bytes further than the table says: [row, 1]. `row`: its
    plane, head, unit, token and existence.
    """
    plane, head, unit, token, live = row
    start = unit_start(table, side, 0, unit, live, KIND, VEC) + token * token_stride(side, VEC)
    return (plane_start(table, side, moved, plane, head, ELEMENT, VEC) + start)[:, None]


@triton.jit
def _plane_scale(table, planes, plane):
    """Return a plane's scale, stored as float32 in the low half of a word."""
    return tl.load(table + tl.load(planes) + plane).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key(table, at, plane, head, unit, token, live):
    """Return each row's key for the digest: [row, 1]."""
    side = at + LOGICAL
    position = unit_start(table, side, 0, unit, live, LISTED, 1) + token * tl.load(side + TOKEN_STRIDE)
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
def _read(table, at, moved, row, grain, key, OF: tl.constexpr, CASTS: tl.constexpr, SUM: tl.constexpr):
    """Return the numbers of a tile in float32, [row, number], and the sum of its words if `SUM`, else 0.

    `grain`, `key` [row, 1]: the grain's number in its row, and the row's key.
    """
    plane, live = row[0], row[4]
    KIND: tl.constexpr = OF[OF_SRC_ELEMENT]
    WIDTH: tl.constexpr = OF[OF_WIDTH]
    BLOCK: tl.constexpr = OF[OF_SRC_BLOCK]
    VALUES: tl.constexpr = OF[OF_VALUES]
    UNITS: tl.constexpr = OF[OF_SRC_KIND]
    SCALE: tl.constexpr = OF[OF_SRC_SCALE]
    WORD: tl.constexpr = tl.float32 if KIND == F32 else (tl.int16 if KIND <= BF16 else tl.int8)  # pyright: ignore
    FACTOR: tl.constexpr = tl.float32 if SCALE == F32 else tl.int8  # pyright: ignore
    total = tl.full([], 0, tl.int64)
    rows = _starts(table, at + SRC, moved, row, WORD, OF[OF_SRC_VEC], UNITS)
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
        scales = _starts(table, at + SRC_SCALES, moved, row, FACTOR, 1, UNITS)
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
def _write(table, at, moved, row, grain, key, x, OF: tl.constexpr, CASTS: tl.constexpr, SUM: tl.constexpr):
    """Store numbers [row, number] in the destination's form, with their block scales. Returns the sum of the words
    stored if `SUM`, else 0.
    """
    plane, live = row[0], row[4]
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
    rows = _starts(table, at + DST, moved, row, WORD, OF[OF_DST_VEC], UNITS)
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
            scales = _starts(table, at + DST_SCALES, moved, row, FACTOR, 1, UNITS) + block
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
def _tile(
    table, at, out, shift, tile, SHAPES: tl.constexpr, I: tl.constexpr, CASTS: tl.constexpr, DIGESTS: tl.constexpr
):
    """Convert one tile of the region described at `at`, whose rows are served by shape `I`; add its sum to `out`."""
    OF: tl.constexpr = SHAPES[I]
    COUNT: tl.constexpr = (OF[OF_VALUES] + OF[OF_WIDTH] - 1) // OF[OF_WIDTH]
    plane, head, piece = plane_and_head(at, tile)
    unit, token, grain, live = rows_of(at, piece, OF[OF_ROWS], COUNT, SEVERAL_UNITS)
    unit += shift[0]  # to lists it would be added for each of four streams, out of registers
    grain = grain.to(tl.int32)[:, None]
    key = grain
    if DIGESTS != NEITHER:
        key = _key(table, at, plane, head, unit, token, live)
    row = plane, head, unit, token, live
    x, read = _read(table, at, shift[1], row, grain, key, OF, CASTS, DIGESTS == DIGESTS_SRC)
    wrote = _write(table, at, shift[2], row, grain, key, x, OF, CASTS, DIGESTS == DIGESTS_DST)
    if DIGESTS != NEITHER:
        tl.atomic_add(out, read + wrote, sem="relaxed")


@triton.jit
def _tiles(table, out, regions, tiles, shift, SHAPES: tl.constexpr, CASTS: tl.constexpr, DIGESTS: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, WORDS if DIGESTS == NEITHER else DIGEST_WORDS)
        shape = tl.load(at + SHAPE).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, out, shift, local, SHAPES, i, CASTS, DIGESTS)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def convert_kernel(
    table,
    regions,
    tiles,
    first_unit,
    src_bytes,
    dst_bytes,
    SHAPES: tl.constexpr,
    CASTS: tl.constexpr,
):
    """Convert all tiles of all regions; the grid is the SM budget, or every tile without one.

    `table`: see `describe`. `first_unit`, `src_bytes`, `dst_bytes`: see `Shift`. `CASTS`: see `casts`.
    """
    _tiles(table, table, regions, tiles, (first_unit, src_bytes, dst_bytes), SHAPES, CASTS, NEITHER)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["out"])
def convert_and_digest_kernel(
    table,
    out,
    regions,
    tiles,
    first_unit,
    src_bytes,
    dst_bytes,
    SHAPES: tl.constexpr,
    CASTS: tl.constexpr,
    DIGESTS: tl.constexpr,
):
    """Convert all tiles as `convert_kernel`, and add the digest of the rows of one end, `DIGESTS`, to `out`."""
    _tiles(table, out, regions, tiles, (first_unit, src_bytes, dst_bytes), SHAPES, CASTS, DIGESTS)


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
    owns = best_shapes(conversions, block_bytes)
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
    shapes = {own._replace(**given) for own, _ in best_shapes(conversions, config.block_bytes)}
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
    return _prepared([each for each in conversions if each.rows], config, sms, using)


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
    marks = [logical for each, logical in zip(conversions, logicals, strict=True) if each.rows]
    return _prepared([each for each in conversions if each.rows], config, sms, using, (marks, end), out)


def _prepared(
    work: Sequence[Conversion],
    config: RowConfig | None,
    sms: int | None,
    using: Program | None,
    digests: tuple[Sequence[Logical], End] | None = None,
    *outputs: torch.Tensor,
) -> Prepared | None:
    """Describe a launch of checked conversions that have rows, and upload its table. `digests`: see `describe`."""
    if not work:
        return None
    device = one_device([*(each.device for each in work), *(each.device for each in outputs)])
    config = using.config if using is not None else config or configured(work, sms)
    launch = describe(work, config.block_bytes, () if using is None else using.shapes, digests)
    kernel = program(launch.shapes, config, device, None if digests is None else digests[1])
    return Prepared.of(kernel, launch, device, sms, *outputs)


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
