"""The row mover is one Triton kernel that copies strided rows to strided rows: gather, scatter and relayout alike.

All regions of a call go in one launch. A tile is `BLOCK` bytes. Rows are cut into grains, powers of two that need no
padding, and a tile takes as many grains as fill it: from one unit if the unit is large enough (one scalar offset a
tile), else from several: one offset a grain, or one a unit if a few whole units fill the tile, as the larger tiles of
an SM budget have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from .launch import RULES, Kernel, Prepared, Program, RowConfig, RowKind, choose, one_device
from .region import Region, RegionError, check_apart
from .table import (
    EITHER,
    ONE_UNIT,
    SEVERAL_UNITS,
    SHAPE,
    SIDE_WORDS,
    SIDES,
    TOKEN_UNITS,
    UNITS,
    UNSPECIALIZED,
    WHOLE_UNITS,
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

#: Word offsets of a region's sides, and the number of words of a region.
SRC, DST = SIDES, tl.constexpr(SIDES.value + SIDE_WORDS.value)
WORDS = tl.constexpr(SIDES.value + 2 * SIDE_WORDS.value)

#: Bytes of a pass over a tile of rows of any width: all at once, the tile's offsets take 128 registers.
PASS_BYTES = tl.constexpr(8192)

Shape = TypeVar("Shape", bound=Hashable)


#: Index of each RowShape field in the kernel's `OF`.
OF_WORD_BYTES, OF_VEC, OF_GRAINS, OF_GRAIN, OF_SPAN, OF_TOKENS, OF_SRC_KIND, OF_DST_KIND = map(tl.constexpr, range(8))


@triton.jit
def _copy(table, at, shift, plane, head, piece, OF: tl.constexpr, ROWS: tl.constexpr):
    """Copy the `ROWS` grains of a piece of the region described at `at`."""
    BYTES: tl.constexpr = OF[OF_WORD_BYTES]
    WORD: tl.constexpr = (  # pyright: ignore
        tl.int64 if BYTES == 8 else tl.int32 if BYTES == 4 else tl.int16 if BYTES == 2 else tl.int8
    )
    VEC: tl.constexpr = OF[OF_VEC]
    GRAIN: tl.constexpr = OF[OF_GRAIN]
    SPAN: tl.constexpr = OF[OF_SPAN]
    src = plane_start(table, at + SRC, shift[1], plane, head, WORD, VEC)
    dst = plane_start(table, at + DST, shift[2], plane, head, WORD, VEC)
    unit, token, grain, live = rows_of(at, piece, ROWS, OF[OF_GRAINS], SPAN)
    src_row = grain.to(tl.int64) * GRAIN
    dst_row = src_row
    if SPAN == ONE_UNIT:
        src += unit_start(table, at + SRC, shift[0], unit, unit >= 0, OF[OF_SRC_KIND], VEC)
        dst += unit_start(table, at + DST, shift[0], unit, unit >= 0, OF[OF_DST_KIND], VEC)
    else:
        src_row += unit_start(table, at + SRC, shift[0], unit, live, OF[OF_SRC_KIND], VEC)
        dst_row += unit_start(table, at + DST, shift[0], unit, live, OF[OF_DST_KIND], VEC)
    if SPAN != TOKEN_UNITS:
        src_row += token * token_stride(at + SRC, VEC)
        dst_row += token * token_stride(at + DST, VEC)
    words = tl.arange(0, GRAIN)[None, :]
    data = tl.load(src + (src_row[:, None] + words), mask=live[:, None], eviction_policy="evict_first")
    tl.store(dst + (dst_row[:, None] + words), data, mask=live[:, None])


@triton.constexpr_function
def first_rows(rows: int) -> int:
    """Return the grains of a unit that a tile takes first: a power of two, padded to all if no rest follows."""
    most = triton.next_power_of_2(rows)
    return most if rest_rows(rows) == 0 else most // 2


@triton.constexpr_function
def rest_rows(rows: int) -> int:
    """Return the grains that a tile takes next, padded to a power of two: of 9 it takes 8 and 1. 0: no rest."""
    most = triton.next_power_of_2(rows)
    rest = triton.next_power_of_2(rows - most // 2) if rows < most else 0
    return rest if 2 * rest < most else 0


@triton.constexpr_function
def units_in_tile(rows: int, tile_rows: int) -> int:
    """Return the whole units of `rows` grains in a tile, up to a third over it: a power of two, or 0."""
    return triton.next_power_of_2(tile_rows * 4 // 3 // rows + 1) // 2


@triton.jit
def _row_in_unit(FIRST: tl.constexpr, ROWS: tl.constexpr):
    return FIRST + tl.arange(0, ROWS)


@triton.jit
def _words_of_rows(stride, FIRST: tl.constexpr, ROWS: tl.constexpr, OF: tl.constexpr):
    """Return the words from the start of a unit to those of its grains from `FIRST` on: [1, grain, word]."""
    GRAINS: tl.constexpr = OF[OF_GRAINS]
    GRAIN: tl.constexpr = OF[OF_GRAIN]
    row = _row_in_unit(FIRST, ROWS)
    word = ((row % GRAINS) * GRAIN)[:, None] + tl.arange(0, GRAIN)[None, :]
    return ((row // GRAINS * stride)[:, None] + word)[None, :, :]


@triton.jit
def _live_rows(live, FIRST: tl.constexpr, ROWS: tl.constexpr, OF: tl.constexpr):
    """Return the mask of grains from `FIRST` on that exist: [unit, grain, 1], or [unit, 1, 1] if all of a unit's do."""
    UNIT_ROWS: tl.constexpr = OF[OF_TOKENS] * OF[OF_GRAINS]
    here = live[:, None, None]
    if FIRST + ROWS > UNIT_ROWS:
        here = here & (_row_in_unit(FIRST, ROWS) < UNIT_ROWS)[None, :, None]
    return here


