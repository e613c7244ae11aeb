"""The digest kernel computes `digest_reference` on a GPU, fused with the row mover's copy or alone, in one launch.

Tiles are the row mover's, in 32-bit words. A row's key is computed once for each 16 bytes; with it they cost 75
instructions more than the copy's 25 (sm_90), of 200 that the memory leaves time for. A tile adds its sum to the result
by one atomic, so launches of parts add up; tiles are larger than the row mover's, to make fewer atomics.

Rows with a width or address that is no multiple of 4 go byte by byte. Contiguous rows of no multiple of 16 (132 B) are
cut anew, as the row mover does, and each word finds its own token and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import digest_reference as definition
from .digest_reference import End, Logical
from .launch import RULES, Kernel, Prepared, Program, RowConfig, choose
from .region import Region, RegionError, at_end, check_apart
from .rows import DST, FULL_TILE, SRC, kind_of_most, recut, with_most_bytes
from .table import (
    ADDRESSES,
    EITHER,
    GRAINS,
    HEAD_STRIDE,
    LISTED,
    ONE_UNIT,
    SEVERAL_UNITS,
    SHAPE,
    SIDE_WORDS,
    TOKEN_STRIDE,
    TOKEN_UNITS,
    UNSPECIALIZED,
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

#: Word offsets after source and destination: the coordinates, as a side with plane keys, positions for units, and steps
#: of heads and positions for strides; the first head; the element of the result.
LOGICAL = tl.constexpr(DST.value + SIDE_WORDS.value)
FIRST_HEAD, OUT, WORDS = (tl.constexpr(LOGICAL.value + SIDE_WORDS.value + i) for i in range(3))

H, T = tl.constexpr(definition.H), tl.constexpr(definition.T)
A, B = tl.constexpr(definition.A), tl.constexpr(definition.B)
M1, M2 = tl.constexpr(definition.M1), tl.constexpr(definition.M2)

#: Index of each DigestShape field in the kernel's `OF`.
(
    OF_ELEMENT_BYTES,
    OF_VEC,
    OF_GRAINS,
    OF_GRAIN,
    OF_HEAD_BYTES,
    OF_HEADS,
    OF_RECUT,
    OF_SPAN,
    OF_SRC_KIND,
    OF_DST_KIND,
    OF_POSITION_KIND,
) = map(tl.constexpr, range(11))


@triton.jit
def key_of(coordinates, plane_key, head, position):
    """Return each row's key: mix64 of its coordinates. `head` counts the region's heads. `coordinates`: see LOGICAL."""
    first_head = tl.load(coordinates + (FIRST_HEAD - LOGICAL))
    logical_head = first_head + tl.load(coordinates + HEAD_STRIDE) * head.to(tl.int64)
    z = plane_key.to(tl.uint64) + logical_head.to(tl.uint64) * H + position.to(tl.uint64) * T
    z = (z ^ (z >> 30)) * M1
    z = (z ^ (z >> 27)) * M2
    return z ^ (z >> 31)


@triton.jit
def sum_of(word, live, key, first, words):
    """Return the summed terms of live `word`s, number `first` + `words` of their row; `words` costs little."""
    a = (key.to(tl.uint32) + first.to(tl.uint32) * A) + words.to(tl.uint32) * A
    b = ((key >> 32).to(tl.uint32) + first.to(tl.uint32) * B) + words.to(tl.uint32) * B
    product = a.to(tl.uint64) * b.to(tl.uint64)
    odd = (product.to(tl.uint32) ^ (product >> 32).to(tl.uint32)) | 1
    odd = tl.where(live, odd, 0)
    term = (word.to(tl.uint32, bitcast=True) + a).to(tl.uint64) * odd.to(tl.uint64)
    return tl.sum(term.to(tl.int64))


@triton.jit
def _move_bytes(src, dst, first, live, BYTES: tl.constexpr, COPY: tl.constexpr):
    """Move the words from byte `first` of a head's `BYTES` on, byte by byte. Returns them, zero-filled past its end."""
    word = first.to(tl.int32) * 0
    for i in tl.static_range(4):
        inside = live & (first + i < BYTES)
        data = tl.load(src + i, mask=inside, other=0, eviction_policy="evict_first")
        if COPY:
            tl.store(dst + i, data, mask=inside)
        word = word | ((data.to(tl.int32) & 0xFF) << (8 * i))
    return word


