"""`fetch` reads the cells that cover a part from data files, and checks each against its digest.

`look_again` re-examines an object whose bytes were wrong, through newly opened files; `suspects` reads all objects of
a segment in file order and compares them with their digests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from kvmover.store.absence import is_data_missing
from kvmover.store.boot import NO_BOOT
from kvmover.store.files import SHORT, FileRun, Files, OpenFile, close_quietly, is_absent, open_shared, reason_of
from kvmover.store.objects import DIGEST, EIO, Failure, Fault, ObjectRead, Verdict
from kvmover.store.part import CellRun, PagePart, PartKey
from kvmover.store.record import BLOCK_BYTES, DIGEST_BYTES, FIXED_BYTES, decode, holds, table, tables
from kvmover.store.segment import Life, Segment
from kvmover.store.stored import StoredObject

#: Reasons against an object without a file, or with a hole in it: another process freed its blocks, or a power cut came
#: before they reached the disk. Neither is evidence of a bad disk.
MISSING, BLANK = "data file is missing", "blank"
GIVEN_BACK = (MISSING, BLANK)


def look_again(folder: Path, each: StoredObject) -> tuple[Verdict, str]:
    """Re-read an object through newly opened files in `folder`. Returns the verdict and its reason.

    Raises OSError if the files cannot be read, which is never evidence against the object.
    """
    segment = Segment(folder, each.segment, NO_BOOT, Life.SEALED)
    try:
        fd = open_shared(segment.head)
    except OSError as error:
        if segment.is_removed(error):
            return Verdict.GONE, "evicted"
        raise
    try:
        raw = os.pread(fd, FIXED_BYTES + each.cells * DIGEST_BYTES, each.record)
    finally:
        close_quietly(fd)
    header = decode(raw, each.record, each.record)
    if not segment.state_anew(each.record)[0]:
        return Verdict.GONE, "evicted"
    if header is None or header.page != each.page:
        return Verdict.BAD, "damaged header"
    return _look_at_payload(segment, each, header.digests)


def _look_at_payload(segment: Segment, each: StoredObject, digests: bytes) -> tuple[Verdict, str]:
    payload, fd = bytearray(each.nbytes), -1
    try:
        fd = open_shared(segment.data)
        got = os.preadv(fd, [payload], each.offset)
    except OSError as error:
        if not is_absent(error):
            raise
        if not segment.state_anew(each.record)[0]:
            return Verdict.GONE, "evicted"
        if is_data_missing(segment):
            return Verdict.BAD, MISSING
        raise  # a listing still has the name
    finally:
        close_quietly(fd)
    if got < each.nbytes:
        return Verdict.BAD, "truncated"
    if holds(memoryview(payload), each.cells, digests, 0):
        return Verdict.WELL, ""
    if not segment.state_anew(each.record)[0]:
        return Verdict.GONE, "evicted"
    return Verdict.BAD, BLANK if _has_blank(payload) else "digest"


def _has_blank(payload: bytearray) -> bool:
    """Returns True if a block of a wrong payload is all zeros, which is a hole in the file."""
    blocks = range(0, len(payload), BLOCK_BYTES)
    return any(payload.count(0, at, at + BLOCK_BYTES) == len(payload[at : at + BLOCK_BYTES]) for at in blocks)


class _Boxed(Protocol):
    """An object of any engine, with its part."""

    @property
    def part(self) -> PartKey: ...


Boxed = TypeVar("Boxed", bound=_Boxed)
SegmentRead: TypeAlias = ObjectRead[StoredObject]
SegmentFailure: TypeAlias = Failure[StoredObject]


class PayloadSource(Protocol):
    """A source of payloads in data files and of their digests."""

    @property
    def files(self) -> Files:
        """The storage backend that moves the bytes."""
        ...

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Open the segments' data files within a `with` block; removed files are left out. Raises OSError."""
        ...

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """Returns the digests in the objects' headers, b"" for an absent object. Raises OSError."""
        ...