@triton.jit
def _copy_units(table, at, shift, plane, head, piece, OF: tl.constexpr, UNITS_IN_TILE: tl.constexpr):
    """Copy whole units: the start of each is loaded once, and rows lie in each as in the first.

    All loads of a thread come before its first store, so all of the tile is in flight.
    """
    BYTES: tl.constexpr = OF[OF_WORD_BYTES]
    WORD: tl.constexpr = (  # pyright: ignore
        tl.int64 if BYTES == 8 else tl.int32 if BYTES == 4 else tl.int16 if BYTES == 2 else tl.int8
    )
    VEC: tl.constexpr = OF[OF_VEC]
    ROWS: tl.constexpr = first_rows(OF[OF_TOKENS] * OF[OF_GRAINS])  # pyright: ignore
    REST: tl.constexpr = rest_rows(OF[OF_TOKENS] * OF[OF_GRAINS])  # pyright: ignore
    unit = piece * UNITS_IN_TILE + tl.arange(0, UNITS_IN_TILE).to(tl.uint32)
    live = unit < tl.load(at + UNITS).to(tl.uint32)
    src = plane_start(table, at + SRC, shift[1], plane, head, WORD, VEC)
    dst = plane_start(table, at + DST, shift[2], plane, head, WORD, VEC)
    src = (src + unit_start(table, at + SRC, shift[0], unit, live, OF[OF_SRC_KIND], VEC))[:, None, None]
    dst = (dst + unit_start(table, at + DST, shift[0], unit, live, OF[OF_DST_KIND], VEC))[:, None, None]
    src_stride = token_stride(at + SRC, VEC)
    dst_stride = token_stride(at + DST, VEC)
    here = _live_rows(live, 0, ROWS, OF)
    data = tl.load(src + _words_of_rows(src_stride, 0, ROWS, OF), mask=here, eviction_policy="evict_first")
    if REST:
        then = _live_rows(live, ROWS, REST, OF)
        more = tl.load(src + _words_of_rows(src_stride, ROWS, REST, OF), mask=then, eviction_policy="evict_first")
        tl.store(dst + _words_of_rows(dst_stride, ROWS, REST, OF), more, mask=then)
    tl.store(dst + _words_of_rows(dst_stride, 0, ROWS, OF), data, mask=here)


