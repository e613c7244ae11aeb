"""A BucketReader loads the cells of a part by ranged reads, merging neighbours, and rechecks objects.

Digests come from the heads, by ranged reads too. Segments not sent yet are read from this process's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvmover.store.bucket.bucket_catalog import BucketCatalog
from kvmover.store.bucket.bucket_writer import BucketWriter
from kvmover.store.bucket.sealed import DATA, DEAD, HEAD, Dead
from kvmover.store.bucket.service import RangeRequest, requests
from kvmover.store.fetch import MISSING, scatter
from kvmover.store.files import SHORT, reason_of
from kvmover.store.objects import DIGEST, Failure, Fault, ObjectRead, Verdict
from kvmover.store.part import PagePart
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, decode, holds
from kvmover.store.stored import StoredObject

#: Payload bytes requested at a time, which are in memory twice: as answers and at their destination.
_BATCH_BYTES = 64 << 20

View = Callable[[int, int], memoryview]


class BucketReader:
    """A reader of one catalog's objects into registered memory: `view(address, nbytes)` returns the destination."""

    def __init__(self, catalog: BucketCatalog, writer: BucketWriter, view: View) -> None:
        self._catalog, self._writer, self._view = catalog, writer, view

    def fetch(self, part: PagePart, reads: Sequence[ObjectRead[StoredObject]]) -> list[Failure[StoredObject]]:
        """Load these reads' cells to their addresses and check each digest. Returns the failed reads."""
        count = max(1, _BATCH_BYTES // part.nbytes)
        some = (reads[first : first + count] for first in range(0, len(reads), count))
        return [failure for few in some for failure in self._fetch_some(part, few)]

    def _fetch_some(self, part: PagePart, reads: Sequence[ObjectRead[StoredObject]]) -> list[Failure[StoredObject]]:
        wanted: list[tuple[str, int, int]] = []
        for read in reads:
            wanted.append(_digests_of(read.each))
            cell, data = read.each.cell_bytes, read.each.segment + DATA
            wanted += [(data, read.each.offset + r.source_cell * cell, r.count * cell) for r in read.source.runs]
        answers = iter(self._bytes(wanted))
        failures: list[Failure[StoredObject]] = []
        for read in reads:
            came = [next(answers) for _ in range(1 + len(read.source.runs))]
            reason = next((each for each in came if isinstance(each, str)), "")
            reason = reason or self._place(part, read, [each for each in came if not isinstance(each, str)])
            if reason:
                suspect = reason in (DIGEST, MISSING) or reason.startswith(SHORT)
                failures.append(Failure(read, Fault.SUSPECT if suspect else Fault.HERE, reason))
        return failures

    def _place(self, part: PagePart, read: ObjectRead[StoredObject], came: Sequence[memoryview]) -> str:
        """Check a read's cells and copy them to their addresses. Returns "" or the reason of failure.

        `came`: the digests, then the cells of each run.
        """
        digests, cell = bytes(came[0]), part.cell_bytes
        for run, payload in zip(read.source.runs, came[1:], strict=True):
            if not holds(payload, run.count, digests, run.source_cell):
                return DIGEST
            if read.source.piece.tokens:
                scatter(read, run, payload, part, self._view(read.address, part.nbytes))
            else:
                self._view(read.address + run.part_cell * cell, len(payload))[:] = payload
        return ""

    def _bytes(self, wanted: Sequence[tuple[str, int, int]]) -> list[memoryview | str]:
        """Return the bytes of each (object, offset, length), or the reason why they are missing."""
        found: list[memoryview | str] = [MISSING] * len(wanted)
        far: list[int] = []
        for item, (name, start, nbytes) in enumerate(wanted):
            if (near := self._held(name, start, nbytes)) is not None:
                found[item] = near
            else:
                far.append(item)
        plan = list(requests([wanted[item] for item in far]))
        answers = self._catalog.bucket.gather([partial(self._read, request) for request in plan])
        for request, answer in zip(plan, answers, strict=True):
            for item in (far[number] for number in request.items):
                found[item] = answer_for(answer, wanted[item][1] - request.start, wanted[item][2])
        return found

    def _read(self, request: RangeRequest) -> memoryview:
        return self._catalog.bucket.read(self._catalog.path(request.name), request.start, request.nbytes)

    def _held(self, name: str, start: int, nbytes: int) -> memoryview | None:
        """Return a range of an unsent segment, or None if the segment is not in memory."""
        segment, _, suffix = name.partition(".")
        with self._catalog.lock:
            filling = self._writer.held.get(segment)
        if filling is None:
            return None
        if "." + suffix == DATA:
            return memoryview(filling.payload)[start : start + nbytes]
        return memoryview(filling.digests_at(start - FIXED_BYTES))[:nbytes]

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes | str]:
        """Return each object's digests from its head, 8 bytes a cell, or the reason why they are missing."""
        return [each if isinstance(each, str) else bytes(each) for each in self._bytes([*map(_digests_of, objects)])]

    def payloads(self, objects: Sequence[StoredObject]) -> list[memoryview | str]:
        """Return each object's payload, unchecked, or the reason why it is missing."""
        return self._bytes([(each.segment + DATA, each.offset, each.nbytes) for each in objects])

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        """Recheck an object by fresh requests. Returns verdict and reason. Raises OSError if the service fails."""
        catalog, bucket = self._catalog, self._catalog.bucket
        if self._held(each.segment + DATA, each.offset, each.nbytes) is not None:
            return Verdict.WELL, ""
        try:
            raw = bytes(bucket.read(catalog.path(each.segment + HEAD), each.record, _record_bytes(each)))
        except FileNotFoundError:
            return Verdict.GONE, "evicted"
        try:
            told = Dead.decode(bucket.get(catalog.path(each.segment + DEAD)))
        except FileNotFoundError:
            told = None
        if told and told.has(each.offset):
            return Verdict.GONE, "evicted"
        header = decode(raw, each.record, each.record)
        if header is None or header.page != each.page:
            return Verdict.BAD, "damaged header"
        try:
            payload = bucket.read(catalog.path(each.segment + DATA), each.offset, each.nbytes)
        except FileNotFoundError:
            return Verdict.GONE, MISSING
        if len(payload) < each.nbytes:
            return Verdict.BAD, "truncated"
        return (Verdict.WELL, "") if holds(payload, each.cells, header.digests, 0) else (Verdict.BAD, DIGEST)


def _record_bytes(each: StoredObject) -> int:
    return FIXED_BYTES + each.cells * DIGEST_BYTES


def _digests_of(each: StoredObject) -> tuple[str, int, int]:
    """Return the name of an object's head, and offset and bytes of its digests there."""
    return each.segment + HEAD, each.record + FIXED_BYTES, each.cells * DIGEST_BYTES


def answer_for(answer: memoryview | OSError, at: int, nbytes: int) -> memoryview | str:
    """Return bytes `at` to `at + nbytes` of a request's answer, or the reason if it failed or is too short."""
    if isinstance(answer, FileNotFoundError):
        return MISSING
    if isinstance(answer, OSError):
        return reason_of(answer)
    share = answer[at : at + nbytes]
    return share if len(share) == nbytes else f"{SHORT} {len(share)} of {nbytes} bytes"
