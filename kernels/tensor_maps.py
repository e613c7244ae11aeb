"""Rows at a pitch as boxes, which one tensor copy (`UTMALDG`, `UTMASTG`) takes: a head's rows of a page are one.

A tensor map is a plane as rows of its token pitch, by words of 8 bytes: two axes and one pitch, so what CUDA asks of
pitches that follow others never matters. Where a box begins is a coordinate, its row in the upper 32 bits of a number
and its word in the lower: steps of units, heads and boxes add to it as they add to an address.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from . import cuda_driver
from .cuda_driver import ELEMENT_BYTES
from .region import Offsets, Region, Side

#: Elements of a box along an axis.
MOST_ELEMENTS = 256

#: Rows that a coordinate counts, signed; words of a row that a map counts.
MOST_ROWS, MOST_WORDS = 1 << 31, 1 << 32

#: What a row adds to a coordinate.
ROW = 1 << 32

#: Sets of maps that are kept: a set is one side's planes, and pools never move.
KEPT_SETS = 64


class NoBox(StrEnum):
    """Why a region's rows are no boxes. They move as runs then."""

    ONE_ROW = "rows follow each other at both ends, or a unit has one"
    ALIGNMENT = "rows are not aligned to 16 bytes"
    WIDE = "a row has more than 2048 bytes"
    OVERLAP = "rows lie closer to each other than they are long"
    FAR = "rows lie 32 GiB or more apart"
    SPLIT = "a row crosses the end of a row of the map"
    OUTSIDE = "rows lie before the plane's first, or more than 2^31 after it"
    ALONE = "no number of rows but one divides a unit and fits a box"


@dataclass(frozen=True, slots=True)
class MappedSide:
    """A side as a kernel finds boxes in it: coordinates where each unit begins, and steps to the next head and box."""

    starts: Offsets
    head_step: int
    box_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A region as boxes of `rows` rows of `row_bytes`, `count` a unit. `src`, `dst`: None where rows follow each other:
    there a box is a run.
    """

    row_bytes: int
    rows: int
    count: int
    src: MappedSide | None
    dst: MappedSide | None

    @property
    def nbytes(self) -> int:
        """Of a box."""
        return self.row_bytes * self.rows


def boxes(region: Region, most_bytes: int) -> Boxes | NoBox:
    """A merged region as boxes of at most `most_bytes`, or why not."""
    row, sides = region.row_bytes, (region.src, region.dst)
    strided = [side for side in sides if side.token_bytes != row]
    if region.tokens == 1 or not strided:
        return NoBox.ONE_ROW
    if region.alignment() != 16:
        return NoBox.ALIGNMENT
    if row > MOST_ELEMENTS * ELEMENT_BYTES:
        return NoBox.WIDE
    most = min(MOST_ELEMENTS, most_bytes // row, region.tokens)
    rows = max((each for each in range(1, most + 1) if region.tokens % each == 0), default=1)
    if rows == 1:
        return NoBox.ALONE
    found: list[MappedSide | None] = []
    for side in sides:
        mapped = None if side.token_bytes == row else _mapped(region, side, rows)
        if isinstance(mapped, NoBox):
            return mapped
        found.append(mapped)
    return Boxes(row, rows, region.tokens // rows, *found)


def _mapped(region: Region, side: Side, rows: int) -> MappedSide | NoBox:
    pitch, row = side.token_bytes, region.row_bytes
    if pitch < row:
        return NoBox.OVERLAP
    if pitch >= MOST_WORDS * ELEMENT_BYTES:
        return NoBox.FAR
    first, inside = np.divmod(side.units, pitch)
    head_rows, head_inside = divmod(side.head_bytes, pitch)
    heads = region.heads - 1
    if int(inside.max()) + heads * head_inside + row > pitch:
        return NoBox.SPLIT
    if int(first.min()) < 0 or int(first.max()) + heads * head_rows + region.tokens > MOST_ROWS:
        return NoBox.OUTSIDE
    starts = first * ROW + inside // ELEMENT_BYTES
    return MappedSide(starts, head_rows * ROW + head_inside // ELEMENT_BYTES, rows * ROW)


def run_side(side: Side, found: Boxes) -> Side:
    """A side whose rows follow each other, with boxes for tokens."""
    return replace(side, token_bytes=found.nbytes)


def maps(side: Side, found: Boxes) -> Offsets:
    """The maps of a side's planes, one after the other: encoded once, whatever moves."""
    pitch, planes = side.token_bytes, side.planes
    heights = np.minimum((planes.sizes - planes.offset - 1) // pitch + 1, MOST_ROWS)
    return _maps(planes.addresses.tobytes(), heights.tobytes(), pitch, found.row_bytes, found.rows)


@lru_cache(KEPT_SETS)
def _maps(addresses: bytes, heights: bytes, pitch: int, row_bytes: int, rows: int) -> Offsets:
    each = zip(np.frombuffer(addresses, np.int64).tolist(), np.frombuffer(heights, np.int64).tolist(), strict=True)
    width, box = pitch // ELEMENT_BYTES, (row_bytes // ELEMENT_BYTES, rows)
    encoded = [cuda_driver.encode_map(address, (width, height), (pitch,), box) for address, height in each]
    return np.concatenate([np.zeros(0, np.int64), *encoded])
