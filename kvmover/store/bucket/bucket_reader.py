"""A BucketReader brings the cells that a part needs by ranged reads, neighbours in one, and looks at objects again.

Digests come from the heads by range, beside the cells. What the process has not sent yet is read from its memory.
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

#: What is on its way, and in memory twice, at once.
_BATCH_BYTES = 64 << 20

View = Callable[[int, int], memoryview]


class BucketReader:
    """Reads of one catalog, into memory that `view` gives: address and bytes."""

    def __init__(self, catalog: BucketCatalog, writer: BucketWriter, view: View) -> None:
        self._catalog, self._writer, self._view = catalog, writer, view

    def fetch(self, part: PagePart, reads: Sequence[ObjectRead[StoredObject]]) -> list[Failure[StoredObject]]:
        """Read and check; what failed. Raises nothing."""
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
        """Check the cells of a read, and copy them to their places: why not, or ""."""
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
        """What is at each (object, offset, bytes), or why it did not come."""
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
        """A range of what is in memory still."""
        segment, _, suffix = name.partition(".")
        with self._catalog.lock:
            filling = self._writer.held.get(segment)
        if filling is None:
            return None
        if "." + suffix == DATA:
            return memoryview(filling.payload)[start : start + nbytes]
        return memoryview(filling.digests_at(start - FIXED_BYTES))[:nbytes]

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes | str]:
        """The digests that the heads have of objects, or why they did not come."""
        return [each if isinstance(each, str) else bytes(each) for each in self._bytes([*map(_digests_of, objects)])]

    def payloads(self, objects: Sequence[StoredObject]) -> list[memoryview | str]:
        """The payloads of objects, unchecked, or why they did not come."""
        return self._bytes([(each.segment + DATA, each.offset, each.nbytes) for each in objects])

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        """A second opinion on an object, by requests of its own. Raises OSError where the service does not say."""
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
            return Verdict.BAD, MISSING
        if len(payload) < each.nbytes:
            return Verdict.BAD, "truncated"
        return (Verdict.WELL, "") if holds(payload, each.cells, header.digests, 0) else (Verdict.BAD, DIGEST)


def _record_bytes(each: StoredObject) -> int:
    return FIXED_BYTES + each.cells * DIGEST_BYTES


def _digests_of(each: StoredObject) -> tuple[str, int, int]:
    """Where the digests of an object are in its head."""
    return each.segment + HEAD, each.record + FIXED_BYTES, each.cells * DIGEST_BYTES


def answer_for(answer: memoryview | OSError, at: int, nbytes: int) -> memoryview | str:
    """The share that one range has of a request's answer, or the reason why it has none."""
    if isinstance(answer, FileNotFoundError):
        return MISSING
    if isinstance(answer, OSError):
        return reason_of(answer)
    share = answer[at : at + nbytes]
    return share if len(share) == nbytes else f"{SHORT} {len(share)} of {nbytes} bytes"
