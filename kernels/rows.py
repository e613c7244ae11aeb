"""The row mover is one Triton kernel that copies strided rows to strided rows: gather, scatter and relayout alike.

All regions of a call, whatever their planes, units and destinations, go in one launch. A tile is `BLOCK` bytes: rows
are cut into grains, powers of two that need no padding, and a tile takes as many grains as fill it, from one unit where
the unit is large enough (one scalar offset a tile) and from several where it is not (one offset a grain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .launch import RowConfig, RowKind, Upload, choose
from .region import Region, RegionError, check_apart, even_distance

#: int64 words that describe a region to the kernel: see `describe`.
FIELDS = tl.constexpr(18)

#: Bytes of the widest access. A tile is `BLOCK` bytes in these; narrower words get as many accesses, not as many bytes:
#: 16 KiB of single bytes would be 128 accesses a thread, out of registers and into local memory.
WIDEST = tl.constexpr(16)

WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

#: How a tile takes units: it lies in one, or takes several, of several tokens or of one.
ONE_UNIT, UNITS, TOKEN_UNITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _unit_offset(table, at, unit, live, SIDE: tl.constexpr, LISTED: tl.constexpr, VEC: tl.constexpr):
    """Word offset of `unit` on a side (0 source, 1 destination): from the table, or a multiple of a stride."""
    first = tl.load(at + 7 + SIDE)
    if LISTED:
        return tl.multiple_of(tl.load(table + first + unit, mask=live, other=0), VEC)
    stride = tl.multiple_of(tl.load(at + 15 + SIDE), VEC)
    return tl.multiple_of(first, VEC) + unit.to(tl.int64) * stride


@triton.jit
def _tile(table, at, tile, SHAPES: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one tile of the region described at `at`, whose rows have shape `I`."""
    SHAPE: tl.constexpr = SHAPES[I]
    WORD: tl.constexpr = SHAPE[0]
    GRAINS: tl.constexpr = SHAPE[1]
    GRAIN: tl.constexpr = SHAPE[2]
    VEC: tl.constexpr = SHAPE[3]
    SPAN: tl.constexpr = SHAPE[4]
    SRC_LISTED: tl.constexpr = SHAPE[5]
    DST_LISTED: tl.constexpr = SHAPE[6]
    BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    ROWS: tl.constexpr = BLOCK // WIDEST * VEC // GRAIN
    planes = tl.load(at + 2).to(tl.int32)
    heads = tl.load(at + 3).to(tl.int32)
    tokens = tl.load(at + 4).to(tl.int32)
    rest = tile // planes
    plane = tile - rest * planes
    piece = rest // heads
    head = (rest - piece * heads).to(tl.int64)
    src = tl.load(table + tl.load(at + 5) + plane).to(tl.pointer_type(WORD))
    dst = tl.load(table + tl.load(at + 6) + plane).to(tl.pointer_type(WORD))
    src = tl.multiple_of(src, VEC * BYTES) + head * tl.multiple_of(tl.load(at + 9), VEC)
    dst = tl.multiple_of(dst, VEC * BYTES) + head * tl.multiple_of(tl.load(at + 11), VEC)
    if SPAN == ONE_UNIT:
        pieces = tl.load(at + 13).to(tl.int32)
        unit = piece // pieces
        piece = piece - unit * pieces
        src += _unit_offset(table, at, unit, unit >= 0, 0, SRC_LISTED, VEC)
        dst += _unit_offset(table, at, unit, unit >= 0, 1, DST_LISTED, VEC)
    s = piece * ROWS + tl.arange(0, ROWS)
    row = s // GRAINS
    src_row = (s - row * GRAINS).to(tl.int64) * GRAIN
    dst_row = src_row
    if SPAN == ONE_UNIT:
        live = row < tokens
        token = row
    else:
        unit = row
        if SPAN == UNITS:
            unit = row // tokens
            token = row - unit * tokens
        live = unit < tl.load(at + 1).to(tl.int32)
        src_row += _unit_offset(table, at, unit, live, 0, SRC_LISTED, VEC)
        dst_row += _unit_offset(table, at, unit, live, 1, DST_LISTED, VEC)
    if SPAN != TOKEN_UNITS:
        src_row += token * tl.multiple_of(tl.load(at + 10), VEC)
        dst_row += token * tl.multiple_of(tl.load(at + 12), VEC)
    words = tl.arange(0, GRAIN)[None, :]
    data = tl.load(src + (src_row[:, None] + words), mask=live[:, None], eviction_policy="evict_first")
    tl.store(dst + (dst_row[:, None] + words), data, mask=live[:, None])


