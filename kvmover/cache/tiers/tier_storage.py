"""Storage is the page store as one rank's pools see it: jobs look up, read and write pages in a thread.

A more urgent job goes first between two batches of another: a read does not wait for a long write. A class that has
used up its rate delays no other class.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Protocol

from kvmover.bounce import PageBounce
from kvmover.cache.prefix import ALL_PAGES
from kvmover.cache.tiers.host_memory import host_pool
from kvmover.cache.tiers.tier_policy import Bucket, Rate, ThroughputEstimator
from kvmover.cache.tiers.tiered_pool import TieredPool, page_tokens
from kvmover.errors import TierError
from kvmover.kernels import cpu
from kvmover.layout import Fleet
from kvmover.store import Got, GotResult, Namespace, PageStore, PartView, Put, elected
from kvmover.transport import memory_of

#: The most pages and bytes of a batch, and its least pages: between two, a more urgent job goes first, and a stop is
#: noticed. 8 MiB take a disk of 2 GB/s 4 ms. Pages of 16 KiB were stored at 0.87 GB/s in batches of 256, at 0.64 in
#: batches of 32.
BATCH_PAGES, _BATCH_BYTES, _LEAST_PAGES = 256, 8 << 20, 4


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page of one tiered pool, at `place` in the tree's batch."""

    place: int
    page_hash: bytes
    host_id: int


@dataclass(slots=True, eq=False)
class StoredPool:
    """A tiered pool in the store, with a `bounce` if its page order is not that of objects."""

    tiered_pool: TieredPool
    view: PartView
    bounce: PageBounce | None = None
    #: Pages that the last batch added to storage.
    written: int = 0

    def put(self, pages: Sequence[PageRef]) -> list[bool]:
        """Write host pages. Returns True for each now in storage. Blocks."""
        hashes, ids = _apart(pages)
        results = self.bounce.put(hashes, ids) if self.bounce else self.view.put(hashes, self._addresses(ids))
        self.written = sum(result.outcome is Put.WRITTEN for result in results)
        return [result.ok for result in results]

    def get(self, pages: Sequence[PageRef]) -> list[GotResult]:
        """Read pages into the host; one not `ok` is garbage there. Blocks."""
        hashes, ids = _apart(pages)
        return self.bounce.get(hashes, ids) if self.bounce else self.view.get(hashes, self._addresses(ids))

    def moved(self, store: PageStore, namespace: Namespace) -> StoredPool:
        """Return the same pool in another namespace."""
        view = store.view(namespace, self.view.part, self.view.writes)
        return StoredPool(self.tiered_pool, view, self.bounce and replace(self.bounce, view=view))

    def _addresses(self, ids: Sequence[int]) -> list[int]:
        return [self.tiered_pool.address(page) for page in ids]


def _both(one: Callable[[bytes], bool], other: Callable[[bytes], bool], page: bytes) -> bool:
    return one(page) and other(page)


def _apart(pages: Sequence[PageRef]) -> tuple[list[bytes], list[int]]:
    return [page.page_hash for page in pages], [page.host_id for page in pages]