@triton.jit
def _tile(table, at, shift, tile, SHAPES: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one tile of the region described at `at`, whose rows are served by shape `I`."""
    OF: tl.constexpr = SHAPES[I]
    ROWS: tl.constexpr = BLOCK // WIDEST * OF[OF_VEC] // OF[OF_GRAIN]
    plane, head, piece = plane_and_head(at, tile)
    if OF[OF_SPAN] == WHOLE_UNITS:
        _copy_units(table, at, shift, plane, head, piece, OF, units_in_tile(OF[OF_TOKENS] * OF[OF_GRAINS], ROWS))
    elif OF[OF_GRAINS] or BLOCK <= PASS_BYTES:
        _copy(table, at, shift, plane, head, piece, OF, ROWS)
    else:
        PASSES: tl.constexpr = BLOCK // PASS_BYTES
        for i in range(PASSES):
            _copy(table, at, shift, plane, head, piece * PASSES + i, OF, ROWS // PASSES)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def move_kernel(
    table,
    regions,
    tiles,
    first_unit,
    src_bytes,
    dst_bytes,
    SHAPES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy all tiles of all regions; the grid is the SM budget, or every tile without one.

    `table`: see `describe`. `first_unit`, `src_bytes`, `dst_bytes`: see `Shift`.
    """
    shift = first_unit, src_bytes, dst_bytes
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, WORDS)
        shape = tl.load(at + SHAPE).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, shift, local, SHAPES, i, BLOCK)