@triton.jit
def _payload(table, at, shift, plane, head, unit, token, first, live, OF: tl.constexpr, COPY: tl.constexpr):
    """Return the words of a tile: [row, word]. Copies them if `COPY`."""
    VEC: tl.constexpr = OF[OF_VEC]
    ELEMENT: tl.constexpr = tl.int32 if OF[OF_ELEMENT_BYTES] == 4 else tl.int8  # pyright: ignore
    src = plane_start(table, at + SRC, shift[1], plane, head, ELEMENT, VEC)
    dst = plane_start(table, at + DST, shift[2], plane, head, ELEMENT, VEC)
    known = unit >= 0 if OF[OF_SPAN] == ONE_UNIT else live
    src_row = unit_start(table, at + SRC, shift[0], unit, known, OF[OF_SRC_KIND], VEC)
    dst_row = unit_start(table, at + DST, shift[0], unit, known, OF[OF_DST_KIND], VEC)
    if OF[OF_SPAN] != TOKEN_UNITS:
        src_row += token * token_stride(at + SRC, VEC)
        dst_row += token * token_stride(at + DST, VEC)
    if OF[OF_ELEMENT_BYTES] == 4:
        words = first.to(tl.int64)[:, None] + tl.arange(0, OF[OF_GRAIN])[None, :]
        data = tl.load(src + (src_row[:, None] + words), mask=live[:, None], eviction_policy="evict_first")
        if COPY:
            tl.store(dst + (dst_row[:, None] + words), data, mask=live[:, None])
    else:
        HEAD_WORDS: tl.constexpr = (OF[OF_HEAD_BYTES] + 3) // 4
        head_in_row = first // HEAD_WORDS
        number = (first - head_in_row * HEAD_WORDS) * 4
        byte = (head_in_row * OF[OF_HEAD_BYTES] + number).to(tl.int64)
        src += (src_row + byte)[:, None]
        dst += (dst_row + byte)[:, None]
        data = _move_bytes(src, dst, number[:, None], live[:, None], OF[OF_HEAD_BYTES], COPY)
    return data


@triton.jit
def _tile(table, at, out, shift, tile, SHAPES: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr):
    """Add the sum of one tile of the region described at `at`, with rows of shape `I`, to `out`; copy it if `COPY`."""
    OF: tl.constexpr = SHAPES[I]
    GRAIN: tl.constexpr = OF[OF_GRAIN]
    HEAD_WORDS: tl.constexpr = (OF[OF_HEAD_BYTES] + 3) // 4
    HEADS_IN_ROW: tl.constexpr = OF[OF_HEADS]
    ROWS: tl.constexpr = BLOCK // WIDEST * OF[OF_VEC] // GRAIN
    plane, head, piece = plane_and_head(at, tile)
    unit, token, grain, live = rows_of(at, piece, ROWS, OF[OF_GRAINS], OF[OF_SPAN])
    first = grain * GRAIN
    word = _payload(table, at, shift, plane, head, unit, token, first, live, OF, COPY)
    known = unit >= 0 if OF[OF_SPAN] == ONE_UNIT else live
    position = unit_start(table, at + LOGICAL, shift[0], unit, known, OF[OF_POSITION_KIND], 1)
    step = tl.load(at + LOGICAL + TOKEN_STRIDE)
    if OF[OF_RECUT]:  # a token begins anywhere in such a row: words are counted from the start of the unit
        if OF[OF_GRAINS]:
            first += token * (OF[OF_GRAINS] * GRAIN)
        else:
            first += token * (tl.load(at + GRAINS).to(tl.int32) * GRAIN)
        token = token * 0
    first = first[:, None]
    words = tl.arange(0, GRAIN)[None, :]
    position = (position + token * step)[:, None]
    if HEAD_WORDS % GRAIN:  # a head begins anywhere in a grain
        first = first + words
        words = words * 0
    head = head * HEADS_IN_ROW
    if HEADS_IN_ROW > 1 or OF[OF_RECUT]:
        group = first // HEAD_WORDS
        first = first - group * HEAD_WORDS
        further = group // HEADS_IN_ROW
        head = head + (group - further * HEADS_IN_ROW)
        position = position + further * step
    key = key_of(at + LOGICAL, tl.load(table + tl.load(at + LOGICAL + ADDRESSES) + plane), head, position)
    tl.atomic_add(out + tl.load(at + OUT), sum_of(word, live[:, None], key, first, words), sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["out"])
