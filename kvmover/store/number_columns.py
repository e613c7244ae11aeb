"""NumberColumns hold numbers of many rows, one array a column; a PageTable finds the row of a page's hash among
millions.

A row is taken and given back. One number is read through a memoryview, in a third of numpy's time; many at once through
numpy. Both share one memory, GrowingNumbers, whose address range the kernel extends: copying an index of a million
objects would take longer than its lock may be held.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmover.store.namespace import HASH_BYTES

_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class GrowingNumbers:
    """An array of numbers of one type, zero until written. Memory is taken when it is written.

    `numbers` and `view` are the same memory, for numpy and for one number at a time; `grow` replaces both.
    """

    __slots__ = ("_memory", "_type", "numbers", "view")

    numbers: npt.NDArray[Any]
    view: memoryview[int]

    def __init__(self, code: str) -> None:
        """`code` is a type code of `array`."""
        self._type = np.dtype(code)
        self._memory = _memory(mmap.PAGESIZE)
        self._look()

    @classmethod
    def mapped(cls, code: str, fd: int, offset: int, nbytes: int) -> GrowingNumbers:
        """Returns the numbers in a range of a file, shared with all who map it until one is written. Raises OSError.

        `offset` is a multiple of the page size. A page that is written becomes private; the file never changes.
        """
        found = cls(code)
        if nbytes:
            found.numbers, found.view = found.numbers[:0], memoryview(b"")
            found._memory = _mapped(fd, offset, nbytes)
            found._look()
        return found

    def __len__(self) -> int:
        return len(self.numbers)

    def grow(self, count: int) -> None:
        """Extend the array to at least `count` numbers, keeping its contents."""
        nbytes = -(-count * self._type.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes <= len(self._memory):
            return
        self.numbers, self.view = np.zeros(0, self._type), memoryview(b"")
        try:
            self._memory.resize(nbytes)
        except (BufferError, OSError):  # a view of it is still in use; or a part of it is a file's, and stays in place
            longer = _memory(nbytes)
            longer[: len(self._memory)] = self._memory[:]
            self._memory = longer
        self._look()

    def _look(self) -> None:
        self.numbers = np.frombuffer(self._memory, self._type)
        self.view = memoryview(self.numbers.data)


def _memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _mapped(fd: int, offset: int, nbytes: int) -> mmap.mmap:
    """Returns memory that begins with a range of a file and is twice as long, so that it seldom grows."""
    whole = _memory(2 * -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    access, sharing = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc.mmap(start, nbytes, access, sharing, fd, offset) != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return whole


class SavedColumn(NamedTuple):
    """A column of `length` numbers in a snapshot; its memory has room for more."""

    memory: GrowingNumbers
    length: int

    @property
    def numbers(self) -> npt.NDArray[Any]:
        """Returns the numbers, which can be written."""
        return self.memory.numbers[: self.length]


Rows = npt.NDArray[np.int32]

#: The meaning of a slot, stored plus one so that empty slots are zero and take no memory: never used, removed, or about
#: to be taken; else the row.
_NONE, _GONE, _CLAIM = -1, -2, -3

#: Up to this many hashes, searching one by one is cheaper.
_FEW = 12

#: Slots that are moved to a larger table at a time: some for each new hash, so that the move ends before that is full.
_MOVED, _MOVED_EACH = 4096, 16

_WORDS = struct.Struct("<4Q")
_ALL_BITS = (1 << 64) - 1


class NumberColumns:
    """A table of equally long columns, each an attribute: `columns.stamp[row]`. `column` is the same one for numpy."""

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
        """`formats` has the type code of each column, as in `array`."""
        self._columns = {name: GrowingNumbers(code) for name, code in formats.items()}
        self._free = array("i")
        self._end = 0
        for name, column in self._columns.items():
            setattr(self, name, column.view)

    def saved(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns' rows in use, and the freed rows as `free`. Valid until the columns change."""
        columns = {name: column.numbers[: self._end] for name, column in self._columns.items()}
        return {**columns, "free": np.array(self._free, np.int32)}

    def load(self, saved: Mapping[str, SavedColumn]) -> None:
        """Replace all rows by saved ones, in place."""
        for name in self._columns:
            self._columns[name], self._end = saved[name]
            setattr(self, name, self._columns[name].view)
        self._free = array("i", saved["free"].numbers.tobytes())

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Returns all rows of a column, free rows included. Valid until the columns grow."""
        return self._columns[name].numbers

    def take(self, count: int) -> Rows:
        """Returns `count` rows for use, whose numbers are left from their last use."""
        rows = _taken(self._free, self._end, count)
        self.grow(int(rows.max(initial=-1)) + 1)
        return rows

    def give_back(self, rows: Rows) -> None:
        """Free these rows."""
        self._free.frombytes(rows.astype(np.int32).tobytes())

    def grow(self, rows: int) -> None:
        """Extend the columns to at least `rows` rows."""
        self._end = max(self._end, rows)
        for name, column in self._columns.items():
            if len(column) < rows:
                setattr(self, name, memoryview(b""))
                column.grow(rows + rows // 4)
                setattr(self, name, column.view)


def _taken(free: array[int], end: int, count: int) -> Rows:
    """Returns freed rows, followed by new rows from `end` on."""
    again = min(count, len(free))
    given = np.array(free[len(free) - again :], np.int32)
    del free[len(free) - again :]
    return np.concatenate([given, np.arange(end, end + count - again, dtype=np.int32)])


class _Slots:
    """A hash table with open addressing and linear probing: rows or marks, placed by the upper bits of a hash."""

    __slots__ = ("_factors", "mask", "said", "shift", "used", "view")

    def __init__(self, said: Rows, used: int, factors: npt.NDArray[np.uint64]) -> None:
        """`said`: slots, a power of two of them, of which `used` were ever used."""
        self.said, self.used, self._factors = said, used, factors
        self.view = said.data
        self.shift, self.mask = 65 - len(said).bit_length(), len(said) - 1

    def __len__(self) -> int:
        return len(self.said)

    def of(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Returns the slot at which the search for each hash begins."""
        return ((keys * self._factors).sum(1, dtype=np.uint64) >> np.uint64(self.shift)).astype(np.int64)

    def find(
        self, keys: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64], hashes: memoryview[int], found: Rows
    ) -> None:
        """Write into `found` the row of each of `keys` that is in the table; row `r` has the hash `known[r]`, in bytes
        `hashes`.

        The last few searches, which are longer, are finished one by one.
        """
        left = np.flatnonzero(found < 0)
        slots = self.of(keys[left])
        while len(left) > _FEW:
            rows = self.said[slots] - 1
            here = rows >= 0
            there = np.flatnonzero(here)
            here[there] = (known[rows[there]] == keys[left[there]]).all(1)
            found[left[here]] = rows[here]
            more = ~here & (rows != _NONE)
            left, slots = left[more], (slots[more] + 1) & self.mask
        for number, slot in zip(left.tolist(), slots.tolist(), strict=True):
            found[number] = self.find_one(keys[number].tobytes(), slot, hashes)

    def find_one(self, key: bytes, slot: int, hashes: memoryview[int]) -> int:
        """Returns the row of a hash, searched from a slot on, or -1."""
        while (row := self.view[slot] - 1) != _NONE:
            if row >= 0 and bytes(hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES]) == key:
                return row
            slot = (slot + 1) & self.mask
        return _NONE

    def put(self, rows: npt.NDArray[Any], known: npt.NDArray[np.uint64]) -> None:
        """Add rows whose hashes are not in the table."""
        slots = self.of(known[rows])
        while len(rows):
            said = self.said[slots]
            free = said <= 0
            self.said[slots[free]] = rows[free] + 1
            lost = self.said[slots] != rows + 1
            self.used += int((said[~lost] == _NONE + 1).sum())
            rows, slots = rows[lost], (slots[lost] + 1) & self.mask

    def remove(self, rows: npt.NDArray[Any], known: npt.NDArray[np.uint64]) -> None:
        """Remove rows that are in the table."""
        slots = self.of(known[rows])
        while len(rows) > _FEW:
            said = self.said[slots]
            here: npt.NDArray[np.bool_] = said == rows + 1
            self.said[slots[here]] = _GONE + 1
            more = ~here & (said != _NONE + 1)
            rows, slots = rows[more], (slots[more] + 1) & self.mask
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            at: int = slot
            while self.view[at] not in (_NONE + 1, row + 1):
                at = (at + 1) & self.mask
            if self.view[at] == row + 1:
                self.view[at] = _GONE + 1


