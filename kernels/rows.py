"""The row mover: one Triton kernel that copies strided rows to strided rows for gather, scatter and relayout alike.

All regions of a call, whatever their planes, units and destinations, go in one launch. A tile is `BLOCK` bytes: rows
are cut into grains, powers of two that need no padding, and a tile takes as many grains as fill it, from one unit where
the unit is large enough (one scalar offset a tile) and from several where it is not (one offset a grain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .config import RowConfig
from .region import Region, RegionError
from .upload import Upload

#: int64 words that describe a region to the kernel: see `_describe`.
FIELDS = tl.constexpr(16)

#: Bytes of the widest access. A tile is `BLOCK` bytes in these; narrower words get as many accesses, not as many bytes:
#: 16 KiB of single bytes would be 128 accesses a thread, out of registers and into local memory.
WIDEST = tl.constexpr(16)

WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _rows(table, at, s, SPAN: tl.constexpr, GRAINS: tl.constexpr, GRAIN: tl.constexpr, VEC: tl.constexpr):
    """Word offsets of the grains `s` of a tile on both sides, and which of them exist."""
    tokens = tl.load(at + 4).to(tl.int32)
    src_token = tl.multiple_of(tl.load(at + 10), VEC)
    dst_token = tl.multiple_of(tl.load(at + 12), VEC)
    row = s // GRAINS
    inside = (s - row * GRAINS) * GRAIN
    if SPAN:
        unit = row // tokens
        token = row - unit * tokens
        live = unit < tl.load(at + 1).to(tl.int32)
        src_unit = tl.load(table + tl.load(at + 7) + unit, mask=live, other=0)
        dst_unit = tl.load(table + tl.load(at + 8) + unit, mask=live, other=0)
        src = tl.multiple_of(src_unit, VEC) + token * src_token + inside
        dst = tl.multiple_of(dst_unit, VEC) + token * dst_token + inside
    else:
        live = row < tokens
        src = row * src_token + inside
        dst = row * dst_token + inside
    return src, dst, live


@triton.jit
def _tile(table, at, tile, SHAPES: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one tile of the region described at `at`, whose rows have shape `I`."""
    SHAPE: tl.constexpr = SHAPES[I]
    WORD: tl.constexpr = SHAPE[0]
    GRAINS: tl.constexpr = SHAPE[1]
    GRAIN: tl.constexpr = SHAPE[2]
    VEC: tl.constexpr = SHAPE[3]
    SPAN: tl.constexpr = SHAPE[4]
    BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    planes = tl.load(at + 2).to(tl.int32)
    heads = tl.load(at + 3).to(tl.int32)
    rest = tile // planes
    plane = tile - rest * planes
    piece = rest // heads
    head = (rest - piece * heads).to(tl.int64)
    src_at = head * tl.load(at + 9)
    dst_at = head * tl.load(at + 11)
    if not SPAN:
        pieces = tl.load(at + 13).to(tl.int32)
        unit = piece // pieces
        piece = piece - unit * pieces
        src_at += tl.load(table + tl.load(at + 7) + unit)
        dst_at += tl.load(table + tl.load(at + 8) + unit)
    src = tl.load(table + tl.load(at + 5) + plane).to(tl.pointer_type(WORD))
    dst = tl.load(table + tl.load(at + 6) + plane).to(tl.pointer_type(WORD))
    src = tl.multiple_of(src, VEC * BYTES) + tl.multiple_of(src_at, VEC)
    dst = tl.multiple_of(dst, VEC * BYTES) + tl.multiple_of(dst_at, VEC)
    ROWS: tl.constexpr = BLOCK // WIDEST * VEC // GRAIN
    s = piece * ROWS + tl.arange(0, ROWS)
    src_row, dst_row, live = _rows(table, at, s, SPAN, GRAINS, GRAIN, VEC)
    words = tl.arange(0, GRAIN)[None, :]
    mask = live[:, None]
    data = tl.load(src + (src_row[:, None] + words), mask=mask, eviction_policy="evict_first")
    tl.store(dst + (dst_row[:, None] + words), data, mask=mask)


