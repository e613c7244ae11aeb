"""An overlap is the numbers that a part of the source's form shares with one of the destination's, and has tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .convert_elements import ELEMENTS, SCALES
from .convert_reference import Conversion, RowForm, borders, element_size
from .digest_reference import End, Logical
from .region import Planes, Region, RegionError, Side
from .table import SIDE_WORDS, WIDEST, Table, kind_of_units

#: Most numbers of a grain: wider grains make no access wider.
MOST_COLUMNS = 128

#: Most grains of a tile: more, of few numbers each, would read offsets instead of payload.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class OverlapEnd:
    """One end of an overlap: each row's first element, and first block scale if there are blocks.

    `size`, `scale_size`: bytes of an element and of a block scale. `first_byte`, `first_scale_byte`: of the first ones
    in a row. `planes`: plane scales [plane], or ones.
    """

    element: str
    block: int
    scale: str
    elements: Side
    size: int
    first_byte: int
    scales: Side
    scale_size: int
    first_scale_byte: int
    planes: npt.NDArray[np.float32]

    @classmethod
    def of(cls, side: Side, form: RowForm, scales: npt.NDArray[np.float32], first: int) -> OverlapEnd:
        """Build the end for rows in `form`, from number `first` of a row on. `scales` [plane, scaled part].

        Raises RegionError if a row has no number `first`.
        """
        own = begun = 0
        for part, start in zip(form.parts, form.starts, strict=True):
            if first < begun + part.values:
                within, size = first - begun, element_size(part.element)
                width = element_size(part.scale) if part.block else 0
                firsts = within * part.element_bytes // part.values, within // max(part.block, 1) * width
                first_byte, first_scale_byte = start + firsts[0], start + part.element_bytes + firsts[1]
                elements, factors = _from_byte(side, first_byte), _from_byte(side, first_scale_byte)
                found = scales[:, own] if part.is_scaled else np.ones(len(side.planes), np.float32)
                streams = elements, size, first_byte, factors, width, first_scale_byte
                return cls(part.element, part.block, part.scale, *streams, found)
            begun, own = begun + part.values, own + part.is_scaled
        raise RegionError(f"number {first} of a row of {form.dim}")

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Plane scales as the kernel reads them: float32 in the low half of a word [plane]."""
        return np.ascontiguousarray(self.planes).view(np.int32).astype(np.int64)

    def streams(self, values: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield elements, then block scales: the first byte in a row, and the bytes of `values` numbers and of a grain
        of `width`.
        """
        together = 2 if self.element == "float4_e2m1fn_x2" else 1
        yield self.first_byte, values * self.size // together, width * self.size // together
        if self.block:
            yield (
                self.first_scale_byte,
                -(-values // self.block) * self.scale_size,
                width // self.block * self.scale_size,
            )

    def describe(self, table: Table, kind: int) -> list[int]:
        """Add both streams to `table`, and return their words. `kind`: see `Table.side`."""
        scales = table.side(self.scales, self.scale_size, kind) if self.block else [0] * SIDE_WORDS.value
        return [*table.side(self.elements, self.size, kind), *scales]


def _from_byte(side: Side, first: int) -> Side:
    """Return `side` with each row starting `first` bytes later."""
    return replace(side, planes=Planes(side.memory, side.allocation, side.offset + first)) if first else side


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """The `values` numbers of every row of a conversion that lie in one part of each form."""

    of: Conversion
    values: int
    src: OverlapEnd
    dst: OverlapEnd

    @property
    def width(self) -> int:
        """Numbers of a grain: a power of two."""
        return max(2, min(MOST_COLUMNS, 1 << (self.values - 1).bit_length()), self.src.block, self.dst.block)


def overlaps(of: Conversion) -> Iterator[Overlap]:
    """Yield the overlaps of a conversion, in the order of a row."""
    for first, stop in pairwise(borders(of.reads, of.writes)):
        src = OverlapEnd.of(of.src, of.reads, of.src_scales, first)
        dst = OverlapEnd.of(of.dst, of.writes, of.dst_scales, first)
        yield Overlap(of, stop - first, src, dst)


class ColumnShape(NamedTuple):
    """The parameters a kernel is compiled for: `values` numbers a row, and the elements and blocks of both ends.

    `src_element`, `dst_element`: numbers of ELEMENTS. `src_block`, `dst_block`: numbers that share a scale; 0: no
    blocks. `src_scale`, `dst_scale`: numbers of SCALES. `largest`: the number that infinity counts as. A tile is `rows`
    grains of `width` numbers. `src_vec`, `dst_vec`: rows start at multiples of so many elements. `src_kind`,
    `dst_kind`: whether a side's units are listed, or follow each other at one distance, as on the wire, without a
    table.
    """

    src_element: int
    dst_element: int
    src_block: int
    dst_block: int
    src_scale: int
    dst_scale: int
    values: int
    largest: float
    width: int
    rows: int
    src_vec: int
    dst_vec: int
    src_kind: int
    dst_kind: int

    @property
    def columns(self) -> int:
        """Number of grains a row."""
        return -(-self.values // self.width)

    def serves(self, own: ColumnShape) -> bool:
        """Return True if tiles of this shape can convert an overlap of best shape `own`."""
        accesses = {"rows": 0, "src_vec": 0, "dst_vec": 0, "src_kind": 0, "dst_kind": 0}
        if self._replace(**accesses) != own._replace(**accesses):
            return False
        narrower = self.src_vec <= own.src_vec and self.dst_vec <= own.dst_vec
        return narrower and self.src_kind >= own.src_kind and self.dst_kind >= own.dst_kind

    @classmethod
    def of(cls, overlap: Overlap, block_bytes: int) -> ColumnShape:
        """Return the best shape: as many rows as fill a tile, and the widest accesses that the addresses allow."""
        of, src, dst = overlap.of, overlap.src, overlap.dst
        width = overlap.width
        # A thread reads as many narrow elements as make one wide access: twice as many would cross shared memory.
        most = 16 // dst.size if src.element != "float4_e2m1fn_x2" else 16
        vecs = min(most, _vec(of, src, of.reads)), _vec(of, dst, of.writes)
        # A thread makes as many narrow accesses as wide ones, not as many bytes: else addresses fill its registers.
        tile = block_bytes // WIDEST.value * min(WIDEST.value // max(src.size, dst.size), *vecs)
        half = of.writes.values == "float16"
        largest = torch.finfo(torch.float16 if half else torch.bfloat16).max
        forms = ELEMENTS[src.element], ELEMENTS[dst.element], src.block, dst.block, SCALES[src.scale], SCALES[dst.scale]
        kinds = kind_of_units(of.src.listed), kind_of_units(of.dst.listed)
        return cls(*forms, overlap.values, largest, width, max(1, min(MOST_ROWS, tile // width)), *vecs, *kinds)


def _vec(of: Conversion, end: OverlapEnd, form: RowForm) -> int:
    """Return the number of elements of which every row's start is a multiple."""
    aligned = Region(end.elements, end.elements, of.heads, of.tokens, form.row_bytes).alignment()
    return max(1, aligned // end.size)


def best_shapes(conversions: Sequence[Conversion], block_bytes: int) -> list[tuple[ColumnShape, Overlap]]:
    """Return all overlaps, each with the shape that suits it best."""
    found = (overlap for each in conversions for overlap in overlaps(each))
    return [(ColumnShape.of(overlap, block_bytes), overlap) for overlap in found]


def can_digest(of: Conversion, logical: Logical, end: End) -> bool:
    """Returns True if one launch can convert rows and digest those at `end`: no word of theirs lies in two streams or
    grains. So it is unless the other form has parts that end within such a word.
    """
    forms = of.reads, of.writes, end
    if forms not in _in_words:
        _in_words[forms] = _has_whole_words(of, end)
    return _in_words[forms] and logical.heads_in_row == 1


#: Answers of `_has_whole_words`, by forms and digested end.
_in_words: dict[tuple[RowForm, RowForm, End], bool] = {}


def _has_whole_words(of: Conversion, end: End) -> bool:
    row_bytes, nbytes = of.at(end).row_bytes, 0
    for overlap in overlaps(of):
        side: OverlapEnd = getattr(overlap, end)
        for first, whole, grain in side.streams(overlap.values, overlap.width):
            nbytes += whole
            if first % 4 or (grain % 4 and whole > grain) or (whole % 4 and first + whole < row_bytes):
                return False
    return nbytes == row_bytes
