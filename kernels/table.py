"""A launch's table: int64 words that describe each region to a kernel, then the lists of addresses and offsets it has.

Words have their names here, for the host that writes them and the kernels that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from .region import Offsets, RegionError, Side, even_distance

#: What begins each region's words; its sides follow, `SIDE_WORDS` each, and what a kernel has beyond.
FIRST_TILE, SHAPE, UNITS, PLANES, HEADS, TOKENS, PIECES, GRAINS, SIDES = map(tl.constexpr, range(9))

#: Of a side: where in the table its planes lie; its list of units and how many are in it, or the first unit and the
#: distance to the next; and further distances.
ADDRESSES, LIST, LIST_LENGTH, FIRST_UNIT, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, SIDE_WORDS = map(
    tl.constexpr, range(8)
)

#: Whether the units of a side follow each other at one distance, are listed in the table, or either, as the table says.
EVEN, LISTED, EITHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

#: Bytes of the widest access. A tile is `BLOCK` bytes in these; narrower words get as many accesses, not as many bytes:
#: 16 KiB of single bytes would be 128 accesses a thread, out of registers and into local memory.
WIDEST = tl.constexpr(16)

#: How a tile takes units: it lies in one, or takes a few whole ones, or rows of several, of several tokens or of one.
ONE_UNIT, WHOLE_UNITS, SEVERAL_UNITS, TOKEN_UNITS = map(tl.constexpr, range(4))


@triton.jit
def find_region(table, regions, tile, WORDS: tl.constexpr):
    """Where the region of `tile` is described, and the tile's number in it."""
    region = 0
    for other in range(1, regions):
        region += (tl.load(table + other * WORDS + FIRST_TILE) <= tile).to(tl.int32)
    at = table + region * WORDS
    return at, (tile - tl.load(at + FIRST_TILE).to(tl.int32)).to(tl.uint32)


@triton.jit
def plane_and_head(at, tile):
    """The plane and head of a tile, and its number among those of their units. Planes are fastest."""
    planes = tl.load(at + PLANES).to(tl.uint32)
    heads = tl.load(at + HEADS).to(tl.uint32)
    rest = tile // planes
    piece = rest // heads
    return tile - rest * planes, (rest - piece * heads).to(tl.int64), piece


