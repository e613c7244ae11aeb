"""StoredObject and Page locate complete objects; Placed locates many, in columns."""

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
    """Returns `nbytes` rounded up to whole blocks of a data file: 8,192 for 5,000."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class StoredObject(msgspec.Struct, frozen=True, gc=False):
    """A complete object with its location, page and part. `record`: byte offset of its header, with its digests.

    `stamp`: last-use time (s) in its header, as last known.
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
        """Returns its bytes in the data file: whole blocks, so that it can be read directly and freed alone."""
        return padded(self.nbytes)

    @property
    def cells(self) -> int:
        """Returns the number of cells in its box: heads x layers."""
        return self.part.box.cells

    @property
    def cell_bytes(self) -> int:
        """Returns the bytes of a cell of shape (kv, token, dim)."""
        return self.nbytes // self.part.box.cells


class Page(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of a page's objects, of every component and rank, which are used and evicted together.

    `stamp`: last-use time (s) known to this process. `parts`: the part of each object, in order.
    """

    objects: list[StoredObject]
    stamp: int
    parts: tuple[PartKey, ...]

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of all objects in whole blocks."""
        return sum(each.held_bytes for each in self.objects)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A table of an index's objects, sorted by segment and record; valid until the index changes.

    `rows` and `pages`: the row of each object and of its page in the index. `segments`: positions in `names`.
    `records`: byte offsets in head files. `offsets`, `held`: byte offsets and bytes (whole blocks) in data files.
    `stamps`: last uses, s.
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
        """Returns the chosen objects."""
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
        """Yield each segment's name and the slice of its objects."""
        ends = np.flatnonzero(np.diff(self.segments, append=-1)) + 1
        first = 0
        for end in ends.tolist():
            yield self.names[int(self.segments[first])], slice(first, end)
            first = end

    def ranges(self) -> list[tuple[str, int, int]]:
        """Returns (segment, offset, bytes) of all blocks, neighbours merged."""
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
    """The totals of an index: objects, payload bytes, and bytes in whole blocks."""

    objects: int = 0
    payload_bytes: int = 0
    held_bytes: int = 0