def digest_kernel(
    table,
    out,
    regions,
    tiles,
    first_unit,
    src_bytes,
    dst_bytes,
    SHAPES: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
):
    """Digest all tiles of all regions; the grid is the SM budget, or every tile without one.

    `table`: see `describe`. `first_unit`, `src_bytes`, `dst_bytes`: see `Shift`. `COPY`: 0 to read the source only.
    """
    shift = first_unit, src_bytes, dst_bytes
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, local = find_region(table, regions, tile, WORDS)
        shape = tl.load(at + SHAPE).to(tl.int32)
        for i in tl.static_range(len(SHAPES)):
            if shape == i:
                _tile(table, at, out, shift, local, SHAPES, i, BLOCK, COPY)


def move_and_digest(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    out: torch.Tensor,
    config: RowConfig | None = None,
    sms: int | None = None,
) -> None:
    """Copy every row of every region and add the digest of the bytes read to `out`, in one launch.

    It goes to the current stream and is not waited for. `out`: int64 on the regions' device, zeros or earlier digests,
    [1] for all or [region]; modulo 2^64 they are `digest_reference`'s. `sms`: SM budget (None: no budget). The memory
    must stay allocated until the stream has passed the launch. Raises RegionError before anything is launched.
    """
    launch = prepare(regions, logicals, out, config, sms)
    if launch is not None:
        launch.run()


def digest(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    side: End,
    out: torch.Tensor,
    config: RowConfig | None = None,
    sms: int | None = None,
) -> None:
    """Add the digest of the rows at one end of the regions to `out`, without a copy. See `move_and_digest`."""
    launch = prepare(regions, logicals, out, config, sms, side)
    if launch is not None:
        launch.run()


def prepare(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    out: torch.Tensor,
    config: RowConfig | None = None,
    sms: int | None = None,
    reads: End | None = None,
    using: Program | None = None,
) -> Prepared | None:
    """Check and describe a launch and upload its table. Returns None if no region has bytes. Raises RegionError.

    `reads`: the end that is only read, as `digest` does; None for `move_and_digest`. `using`: see `rows.move`.
    """
    definition.check(regions, logicals)
    if out.dtype != torch.int64 or out.dim() != 1 or len(out) not in (1, len(regions)) or not out.is_contiguous():
        raise RegionError(f"a result of {tuple(out.shape)} {out.dtype}, not int64 [1] or one for each region")
    for region in regions:
        if region.src.device != out.device:
            raise RegionError(f"regions on {region.src.device} and a result on {out.device}")
    work = [number for number, region in enumerate(regions) if region.nbytes]
    if not work:
        return None
    if reads is None:
        check_apart([regions[number] for number in work])
    else:
        regions = [at_end(region, reads) for region in regions]
    outs = [number if len(out) > 1 else 0 for number in work]
    moved, coordinates = [regions[i] for i in work], [logicals[i] for i in work]
    config = using.config if using is not None else config or configured(moved, sms, out.device)
    launch = describe(moved, coordinates, outs, config.block_bytes, () if using is None else using.shapes)
    return Prepared.of(program(launch.shapes, config, reads), launch, out.device, sms, out)


def configured(regions: Sequence[Region], sms: int | None, device: torch.device) -> RowConfig:
    """Return the launch configuration of these regions: measured on this GPU, or by rule."""
    return choose(kind_of_most(regions), sms, device, Kernel.DIGEST)


def program(shapes: tuple[DigestShape, ...], config: RowConfig, reads: End | None) -> Program:
    """Return the kernel for these shapes. `reads`: see `prepare`."""
    constants = ("BLOCK", config.block_bytes), ("COPY", int(reads is None))
    return Program(digest_kernel, shapes, config, constants, outputs=1)