@triton.jit
def find_region(table, regions, tile, WIDTH: tl.constexpr):
    """Where the region of `tile` is described, and the tile's number in it. A region begins with its first tile's."""
    region = 0
    for other in range(1, regions):
        region += (tl.load(table + other * WIDTH) <= tile).to(tl.int32)
    at = table + region * WIDTH
    return at, tile - tl.load(at).to(tl.int32)


@triton.jit
def move_kernel(table, regions, tiles, SHAPES: tl.constexpr, BLOCK: tl.constexpr):
    """Persistent over all tiles of all regions; the grid is the SM budget.

    `table` int64: `FIELDS` words a region, then plane addresses in bytes and unit offsets in words (see `describe`).
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, FIELDS)
        shape = tl.load(at + 14).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, local, SHAPES, i, BLOCK)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the kernel is compiled for: rows of `grains` x `grain` words; `vec` words make the widest access.

    `span`: how a tile takes units; several where one would leave most of the tile empty. `src_listed`, `dst_listed`: 0
    where a side's units follow each other at one distance, as on the wire, and need no table.
    """

    word_bytes: int
    vec: int
    grains: int
    grain: int
    span: int
    src_listed: int
    dst_listed: int

    @property
    def constexpr(self) -> tuple[tl.dtype, int, int, int, int, int, int]:
        """The shape as Triton's compile-time arguments."""
        sides = self.src_listed, self.dst_listed
        return WORDS[self.word_bytes], self.grains, self.grain, self.vec, self.span, *sides

    @classmethod
    def of(cls, region: Region, block_bytes: int) -> RowShape:
        """The widest word that every address of `region` allows, and the grain that wastes least of a tile."""
        alignment = region.alignment()
        word = min(alignment, 8)
        vec = alignment // word
        words = region.row_bytes // word
        block_words = block_bytes // WIDEST.value * vec
        in_unit = region.tokens * words
        tiles = -(-in_unit // block_words)
        several = region.units > 1 and in_unit < FULL_TILE * tiles * block_words
        span = (TOKEN_UNITS if region.tokens == 1 else UNITS) if several else ONE_UNIT
        grain = vec if several else min(words & -words, block_words)
        listed = [int(even_distance(side.units) is None) for side in (region.src, region.dst)]
        return cls(word, vec, words // grain, grain, span.value, *listed)


#: Contiguous tokens are cut into rows of at most this.
RECUT_BYTES = 2048


def recut(region: Region) -> Region:
    """The same bytes in rows of a power of two, where the tokens of a unit follow each other on both sides.

    132 B rows allow 4-byte words; 64 of them in a row are 33 rows of 256 B, in 16-byte words. And a tail of any length
    has one of a few row widths, so that it compiles nothing new.
    """
    src, dst, row_bytes = region.src, region.dst, region.row_bytes
    if region.tokens == 1 or not src.token_bytes == dst.token_bytes == row_bytes:
        return region
    total = region.tokens * row_bytes
    cut = min(total & -total, RECUT_BYTES)
    sides = (replace(side, token_bytes=cut) for side in (src, dst))
    return Region(*sides, region.heads, total // cut, cut)


def kind_of(region: Region) -> RowKind:
    """What the launch configuration of a region goes by."""
    cut = recut(region)
    return RowKind(cut.row_bytes, cut.tokens * cut.row_bytes)


#: Below this share of useful words in a unit's tiles, tiles take rows of several units instead.
FULL_TILE = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class RowLaunch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the row shapes to compile for."""

    table: npt.NDArray[np.int64]
    regions: int
    tiles: int
    shapes: tuple[RowShape, ...]


def describe(regions: Sequence[Region], block_bytes: int) -> RowLaunch:
    """Lay the regions out as the kernel reads them. `table` int64: FIELDS words a region, then planes, then units."""
    fields = FIELDS.value
    parts: list[npt.NDArray[np.int64]] = []
    used = len(regions) * fields
    header = np.zeros((len(regions), fields), np.int64)
    shapes: dict[RowShape, int] = {}
    tiles = 0
    for number, region in enumerate(map(recut, regions)):
        shape = RowShape.of(region, block_bytes)
        block = block_bytes // WIDEST.value * shape.vec
        places: list[int] = []
        for part in (region.src.addresses(), region.dst.addresses()):
            places.append(used)
            parts.append(part)
            used += len(part)
        unit_strides: list[int] = []
        for side, listed in ((region.src, shape.src_listed), (region.dst, shape.dst_listed)):
            units = side.units // shape.word_bytes
            places.append(used if listed else int(units[0]))
            unit_strides.append(0 if listed else even_distance(units) or 0)
            if listed:
                parts.append(units)
                used += len(units)
        rows_words = region.tokens * shape.grains * shape.grain
        pieces = -(-rows_words * (region.units if shape.span else 1) // block)
        if pieces * (block // shape.grain) >= 1 << 31:
            raise RegionError(
                f"{region.nbytes} bytes in words of {shape.word_bytes}; the kernel counts them in 32 bits"
            )
        strides = (region.src.head_bytes, region.src.token_bytes, region.dst.head_bytes, region.dst.token_bytes)
        header[number, :17] = (
            tiles,
            region.units,
            region.planes,
            region.heads,
            region.tokens,
            *places,
            *(stride // shape.word_bytes for stride in strides),
            pieces,
            shapes.setdefault(shape, len(shapes)),
            *unit_strides,
        )
        tiles += pieces * region.planes * region.heads * (1 if shape.span else region.units)
    if tiles >= 1 << 31:
        raise RegionError(f"{tiles} tiles in one launch; the kernel counts them in 32 bits")
    return RowLaunch(np.concatenate([header.reshape(-1), *parts]), len(regions), tiles, tuple(shapes))


_uploads: dict[torch.device, Upload] = {}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRows:
    """A launch with its table on the device: may be run again, and captured in a CUDA graph."""

    table: torch.Tensor
    launch: RowLaunch
    config: RowConfig
    programs: int

    def run(self) -> None:
        """Launch on the current stream."""
        move_kernel[(self.programs,)](
            self.table,
            self.launch.regions,
            self.launch.tiles,
            SHAPES=tuple(shape.constexpr for shape in self.launch.shapes),
            BLOCK=self.config.block_bytes,
            num_warps=self.config.warps,
        )


def prepare(regions: Sequence[Region], config: RowConfig | None = None, sms: int | None = None) -> PreparedRows | None:
    """What `move` does before it launches; None when there is nothing to move."""
    for region in regions:
        region.check()
    work = [region for region in regions if region.nbytes]
    if not work:
        return None
    device = work[0].src.memory[0].device
    for region in work:
        if region.src.memory[0].device != device:
            raise RegionError(f"regions on {device} and {region.src.memory[0].device} cannot share a launch")
    check_apart(work)
    config = config or choose(kind_of(max(work, key=lambda region: region.nbytes)), sms, device)
    launch = describe(work, config.block_bytes)
    table = _uploads.setdefault(device, Upload(device)).to_device(launch.table)
    return PreparedRows(table, launch, config, config.programs(launch.tiles, sms, device))


def move(regions: Sequence[Region], config: RowConfig | None = None, sms: int | None = None) -> None:
    """Copy every row of every region in one launch on the current stream, without a synchronise.

    All regions on one device. `sms` is the SM budget (None: no budget). The regions' memory must stay allocated until
    the stream has passed the launch. Raises RegionError before anything is launched; regions without rows are skipped.
    """
    prepared = prepare(regions, config, sms)
    if prepared is not None:
        prepared.run()