class RowShape(NamedTuple):
    """The parameters a kernel is compiled for: rows of `grains` x `grain` words; `vec` words make the widest access.

    `grains` 0: rows of any width, counted at run time. `span`: how a tile takes units; several if one would leave tiles
    below `FULL_TILE`. `tokens`: of a unit, if tiles take whole units; else 0. `src_kind`, `dst_kind`: whether a side's
    units are listed, or follow each other at one distance, as on the wire, without a table.
    """

    word_bytes: int
    vec: int
    grains: int
    grain: int
    span: int
    tokens: int
    src_kind: int
    dst_kind: int

    @property
    def access_bytes(self) -> int:
        """Bytes of the widest access, to which every row is aligned."""
        return self.word_bytes * self.vec

    @classmethod
    def of(cls, region: Region, block_bytes: int) -> RowShape:
        """Return the shape of the widest word that every address of `region` allows, and the least wasteful grain."""
        alignment = region.alignment()
        word = min(alignment, 8)
        vec = alignment // word
        words = region.row_bytes // word
        block_words = block_bytes // WIDEST.value * vec
        in_unit = region.tokens * words
        tiles = -(-in_unit // block_words)
        kinds = kind_of_units(region.src.listed), kind_of_units(region.dst.listed)
        grain = min(words & -words, block_words)
        if region.units == 1 or in_unit >= FULL_TILE * tiles * block_words:
            return cls(word, vec, words // grain, grain, ONE_UNIT.value, 0, *kinds)
        if _taken_whole(in_unit // grain, grain, block_words, WHOLE_UNIT_ACCESSES * vec):
            return cls(word, vec, words // grain, grain, WHOLE_UNITS.value, region.tokens, *kinds)
        span = TOKEN_UNITS if region.tokens == 1 else SEVERAL_UNITS
        return cls(word, vec, words // vec, vec, span.value, 0, *kinds)

    @classmethod
    def of_any_rows(cls, alignment: int) -> RowShape:
        """Return the shape of rows aligned to `alignment` bytes, of any width, number and distance."""
        word = min(alignment, 8)
        vec = alignment // word
        return cls(word, vec, 0, vec, SEVERAL_UNITS.value, 0, EITHER.value, EITHER.value)

    @property
    def of_any_units(self) -> RowShape:
        """Shape of the same rows, in units of any number of tokens."""
        words = self.grains * self.grain
        return self._replace(grains=words // self.vec, grain=self.vec, span=SEVERAL_UNITS.value, tokens=0)

    def serves(self, own: RowShape, region: Region) -> bool:
        """Return True if tiles of this shape move a region hardly slower than tiles of `own`, its best shape."""
        if not self.grains:
            return self.access_bytes <= own.access_bytes
        if self == own:
            return True
        alike = self.access_bytes == own.access_bytes and self.grains * self.grain == own.grains * own.grain
        alike = alike and self.tokens in (0, own.tokens)
        spans = own.span, SEVERAL_UNITS.value, TOKEN_UNITS.value if region.tokens == 1 else own.span
        return alike and self.span in spans and self.src_kind >= own.src_kind and self.dst_kind >= own.dst_kind


#: Rows with this share of a launch's bytes have their own code; other rows share the code for any rows.
LEAST_SHARE = 1 / 8


def with_most_bytes(shapes: Iterable[tuple[Shape, int]]) -> list[Shape]:
    """Return the shapes with `LEAST_SHARE` of all bytes, sorted. `shapes`: each region's shape and bytes."""
    nbytes = Counter[Shape]()
    for shape, of_region in shapes:
        nbytes[shape] += of_region
    return sorted(shape for shape in nbytes if nbytes[shape] >= LEAST_SHARE * nbytes.total())


def shapes_for(owns: Sequence[tuple[RowShape, Region]]) -> tuple[RowShape, ...]:
    """Return the shapes to compile for regions like these: few kernels for many sizes of requests.

    Shapes of the rows with most of the bytes, then of any rows, the widest first. `owns`: see `cuts`.
    """
    most = with_most_bytes((own, cut.nbytes) for own, cut in owns)
    rest = [own.access_bytes for own, cut in owns if not any(shape.serves(own, cut) for shape in most)]
    widths = sorted({max(rest), min(rest)}, reverse=True) if rest else ()
    return (*most, *map(RowShape.of_any_rows, widths))


#: Most bytes of a row that contiguous tokens are cut into.
RECUT_BYTES = 2048


def recut(region: Region) -> Region:
    """Return the same bytes in rows of a power of two, if a unit's tokens follow each other on both sides.

    132 B rows allow 4-byte words; 64 of them in a row are 33 rows of 256 B, in 16-byte words. A tail of any length has
    one of a few row widths, so it compiles no new kernel.
    """
    src, dst, row_bytes = region.src, region.dst, region.row_bytes
    if region.tokens == 1 or not src.token_bytes == dst.token_bytes == row_bytes:
        return region
    total = region.tokens * row_bytes
    cut = min(total & -total, RECUT_BYTES)
    sides = (replace(side, token_bytes=cut) for side in (src, dst))
    return Region(*sides, region.heads, total // cut, cut)


def kind_of(region: Region) -> RowKind:
    """Return the row kind that selects a region's launch configuration."""
    cut = recut(region)
    return RowKind(cut.row_bytes, cut.tokens * cut.row_bytes)


def kind_of_most(regions: Sequence[Region]) -> RowKind:
    """Return the row kind of the region with most bytes."""
    return kind_of(max(regions, key=lambda region: region.nbytes))


#: Below this share of useful words in a unit's tiles, tiles take rows of several units instead.
FULL_TILE = 0.75

#: Least accesses of a unit for tiles to take whole units: as many as 8 warps make at once, 4 KiB of the widest. Only
#: tiles of an SM budget are several times as large.
WHOLE_UNIT_ACCESSES = 256


def _taken_whole(rows: int, grain: int, block_words: int, least: int) -> bool:
    """Return True if a tile takes whole units of `rows` grains.

    A unit, padded to a power of two, must have `least` words, and the units of a tile must fill it. Tiles of `least`
    words, as there are without a budget, take a unit or rows of several.
    """
    fills_taken = rows >= FULL_TILE * (first_rows(rows) + rest_rows(rows))
    fills_tile = units_in_tile(rows, block_words // grain) * rows * grain >= FULL_TILE * block_words
    return fills_taken and fills_tile and block_words > least <= triton.next_power_of_2(rows) * grain


def cuts(regions: Iterable[Region], block_bytes: int) -> list[tuple[RowShape, Region]]:
    """Return the regions cut anew, each with the shape that suits it best."""
    return [(RowShape.of(cut, block_bytes), cut) for cut in map(recut, regions)]


def describe(regions: Sequence[Region], block_bytes: int, shapes: tuple[RowShape, ...] = ()) -> Launch:
    """Lay the regions out for the kernel, compiled for `shapes`, or for those that serve these regions best.

    The first shape that can serve a region does. Raises RegionError if a count reaches 2^31: the kernel has 32 bits.
    """
    owns = cuts(regions, block_bytes)
    shapes = shapes or shapes_for(owns)
    table = Table(len(regions), WORDS.value)
    for own, region in owns:
        number = next((i for i, shape in enumerate(shapes) if shape.serves(own, region)), len(shapes))
        if number == len(shapes):
            shapes = (*shapes, RowShape.of_any_rows(own.access_bytes))
        shape = shapes[number]
        word, grains = shape.word_bytes, region.row_bytes // shape.word_bytes // shape.grain
        per_tile = block_bytes // WIDEST.value * shape.vec // shape.grain
        if shape.tokens:
            pieces = -(-region.units // units_in_tile(shape.tokens * grains, per_tile))
        else:
            pieces = -(-region.tokens * grains * (region.units if shape.span else 1) // per_tile)
        if pieces * per_tile >= 1 << 31:
            raise RegionError(f"{region.nbytes} bytes in words of {word}; the kernel counts them in 32 bits")
        sides = [
            *table.side(region.src, word, kind_in(shape.src_kind, own.src_kind)),
            *table.side(region.dst, word, kind_in(shape.dst_kind, own.dst_kind)),
        ]
        counts = Counts(region.units, region.planes, region.heads, region.tokens)
        table.region(number, counts, pieces, grains, shape.span, sides)
    return table.launch(shapes)


def program(shapes: tuple[RowShape, ...], config: RowConfig) -> Program:
    """Return the kernel for these shapes."""
    return Program(move_kernel, shapes, config, (("BLOCK", config.block_bytes),))


def standing_program(regions: Sequence[Region], kinds: tuple[int, int], sms: int | None) -> Program:
    """Return the one kernel for regions like these, of any number, width and distance, to compile before a move.

    `kinds`: EVEN or LISTED, for the units of each end; LISTED even if they happen to follow each other.
    """
    config = choose(kind_of_most(regions), sms, regions[0].src.device)
    src, dst = kinds
    owns = [(own._replace(src_kind=src, dst_kind=dst), cut) for own, cut in cuts(regions, config.block_bytes)]
    most = with_most_bytes((own, cut.nbytes) for own, cut in owns)
    shorter = dict.fromkeys(shape.of_any_units for shape in most if shape.tokens)  # pages that begin out of step
    widths = [own.access_bytes for own, _ in owns]
    return program(
        (*most, *shorter, *map(RowShape.of_any_rows, sorted({max(widths), min(widths)}, reverse=True))), config
    )


def general_program() -> Program:
    """Return the one kernel for regions of any rows and units, to start with before kernels for them are compiled."""
    widths = (1 << bits for bits in reversed(range(WIDEST.value.bit_length())))
    return program(tuple(map(RowShape.of_any_rows, widths)), RULES[Kernel.ROWS][1])


def prepare(
    regions: Sequence[Region], config: RowConfig | None = None, sms: int | None = None, using: Program | None = None
) -> Prepared | None:
    """Check the regions and upload their table. Returns None if no region has bytes. Raises RegionError as `move`."""
    for region in regions:
        region.check()
    work = [region for region in regions if region.nbytes]
    if not work:
        return None
    device = one_device(region.src.device for region in work)
    check_apart(work)
    return prepared(work, device, config, sms, using)


def prepared(
    work: Sequence[Region],
    device: torch.device,
    config: RowConfig | None = None,
    sms: int | None = None,
    using: Program | None = None,
) -> Prepared:
    """Upload the table of checked regions, which the kernel reaches from `device`. Returns their launch."""
    if using is None:
        config = config or choose(kind_of_most(work), sms, device)
        launch = describe(work, config.block_bytes)
    else:
        config, launch = using.config, describe(work, using.config.block_bytes, using.shapes)
    return Prepared.of(program(launch.shapes, config), launch, device, sms)


def move(
    regions: Sequence[Region], config: RowConfig | None = None, sms: int | None = None, using: Program | None = None
) -> None:
    """Copy every row of every region in one launch on the current stream of their device, without a synchronise.

    All regions must be on one device. `sms`: SM budget (None: no budget). `using`: a kernel made for regions like
    these; None: the best for these, compiled on first use. The memory must stay allocated until the stream has passed
    the launch. Regions without rows are skipped. Raises RegionError before anything is launched.
    """
    launch = prepare(regions, config, sms, using)
    if launch is not None:
        launch.run()
