"""The conversion kernel brings rows into another form while it moves them: bfloat16 to fp8 or NVFP4, and any way back.

Bit for bit what `convert_reference` defines. The numbers that two parts of the two forms have in common are an overlap,
and an overlap is cut into columns of a power of two that holds whole blocks. A tile is a column of some rows of one
plane and head, from as many units as it takes: so a scale is known where its block is read, and no tile waits for
another. All overlaps of a call that are alike go in one launch; there are as many kernels as kinds of overlap.

From sm_90 on the hardware converts to e4m3. Before, it cannot (sm_80), or Triton 3.6 goes through fp16 and rounds twice
(sm_89): there, and in Triton's interpreter, the same numbers come from integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .convert_reference import SCALE_FLOOR, Conversion, RowForm, borders, element_size
from .launch import RowConfig, Upload, on, one_device
from .region import RegionError, Side, even_distance
from .table import WIDEST, find_region

FLOOR = tl.constexpr(SCALE_FLOOR)

#: Kinds of elements, as the kernel knows them.
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float4_e2m1fn_x2": 4}
F32, F16, BF16, E4M3, E2M1 = (tl.constexpr(number) for number in range(5))

#: Streams of a region: where elements and scales are read, and where they are written.
SRC, SRC_SCALES, DST, DST_SCALES = (tl.constexpr(number) for number in range(4))


@triton.jit
def _row_pointers(
    table,
    at,
    plane,
    head,
    unit,
    token,
    live,
    STREAM: tl.constexpr,
    ELEMENT: tl.constexpr,
    VEC: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Where each row starts in a stream: [row]. Everything but planes is in elements."""
    base = tl.load(table + tl.load(at + 9 + STREAM) + plane).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, VEC * ELEMENT.primitive_bitwidth // 8)
    base += head * tl.multiple_of(tl.load(at + 21 + STREAM), VEC)
    first = tl.load(at + 13 + STREAM)
    if LISTED:
        start = tl.multiple_of(tl.load(table + first + unit, mask=live, other=0), VEC)
    else:
        start = tl.multiple_of(first, VEC) + unit.to(tl.int64) * tl.multiple_of(tl.load(at + 17 + STREAM), VEC)
    return base + (start + token * tl.multiple_of(tl.load(at + 25 + STREAM), VEC))


