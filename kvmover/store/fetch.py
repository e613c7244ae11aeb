"""`fetch` reads what covers a part: which bytes of which objects, and every cell checked before it counts as read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from kvmover.store.cover import CellRun
from kvmover.store.files import SHORT, FileRun, Files, OpenFile, reason_of
from kvmover.store.objects import DIGEST, EIO, Failure, Fault, ObjectRead
from kvmover.store.part import PagePart, PartKey
from kvmover.store.record import holds
from kvmover.store.second_look import MISSING
from kvmover.store.stored import StoredObject


class _Boxed(Protocol):
    """An object of any engine, which says of what part it is."""

    @property
    def part(self) -> PartKey: ...


Boxed = TypeVar("Boxed", bound=_Boxed)
SegmentRead: TypeAlias = ObjectRead[StoredObject]
SegmentFailure: TypeAlias = Failure[StoredObject]


class PayloadSource(Protocol):
    """Where payloads lie in files, and digests beside them."""

    @property
    def files(self) -> Files:
        """What moves the bytes."""
        ...

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Open data files of segments, for the length of a block; removed ones are left out. Raises OSError."""
        ...

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """The digests that the headers of objects have, b"" of one that is not there. Raises OSError."""
        ...


def fetch(catalog: PayloadSource, part: PagePart, reads: Sequence[SegmentRead]) -> list[SegmentFailure]:
    """Read and check, a little at a time, so that the check finds it in the cache; what failed."""
    failures: list[SegmentFailure] = []
    size = max(1, catalog.files.group_bytes // part.nbytes)
    try:
        with catalog.lend({read.each.segment for read in reads}) as files:
            there = [read for read in reads if read.each.segment in files]
            if len(there) < len(reads):
                failures += [Failure(r, Fault.SUSPECT, MISSING) for r in reads if r.each.segment not in files]
            tables = catalog.digests([read.each for read in there])
            groups = [
                _Group.of(there[first : first + size], tables[first : first + size], part, files)
                for first in range(0, len(there), size)
            ]
            found: list[list[SegmentFailure]] = [[] for _ in groups]

            def look(number: int, reasons: list[str]) -> None:
                found[number] = groups[number].check(catalog, part, files, reasons)

            catalog.files.read_each([group.runs for group in groups], look)
            failures += chain.from_iterable(found)
    except OSError as error:
        return [Failure(read, Fault.HERE, reason_of(error)) for read in reads]
    return failures


@dataclass(frozen=True, slots=True)
class _Group:
    """Reads whose cells come in one call. `owners`: read, first cell in its object and number of cells, of each run.

    `tables`: the digests of each read's object.
    """

    reads: Sequence[SegmentRead]
    tables: Sequence[bytes]
    runs: list[FileRun]
    owners: list[tuple[int, int, int]]

    @classmethod
    def of(
        cls, reads: Sequence[SegmentRead], tables: Sequence[bytes], part: PagePart, files: dict[str, OpenFile]
    ) -> _Group:
        cell = part.cell_bytes
        group = cls(reads, tables, [], [])
        for number, read in enumerate(reads):
            if read.source.piece.tokens:
                continue
            file, offset, address = files[read.each.segment], read.each.offset, read.address
            for run in read.source.runs:
                first, count = run.source_cell, run.count
                group.runs.append(FileRun(file, offset + first * cell, address + run.part_cell * cell, count * cell))
                group.owners.append((number, first, count))
        return group

    def check(
        self, catalog: PayloadSource, part: PagePart, files: dict[str, OpenFile], reasons: Sequence[str]
    ) -> list[SegmentFailure]:
        """Compare what came with the digests, and fetch what must go by way of a copy."""
        bad, tables = [""] * len(self.reads), self.tables
        views = catalog.files.views(self.runs)
        for (number, first, count), view, reason in zip(self.owners, views, reasons, strict=True):
            if reason or not holds(view, count, tables[number], first):
                bad[number] = bad[number] or reason or DIGEST
        for number, read in enumerate(self.reads):
            if read.source.piece.tokens:
                memory = catalog.files.view(read.address, part.nbytes)
                bad[number] = bad[number] or _tokens(files[read.each.segment], read, tables[number], part, memory)
        return [Failure(read, _fault(reason), reason) for read, reason in zip(self.reads, bad, strict=True) if reason]


def _fault(reason: str) -> Fault:
    suspect = reason in (DIGEST, MISSING, EIO) or reason.startswith(SHORT)
    return Fault.SUSPECT if suspect else Fault.HERE


def _tokens(file: OpenFile, read: SegmentRead, digests: bytes, part: PagePart, memory: memoryview) -> str:
    """Tokens out of cells that hold others too: the page was written under another context parallelism.

    A cell cannot be checked but whole, so it is read aside, checked, and the tokens are copied out.
    """
    for run in read.source.runs:
        payload = bytearray(run.count * read.each.cell_bytes)
        try:
            got = os.preadv(file.fd, [payload], read.each.offset + run.source_cell * read.each.cell_bytes)
        except OSError as error:
            return reason_of(error)
        if got < len(payload):
            return f"{SHORT} {got} of {len(payload)} bytes"
        if not holds(memoryview(payload), run.count, digests, run.source_cell):
            return DIGEST
        scatter(read, run, memoryview(payload), part, memory)
    return ""


def scatter(read: ObjectRead[Boxed], run: CellRun, payload: memoryview, part: PagePart, memory: memoryview) -> None:
    """Copy the tokens that are wanted of a run's cells, which were checked, to their places in the part's `memory`."""
    held = read.each.part.box.tokens.tokens
    sources, targets = (list(places) for places in zip(*read.source.piece.tokens, strict=True))
    shape = (part.component.kv, part.box.tokens.tokens, part.row_bytes)
    out = np.frombuffer(memory, np.uint8).reshape(part.box.cells, *shape)
    rows = np.frombuffer(payload, np.uint8).reshape(run.count, part.component.kv, held, part.row_bytes)
    out[run.part_cell : run.part_cell + run.count, :, targets] = rows[:, :, sources]
