"""SegmentRows are the objects of one segment in an index: by the places of their headers, which rise."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from kvmover.store.stored import Places, Rows

#: Records of a head begin at multiples of this.
RECORDS_AT = 8


@dataclass(slots=True, eq=False)
class SegmentRows:
    """Objects of one segment: places of their headers, rising, in `RECORDS_AT`, and their rows, or -1."""

    number: int
    records: array[int] = field(default_factory=lambda: array("I"))
    rows: array[int] = field(default_factory=lambda: array("i"))
    live: int = 0
    held_bytes: int = 0

    def add(self, records: Places, rows: Rows) -> None:
        """Rising among themselves, and nearly always behind what is there."""
        numbers = (records // RECORDS_AT).astype(np.uint32)
        if not self.records or numbers[0] > self.records[-1]:
            self.records.frombytes(numbers.tobytes())
            self.rows.frombytes(rows.tobytes())
            return
        for record, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            at = bisect_left(self.records, record)
            self.records.insert(at, record)
            self.rows.insert(at, row)

    def place(self, record: int) -> int:
        """Where in the columns a header is, or -1."""
        record //= RECORDS_AT
        at = bisect_left(self.records, record)
        return at if at < len(self.records) and self.records[at] == record and self.rows[at] >= 0 else -1

    def at(self, records: Places) -> tuple[Places, Rows]:
        """Where in the columns the headers are, and the rows, of those objects that live."""
        known = np.frombuffer(self.records, np.uint32)
        if not len(known):
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        wanted = records // RECORDS_AT
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        places = places[known[places] == wanted]
        rows = np.frombuffer(self.rows, np.int32)[places]
        return places[rows >= 0], rows[rows >= 0]

    def remove(self, places: Places) -> None:
        """These live no more."""
        np.frombuffer(self.rows, np.int32)[places] = -1

    def take(self) -> Rows:
        """Rows of the objects that live."""
        rows = np.array(self.rows, np.int32)
        return rows[rows >= 0]