def standing_program(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    kinds: tuple[int, int],
    sms: int | None,
    reads: End | None = None,
) -> Program:
    """Return the one kernel for regions like these, with listed positions; see `rows.standing_program`."""
    config = configured(regions, sms, regions[0].src.device)
    regions = regions if reads is None else [at_end(region, reads) for region in regions]
    given = dict(zip(("src_kind", "dst_kind", "position_kind"), (*kinds, LISTED.value), strict=True))
    owns = [
        (own._replace(**given), cut)
        for own, cut in (DigestShape.of(*each, config.block_bytes) for each in zip(regions, logicals, strict=True))
    ]
    most = with_most_bytes((own, cut.nbytes) for own, cut in owns)
    narrow = dict[tuple[int, ...], DigestShape]()
    for own, _ in owns:
        rows = own.element_bytes, own.head_bytes, own.heads
        narrow[rows] = min(narrow.get(rows, own.of_any_rows), own.of_any_rows)
    return program((*most, *sorted(narrow.values(), reverse=True)), config, reads)


#: Bytes of a head, and words of an access, of rows that `general_program` has code for: those of public models, in the
#: forms that engines keep, and of states. Rows of 132 bytes lie in 16-byte words where tokens follow each other.
GENERAL_HEADS = (
    *((nbytes, 4) for nbytes in (64, 128, 256, 512, 576, 656, 768, 1024, 1152, 2048, 4096, 8192, 65536)),
    *((132, 4), (132, 1), (584, 2)),
)


def general_program(reads: End | None = None) -> Program:
    """Return the one kernel for regions of heads of GENERAL_HEADS, of any number and distance; see
    `rows.general_program`. `reads`: see `prepare`.
    """
    either, span = EITHER.value, SEVERAL_UNITS.value
    shapes = (DigestShape(4, vec, 0, vec, nbytes, 1, 1, span, either, either, either) for nbytes, vec in GENERAL_HEADS)
    return program(tuple(sorted(shapes, reverse=True)), RULES[Kernel.DIGEST][1], reads)