def fetch(catalog: PayloadSource, part: PagePart, reads: Sequence[SegmentRead]) -> list[SegmentFailure]:
    """Read and check in small groups, so that checks hit the CPU cache. Returns the failures."""
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
    """A group of reads issued in one call. `tables`: the digests of each read's object.

    `owners`: for each run the read's number, the first cell in its object, and the cell count.
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
        """Check the cells read against the digests, and read token-wise shares through a copy."""
        bad, expected = [""] * len(self.reads), self.tables
        found = _digests(catalog.files.views(self.runs), [count for _, _, count in self.owners])
        for (number, first, count), digests, reason in zip(self.owners, found, reasons, strict=True):
            if reason or digests != expected[number][first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]:
                bad[number] = bad[number] or reason or DIGEST
        for number, read in enumerate(self.reads):
            if read.source.piece.tokens:
                memory = catalog.files.view(read.address, part.nbytes)
                bad[number] = bad[number] or _tokens(files[read.each.segment], read, expected[number], part, memory)
        return [Failure(read, _fault(reason), reason) for read, reason in zip(self.reads, bad, strict=True) if reason]


def _digests(views: Sequence[memoryview], counts: Sequence[int]) -> list[bytes]:
    """Returns the digests of each view's cells, `counts` of them, in one call where all have as many."""
    if len(set(counts)) == 1:
        return tables(views, counts[0])
    return [table(view, count) for view, count in zip(views, counts, strict=True)]


def _fault(reason: str) -> Fault:
    suspect = reason in (DIGEST, MISSING, EIO) or reason.startswith(SHORT)
    return Fault.SUSPECT if suspect else Fault.HERE


def _tokens(file: OpenFile, read: SegmentRead, digests: bytes, part: PagePart, memory: memoryview) -> str:
    """Read single tokens of cells, for a page written under another context parallelism.

    A digest covers a whole cell, so each cell is read aside, checked, and its tokens are copied out. Returns the
    reason for failure, or "".
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
    """Copy the wanted tokens of a run's checked cells to their places in the part's `memory`."""
    held = read.each.part.box.tokens.tokens
    sources, targets = (list(places) for places in zip(*read.source.piece.tokens, strict=True))
    shape = (part.component.kv, part.box.tokens.tokens, part.row_bytes)
    out = np.frombuffer(memory, np.uint8).reshape(part.box.cells, *shape)
    rows = np.frombuffer(payload, np.uint8).reshape(run.count, part.component.kv, held, part.row_bytes)
    out[run.part_cell : run.part_cell + run.count, :, targets] = rows[:, :, sources]


#: Bytes per read; the next read is prefetched meanwhile.
_READ_BYTES = 8 << 20


def suspects(
    catalog: PayloadSource, segment: str, objects: Sequence[StoredObject]
) -> Iterator[tuple[StoredObject, bool]]:
    """Yield each object, and True if it does not match its digests. Call without the lock.

    Raises OSError if the data file exists and cannot be opened, which is no evidence against its objects.
    """
    ordered = sorted(objects, key=attrgetter("offset"))
    tables = dict(zip(ordered, catalog.digests(ordered), strict=True))
    groups = list(_groups(ordered))
    with catalog.lend([segment]) as files:
        if segment not in files:
            yield from ((each, True) for each in ordered)
            return
        fd = files[segment].fd
        buffer = bytearray(max((_span(group) for group in groups), default=0))
        for number, group in enumerate(groups):
            if number + 1 < len(groups):
                following = groups[number + 1]
                os.posix_fadvise(fd, following[0].offset, _span(following), os.POSIX_FADV_WILLNEED)
            view = memoryview(buffer)[: _span(group)]
            try:
                got = os.preadv(fd, [view], group[0].offset)
            except OSError:  # then each object counts as a suspect
                got = 0
            for each in group:
                at = each.offset - group[0].offset
                whole = at + each.nbytes <= got
                yield each, not whole or not holds(view[at : at + each.nbytes], each.cells, tables[each], 0)


def _groups(ordered: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    """Yield groups of neighbours in the file, each read in one call."""
    group: list[StoredObject] = []
    for each in ordered:
        if group and each.offset + each.nbytes - group[0].offset > _READ_BYTES:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _span(group: Sequence[StoredObject]) -> int:
    return group[-1].offset + group[-1].nbytes - group[0].offset
