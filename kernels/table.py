"""The table of a launch describes each region to a kernel in int64 words, then lists addresses and offsets.

The host that writes the words and the kernels that read them take the words' names from here.
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

#: The words that begin a region's description; its sides follow, `SIDE_WORDS` each, and the kernel's further words.
FIRST_TILE, SHAPE, UNITS, PLANES, HEADS, TOKENS, PIECES, GRAINS, SIDES = map(tl.constexpr, range(9))

#: The words of a side: where in the table its planes' addresses lie; its list of units and the list's length, or the
#: first unit and the distance to the next; and further distances.
ADDRESSES, LIST, LIST_LENGTH, FIRST_UNIT, UNIT_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, SIDE_WORDS = map(
    tl.constexpr, range(8)
)

#: The units of a side: at one distance, listed in the table, or either, as the table says.
EVEN, LISTED, EITHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

#: The arguments of every kernel that change from launch to launch, for which it is not compiled anew; see `Shift`.
UNSPECIALIZED = "regions", "tiles", "first_unit", "src_bytes", "dst_bytes"

#: Bytes of the widest access. A tile is `BLOCK` bytes in these; narrower words get as many accesses, not as many bytes:
#: 16 KiB of single bytes would be 128 accesses a thread, out of registers and into local memory.
WIDEST = tl.constexpr(16)

#: The units of a tile: it lies in one, or takes a few whole units, or rows of several, of several tokens or of one.
ONE_UNIT, WHOLE_UNITS, SEVERAL_UNITS, TOKEN_UNITS = map(tl.constexpr, range(4))


@triton.jit
def find_region(table, regions, tile, WORDS: tl.constexpr):
    """Return the pointer to the description of `tile`'s region, and the tile's number in the region."""
    region = 0
    for other in range(1, regions):
        region += (tl.load(table + other * WORDS + FIRST_TILE) <= tile).to(tl.int32)
    at = table + region * WORDS
    return at, (tile - tl.load(at + FIRST_TILE).to(tl.int32)).to(tl.uint32)


@triton.jit
def plane_and_head(at, tile):
    """Return the plane and head of a tile, and its number among the tiles of their units. Planes are fastest."""
    planes = tl.load(at + PLANES).to(tl.uint32)
    heads = tl.load(at + HEADS).to(tl.uint32)
    rest = tile // planes
    piece = rest // heads
    return tile - rest * planes, (rest - piece * heads).to(tl.int64), piece


@triton.jit
def rows_of(at, piece, ROWS: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Return the unit of a piece of `ROWS` grains, one or [row], and [row] token, grain in the token, and existence.

    `COUNT`: grains a token; 0: the table says.
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
def plane_start(table, side, moved, plane, head, ELEMENT: tl.constexpr, VEC: tl.constexpr):
    """Return a pointer to the start of a plane and head on a side, aligned to `VEC` elements. `moved`: in bytes."""
    base = (tl.load(table + tl.load(side + ADDRESSES) + plane) + moved).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, VEC * ELEMENT.primitive_bitwidth // 8)
    return base + head * tl.multiple_of(tl.load(side + HEAD_STRIDE), VEC)


@triton.jit
def unit_start(table, side, first, unit, live, KIND: tl.constexpr, VEC: tl.constexpr):
    """Return the elements from the start of a plane to that of a unit, a multiple of `VEC`: `unit` counts from unit
    `first` of the side's list on, with which the launch begins. `live` masks list loads.
    """
    if KIND == LISTED:
        return tl.multiple_of(tl.load(table + (tl.load(side + LIST) + first) + unit, mask=live, other=0), VEC)
    stride = tl.multiple_of(tl.load(side + UNIT_STRIDE), VEC)
    start = tl.multiple_of(tl.load(side + FIRST_UNIT), VEC) + first * stride
    start += unit.to(tl.int64) * stride
    if KIND == EITHER:
        listed = live & (unit < tl.load(side + LIST_LENGTH) - first)
        start += tl.multiple_of(tl.load(table + (tl.load(side + LIST) + first) + unit, mask=listed, other=0), VEC)
    return start


@triton.jit
def token_stride(side, VEC: tl.constexpr):
    """Return the elements from a token to the next, a multiple of `VEC`."""
    return tl.multiple_of(tl.load(side + TOKEN_STRIDE), VEC)


def kind_of_units(units: Offsets) -> int:
    """Return EVEN for units that need no list, or LISTED."""
    return (LISTED if even_distance(units) is None else EVEN).value


def kind_in(shape: int, own: int) -> int:
    """Return the kind in which a side of kind `own` is described to a kernel of kind `shape`."""
    return own if shape == EITHER.value else shape


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel call prepared on the host: the table to upload, the tiles to run, the shapes to compile for.

    `table` int64: `words` words for each of `regions` regions, then their lists.
    """

    table: npt.NDArray[np.int64]
    words: int
    regions: int
    tiles: int
    shapes: tuple[Any, ...]

    @property
    def header(self) -> npt.NDArray[np.int64]:
        """The words of each region [region, word]."""
        return self.table[: self.regions * self.words].reshape(self.regions, self.words)


