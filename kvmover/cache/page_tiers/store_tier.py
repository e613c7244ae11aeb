"""StoreTier is a PageTier over the page store, with a thread for each verb, so that submitting a job never blocks."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Queue
from threading import Lock, Thread
from typing import Generic, TypeVar

from kvmover.cache.page_tiers.page_tier import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.errors import KvmoverError, StoreError
from kvmover.store import Got, GotResult, Namespace, PageStore, PartView, Put, PutResult

log = logging.getLogger(__name__)

Job = TypeVar("Job")

#: The outcome of a page that was not written because too many were waiting.
DROPPED = "dropped"

#: The most batches of touched names that wait for the store; beyond it the oldest are dropped.
_MOST_TOUCHED = 1024


class StoreWorker(Generic[Job]):
    """A thread that moves pages to or from the store, one job after the other.

    `work` runs a job and must not raise.
    """

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._work = work
        self._jobs = Queue[Job | None]()
        self._thread = Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; returns at once."""
        self._jobs.put(job)

    def settle(self) -> None:
        """Block until every queued job is done."""
        self._jobs.join()

    def close(self) -> None:
        """Finish the queued jobs, and end the thread. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:
                self._work(job)
            self._jobs.task_done()
            if job is None:
                return


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The pages in registered memory, laid out as in the store: page n begins at address `address + n * stride`."""

    view: PartView
    address: int
    stride: int

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Returns, for each page, True if a `get` would find it now."""
        return self.view.exists(names)

    def put(self, names: Sequence[bytes], places: Sequence[int]) -> list[PutResult]:
        """Write the pages that the store lacks. Blocks. Raises StoreError or DescriptorError before any write."""
        return self.view.put(names, [self.address + place * self.stride for place in places])

    def get(self, names: Sequence[bytes], places: Sequence[int]) -> list[GotResult]:
        """Read pages into their places. Blocks. Raises StoreError or DescriptorError before any read."""
        return self.view.get(names, [self.address + place * self.stride for place in places])

    def moved(self, store: PageStore, space: Namespace) -> StoredPages:
        """Returns the same memory for pages in `space`, to which `store` has switched."""
        return replace(self, view=store.view(space, self.view.part, self.view.writes))


def has_become(store: PageStore, space: Namespace | None) -> bool:
    """Switch a store to another namespace (None: only leave its own). Returns False, and logs, if it cannot be opened.

    The store then misses, as a failing one does.
    """
    try:
        store.become(space)
    except StoreError as error:
        log.error("nothing is stored or found from now on: %s", error)
        return False
    return True


class StoreTier(PageTier):
    """A PageTier over one namespace of the store. Outcomes: of `Put` and `Got`, and DROPPED.

    A page is found by its name alone: requests are ignored.
    """

    def __init__(
        self,
        store: PageStore,
        space: Namespace,
        pages: Mapping[PageVerb, StoredPages],
        most_waiting: int,
        closed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a tier that owns `store`; `close` calls `closed` before it closes the store.

        `pages`: the memory in `space`, once for each verb's thread. `most_waiting`: pages that may wait to be written,
        during which the engine cannot use their places; a job beyond that ends at once with its pages DROPPED, unless
        no other job waits.
        """
        self.store, self.space, self._pages = store, space, dict(pages)
        self._most_waiting, self._closed, self._clock = most_waiting, closed, clock
        self._lock, self._waiting = Lock(), 0
        self._ended: list[FinishedJob] = []
        self._touched = deque[Iterable[bytes]](maxlen=_MOST_TOUCHED)
        self._workers = {
            verb: StoreWorker[Callable[[], None]](f"kvmover-tier-{verb}", lambda work: work()) for verb in PageVerb
        }

    def lookup(self, job: PageJob) -> None:
        self._put(PageVerb.LOOKUP, job)

    def read(self, job: PageJob) -> None:
        self._put(PageVerb.READ, job)

    def write(self, job: PageJob) -> None:
        pages = len(job.names)
        with self._lock:
            fits = not self._waiting or self._waiting + pages <= self._most_waiting
            if fits:
                self._waiting += pages
            else:
                self._ended.append(FinishedJob(PageVerb.WRITE, job, (False,) * pages, Counter({DROPPED: pages})))
        if fits:
            self._put(PageVerb.WRITE, job)

    def touch(self, names: Iterable[bytes]) -> None:
        self._touched.append(names)
        if len(self._touched) == 1:  # else the queued call takes these too
            self._workers[PageVerb.LOOKUP].put(self._tell_uses)

    def release(self, request: PageRequest) -> None:
        pass

    def finished(self) -> list[FinishedJob]:
        with self._lock:
            taken, self._ended = self._ended, []
            return taken

    def settle(self) -> None:
        self._workers[PageVerb.WRITE].settle()
        self._workers[PageVerb.READ].settle()

    def become(self, space: Namespace | None) -> None:
        """Finish submitted reads and writes, then switch to another namespace; None: only leave the present one."""
        self.settle()
        if has_become(self.store, space) and space is not None:
            self._pages = {verb: pages.moved(self.store, space) for verb, pages in self._pages.items()}
            self.space = space

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._closed()
        self.store.close()

    def _put(self, verb: PageVerb, job: PageJob) -> None:
        self._workers[verb].put(partial(self._do, verb, job))

    def _do(self, verb: PageVerb, job: PageJob) -> None:
        """Run a job in its verb's thread. If the store raises, all its pages have failed."""
        began, pages, count = self._clock(), self._pages[verb], len(job.names)
        done, outcomes = [False] * count, Counter[str]()
        try:
            if verb is PageVerb.LOOKUP:
                done = pages.exists(job.names)
            else:
                answers = (pages.put if verb is PageVerb.WRITE else pages.get)(job.names, job.places)
                done = [answer.ok for answer in answers]
                outcomes.update(answer.outcome for answer in answers)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%s of %d pages", verb, count)
            if verb is not PageVerb.LOOKUP:
                outcomes[Put.FAILED if verb is PageVerb.WRITE else Got.FAILED] += count
        nbytes = (outcomes[Put.WRITTEN] + outcomes[Got.READ]) * pages.view.part.nbytes
        ended = FinishedJob(verb, job, tuple(done), outcomes, nbytes, self._clock() - began)
        with self._lock:
            self._waiting -= count if verb is PageVerb.WRITE else 0
            self._ended.append(ended)

    def _tell_uses(self) -> None:
        """Report all touched names to the store, in the look-up thread."""
        names = set[bytes]()
        while self._touched:
            names.update(self._touched.popleft())
        try:
            self.store.used(list(names))
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d pages were used, of which the store does not know", len(names))