class Storage:
    """A page store with a StoredPool for each tiered pool. The caller owns it, and keeps the pools meanwhile."""

    def __init__(
        self,
        store: PageStore,
        namespace: Namespace,
        tiered_pools: Sequence[TieredPool],
        fleet: Fleet,
        rank: int,
        writes: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Register the pools' host memory. Raises TierError unless `namespace` has the fleet's page size, over all CP
        ranks.

        `writes`: True for page hashes that this rank may write.
        """
        if namespace.page_tokens != page_tokens(fleet):
            raise TierError(f"pages of {namespace.page_tokens} tokens in {namespace}, and of {page_tokens(fleet)} here")
        self.store, self.reads = store, ThroughputEstimator()
        self.stored_pools: list[StoredPool] = []
        largest = max((tiered_pool.part.nbytes for tiered_pool in tiered_pools), default=1)
        self.batch_pages = min(BATCH_PAGES, max(_LEAST_PAGES, _BATCH_BYTES // largest))
        for tiered_pool in tiered_pools:
            host = tiered_pool.host
            packed = None if tiered_pool.packed else host_pool(host.spec.packed(self.batch_pages))
            for tensor in (packed or host).tensors:
                store.register(memory_of(tensor))
            own = partial(elected, tiered_pool.part.component, fleet, rank)
            view = store.view(namespace, tiered_pool.part, partial(_both, own, writes) if writes else own)
            bounce = None if packed is None else PageBounce(host, packed, view, cpu.move)
            self.stored_pools.append(StoredPool(tiered_pool, view, bounce))

    def moved(self, namespace: Namespace) -> None:
        """Switch to the store's new `namespace`. Open jobs find and write no page any more."""
        self.stored_pools = [each.moved(self.store, namespace) for each in self.stored_pools]

    def whole(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return True for each hash whose part is in storage, of all pools that need every page."""
        rows = [
            stored_pool.view.exists(hashes)
            for stored_pool in self.stored_pools
            if stored_pool.tiered_pool.rule == ALL_PAGES
        ]
        return [all(row[number] for row in rows) for number in range(len(hashes))]


@dataclass(slots=True, eq=False)
class StorageLookup:
    """A look-up. `present` [pool][hash]: True if storage has the page's part."""

    storage: Storage
    hashes: Sequence[bytes]
    present: list[list[bool]] = field(default_factory=list[list[bool]])
    nbytes: int = 0

    @property
    def moves(self) -> bool:
        """Returns False: a look-up is held to no rate."""
        return False

    def step(self) -> bool:
        """Look up all hashes. Returns True."""
        self.present = [stored_pool.view.exists(self.hashes) for stored_pool in self.storage.stored_pools]
        return True


@dataclass(slots=True, eq=False)
class StorageRead:
    """A read into the host, in order of place, until a page is missing or `stopping()` is True.

    `good`: all places before it are read. `why`: the outcome that ended it early.
    """

    storage: Storage
    wanted: Sequence[tuple[StoredPool, PageRef]]
    places: int
    stopping: Callable[[], bool]
    good: int = 0
    nbytes: int = 0
    pages: int = 0
    why: Got | None = None
    _at: int = 0

    @property
    def moves(self) -> bool:
        """Returns True if pages are left and the read goes on."""
        return self._at < len(self.wanted) and not self.stopping()

    def step(self) -> bool:
        """Read one batch across all pools. Returns True once over, with `good` final."""
        if self._at >= len(self.wanted):
            self.good = self.places
            return True
        if self.stopping():
            self.good = self.wanted[self._at][1].place
            return True
        batch = self.wanted[self._at : self._at + self.storage.batch_pages]
        self._at += len(batch)
        self.good = batch[0][1].place
        watch, nbytes = Stopwatch(), 0
        for stored_pool in dict.fromkeys(each for each, _ in batch):
            pages = [page for each, page in batch if each is stored_pool]
            results = stored_pool.get(pages)
            nbytes += stored_pool.tiered_pool.part.nbytes * sum(result.ok for result in results)
            self.pages += sum(result.ok for result in results)
            bad = [(page.place, result) for page, result in zip(pages, results, strict=True) if not result.ok]
            if bad and (self.why is None or bad[0][0] < self.good):
                self.good, self.why = bad[0][0], bad[0][1].outcome
        self.nbytes += nbytes
        if self.why is not None:
            return True
        if nbytes:
            self.storage.reads.add(nbytes, watch.seconds)
        return False


@dataclass(slots=True, eq=False)
class StorageWrite:
    """A write of host pages. `failed` counts pages by reason."""

    storage: Storage
    given: Sequence[tuple[StoredPool, PageRef]]
    stored: int = 0
    nbytes: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    _at: int = 0

    @property
    def moves(self) -> bool:
        """Returns True: every step writes."""
        return True

    def step(self) -> bool:
        """Write one batch across all pools. Returns True after the last."""
        batch = self.given[self._at : self._at + self.storage.batch_pages]
        self._at += len(batch)
        for stored_pool in dict.fromkeys(each for each, _ in batch):
            pages = [page for each, page in batch if each is stored_pool]
            good = stored_pool.put(pages)
            self.stored += stored_pool.written
            self.nbytes += stored_pool.written * stored_pool.tiered_pool.part.nbytes
            if not all(good):
                self.failed["write failed"] += len(good) - sum(good)
        return self._at >= len(self.given)


#: Longest sleep at a used-up rate, s: the job may have been told to stop.
_ASK_S = 0.02


class Urgency(IntEnum):
    """The classes of jobs, most urgent first."""

    LOOK = 0
    READ = 1
    WRITE = 2


class StorageJob(Protocol):
    """A job of the storage thread, in steps; an exception ends it, as its outcome.

    `nbytes`: bytes moved so far.
    """

    nbytes: int

    @property
    def moves(self) -> bool:
        """Returns True if the next step would move bytes."""
        ...

    def step(self) -> bool:
        """Do one batch. Returns True if it was the last."""
        ...


#: Called by `StorageWorker.poll`, in the caller's thread, with the exception that ended the job, or None.
Ended = Callable[[Exception | None], None]


class StorageWorker:
    """A daemon thread that runs storage jobs, until closed."""

    def __init__(self, rates: Mapping[Urgency, Rate] = MappingProxyType({})) -> None:
        now_s = time.monotonic()
        self._buckets = {urgency: Bucket.full(rate, now_s) for urgency, rate in rates.items()}
        self._queues: tuple[deque[tuple[StorageJob, Ended]], ...] = tuple(deque() for _ in Urgency)
        self._over: deque[tuple[Ended, Exception | None]] = deque()
        self._work, self._news = threading.Condition(), threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, job: StorageJob, urgency: Urgency, ended: Ended) -> None:
        """Queue a job. `poll` calls `ended`, once."""
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmover-storage", daemon=True)
                self._thread.start()
            self._queues[urgency].append((job, ended))
            self._work.notify()

    def poll(self) -> None:
        """Call `ended` of jobs that are over."""
        self._news.clear()
        while self._over:
            ended, error = self._over.popleft()
            ended(error)

    def wait(self, seconds: float) -> None:
        """Sleep until a job has ended, at most `seconds`."""
        self._news.wait(seconds)

    @property
    def queued(self) -> int:
        """Returns the jobs that have not ended."""
        return sum(map(len, self._queues))

    def close(self) -> None:
        """Finish the batch under way and join the thread. Queued jobs are dropped, their `ended` uncalled."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            urgency = None
            with self._work:
                while not self._closing and urgency is None:
                    urgency = self._next()
                    if urgency is None:
                        self._work.wait(self._pause_s())
                if self._closing or urgency is None:
                    return
                queue = self._queues[urgency]
                job, ended = queue[0]
            error, before = None, job.nbytes
            try:
                over = job.step()
            except Exception as caught:  # any error ends the job, and its owner must be told
                error, over = caught, True
            if urgency in self._buckets:
                self._buckets[urgency] = self._buckets[urgency].spent(job.nbytes - before, time.monotonic())
            if over:
                with self._work:
                    queue.popleft()
                self._over.append((ended, error))
                self._news.set()

    def _next(self) -> Urgency | None:
        return next((urgency for urgency in Urgency if self._queues[urgency] and not self._wait_s(urgency)), None)

    def _pause_s(self) -> float | None:
        """Return the seconds until a class may go on or must notice a stop."""
        waits = [self._wait_s(urgency) for urgency in Urgency if self._queues[urgency]]
        return min(_ASK_S, *waits) if waits else None

    def _wait_s(self, urgency: Urgency) -> float:
        bucket = self._buckets.get(urgency)
        return bucket.wait_s(time.monotonic()) if bucket and self._queues[urgency][0][0].moves else 0.0


class Stopwatch:
    """A watch that starts when it is made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Returns the seconds since it was made."""
        return time.monotonic() - self._began_s