@triton.jit
def rows_of(at, piece, ROWS: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """What a piece of `ROWS` grains holds: its unit, one or [row], and [row] token, grain in it, and whether it exists.

    `COUNT`: grains a token; 0 where the table says.
    """
    tokens = tl.load(at + TOKENS).to(tl.uint32)
    unit = piece
    if SPAN == ONE_UNIT:
        pieces = tl.load(at + PIECES).to(tl.uint32)
        unit = piece // pieces
        piece = piece - unit * pieces
    s = piece * ROWS + tl.arange(0, ROWS).to(tl.uint32)
    if COUNT:
        token = s // COUNT
        grain = s - token * COUNT
    else:
        count = tl.load(at + GRAINS).to(tl.uint32)
        token = s // count
        grain = s - token * count
    if SPAN == ONE_UNIT:
        live = token < tokens
    else:
        unit = token
        if SPAN == SEVERAL_UNITS:
            unit = token // tokens
        token = token - unit * tokens
        live = unit < tl.load(at + UNITS).to(tl.uint32)
    return unit, token, grain, live


@triton.jit
def plane_start(table, side, plane, head, ELEMENT: tl.constexpr, VEC: tl.constexpr):
    """Where a plane and head start on a side."""
    base = tl.load(table + tl.load(side + ADDRESSES) + plane).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, VEC * ELEMENT.primitive_bitwidth // 8)
    return base + head * tl.multiple_of(tl.load(side + HEAD_STRIDE), VEC)


@triton.jit
def unit_start(table, side, unit, live, KIND: tl.constexpr, VEC: tl.constexpr):
    """Elements from the start of a plane to that of `unit`."""
    if KIND == LISTED:
        return tl.multiple_of(tl.load(table + tl.load(side + LIST) + unit, mask=live, other=0), VEC)
    stride = tl.multiple_of(tl.load(side + UNIT_STRIDE), VEC)
    start = tl.multiple_of(tl.load(side + FIRST_UNIT), VEC) + unit.to(tl.int64) * stride
    if KIND == EITHER:
        listed = live & (unit < tl.load(side + LIST_LENGTH))
        start += tl.multiple_of(tl.load(table + tl.load(side + LIST) + unit, mask=listed, other=0), VEC)
    return start


@triton.jit
def token_stride(side, VEC: tl.constexpr):
    """Elements from a token to the next."""
    return tl.multiple_of(tl.load(side + TOKEN_STRIDE), VEC)


def kind_of_units(units: Offsets) -> int:
    """EVEN, for units that need no list, or LISTED."""
    return (LISTED if even_distance(units) is None else EVEN).value


def kind_in(shape: int, own: int) -> int:
    """How a side is described to a kernel whose shape takes `shape`, if its own kind is `own`."""
    return own if shape == EITHER.value else shape


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel call, worked out on the host: the table to upload, the tiles to run, the shapes to compile for.

    `table` int64: `words` words for each of `regions` regions, then their lists.
    """

    table: npt.NDArray[np.int64]
    words: int
    regions: int
    tiles: int
    shapes: tuple[Any, ...]

    @property
    def header(self) -> npt.NDArray[np.int64]:
        """What describes each region [region, word]."""
        return self.table[: self.regions * self.words].reshape(self.regions, self.words)


@dataclass(frozen=True, slots=True)
class Counts:
    """How often a region's loops run."""

    units: int
    planes: int
    heads: int
    tokens: int


@dataclass(slots=True, eq=False)
class Table:
    """The table of `regions` regions while it is laid out, of `words` words each."""

    regions: int
    words: int
    tiles: int = 0
    _rows: list[list[int]] = field(default_factory=list[list[int]])
    _lists: list[Offsets] = field(default_factory=list[Offsets])
    _used: int = 0

    def __post_init__(self) -> None:
        self._used = self.regions * self.words

    def append(self, values: Offsets) -> int:
        """Add a list, and return its place."""
        place = self._used
        self._lists.append(values)
        self._used += len(values)
        return place

    def append_at(self, values: Offsets, words: int) -> int:
        """As `append`, at a multiple of `words`."""
        self.append(np.zeros(-self._used % words, np.int64))
        return self.append(values)

    def side(self, side: Side, element_bytes: int, kind: int) -> list[int]:
        """The words of a side, whose lists are added. `kind`: EVEN where units are, or LISTED."""
        words = self.units(side.units, element_bytes, kind)
        strides = side.head_bytes // element_bytes, side.token_bytes // element_bytes
        return [self.append(side.planes.addresses), *words, *strides]

    def units(self, units: Offsets, element_bytes: int, kind: int) -> tuple[int, int, int, int]:
        """LIST to UNIT_STRIDE of a side's units."""
        if kind == LISTED.value:
            return self.append(units // element_bytes), len(units), 0, 0
        distance = int(units[1] - units[0]) if len(units) > 1 else 0
        return 0, 0, int(units[0]) // element_bytes, distance // element_bytes

    def region(self, shape: int, counts: Counts, pieces: int, grains: int, span: int, further: Sequence[int]) -> None:
        """Describe the next region: `further` are its sides, and what the kernel has beyond."""
        tiles = pieces * counts.planes * counts.heads * (counts.units if span == ONE_UNIT.value else 1)
        self.add(tiles, shape, counts, pieces, grains, further)

    def add(self, tiles: int, shape: int, counts: Counts, pieces: int, grains: int, further: Sequence[int]) -> None:
        """As `region`, of so many tiles."""
        loops = counts.units, counts.planes, counts.heads, counts.tokens
        self._rows.append([self.tiles, shape, *loops, pieces, grains, *further])
        self.tiles += tiles
        if self.tiles >= 1 << 31:
            raise RegionError(f"{self.tiles} tiles in one launch; the kernel counts them in 32 bits")

    def launch(self, shapes: tuple[Any, ...]) -> Launch:
        """All of it."""
        header = np.array(self._rows, np.int64).reshape(-1, self.words)
        assert len(header) == self.regions, "every region is described, by as many words"
        table = np.concatenate([header.reshape(-1), *self._lists])
        return Launch(table, self.words, self.regions, self.tiles, shapes)
