"""The digest kernel computes `digest_reference` on a GPU, fused with the row mover's copy or alone, in one launch.

Tiles are the row mover's, in words of 32 bits. A row's key is worked out once for each 16 bytes; with it they cost 75
instructions more than the 25 of the copy (sm_90), of 200 that the memory leaves time for. A tile adds its sum to the
result by one atomic, so that launches of parts add up, and tiles are larger than the row mover's to make fewer of them.

Rows of a width or at an address that is no multiple of 4 go byte by byte. Contiguous rows of no multiple of 16 (132 B)
are cut anew, as the row mover does, and each of their words finds its own token and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from . import digest_reference as definition
from .digest_reference import End, Logical
from .launch import RowConfig, Upload
from .region import Offsets, Region, RegionError, check_apart, even_distance
from .rows import FULL_TILE, ONE_UNIT, TOKEN_UNITS, UNITS, WIDEST, find_region, recut

H, T = tl.constexpr(definition.H), tl.constexpr(definition.T)
A, B = tl.constexpr(definition.A), tl.constexpr(definition.B)
M1, M2 = tl.constexpr(definition.M1), tl.constexpr(definition.M2)


@triton.jit
def _of_unit(table, at, unit, live, SLOT: tl.constexpr, LISTED: tl.constexpr, VEC: tl.constexpr):
    """Offset or position of `unit`: from the table, or a multiple of a stride."""
    first = tl.load(at + SLOT)
    if LISTED:
        return tl.multiple_of(tl.load(table + first + unit, mask=live, other=0), VEC)
    return tl.multiple_of(first, VEC) + unit.to(tl.int64) * tl.multiple_of(tl.load(at + SLOT + 1), VEC)


@triton.jit
def _base(table, at, plane, head, SIDE: tl.constexpr, ELEMENT: tl.constexpr, VEC: tl.constexpr):
    """Where a plane and head start on a side (0 source, 1 destination)."""
    base = tl.load(table + tl.load(at + 5 + SIDE) + plane).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, VEC * ELEMENT.primitive_bitwidth // 8)
    return base + head * tl.multiple_of(tl.load(at + 14 + 2 * SIDE), VEC)


@triton.jit
def _key(at, plane_key, head, position):
    """The key of each row: mix64 of its coordinates. `head` counts the region's heads."""
    logical_head = tl.load(at + 19) + tl.load(at + 20) * head.to(tl.int64)
    z = plane_key.to(tl.uint64) + logical_head.to(tl.uint64) * H + position.to(tl.uint64) * T
    z = (z ^ (z >> 30)) * M1
    z = (z ^ (z >> 27)) * M2
    return z ^ (z >> 31)


@triton.jit
def _sum(word, live, key, first, words):
    """Sum of the terms of `word`, number `first` + `words` of their row: two numbers, of which one is cheap."""
    a = (key.to(tl.uint32) + first.to(tl.uint32) * A) + words.to(tl.uint32) * A
    b = ((key >> 32).to(tl.uint32) + first.to(tl.uint32) * B) + words.to(tl.uint32) * B
    product = a.to(tl.uint64) * b.to(tl.uint64)
    odd = (product.to(tl.uint32) ^ (product >> 32).to(tl.uint32)) | 1
    odd = tl.where(live, odd, 0)
    term = (word.to(tl.uint32, bitcast=True) + a).to(tl.uint64) * odd.to(tl.uint64)
    return tl.sum(term.to(tl.int64))


@triton.jit
def _move_bytes(src, dst, first, live, BYTES: tl.constexpr, COPY: tl.constexpr):
    """The words from byte `first` of a head's `BYTES` on, byte by byte, filled with zeros beyond its end."""
    word = first.to(tl.int32) * 0
    for i in tl.static_range(4):
        inside = live & (first + i < BYTES)
        data = tl.load(src + i, mask=inside, other=0, eviction_policy="evict_first")
        if COPY:
            tl.store(dst + i, data, mask=inside)
        word = word | ((data.to(tl.int32) & 0xFF) << (8 * i))
    return word