class PageTable:
    """A table of rows by hash, at most half full. `seed` makes the order of slots its own, so that clients cannot
    choose hashes that collide.

    A table that is too small is moved to a larger one, a few slots with each new hash, and searched beside it.
    """

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)  # numpy's would be imported by every rank
        self._numbers = [chance.getrandbits(64) | 1 for _ in range(4)]
        self._factors: npt.NDArray[np.uint64] = np.array(self._numbers, np.uint64)
        self._hashes = GrowingNumbers("Q")
        self._free = array("i")
        self._end = self._live = 0
        self._slots = _Slots(np.zeros(1 << 10, np.int32), 0, self._factors)
        #: The table before, and how many of its slots are moved.
        self._small: _Slots | None = None
        self._moved = 0
        self._look()

    def __len__(self) -> int:
        return self._live

    def saved(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of the table. Valid until it changes."""
        self._move(len(self._small) if self._small else 0)
        hashes = self._keys[: self._end].reshape(-1)
        free = np.array(self._free, np.int32)
        return {"hashes": hashes, "slots": self._slots.said, "factors": self._factors, "free": free}

    def load(self, saved: Mapping[str, SavedColumn]) -> None:
        """Replace all hashes by saved ones, in place."""
        self._factors = saved["factors"].numbers
        self._numbers = self._factors.tolist()
        self._hashes, self._end = saved["hashes"].memory, saved["hashes"].length // 4
        self._free = array("i", saved["free"].numbers.tobytes())
        said = saved["slots"].numbers
        self._slots, self._small, self._moved = _Slots(said, int(np.count_nonzero(said)), self._factors), None, 0
        self._live = self._end - len(self._free)
        self._look()

    def find(self, page: bytes) -> int:
        """Returns the row of a hash, or -1."""
        (a, b, c, d), (e, f, g, h) = _WORDS.unpack(page), self._numbers
        mixed: int = a * e + b * f + c * g + d * h & _ALL_BITS
        for slots in (self._slots, self._small) if self._small else (self._slots,):
            if (row := slots.find_one(page, mixed >> slots.shift, self._bytes)) >= 0:
                return row
        return _NONE

    def find_many(self, pages: Sequence[bytes]) -> Rows:
        """Returns the row of each hash, or -1."""
        keys = np.frombuffer(b"".join(pages), np.uint64).reshape(-1, 4)
        found = np.full(len(keys), _NONE, np.int32)
        self._slots.find(keys, self._keys, self._bytes, found)
        if self._small:
            self._small.find(keys, self._keys, self._bytes, found)
        return found

    def put_many(self, pages: bytes) -> tuple[Rows, Rows]:
        """Add hashes. Returns the row of each, and the new rows in the order of their hashes."""
        keys = np.frombuffer(pages, np.uint64).reshape(-1, 4)
        rows = self.find_many([pages])
        new = np.flatnonzero(rows < 0)
        if not len(new):
            return rows, rows[:0]
        self._make_room(len(new))
        return rows, self._claim(keys, new, rows)

    def _claim(self, keys: npt.NDArray[np.uint64], new: npt.NDArray[np.int64], rows: Rows) -> Rows:
        """Take slots and rows for the hashes numbered `new`, which are not in the table. Returns the new rows.

        A slot is claimed by the number of a hash, counted down from -3. Equal hashes probe the same slots: the later
        one meets its own hash there and gets the claimant's row.
        """
        table = self._slots
        left, slots = new, table.of(keys[new])
        owner = np.full(len(keys), _NONE, np.int64)
        slot_of = np.zeros(len(keys), np.int64)
        while len(left):
            before = table.said[slots] - 1
            free = (before == _NONE) | (before == _GONE)
            # numpy keeps the last write to equal places, so the first hash is written last.
            table.said[slots[free][::-1]] = _CLAIM + 1 - left[free][::-1]
            there = np.maximum(_CLAIM + 1 - table.said[slots].astype(np.int64), -1)
            mine = there == left
            twin = mine.copy()
            met = np.flatnonzero((there >= 0) & ~mine)
            twin[met] = (keys[there[met]] == keys[left[met]]).all(1)
            owner[left[twin]] = there[twin]
            slot_of[left[mine]] = slots[mine]
            table.used += int((before[mine] == _NONE).sum())
            left, slots = left[~twin], (slots[~twin] + 1) & table.mask
        winners = new[owner[new] == new]
        fresh = self._take(len(winners))
        rows[winners] = fresh
        self._keys[fresh] = keys[winners]
        table.said[slot_of[winners]] = fresh + 1
        rows[new] = rows[owner[new]]
        self._live += len(winners)
        return fresh

    def remove_many(self, rows: npt.NDArray[np.int64]) -> None:
        """Remove the pages of these rows."""
        self._slots.remove(rows, self._keys)
        if self._small:
            self._small.remove(rows, self._keys)
        self._free.frombytes(rows.astype(np.int32).tobytes())
        self._live -= len(rows)

    def key(self, row: int) -> bytes:
        """Returns the hash of a row."""
        return bytes(self._bytes[row * HASH_BYTES : (row + 1) * HASH_BYTES])

    def keys(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Returns the hashes of rows, uint8 [row, byte]."""
        return self._keys[rows].view(np.uint8).reshape(-1, HASH_BYTES)

    def rows(self) -> Rows:
        """Returns all rows in use, ascending."""
        self._move(len(self._small) if self._small else 0)
        return np.sort(self._slots.said[self._slots.said > 0]) - 1

    def _take(self, count: int) -> Rows:
        rows = _taken(self._free, self._end, count)
        self._end = max(self._end, int(rows.max(initial=-1)) + 1)
        if self._end > len(self._keys):
            self._keys, self._bytes = np.zeros((0, 4), np.uint64), memoryview(b"")
            self._hashes.grow(self._end * 5)
            self._look()
        return rows

    def _look(self) -> None:
        self._keys = self._hashes.numbers[: len(self._hashes) // 4 * 4].reshape(-1, 4)
        self._bytes = self._hashes.view.cast("B")

    def _make_room(self, more: int) -> None:
        """Make slots for `more` hashes; slots of removed hashes are dropped."""
        self._move(_MOVED + more * _MOVED_EACH)
        if (self._slots.used + more) * 2 <= len(self._slots):
            return
        self._move(len(self._small) if self._small else 0)
        bits = 10
        while (self._live + more) * 8 > 3 << bits:  # with room for some more
            bits += 1
        self._small, self._slots, self._moved = self._slots, _Slots(np.zeros(1 << bits, np.int32), 0, self._factors), 0
        self._move(_MOVED + more * _MOVED_EACH)

    def _move(self, slots: int) -> None:
        """Move the rows in the next `slots` slots of the old table, which stays in use until all are moved."""
        if self._small is None or not slots:
            return
        some = self._small.said[self._moved : self._moved + slots]
        self._slots.put(some[some > 0] - 1, self._keys)
        self._moved += slots
        if self._moved >= len(self._small):
            self._small = None
