"""Checks refuse a bad call before a backend sees it.

NIXL 1.5.1 accepts a length of zero, a range twice, and a negative stride that leaves registered memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import ItemsView, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.errors import DescriptorError, LeaseOver, ProtocolError
from kvmover.transport.base import ADDRESS, COUNT, DEVICE, NBYTES, STRIDE, Descriptors, Memory, MemoryKind

#: NIXL carries larger notes in order too, but 4 MiB takes 95 ms on loopback TCP where 1 MiB takes 1 ms.
MAX_NOTE_BYTES = 1 << 20

#: Linux maps pages from here on (vm.mmap_min_addr), so a smaller address is an offset without its base.
_LOWEST_ADDRESS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """The ranges of one device's memory by address, after a sentinel below all."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    serials: npt.NDArray[np.int64]
    ordered: list[int]

    def at(self, address: int) -> int:
        """Returns the last range from at or before an address; 0: the sentinel."""
        return bisect_right(self.ordered, address) - 1


class Ranges:
    """The registered ranges of one process, disjoint; a range registered again gets another serial number, as its keys
    differ.
    """

    def __init__(self, entries: Iterable[tuple[Memory, int]] = ()) -> None:
        self._serials: dict[Memory, int] = {}
        self._tables: dict[tuple[MemoryKind, int], _Sorted] = {}
        self.revision = 0
        for memory, serial in entries:
            self.add(memory)
            self._serials[memory] = serial

    def __contains__(self, memory: Memory) -> bool:
        return memory in self._serials

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._serials)

    def items(self) -> ItemsView[Memory, int]:
        """Returns ranges and serial numbers."""
        return self._serials.items()

    def add(self, memory: Memory) -> None:
        """Add a range. Raises DescriptorError if it is empty, below every mapping, or overlaps another."""
        end = memory.address + memory.nbytes
        if memory.nbytes <= 0 or memory.address < _LOWEST_ADDRESS or end >= 1 << 63 or memory.device < 0:
            raise DescriptorError(f"{memory} is not memory that can be registered")
        for other in self._serials:
            if (other.kind, other.device) != (memory.kind, memory.device):
                continue
            if memory.address < other.address + other.nbytes and other.address < end:
                raise DescriptorError(f"{memory} overlaps {other}, which is registered already")
        self.revision += 1
        self._serials[memory] = self.revision
        self._tables.clear()

    def remove(self, memory: Memory) -> None:
        """Remove a range. Raises DescriptorError if it is not registered."""
        if memory not in self._serials:
            raise DescriptorError(f"{memory} is not registered")
        self.revision += 1
        del self._serials[memory]
        self._tables.clear()

    def check(self, descriptors: Descriptors, owner: str) -> None:
        """Raise DescriptorError, which names `owner`, unless every run lies in a registered range."""
        table = descriptors.table
        if len(table) == 1 and self._holds(descriptors.kind, *table[0].tolist()):
            return
        devices = table[:, DEVICE]
        if (devices == devices[0]).all():
            self._check_rows(descriptors.kind, int(devices[0]), table, owner)
            return
        for device in np.unique(devices).tolist():
            self._check_rows(descriptors.kind, device, table[devices == device], owner)

    def beside(self, descriptors: Descriptors) -> tuple[npt.NDArray[np.int64], ...]:
        """Returns the rows of descriptors, and starts and ends of the ranges of the first row's device."""
        rows = np.ascontiguousarray(descriptors.table)
        found = self._table(descriptors.kind, int(rows[0, DEVICE]))
        return rows, found.starts, found.ends

    def serials(self, descriptors: Descriptors) -> frozenset[int]:
        """Returns the serial numbers of checked descriptors' ranges."""
        table = descriptors.table
        if len(table) == 1:
            found = self._table(descriptors.kind, int(table[0, DEVICE]))
            return frozenset([int(found.serials[found.at(int(table[0, ADDRESS]))])])
        serials = set[int]()
        for device in np.unique(table[:, DEVICE]).tolist():
            found = self._table(descriptors.kind, device)
            address = table[table[:, DEVICE] == device, ADDRESS]
            serials.update(found.serials[np.searchsorted(found.starts, address, side="right") - 1].tolist())
        return frozenset(serials)

    def _holds(self, kind: MemoryKind, address: int, nbytes: int, device: int, stride: int, count: int) -> bool:
        """Returns True if a row lies in one range; arrays are slower."""
        found = self._table(kind, device)
        at = found.at(address)
        room = int(found.ends[at]) - address if at > 0 else -1  # entry 0 is the sentinel
        return nbytes <= room and (count == 1 or nbytes <= stride <= (room - nbytes) // (count - 1))

    def _check_rows(self, kind: MemoryKind, device: int, rows: npt.NDArray[np.int64], owner: str) -> None:
        address, nbytes, stride, gaps = rows[:, ADDRESS], rows[:, NBYTES], rows[:, STRIDE], rows[:, COUNT] - 1
        found = self._table(kind, device)
        at = np.searchsorted(found.starts, address, side="right") - 1
        room = np.where(at >= 0, found.ends[at] - address, -1)
        # Compared by division, since a product of two hostile int64 wraps round to something that fits.
        bad = (room < nbytes) | (gaps > (room - nbytes) // np.maximum(stride, 1)) | ((gaps > 0) & (stride < nbytes))
        if not bad.any():
            return
        row = rows[np.argmax(bad)].tolist()
        runs = f"{row[COUNT]} run(s) of {row[NBYTES]} bytes from {row[ADDRESS]:#x}, stride {row[STRIDE]}"
        if row[COUNT] > 1 and row[STRIDE] < row[NBYTES]:
            raise DescriptorError(f"{owner}: {runs}: the runs overlap or go backwards")
        raise DescriptorError(f"{owner}: {runs}: outside the registered {kind} memory of device {device}")

    def _table(self, kind: MemoryKind, device: int) -> _Sorted:
        table = self._tables.get((kind, device))
        if table is None:
            mine = [memory for memory in self._serials if (memory.kind, memory.device) == (kind, device)]
            spans = sorted((memory.address, memory.address + memory.nbytes, self._serials[memory]) for memory in mine)
            bounds = np.array([(-(1 << 62), -(1 << 62), 0), *spans], np.int64)
            starts, ends, serials = (np.ascontiguousarray(column) for column in bounds.T)
            table = self._tables[kind, device] = _Sorted(starts, ends, serials, starts.tolist())
        return table


def touches(descriptors: Descriptors, memory: Memory) -> bool:
    """Returns True if a checked row lies in `memory`."""
    if descriptors.kind != memory.kind:
        return False
    table = descriptors.table
    inside = (table[:, ADDRESS] >= memory.address) & (table[:, ADDRESS] < memory.address + memory.nbytes)
    return bool((inside & (table[:, DEVICE] == memory.device)).any())


def check_runs(local: Descriptors, remote: Descriptors) -> None:
    """Raise DescriptorError unless both sides expand to equally many runs of equal lengths, in order."""
    if len(local.table) == len(remote.table) == 1:  # the case of a packed chunk
        here, there = local.table[0].tolist(), remote.table[0].tolist()
        if (here[NBYTES], here[COUNT]) == (there[NBYTES], there[COUNT]):
            return
    ours, theirs = local.table[:, [NBYTES, COUNT]], remote.table[:, [NBYTES, COUNT]]
    if np.array_equal(ours, theirs):
        return
    if local.count != remote.count:
        raise DescriptorError(f"{local.count} local runs do not pair with {remote.count} remote runs")
    ours, theirs = np.repeat(ours[:, 0], ours[:, 1]), np.repeat(theirs[:, 0], theirs[:, 1])
    if not np.array_equal(ours, theirs):
        at = int(np.argmax(ours != theirs))
        raise DescriptorError(f"run {at} is {ours[at]} bytes here and {theirs[at]} bytes at the peer")


class Operation(msgspec.Struct, frozen=True, eq=False):
    """The arguments of `Transport.write` or `Transport.read`."""

    verb: Literal["WRITE", "READ"]
    peer: str
    local: Descriptors
    remote: Descriptors
    note: bytes
    deadline_s: float
    until: float = math.inf

    def check(self, ours: Ranges, theirs: Ranges) -> None:
        """Raise ProtocolError for a note that is too long.

        Raises DescriptorError for a deadline not in the future, memory outside either side's ranges, or runs that do
        not pair.
        """
        check_note(self.note)
        if not 0 < self.deadline_s < math.inf:
            raise DescriptorError(f"an operation needs a finite deadline in seconds from now, got {self.deadline_s}")
        if NATIVE is not None and NATIVE.runs_fit(*ours.beside(self.local), *theirs.beside(self.remote)):
            return
        ours.check(self.local, "local")
        theirs.check(self.remote, self.peer)
        check_runs(self.local, self.remote)

    def check_until(self, now: float) -> None:
        """Raise LeaseOver from `until` on."""
        if now >= self.until:
            raise LeaseOver(f"the permission to write to {self.peer} is over")


def check_note(note: bytes) -> None:
    """Raise ProtocolError for a note above MAX_NOTE_BYTES."""
    if len(note) > MAX_NOTE_BYTES:
        raise ProtocolError(f"note of {len(note)} bytes is longer than {MAX_NOTE_BYTES}")