@triton.jit
def _rows_of(at, tile, SHAPE: tl.constexpr, ROWS: tl.constexpr):
    """What a tile is of: plane, head, unit (of all, or [row]), and [row] token, first word and whether it exists."""
    planes = tl.load(at + 2).to(tl.int32)
    heads = tl.load(at + 3).to(tl.int32)
    tokens = tl.load(at + 4).to(tl.int32)
    rest = tile // planes
    plane = tile - rest * planes
    piece = rest // heads
    head = (rest - piece * heads).to(tl.int64)
    unit = piece
    if SHAPE[7] == ONE_UNIT:
        pieces = tl.load(at + 21).to(tl.int32)
        unit = piece // pieces
        piece = piece - unit * pieces
    s = piece * ROWS + tl.arange(0, ROWS)
    row = s // SHAPE[2]
    first = (s - row * SHAPE[2]) * SHAPE[3]
    token = row
    if SHAPE[7] == ONE_UNIT:
        live = row < tokens
    else:
        unit = row
        if SHAPE[7] == UNITS:
            unit = row // tokens
        token = row - unit * tokens
        live = unit < tl.load(at + 1).to(tl.int32)
    return plane, head, unit, token, first, live


@triton.jit
def _payload(table, at, plane, head, unit, token, first, live, SHAPE: tl.constexpr, COPY: tl.constexpr):
    """Copy the words of a tile, and return them: [row, word]."""
    VEC: tl.constexpr = SHAPE[1]
    src = _base(table, at, plane, head, 0, SHAPE[0], VEC)
    dst = _base(table, at, plane, head, 1, SHAPE[0], VEC)
    known = unit >= 0 if SHAPE[7] == ONE_UNIT else live
    src_row = _of_unit(table, at, unit, known, 8, SHAPE[8], VEC)
    dst_row = _of_unit(table, at, unit, known, 10, SHAPE[9], VEC)
    if SHAPE[7] != TOKEN_UNITS:
        src_row += token * tl.multiple_of(tl.load(at + 15), VEC)
        dst_row += token * tl.multiple_of(tl.load(at + 17), VEC)
    if SHAPE[0] == tl.int32:
        words = first.to(tl.int64)[:, None] + tl.arange(0, SHAPE[3])[None, :]
        data = tl.load(src + (src_row[:, None] + words), mask=live[:, None], eviction_policy="evict_first")
        if COPY:
            tl.store(dst + (dst_row[:, None] + words), data, mask=live[:, None])
    else:
        head_in_row = first // ((SHAPE[4] + 3) // 4)
        number = (first - head_in_row * ((SHAPE[4] + 3) // 4)) * 4
        byte = (head_in_row * SHAPE[4] + number).to(tl.int64)
        src += (src_row + byte)[:, None]
        dst += (dst_row + byte)[:, None]
        data = _move_bytes(src, dst, number[:, None], live[:, None], SHAPE[4], COPY)
    return data


@triton.jit
def _tile(table, at, out, tile, SHAPES: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr):
    """Copy one tile of the region described at `at`, whose rows have shape `I`, and add its sum to `out`."""
    SHAPE: tl.constexpr = SHAPES[I]
    GRAIN: tl.constexpr = SHAPE[3]
    HEAD_WORDS: tl.constexpr = (SHAPE[4] + 3) // 4
    HEADS: tl.constexpr = SHAPE[5]
    RECUT: tl.constexpr = SHAPE[6]
    ROWS: tl.constexpr = BLOCK // WIDEST * SHAPE[1] // GRAIN
    plane, head, unit, token, first, live = _rows_of(at, tile, SHAPE, ROWS)
    word = _payload(table, at, plane, head, unit, token, first, live, SHAPE, COPY)
    known = unit >= 0 if SHAPE[7] == ONE_UNIT else live
    position = _of_unit(table, at, unit, known, 12, SHAPE[10], 1)
    step = tl.load(at + 18)
    if RECUT:  # a token begins anywhere in such a row: words are counted from the start of the unit
        first += token * (SHAPE[2] * GRAIN)
        token = token * 0
    first = first[:, None]
    words = tl.arange(0, GRAIN)[None, :]
    position = (position + token * step)[:, None]
    if HEAD_WORDS % GRAIN:  # a head begins anywhere in a grain
        first = first + words
        words = words * 0
    head = head * HEADS
    if HEADS > 1 or RECUT:
        group = first // HEAD_WORDS
        first = first - group * HEAD_WORDS
        further = group // HEADS
        head = head + (group - further * HEADS)
        position = position + further * step
    key = _key(at, tl.load(table + tl.load(at + 7) + plane), head, position)
    tl.atomic_add(out + tl.load(at + 23), _sum(word, live[:, None], key, first, words), sem="relaxed")


@triton.jit
def digest_kernel(table, out, regions, tiles, SHAPES: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr):
    """Persistent over all tiles of all regions; the grid is the SM budget.

    `table` int64: `FIELDS` words a region, then plane addresses and keys, unit offsets in elements and positions (see
    `digest_table`). `COPY`: 0 to read the source only.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, FIELDS)
        shape = tl.load(at + 22).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, out, local, SHAPES, i, BLOCK, COPY)


#: The rule for what was not tuned: four 16-byte accesses a thread, and an atomic for each 8 KiB.
CONFIG = RowConfig(block_bytes=8192, warps=4)


_uploads: dict[torch.device, Upload] = {}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDigest:
    """A launch with its table on the device. `run` may be called again, as long as the regions' memory is there."""

    launch: DigestLaunch
    table: torch.Tensor
    out: torch.Tensor
    config: RowConfig
    programs: int
    copies: int

    def run(self) -> None:
        """Launch on the current stream, without a synchronise."""
        digest_kernel[(self.programs,)](
            self.table,
            self.out,
            self.launch.regions,
            self.launch.tiles,
            SHAPES=tuple(shape.constexpr for shape in self.launch.shapes),
            BLOCK=self.config.block_bytes,
            COPY=self.copies,
            num_warps=self.config.warps,
        )


def move_and_digest(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    out: torch.Tensor,
    config: RowConfig = CONFIG,
    sms: int | None = None,
) -> None:
    """Copy every row of every region and add the digest of what was read to `out`, in one launch on the current stream.

    `out` int64 on the regions' device, zeros or digests so far: [1] for all, or [region]; modulo 2^64 they are the
    definition's. `sms` is the SM budget (None: no budget). The memory must stay allocated until the stream has
    passed the launch, which is not waited for. Raises RegionError before anything is launched.
    """
    prepared = prepare(regions, logicals, out, config, sms)
    if prepared is not None:
        prepared.run()


def digest(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    side: End,
    out: torch.Tensor,
    config: RowConfig = CONFIG,
    sms: int | None = None,
) -> None:
    """Add the digest of the rows at one end of the regions to `out`; nothing moves. Else as `move_and_digest`."""
    definition.check(regions, logicals)
    ends = [replace(region, src=getattr(region, side), dst=getattr(region, side)) for region in regions]
    prepared = _prepare(ends, logicals, out, config, sms, 0)
    if prepared is not None:
        prepared.run()


def prepare(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    out: torch.Tensor,
    config: RowConfig = CONFIG,
    sms: int | None = None,
) -> PreparedDigest | None:
    """Check and describe the launch of `move_and_digest` and upload its table; None where there is nothing to do."""
    return _prepare(regions, logicals, out, config, sms, 1)


def _prepare(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    out: torch.Tensor,
    config: RowConfig,
    sms: int | None,
    copies: int,
) -> PreparedDigest | None:
    definition.check(regions, logicals)
    if out.dtype != torch.int64 or out.dim() != 1 or len(out) not in (1, len(regions)) or not out.is_contiguous():
        raise RegionError(f"a result of {tuple(out.shape)} {out.dtype}, not int64 [1] or one for each region")
    for region in regions:
        if region.src.memory[0].device != out.device:
            raise RegionError(f"regions on {region.src.memory[0].device} and a result on {out.device}")
    work = [number for number, region in enumerate(regions) if region.nbytes]
    if not work:
        return None
    if copies:
        check_apart([regions[number] for number in work])
    outs = [number if len(out) > 1 else 0 for number in work]
    launch = describe([regions[i] for i in work], [logicals[i] for i in work], outs, config.block_bytes)
    table = _uploads.setdefault(out.device, Upload(out.device)).to_device(launch.table)
    return PreparedDigest(launch, table, out, config, config.programs(launch.tiles, sms, out.device), copies)


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