@dataclass(frozen=True, slots=True)
class Counts:
    """The iteration counts of a region's loops."""

    units: int
    planes: int
    heads: int
    tokens: int


@dataclass(slots=True, eq=False)
class Table:
    """The table of `regions` regions, of `words` words each, while it is laid out."""

    regions: int
    words: int
    tiles: int = 0
    _rows: list[list[int]] = field(default_factory=list[list[int]])
    _lists: list[Offsets] = field(default_factory=list[Offsets])
    _used: int = 0

    def __post_init__(self) -> None:
        self._used = self.regions * self.words

    def append(self, values: Offsets) -> int:
        """Add a list. Returns its place, in words of the table."""
        place = self._used
        self._lists.append(values)
        self._used += len(values)
        return place

    def append_at(self, values: Offsets, words: int) -> int:
        """Add a list at a multiple of `words`. Returns its place."""
        self.append(np.zeros(-self._used % words, np.int64))
        return self.append(values)

    def side(self, side: Side, element_bytes: int, kind: int) -> list[int]:
        """Add a side's lists. Returns its words. `kind`: EVEN, for units that are, or LISTED."""
        words = self.units(side.listed, element_bytes, kind)
        strides = side.head_bytes // element_bytes, side.token_bytes // element_bytes
        return [self.append(side.planes.addresses), *words, *strides]

    def units(self, units: Offsets, element_bytes: int, kind: int) -> tuple[int, int, int, int]:
        """Return the words LIST to UNIT_STRIDE of a side's units; add the list if `kind` is LISTED."""
        if kind == LISTED.value:
            return self.append(units // element_bytes), len(units), 0, 0
        distance = int(units[1] - units[0]) if len(units) > 1 else 0
        return 0, 0, int(units[0]) // element_bytes, distance // element_bytes

    def region(self, shape: int, counts: Counts, pieces: int, grains: int, span: int, further: Sequence[int]) -> None:
        """Describe the next region. `further`: the words of its sides, then the kernel's own."""
        tiles = pieces * counts.planes * counts.heads * (counts.units if span == ONE_UNIT.value else 1)
        self.add(tiles, shape, counts, pieces, grains, further)

    def add(self, tiles: int, shape: int, counts: Counts, pieces: int, grains: int, further: Sequence[int]) -> None:
        """Describe the next region, of `tiles` tiles. Raises RegionError if a launch reaches 2^30 tiles.

        A program adds the number of programs, at most `tiles`, to its last tile, in 32 bits.
        """
        loops = counts.units, counts.planes, counts.heads, counts.tokens
        self._rows.append([self.tiles, shape, *loops, pieces, grains, *further])
        self.tiles += tiles
        if self.tiles >= 1 << 30:
            raise RegionError(f"{self.tiles} tiles in one launch; the kernel counts them in 32 bits")

    def launch(self, shapes: tuple[Any, ...]) -> Launch:
        """Return the launch. Every region must have been described."""
        header = np.array(self._rows, np.int64).reshape(-1, self.words)
        assert len(header) == self.regions, "every region is described, by as many words"
        table = np.concatenate([header.reshape(-1), *self._lists])
        return Launch(table, self.words, self.regions, self.tiles, shapes)