@triton.jit
def move_kernel(table, regions, tiles, SHAPES: tl.constexpr, BLOCK: tl.constexpr):
    """Persistent over all tiles of all regions; the grid is the SM budget.

    `table` int64: `FIELDS` words a region, then plane addresses in bytes and unit offsets in words (see `_describe`).
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        region = 0
        for other in range(1, regions):
            region += (tl.load(table + other * FIELDS) <= tile).to(tl.int32)
        at = table + region * FIELDS
        local = tile - tl.load(at).to(tl.int32)
        shape = tl.load(at + 14).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, local, SHAPES, i, BLOCK)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the kernel is compiled for: rows of `grains` x `grain` words; `vec` words make the widest access.

    `span`: a tile takes rows of several units, because one unit would leave most of the tile empty.
    """

    word_bytes: int
    vec: int
    grains: int
    grain: int
    span: int

    @property
    def constexpr(self) -> tuple[tl.dtype, int, int, int, int]:
        return WORDS[self.word_bytes], self.grains, self.grain, self.vec, self.span

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
        span = region.units > 1 and in_unit < FULL_TILE * tiles * block_words
        grain = vec if span else min(words & -words, block_words)
        return cls(word, vec, words // grain, grain, int(span))


#: Below this share of useful words in a unit's tiles, tiles take rows of several units instead.
FULL_TILE = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the row shapes to compile for."""

    table: npt.NDArray[np.int64]
    regions: int
    tiles: int
    shapes: tuple[RowShape, ...]


def describe(regions: Sequence[Region], block_bytes: int) -> Launch:
    """Lay the regions out as the kernel reads them. `table` int64: FIELDS words a region, then planes, then units."""
    fields = FIELDS.value
    parts: list[npt.NDArray[np.int64]] = []
    used = len(regions) * fields
    header = np.zeros((len(regions), fields), np.int64)
    shapes: dict[RowShape, int] = {}
    tiles = 0
    for number, region in enumerate(regions):
        shape = RowShape.of(region, block_bytes)
        block = block_bytes // WIDEST.value * shape.vec
        places: list[int] = []
        for part in (
            region.src.addresses(),
            region.dst.addresses(),
            region.src.units // shape.word_bytes,
            region.dst.units // shape.word_bytes,
        ):
            places.append(used)
            parts.append(part)
            used += len(part)
        rows_words = region.tokens * shape.grains * shape.grain
        pieces = -(-rows_words * (region.units if shape.span else 1) // block)
        if pieces * (block // shape.grain) >= 1 << 31:
            raise RegionError(
                f"{region.nbytes} bytes in words of {shape.word_bytes}; the kernel counts them in 32 bits"
            )
        strides = (region.src.head_bytes, region.src.token_bytes, region.dst.head_bytes, region.dst.token_bytes)
        header[number, :15] = (
            tiles,
            region.units,
            region.planes,
            region.heads,
            region.tokens,
            *places,
            *(stride // shape.word_bytes for stride in strides),
            pieces,
            shapes.setdefault(shape, len(shapes)),
        )
        tiles += pieces * region.planes * region.heads * (1 if shape.span else region.units)
    if tiles >= 1 << 31:
        raise RegionError(f"{tiles} tiles in one launch; the kernel counts them in 32 bits")
    return Launch(np.concatenate([header.reshape(-1), *parts]), len(regions), tiles, tuple(shapes))


_uploads: dict[torch.device, Upload] = {}


def move(regions: Sequence[Region], config: RowConfig | None = None, sms: int | None = None) -> None:
    """Copy every row of every region in one launch on the current stream, without a synchronise.

    All regions on one device. `sms` is the SM budget (None: no budget). The regions' memory must stay allocated until
    the stream has passed the launch. Raises RegionError before anything is launched; regions without rows are skipped.
    """
    for region in regions:
        region.check()
    work = [region for region in regions if region.nbytes]
    if not work:
        return
    device = work[0].src.memory[0].device
    for region in work:
        if region.src.memory[0].device != device:
            raise RegionError(f"regions on {device} and {region.src.memory[0].device} cannot share a launch")
    config = config or RowConfig()
    launch = describe(work, config.block_bytes)
    table = _uploads.setdefault(device, Upload(device)).to_device(launch.table)
    move_kernel[(config.programs(launch.tiles, sms, device),)](
        table,
        launch.regions,
        launch.tiles,
        SHAPES=tuple(shape.constexpr for shape in launch.shapes),
        BLOCK=config.block_bytes,
        num_warps=config.warps,
    )
