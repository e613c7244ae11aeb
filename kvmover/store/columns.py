"""NumberColumns are numbers of many rows, one array each; a PageTable finds the row of a page's hash among millions.

A row is taken and given back. One number is read through a memoryview, in a third of the time that numpy takes; many
at once through numpy. Both look at the same memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmover.store.namespace import HASH_BYTES

Rows = npt.NDArray[np.int32]

#: What a slot without a row says: nobody was here, somebody was, or who is about to be.
_NONE, _GONE, _CLAIM = -1, -2, -3

#: Rows that there is always memory for.
_LEAST = 64

_WORDS = struct.Struct("<4Q")
_ALL_BITS = (1 << 64) - 1


class NumberColumns:
    """Rows of equal columns, each an attribute: `columns.stamp[row]`. `column` is the same one for numpy."""

    first: memoryview[int]
    parts: memoryview[int]
    before: memoryview[int]
    after: memoryview[int]
    record: memoryview[int]
    offset: memoryview[int]
    segment: memoryview[int]
    kind: memoryview[int]
    page: memoryview[int]
    next: memoryview[int]
    stamp: memoryview[int]

    def __init__(self, **formats: str) -> None:
        """`formats`: the type code of each column, as `array` has them."""
        self._arrays = {name: np.zeros(0, code) for name, code in formats.items()}
        self._free = array("i")
        self._end = 0
        self.grow(0)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """All rows of a column, those that nobody holds too. Until the columns grow."""
        return self._arrays[name]

    def take(self, count: int) -> Rows:
        """New rows, whose numbers are what they were."""
        again = min(count, len(self._free))
        rows = np.concatenate(
            [
                np.array(self._free[len(self._free) - again :], np.int32),
                np.arange(self._end, self._end + count - again, dtype=np.int32),
            ]
        )
        del self._free[len(self._free) - again :]
        self.grow(self._end + count - again)
        return rows

    def give_back(self, rows: Rows) -> None:
        """Nobody holds these rows any more."""
        self._free.frombytes(rows.astype(np.int32).tobytes())

    def grow(self, rows: int) -> None:
        """Have at least so many rows."""
        self._end = max(self._end, rows)
        for name, old in self._arrays.items():
            if len(old) < max(rows, _LEAST):
                fresh = np.zeros(max(rows, len(old) + len(old) // 4, _LEAST), old.dtype)
                fresh[: len(old)] = old
                self._arrays[name] = fresh
                setattr(self, name, memoryview(fresh.data))


class PageTable:
    """Rows by hash: open addressing, linear probing, at most half full. `seed` makes the order of slots its own,
    so that nobody can choose hashes that all fall together.
    """

    def __init__(self, seed: int) -> None:
        self._factors = np.random.default_rng(seed).integers(0, 1 << 63, 4, np.uint64) * np.uint64(2) + np.uint64(1)
        self._numbers: list[int] = self._factors.tolist()
        self._keys = np.zeros((_LEAST, 4), np.uint64)
        self._bytes = self._keys.data.cast("B")
        self._free = array("i")
        self._end = self._live = 0
        self._set_slots(10)

    def __len__(self) -> int:
        return self._live

    def find(self, page: bytes) -> int:
        """The row of a hash, or -1."""
        (a, b, c, d), (e, f, g, h) = _WORDS.unpack(page), self._numbers
        slot: int = (a * e + b * f + c * g + d * h & _ALL_BITS) >> self._shift
        while True:
            row = self._view[slot]
            if row == _NONE:
                return _NONE
            if row >= 0 and self.key(row) == page:
                return row
            slot = (slot + 1) & self._mask

    def find_many(self, pages: Sequence[bytes]) -> Rows:
        """The row of each hash, or -1."""
        keys = np.frombuffer(b"".join(pages), np.uint64).reshape(-1, 4)
        found = np.full(len(keys), _NONE, np.int32)
        left, slots = np.arange(len(keys)), self._slots_of(keys)
        while len(left):
            rows = self._slots[slots]
            here = self._equal(rows, keys, left)
            found[left[here]] = rows[here]
            more = ~here & (rows != _NONE)
            left, slots = left[more], (slots[more] + 1) & self._mask
        return found

    def _equal(self, rows: Rows, keys: npt.NDArray[np.uint64], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Of which rows the hash is that of the number beside it."""
        equal = rows >= 0
        there = np.flatnonzero(equal)
        equal[there] = (self._keys[rows[there]] == keys[numbers[there]]).all(1)
        return equal

    def put_many(self, pages: bytes) -> tuple[Rows, Rows]:
        """The row of each hash, and the rows that are new, in the order of their hashes."""
        keys = np.frombuffer(pages, np.uint64).reshape(-1, 4)
        rows = self.find_many([pages])
        new = np.flatnonzero(rows < 0)
        if not len(new):
            return rows, rows[:0]
        self._make_room(len(new))
        return rows, self._claim(keys, new, rows)

    def _claim(self, keys: npt.NDArray[np.uint64], new: npt.NDArray[np.int64], rows: Rows) -> Rows:
        """Slots and rows for the hashes number `new`, which are not in the table; the rows.

        A slot is claimed by the number of a hash, counted down from -3. Twins go by the same slots: who meets its own
        hash there has the row of who claimed it.
        """
        left, slots = new, self._slots_of(keys[new])
        owner = np.full(len(keys), _NONE, np.int64)
        slot_of = np.zeros(len(keys), np.int64)
        while len(left):
            before = self._slots[slots]
            free = (before == _NONE) | (before == _GONE)
            # Of equal places numpy lets the last win: so the first hash is written last.
            self._slots[slots[free][::-1]] = _CLAIM - left[free][::-1]
            there = np.maximum(_CLAIM - self._slots[slots].astype(np.int64), -1)
            mine = there == left
            twin = mine.copy()
            met = np.flatnonzero((there >= 0) & ~mine)
            twin[met] = (keys[there[met]] == keys[left[met]]).all(1)
            owner[left[twin]] = there[twin]
            slot_of[left[mine]] = slots[mine]
            self._used += int((before[mine] == _NONE).sum())
            left, slots = left[~twin], (slots[~twin] + 1) & self._mask
        winners = new[owner[new] == new]
        fresh = self._take(len(winners))
        rows[winners] = fresh
        self._keys[fresh] = keys[winners]
        self._slots[slot_of[winners]] = fresh
        rows[new] = rows[owner[new]]
        self._live += len(winners)
        return fresh

    def remove_many(self, rows: npt.NDArray[np.int64]) -> None:
        """The pages of these rows are gone."""
        left, slots = rows, self._slots_of(self._keys[rows])
        while len(left):
            here = self._slots[slots] == left
            self._slots[slots[here]] = _GONE
            left, slots = left[~here], (slots[~here] + 1) & self._mask
        self._free.frombytes(rows.astype(np.int32).tobytes())
        self._live -= len(rows)

    def key(self, row: int) -> bytes:
        """The hash of a row."""
        return bytes(self._bytes[row * HASH_BYTES : (row + 1) * HASH_BYTES])

    def keys(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """The hashes of rows, a row of bytes each."""
        return self._keys[rows].view(np.uint8).reshape(-1, HASH_BYTES)

    def rows(self) -> Rows:
        """All rows that are in use, rising."""
        return np.sort(self._slots[self._slots >= 0])

    def _slots_of(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return ((keys * self._factors).sum(1, dtype=np.uint64) >> np.uint64(self._shift)).astype(np.int64)

    def _take(self, count: int) -> Rows:
        again = min(count, len(self._free))
        rows = np.concatenate(
            [
                np.array(self._free[len(self._free) - again :], np.int32),
                np.arange(self._end, self._end + count - again, dtype=np.int32),
            ]
        )
        del self._free[len(self._free) - again :]
        self._end += count - again
        if self._end > len(self._keys):
            fresh = np.zeros((max(self._end, len(self._keys) * 5 // 4), 4), np.uint64)
            fresh[: len(self._keys)] = self._keys
            self._keys = fresh
            self._bytes = fresh.data.cast("B")
        return rows

    def _make_room(self, more: int) -> None:
        """Slots for `more` hashes; those of hashes that are gone are cleared with it."""
        if (self._used + more) * 2 <= len(self._slots):
            return
        rows = self.rows()
        bits = 10
        while (self._live + more) * 8 > 3 << bits:  # so that the next times do not come here again
            bits += 1
        self._set_slots(bits)
        slots = self._slots_of(self._keys[rows])
        while len(rows):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = rows[free]
            lost = self._slots[slots] != rows
            rows, slots = rows[lost], (slots[lost] + 1) & self._mask
        self._used = int((self._slots >= 0).sum())

    def _set_slots(self, bits: int) -> None:
        self._slots = np.full(1 << bits, _NONE, np.int32)
        self._view = self._slots.data
        self._shift, self._mask, self._used = 64 - bits, (1 << bits) - 1, 0
