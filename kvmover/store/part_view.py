"""A PartView is one rank's access to a store: it puts, gets and looks up the part of pages that the rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from kvmover.errors import DescriptorError, StoreError
from kvmover.store.cover import ObjectShare, shares
from kvmover.store.namespace import check_page
from kvmover.store.objects import Failure, Fault, ObjectDraft, ObjectRead, Objects, Verdict
from kvmover.store.part import PagePart, PartKey
from kvmover.store.store_results import Got, GotResult, Put, PutResult
from kvmover.store.tenure import Tenure

_WRITTEN, _PRESENT, _ELSEWHERE = (PutResult(put) for put in (Put.WRITTEN, Put.PRESENT, Put.ELSEWHERE))
#: Most read attempts of a page, even if a service keeps reporting it gone and then present.
_ROUNDS = 16
_READ, _ABSENT = GotResult(Got.READ), GotResult(Got.ABSENT)


class PartView:
    """A rank's view: pages move to and from memory packed `head layer kv token dim`, `part.nbytes` at each address.

    Every batch returns a result for each page, also on failures, so that ranks can agree on them. Once the store has
    left the view's namespace, every look-up misses and every put fails.
    """

    def __init__(
        self, tenure: Tenure, part: PagePart, key: PartKey, writes: Callable[[bytes], bool] | None = None
    ) -> None:
        self.part, self.writes = part, writes
        self._size = part.nbytes
        self._tenure, self._key = tenure, key
        self._plans: dict[tuple[PartKey, ...], tuple[ObjectShare, ...] | None] = {}

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        """Returns True for each page whose objects cover this part. Raises StoreError for a malformed hash."""
        for page in pages:
            check_page(page)
        with self._tenure.using() as objects:
            return [self._plan(parts) is not None for parts in objects.parts_of(pages, self._key)]

    def leading(self, pages: Sequence[bytes]) -> int:
        """Returns the number of leading pages that exist."""
        return sum(1 for _ in takewhile(bool, self.exists(pages)))

    def put(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[PutResult]:
        """Write absent pages. Raises StoreError or DescriptorError before any write."""
        with self._tenure.using() as objects:
            return self._put(objects, pages, addresses)

    def get(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[GotResult]:
        """Read pages. If an object is bad and other objects cover its share, these are read instead."""
        with self._tenure.using() as objects:
            return self._get(objects, pages, addresses)

    def _put(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> list[PutResult]:
        self._check(objects, pages, addresses)
        results: dict[int, PutResult] = {}
        todo = self._missing(objects, pages, results)
        if todo:
            drafts = [ObjectDraft(pages[item], addresses[item]) for item in todo]
            reasons = objects.put(self.part, self._key, drafts, pages)
            for item, reason in zip(todo, reasons, strict=True):
                results[item] = PutResult(Put.FAILED, reason) if reason else _WRITTEN
        first = {page: results[item] for item, page in reversed(list(enumerate(pages))) if item in results}
        answers = [results.get(item, _PRESENT if first[page].ok else first[page]) for item, page in enumerate(pages)]
        counters = objects.counters
        counters.puts.update(answer.outcome for answer in answers)
        counters.failed.update(answer.reason for answer in answers if not answer.ok)
        counters.written_bytes += self._size * sum(answer is _WRITTEN for answer in answers)
        return answers

    def _get(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> list[GotResult]:
        self._check(objects, pages, addresses)
        swept = objects.sweep(self.part, self._plan, pages, addresses)
        objects.used([pages[item] for item in swept])
        results = dict.fromkeys(swept, _READ)
        again: set[int] = set()
        pending = [item for item in range(len(pages)) if item not in results]
        for _ in range(_ROUNDS):
            if not pending:
                break
            reads = self._reads(objects, pending, pages, addresses)
            failures = objects.read(self.part, reads) if reads else []
            failed = {failure.read.item: self._judge(objects, failure, again) for failure in failures}
            done = [item for item in dict.fromkeys(read.item for read in reads) if item not in failed]
            objects.used([pages[item] for item in done])
            for item in pending:
                results.setdefault(item, _ABSENT)
            results.update(dict.fromkeys(done, _READ))
            results.update({item: answer for item, (answer, _) in failed.items()})
            # Bad objects are deleted by now; pages whose objects are well are read again.
            pending = sorted(item for item, (_, retry) in failed.items() if retry)
        objects.counters.gots.update(results[item].outcome for item in range(len(pages)))
        objects.counters.read_bytes += self._size * sum(result.ok for result in results.values())
        return [results[item] for item in range(len(pages))]

    def _check(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> None:
        if len(pages) != len(addresses):
            raise StoreError(f"{len(pages)} pages at {len(addresses)} addresses")
        for page in pages:
            check_page(page)
        if addresses:
            memory_at, low, high = objects.memory_at, min(addresses), max(addresses)
            try:
                memory_at(low, high - low + self._size)  # most batches lie in one pool
            except DescriptorError:
                for address in addresses:
                    memory_at(address, self._size)

    def _plan(self, parts: tuple[PartKey, ...]) -> tuple[ObjectShare, ...] | None:
        """Returns the shares of objects of `parts` that cover the part, or None. Cached: most pages are alike."""
        if parts not in self._plans:
            held = {n: key.box for n, key in enumerate(parts) if key.component == self._key.component}
            self._plans[parts] = shares(self._key.box, held)
        return self._plans[parts]

    def _missing(self, objects: Objects[Any], pages: Sequence[bytes], results: dict[int, PutResult]) -> list[int]:
        """Returns positions of the `pages` to write here; the rest have results, or repeat a page to write."""
        todo: dict[bytes, int] = {}
        owed: list[object] = []
        for item, (page, found) in enumerate(zip(pages, objects.find(pages, self._key), strict=True)):
            if found and (plan := self._plan(found.parts)):
                results[item] = _PRESENT
                owed += [found.objects[share.number] for share in plan]
            elif self.writes and not self.writes(page):
                results[item] = _ELSEWHERE
            else:
                todo.setdefault(page, item)
        objects.owe(owed)
        return list(todo.values())

    def _reads(
        self, objects: Objects[Any], pending: Sequence[int], pages: Sequence[bytes], addresses: Sequence[int]
    ) -> list[ObjectRead[Any]]:
        reads: list[ObjectRead[Any]] = []
        asked = objects.find([pages[item] for item in pending], self._key)
        for item, found in zip(pending, asked, strict=True):
            plan = self._plan(found.parts) if found else None
            if found and plan:
                for each in plan:
                    reads.append(ObjectRead(item, addresses[item], found.objects[each.number], each))
        return reads

    def _judge(self, objects: Objects[Any], failure: Failure[Any], again: set[int]) -> tuple[GotResult, bool]:
        """Returns the result of a failed read, and True if the page is to be read again.

        The object was deleted meanwhile; or is bad on a second look, and deleted; or is well, and read again. A refusal
        by the system is no evidence against it.
        """
        if failure.fault is Fault.HERE:
            return GotResult(Got.FAILED, failure.reason), False
        verdict, reason = objects.judge(failure)
        match verdict:
            case Verdict.UNKNOWN:
                return GotResult(Got.FAILED, reason), False
            case Verdict.WELL:
                item = failure.read.item
                retry = item not in again
                again.add(item)
                return GotResult(Got.FAILED, f"{failure.reason}, and well when it was looked at again"), retry
            case Verdict.GONE:
                return GotResult(Got.EVICTED, reason), True
            case Verdict.SPARED:
                return GotResult(Got.FAILED, f"{reason}, and left to others"), True
            case Verdict.BAD:
                return GotResult(Got.POISONED, reason), True