class DigestShape(NamedTuple):
    """The parameters a kernel is compiled for: rows of `grains` x `grain` words, of `heads` heads of `head_bytes`.

    `element_bytes`: 4, or 1 if rows move byte by byte; `vec` words make the widest access. `grains` 0: rows of any
    width, counted at run time. `recut`: 1 if rows are cut without regard to tokens. `span`: how a tile takes units. The
    kinds: whether units and positions are listed, or at one distance.
    """

    element_bytes: int
    vec: int
    grains: int
    grain: int
    head_bytes: int
    heads: int
    recut: int
    span: int
    src_kind: int
    dst_kind: int
    position_kind: int

    @property
    def of_any_rows(self) -> DigestShape:
        """Shape of rows with these heads and alignment, of any number and distance, cut anew or not."""
        either = dict.fromkeys(("src_kind", "dst_kind", "position_kind"), EITHER.value)
        whole = int(self.element_bytes == 4)
        return self._replace(grains=0, grain=self.vec, recut=whole, span=SEVERAL_UNITS.value, **either)

    def serves(self, own: DigestShape, region: Region) -> bool:
        """Return True if tiles of this shape move a region hardly slower than tiles of `own`, its best shape."""
        if not self.grains:
            rows = self.element_bytes, self.head_bytes, self.heads
            return rows == (own.element_bytes, own.head_bytes, own.heads) and self.vec <= own.vec
        rows = self._replace(grain=1, grains=self.grains * self.grain, span=0, src_kind=0, dst_kind=0, position_kind=0)
        theirs = own._replace(grain=1, grains=own.grains * own.grain, span=0, src_kind=0, dst_kind=0, position_kind=0)
        spans = {own.span, SEVERAL_UNITS.value, *([TOKEN_UNITS.value] if region.tokens == 1 else [])}
        kinds = zip(_kinds(self), _kinds(own), strict=True)
        return rows == theirs and self.span in spans and all(ours >= needed for ours, needed in kinds)

    @classmethod
    def of(cls, region: Region, logical: Logical, block_bytes: int) -> tuple[DigestShape, Region]:
        """Return the shape of the widest access and the least wasteful grain, and the region in the shape's rows."""
        head_bytes = region.row_bytes // logical.heads_in_row
        cut = recut(region) if region.row_bytes % WIDEST.value and head_bytes % 4 == 0 else region
        cut = cut if cut.alignment() > region.alignment() >= 4 else region
        wide = cut.alignment() >= 4 and head_bytes % 4 == 0
        vec = cut.alignment() // 4 if wide else 1
        words = cut.row_bytes // 4 if wide else -(-head_bytes // 4) * logical.heads_in_row
        block_words = block_bytes // WIDEST.value * vec
        in_unit = cut.tokens * words
        several = cut.units > 1 and in_unit < FULL_TILE * -(-in_unit // block_words) * block_words
        span = (TOKEN_UNITS if cut.tokens == 1 else SEVERAL_UNITS) if several else ONE_UNIT
        head_words = -(-head_bytes // 4)
        grain = vec if several or not wide else max(vec, min(head_words & -head_words, block_words))
        units = cut.src.listed, cut.dst.listed, logical.listed
        kinds = map(kind_of_units, units)
        row = words // grain, grain, head_bytes, logical.heads_in_row
        return cls(4 if wide else 1, vec, *row, int(cut is not region), span.value, *kinds), cut


def coordinate_words(table: Table, logical: Logical, kind: int) -> list[int]:
    """Add the coordinates' lists to `table`. Returns the words from LOGICAL to FIRST_HEAD. `kind`: of positions."""
    keys, positions = table.append(logical.plane_keys()), table.units(logical.listed, 1, kind)
    return [keys, *positions, logical.head_step, logical.position_step, logical.first_head]


def _kinds(shape: DigestShape) -> tuple[int, int, int]:
    return shape.src_kind, shape.dst_kind, shape.position_kind


def shapes_for(owns: Sequence[tuple[DigestShape, Region]]) -> tuple[DigestShape, ...]:
    """Return the shapes to compile for regions like these; see `rows.shapes_for`."""
    most = with_most_bytes((own, cut.nbytes) for own, cut in owns)
    rest = [own for own, cut in owns if not any(shape.serves(own, cut) for shape in most)]
    return (*most, *sorted({own.of_any_rows for own in rest}, reverse=True))


def describe(
    regions: Sequence[Region],
    logicals: Sequence[Logical],
    outs: Sequence[int],
    block_bytes: int,
    shapes: tuple[DigestShape, ...] = (),
) -> Launch:
    """Lay regions and coordinates out as the kernel reads them; region i adds to element `outs[i]` of the result.

    The kernel is compiled for `shapes`, or for those that serve these regions best. Raises RegionError if a count
    reaches 2^31: the kernel has 32 bits.
    """
    owns = [DigestShape.of(*each, block_bytes) for each in zip(regions, logicals, strict=True)]
    shapes = shapes or shapes_for(owns)
    table = Table(len(regions), WORDS.value)
    for (own, cut), logical, out in zip(owns, logicals, outs, strict=True):
        number = next((i for i, shape in enumerate(shapes) if shape.serves(own, cut)), len(shapes))
        if number == len(shapes):
            shapes = (*shapes, own.of_any_rows)
        shape = shapes[number]
        grains = own.grains * own.grain // shape.grain
        per_tile = block_bytes // WIDEST.value * shape.vec // shape.grain
        pieces = -(-cut.tokens * grains * (cut.units if shape.span else 1) // per_tile)
        if pieces * per_tile >= 1 << 31 or shape.grain * grains * cut.tokens >= 1 << 31:
            raise RegionError(f"{cut.nbytes} bytes; the kernel counts their words in 32 bits")
        element = shape.element_bytes
        src, dst, places = map(kind_in, _kinds(shape), _kinds(own))
        sides = [*table.side(cut.src, element, src), *table.side(cut.dst, element, dst)]
        coordinates = [*coordinate_words(table, logical, places), out]
        counts = Counts(cut.units, cut.planes, cut.heads, cut.tokens)
        table.region(number, counts, pieces, grains, shape.span, [*sides, *coordinates])
    return table.launch(shapes)
