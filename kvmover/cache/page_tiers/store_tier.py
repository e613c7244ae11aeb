"""StoreTier: the page store as a PageTier, with a thread for each verb, so that its engine waits for no disk."""

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

#: Batches of touched names that wait for the store: the oldest are forgotten beyond so many.
_MOST_TOUCHED = 1024


class StoreWorker(Generic[Job]):
    """A thread beside the engine's own that moves pages to or from the store, one job after the other.

    `work` does a job and raises nothing.
    """

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._work = work
        self._jobs = Queue[Job | None]()
        self._thread = Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job for the thread; returns at once."""
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until every job that was put has been done."""
        self._jobs.join()

    def close(self) -> None:
        """Do the jobs that are left and end the thread."""
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
    """Pages in registered memory that lie there as in the store: page n begins at `address + n * stride`."""

    view: PartView
    address: int
    stride: int

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Returns for each page whether a `get` would find it now."""
        return self.view.exists(names)

    def put(self, names: Sequence[bytes], places: Sequence[int]) -> list[PutResult]:
        """Write pages that the store lacks. Blocks. Raises StoreError or DescriptorError before anything is written."""
        return self.view.put(names, [self.address + place * self.stride for place in places])

    def get(self, names: Sequence[bytes], places: Sequence[int]) -> list[GotResult]:
        """Read pages into their places. Blocks. Raises StoreError or DescriptorError before anything is read."""
        return self.view.get(names, [self.address + place * self.stride for place in places])

    def moved(self, store: PageStore, space: Namespace) -> StoredPages:
        """Returns the same memory for pages in `space`, which `store` has become."""
        return replace(self, view=store.view(space, self.view.part, self.view.writes))


def has_become(store: PageStore, space: Namespace | None) -> bool:
    """Returns whether a store has become that of another namespace; None: of none.

    A namespace that cannot be opened is logged, and costs its hits, as a store that fails.
    """
    try:
        store.become(space)
    except StoreError as error:
        log.error("nothing is stored or found from now on: %s", error)
        return False
    return True


class StoreTier(PageTier):
    """Pages of one namespace of the store. Outcomes are those of `Put` and `Got`, and DROPPED.

    A page is found by its name alone: requests have no meaning here.
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
        """`pages` of `space`, for each verb its own, since each verb has a thread. The store belongs to the tier, which
        calls `closed` before it closes it.

        `most_waiting`: pages that may wait to be written, since the engine cannot use their places meanwhile. A job
        beyond that ends at once with its pages DROPPED, unless no other job waits.
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
        if len(self._touched) == 1:  # else the thread has been told, and takes these too
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
        """End what was submitted, and go on with pages of another namespace; None: with none."""
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
        """Do a job in the thread of its verb. Where the store raised, all of its pages have failed."""
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
        """Tell the store of all pages that were touched, in the thread of look-ups."""
        names = set[bytes]()
        while self._touched:
            names.update(self._touched.popleft())
        try:
            self.store.used(list(names))
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d pages were used, of which the store does not know", len(names))
