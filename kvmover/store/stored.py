"""StoredObject and Page say where complete objects are; Placed says it of many, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.store.part import PartKey
from kvmover.store.record import BLOCK_BYTES

#: Rows of an index, of any integer type.
Rows = npt.NDArray[Any]
Places = npt.NDArray[np.int64]


def padded(nbytes: int) -> int:
    """`nbytes` in whole blocks of a data file: 5,000 take 8,192."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class StoredObject(msgspec.Struct, frozen=True, gc=False):
    """One complete object: where it is, and what it is of. `record` is the place of its header, which has its digests.

    `stamp`: second of the last use that its header is known to say.
    """

    segment: str
    record: int
    offset: int
    nbytes: int
    page: bytes
    part: PartKey
    stamp: int

    @property
    def held_bytes(self) -> int:
        """What it takes of its data file: whole blocks, so that it can be read directly and freed alone."""
        return padded(self.nbytes)

    @property
    def cells(self) -> int:
        """Cells of its box: heads x layers."""
        return self.part.box.cells

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell, `kv token dim`, as long as every other."""
        return self.nbytes // self.part.box.cells


class Page(msgspec.Struct, frozen=True, gc=False):
    """All objects of a page, of every component and rank, as they are now: they are used and evicted together.

    `stamp`: second of the last use that this process knows of. `parts`: of the objects, one each, in order.
    """

    objects: list[StoredObject]
    stamp: int
    parts: tuple[PartKey, ...]

    @property
    def held_bytes(self) -> int:
        """Blocks of all objects."""
        return sum(each.held_bytes for each in self.objects)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Objects of an index, sorted by segment and place, a column for each field. As long as the index is not changed.

    `rows` and `pages` are the index's own numbers of objects and of their pages; `segments` are places in `names`.
    `records` are bytes of the head file, `offsets` and `held` (whole blocks) of the data file, `stamps` seconds.
    """

    rows: Rows
    pages: Rows
    segments: Rows
    records: Places
    offsets: Places
    held: Places
    stamps: Places
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, chosen: npt.NDArray[Any] | slice) -> Placed:
        """The objects that are chosen."""
        return Placed(
            self.rows[chosen],
            self.pages[chosen],
            self.segments[chosen],
            self.records[chosen],
            self.offsets[chosen],
            self.held[chosen],
            self.stamps[chosen],
            self.names,
        )

    def by_segment(self) -> Iterator[tuple[str, slice]]:
        """The name of each segment, and where its objects are."""
        ends = np.flatnonzero(np.diff(self.segments, append=-1)) + 1
        first = 0
        for end in ends.tolist():
            yield self.names[int(self.segments[first])], slice(first, end)
            first = end

    def ranges(self) -> list[tuple[str, int, int]]:
        """Segment, offset and bytes of all blocks, neighbours together."""
        if not len(self):
            return []
        ends = self.offsets + self.held
        new = np.flatnonzero((np.diff(self.segments) != 0) | (self.offsets[1:] != ends[:-1])) + 1
        firsts, lasts = [0, *new.tolist()], [*(new - 1).tolist(), len(self) - 1]
        return [
            (self.names[int(self.segments[first])], int(self.offsets[first]), int(ends[last] - self.offsets[first]))
            for first, last in zip(firsts, lasts, strict=True)
        ]


@dataclass(slots=True, eq=False)
class Holdings:
    """What an index holds: objects, their payload, and the blocks that it takes."""

    objects: int = 0
    payload_bytes: int = 0
    held_bytes: int = 0