@triton.jit
def _plane_scale(table, at, plane, WORD: tl.constexpr):
    """A plane's own scale: float32, in the low half of a word."""
    return tl.load(table + tl.load(at + WORD) + plane).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _as_float(q, KIND: tl.constexpr, CASTS: tl.constexpr):
    """Stored elements as float32, exactly: words of their width, e2m1 one in each byte."""
    if KIND == F32:
        x = q
    elif KIND == F16:
        x = q.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == BF16:
        x = (q.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == E4M3:
        if CASTS:
            x = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            wide = q.to(tl.int32)
            # Twenty places up, in float32's exponent and mantissa, they are the number times 2**-120, subnormal or not.
            magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            x = (magnitude.to(tl.int32, bitcast=True) | (wide & 0x80) << 24).to(tl.float32, bitcast=True)
            x = tl.where((wide & 0x7F) == 0x7F, float("nan"), x)
    else:
        wide = q.to(tl.int32)
        magnitude = ((wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
        x = (magnitude.to(tl.int32, bitcast=True) | (wide & 8) << 28).to(tl.float32, bitcast=True)
    return x


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
def _to_fp4(y):
    """float32 to e2m1 in the low half of int8, to nearest even, 6 beyond it. Not of NaN."""
    m = tl.abs(y)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    return (code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.int8)


@triton.jit
def _to_words(x, KIND: tl.constexpr, CASTS: tl.constexpr):
    """float32 to a plain element, to nearest even, as the integer that is stored; NaN as the hardware writes it."""
    if KIND == F32:
        words = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FFFFFFF).to(tl.float32, bitcast=True)
    elif KIND == F16:
        words = tl.where(x == x, x.to(tl.float16).to(tl.int16, bitcast=True), 0x7FFF).to(tl.int16)
    elif CASTS:
        words = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        words = tl.where(x == x, words, 0x7FFF).to(tl.int16)
    return words


@triton.jit
def _by_block(x, factors, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """Numbers [row, column] times, or divided by, the factor of their block [row, block]."""
    blocks = tl.reshape(x, [ROWS, WIDTH // BLOCK, BLOCK])
    each = factors[:, :, None]
    if DIVIDE:
        blocks, each = tl.broadcast(blocks, each)
        done = tl.div_rn(blocks, each)
    else:
        done = blocks * each
    return tl.reshape(done, [ROWS, WIDTH])


@triton.jit
def _read(table, at, plane, head, unit, token, live, first, SHAPE: tl.constexpr, CASTS: tl.constexpr):
    """The numbers of a column in float32 [row, column]; `first`: the column's first number in its part."""
    KIND: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = SHAPE[2]
    ROWS: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    VALUES: tl.constexpr = SHAPE[11]
    WORD: tl.constexpr = tl.float32 if KIND == F32 else (tl.int16 if KIND <= BF16 else tl.int8)  # pyright: ignore
    FACTOR: tl.constexpr = tl.float32 if KIND == E4M3 else tl.int8  # pyright: ignore
    rows = _row_pointers(table, at, plane, head, unit, token, live, SRC, WORD, SHAPE[6], SHAPE[8])[:, None]
    here = live[:, None]
    if KIND == E2M1:
        column = first // 2 + tl.arange(0, WIDTH // 2)[None, :]
        if VALUES % WIDTH:
            here = here & (column * 2 < VALUES)
        pairs = tl.load(rows + column, mask=here, other=0, eviction_policy="evict_first")
        q = tl.interleave(pairs & 0xF, (pairs >> 4) & 0xF)
    else:
        column = first + tl.arange(0, WIDTH)[None, :]
        if VALUES % WIDTH:
            here = here & (column < VALUES)
        q = tl.load(rows + column, mask=here, other=0, eviction_policy="evict_first")
    x = _as_float(q, KIND, CASTS)
    if BLOCK > 0:
        number = first // BLOCK + tl.arange(0, WIDTH // BLOCK)[None, :]
        here = live[:, None] & (number * BLOCK < VALUES)
        scales = _row_pointers(table, at, plane, head, unit, token, live, SRC_SCALES, FACTOR, 1, SHAPE[8])
        factors = tl.load(scales[:, None] + number, mask=here, other=0)
        if KIND == E2M1:
            factors = _as_float(factors, E4M3, CASTS) * _plane_scale(table, at, plane, 7)
        x = _by_block(x, factors, ROWS, WIDTH, BLOCK, 0)
    elif KIND == E4M3:
        x = x * _plane_scale(table, at, plane, 7)
    return x


@triton.jit
def _write(table, at, plane, head, unit, token, live, first, x, SHAPE: tl.constexpr, CASTS: tl.constexpr):
    """Numbers [row, column] in the form of the destination, their scales too."""
    KIND: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    ROWS: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[5]
    VALUES: tl.constexpr = SHAPE[11]
    WORD: tl.constexpr = tl.float32 if KIND == F32 else (tl.int16 if KIND <= BF16 else tl.int8)  # pyright: ignore
    FACTOR: tl.constexpr = tl.float32 if KIND == E4M3 else tl.int8  # pyright: ignore
    rows = _row_pointers(table, at, plane, head, unit, token, live, DST, WORD, SHAPE[7], SHAPE[9])[:, None]
    column = first + tl.arange(0, WIDTH)[None, :]
    here = live[:, None]
    if VALUES % WIDTH:
        here = here & (column < VALUES)
    if KIND <= BF16:
        tl.store(rows + column, _to_words(x, KIND, CASTS), mask=here)
    else:
        largest = SHAPE[10]
        x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))  # NaN stays
        if BLOCK == 0:
            own = tl.full([ROWS, WIDTH], 1.0, tl.float32) * _plane_scale(table, at, plane, 8)
            tl.store(rows + column, _to_fp8(tl.div_rn(x, own), CASTS), mask=here)
        else:
            BLOCKS: tl.constexpr = WIDTH // BLOCK
            blocks = tl.reshape(x, [ROWS, BLOCKS, BLOCK])
            amax = tl.max(tl.where(blocks == blocks, tl.abs(blocks), 0.0), 2)
            number = first // BLOCK + tl.arange(0, BLOCKS)[None, :]
            held = live[:, None] & (number * BLOCK < VALUES)
            scales = _row_pointers(table, at, plane, head, unit, token, live, DST_SCALES, FACTOR, 1, SHAPE[9])
            if KIND == E4M3:
                factors = tl.maximum(tl.div_rn(amax, tl.full([ROWS, BLOCKS], 448.0, tl.float32)), FLOOR)
                tl.store(scales[:, None] + number, factors, mask=held)
                tl.store(rows + column, _to_fp8(_by_block(x, factors, ROWS, WIDTH, BLOCK, 1), CASTS), mask=here)
            else:
                own = tl.full([ROWS, BLOCKS], 1.0, tl.float32) * _plane_scale(table, at, plane, 8)
                stored = tl.div_rn(tl.div_rn(amax, tl.full([ROWS, BLOCKS], 6.0, tl.float32)), own)
                odd = tl.max(tl.where(blocks == blocks, 0.0, 1.0), 2)
                stored = tl.where(odd == 1.0, 0x7F, _to_fp8(stored, CASTS)).to(tl.int8)
                tl.store(scales[:, None] + number, stored, mask=held)
                factors = _as_float(stored, E4M3, CASTS) * own
                y = _by_block(x, tl.where(factors == 0.0, float("inf"), factors), ROWS, WIDTH, BLOCK, 1)
                code = _to_fp4(tl.where(y == y, y, 0.0))
                low, high = tl.split(tl.reshape(code, [ROWS, WIDTH // 2, 2]))
                pair = first // 2 + tl.arange(0, WIDTH // 2)[None, :]
                whole = live[:, None]
                if VALUES % WIDTH:
                    whole = whole & (pair * 2 < VALUES)
                tl.store(rows + pair, low | (high << 4), mask=whole)


@triton.jit(do_not_specialize=["regions", "tiles"])
def convert_kernel(table, regions, tiles, SHAPE: tl.constexpr, CASTS: tl.constexpr):
    """Persistent over all tiles of all regions of one kind; the grid is the SM budget.

    `table` int64: `FIELDS` words a region, then plane addresses in bytes, unit offsets in elements, and scales (see
    `describe`). `CASTS`: the hardware converts.
    """
    WIDTH: tl.constexpr = SHAPE[2]
    ROWS: tl.constexpr = SHAPE[3]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, FIELDS)
        planes, heads = tl.load(at + 2).to(tl.uint32), tl.load(at + 3).to(tl.uint32)
        tokens, columns = tl.load(at + 4).to(tl.uint32), tl.load(at + 5).to(tl.uint32)
        rest = local // columns
        first = (local - rest * columns) * WIDTH
        piece = rest // planes
        plane = rest - piece * planes
        part = piece // heads
        head = (piece - part * heads).to(tl.int64)
        row = part * ROWS + tl.arange(0, ROWS).to(tl.uint32)
        unit = row // tokens
        token = row - unit * tokens
        live = unit < tl.load(at + 1).to(tl.uint32)
        x = _read(table, at, plane, head, unit, token, live, first, SHAPE, CASTS)
        _write(table, at, plane, head, unit, token, live, first, x, SHAPE, CASTS)


#: Two 16-byte accesses of the wider side a thread; under a budget a program fills an SM.
CONFIG = RowConfig(block_bytes=4096, warps=4)
BUDGET_CONFIG = RowConfig(block_bytes=32768, warps=32)

#: A product and a sum in one rounding would be other bits.
OPTIONS = {"enable_fp_fusion": False}

#: int64 words that describe a region to the kernel: see `describe`.
FIELDS = tl.constexpr(30)

#: Numbers of a column at most: wider ones make no access wider.
MOST_COLUMNS = 128

#: Of rows with few numbers: a tile of more would read offsets instead of payload.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Stream:
    """Elements or scales of an overlap on one side, from `first_byte` of a row on; `size` bytes each, 0: no such."""

    side: Side
    first_byte: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """`values` numbers of every row of a conversion that lie in one part of each form.

    `elements`, `blocks`: of source and destination. `scales`: of the planes [plane], ones where there are none.
    """

    of: Conversion
    values: int
    elements: tuple[str, str]
    blocks: tuple[int, int]
    streams: tuple[Stream, Stream, Stream, Stream]
    scales: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def overlaps(of: Conversion) -> Iterator[Overlap]:
    """All of a conversion, in the order of a row."""
    for first, stop in pairwise(borders(of.reads, of.writes)):
        found = [
            _side_of(side, form, scales, first)
            for side, form, scales in ((of.src, of.reads, of.src_scales), (of.dst, of.writes, of.dst_scales))
        ]
        elements, blocks, values, factors, scales = zip(*found, strict=True)
        streams = values[0], factors[0], values[1], factors[1]
        yield Overlap(of, stop - first, elements, blocks, streams, scales)


def _side_of(
    side: Side, form: RowForm, scales: npt.NDArray[np.float32], first: int
) -> tuple[str, int, Stream, Stream, npt.NDArray[np.float32]]:
    """Element, block, streams of elements and scales, and the planes' scales, from number `first` of a row on."""
    own = begun = 0
    for part, start in zip(form.parts, form.starts, strict=True):
        if first < begun + part.values:
            within = first - begun
            size = element_size(part.element)
            elements = Stream(side, start + within * part.element_bytes // part.values, size)
            at = start + part.element_bytes
            factors = Stream(side, 0, 0)
            if part.block:
                width = element_size(part.scale)
                factors = Stream(side, at + within // part.block * width, width)
            found = scales[:, own] if part.is_scaled else np.ones(len(side.offset), np.float32)
            return part.element, part.block, elements, factors, found
        begun, own = begun + part.values, own + part.is_scaled
    raise RegionError(f"number {first} of a row of {form.dim}")


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """What the kernel is compiled for: tiles of `rows` x `width` of a row's `values`, of these kinds and in blocks.

    `vecs`: elements of which every row starts at a multiple, at source and destination. `listed`: 0 where units follow
    each other at one distance, as on the wire, and need no table. `largest`: what infinity counts as.
    """

    kinds: tuple[int, int]
    width: int
    rows: int
    blocks: tuple[int, int]
    vecs: tuple[int, int]
    listed: tuple[int, int]
    largest: float
    values: int

    @property
    def constexpr(self) -> tuple[float, ...]:
        """As the kernel takes it: plain numbers, which can be written as JSON, as vLLM has Triton do."""
        return *self.kinds, self.width, self.rows, *self.blocks, *self.vecs, *self.listed, self.largest, self.values

    @classmethod
    def of(cls, overlap: Overlap, config: RowConfig) -> ColumnShape:
        """As many rows as fill a tile, and the widest accesses that the addresses allow."""
        kinds = _KINDS[overlap.elements[0]], _KINDS[overlap.elements[1]]
        width = max(2, min(MOST_COLUMNS, 1 << (overlap.values - 1).bit_length()), *overlap.blocks)
        reads, _, writes, _ = overlap.streams
        # Of narrow elements a thread reads as many as make one wide access: twice as many would cross shared memory.
        most = 16 // writes.size if overlap.elements[0] != "float4_e2m1fn_x2" else 16
        vecs = min(most, _vec(overlap.of, reads)), _vec(overlap.of, writes)
        wide = max(1, *(stream.size for stream in (reads, writes)))
        # Narrow accesses: as many a thread as of wide ones, not as many bytes: else addresses fill its registers.
        tile = config.block_bytes // WIDEST.value * min(WIDEST.value // wide, *vecs)
        rows = max(1, min(MOST_ROWS, tile // width))
        listed = tuple(int(even_distance(side.units) is None) for side in (overlap.of.src, overlap.of.dst))
        half = overlap.of.writes.values == "float16"
        largest = torch.finfo(torch.float16 if half else torch.bfloat16).max
        return cls(kinds, width, rows, overlap.blocks, vecs, (listed[0], listed[1]), largest, overlap.values)


def _vec(of: Conversion, stream: Stream) -> int:
    """Elements of which each row's first is at a multiple."""
    aligned = of.at("src" if stream.side is of.src else "dst").alignment()
    return max(1, gcd(aligned, stream.first_byte or 16, 16) // stream.size)


@dataclass(frozen=True, slots=True, eq=False)
class ConvertLaunch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the shape to compile for."""

    table: npt.NDArray[np.int64]
    regions: int
    tiles: int
    shape: ColumnShape


def describe(conversions: Sequence[Conversion], config: RowConfig) -> list[ConvertLaunch]:
    """Lay the overlaps out as the kernel reads them: a launch for those that are alike."""
    kinds: dict[ColumnShape, list[Overlap]] = {}
    for each in conversions:
        for overlap in overlaps(each):
            kinds.setdefault(ColumnShape.of(overlap, config), []).append(overlap)
    return [_launch(shape, alike) for shape, alike in kinds.items()]


def _launch(shape: ColumnShape, alike: Sequence[Overlap]) -> ConvertLaunch:
    header = np.zeros((len(alike), FIELDS.value), np.int64)
    parts = [header.reshape(-1)]
    tiles = 0
    for fields, overlap in zip(header, alike, strict=True):
        of, columns = overlap.of, -(-overlap.values // shape.width)
        units = len(of.src.units)
        fields[:6] = tiles, units, of.planes, of.heads, of.tokens, columns
        for number, scales in enumerate(overlap.scales):
            fields[7 + number] = sum(map(len, parts))
            parts.append(np.ascontiguousarray(scales).view(np.int32).astype(np.int64))
        for number, stream in enumerate(overlap.streams):
            if stream.size:
                _describe_stream(parts, fields, number, stream)
        pieces = -(-units * of.tokens // shape.rows)
        if pieces * shape.rows >= 1 << 31:
            raise RegionError(f"{units} units of {of.tokens} tokens; the kernel counts them in 32 bits")
        tiles += pieces * of.planes * of.heads * columns
    if tiles >= 1 << 31:
        raise RegionError(f"{tiles} tiles in one launch; the kernel counts them in 32 bits")
    return ConvertLaunch(np.concatenate(parts), len(alike), tiles, shape)


def _describe_stream(
    parts: list[npt.NDArray[np.int64]], fields: npt.NDArray[np.int64], number: int, stream: Stream
) -> None:
    """Fill in a stream, and append its tables to `parts`."""
    side, size = stream.side, stream.size
    fields[9 + number] = sum(map(len, parts))
    parts.append(side.addresses() + stream.first_byte)
    distance = even_distance(side.units)
    if distance is None:
        fields[13 + number] = sum(map(len, parts))
        parts.append(side.units // size)
    else:
        fields[13 + number], fields[17 + number] = side.units[0] // size, distance // size
    fields[21 + number], fields[25 + number] = side.head_bytes // size, side.token_bytes // size


def convert(conversions: Sequence[Conversion], config: RowConfig | None = None, sms: int | None = None) -> None:
    """Convert every row, in a launch a kind of overlap on the current stream, without a synchronise.

    All conversions on one device. `sms` is the SM budget (None: no budget). Their memory must stay allocated until the
    stream has passed the launches. Raises RegionError before anything is launched; those without rows are skipped.
    """
    for each in conversions:
        each.check()
    work = [each for each in conversions if each.rows]
    if not work:
        return
    device = one_device(each.device for each in work)
    config = config or (CONFIG if sms is None else BUDGET_CONFIG)
    upload = Upload.here(device)
    with on(device):
        for launch in describe(work, config):
            convert_kernel[(config.programs(launch.tiles, sms, device),)](
                upload.to_device(launch.table),
                launch.regions,
                launch.tiles,
                SHAPE=launch.shape.constexpr,
                CASTS=casts(device),
                num_warps=config.warps,
                **OPTIONS,
            )


def casts(device: torch.device) -> int:
    """1 where the hardware converts float32 to e4m3 in one rounding, as Triton uses it: from sm_90 on."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))
