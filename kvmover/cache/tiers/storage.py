"""Storage is the page store as one rank's pools see it: its jobs look up, read and write pages, and a thread does them.

Jobs of the more urgent class go first, between two batches of another: a read does not wait for a long write. A class
that has moved what its rate allows waits, and no other one with it.
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
from kvmover.cache.tiers.policy import Bucket, Rate, ThroughputEstimator
from kvmover.cache.tiers.tiered_pool import TieredPool, page_tokens
from kvmover.errors import TierError
from kvmover.kernels import cpu
from kvmover.layout import Fleet
from kvmover.store import Got, GotResult, Namespace, PageStore, PartView, Put, elected
from kvmover.transport import memory_of

#: The most pages and bytes of a batch, and its pages however large they are: between two, a more urgent job goes first,
#: and a stop is noticed. 8 MiB take a disk of 2 GB/s 4 ms. Pages of 16 KiB were stored at 0.87 GB/s in batches of 256,
#: at 0.64 in batches of 32.
BATCH_PAGES, _BATCH_BYTES, _LEAST_PAGES = 256, 8 << 20, 4


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page of one tiered pool: its place in a batch of the tree's, its hash, and its page on the host."""

    place: int
    page_hash: bytes
    host_id: int


@dataclass(slots=True, eq=False)
class StoredPool:
    """One tiered pool in the store. `bounce`: where the host's order is another than that of objects."""

    tiered_pool: TieredPool
    view: PartView
    bounce: PageBounce | None = None
    #: Of the last batch: pages that were not there yet.
    written: int = 0

    def put(self, pages: Sequence[PageRef]) -> list[bool]:
        """Write pages of the host: for each, whether storage has it now. Blocks."""
        hashes, ids = _apart(pages)
        results = self.bounce.put(hashes, ids) if self.bounce else self.view.put(hashes, self._addresses(ids))
        self.written = sum(result.outcome is Put.WRITTEN for result in results)
        return [result.ok for result in results]

    def get(self, pages: Sequence[PageRef]) -> list[GotResult]:
        """Read pages into the host: one result a page. What is not `ok` is garbage there. Blocks."""
        hashes, ids = _apart(pages)
        return self.bounce.get(hashes, ids) if self.bounce else self.view.get(hashes, self._addresses(ids))

    def moved(self, store: PageStore, namespace: Namespace) -> StoredPool:
        """Returns the same pool in another namespace."""
        view = store.view(namespace, self.view.part, self.view.writes)
        return StoredPool(self.tiered_pool, view, self.bounce and replace(self.bounce, view=view))

    def _addresses(self, ids: Sequence[int]) -> list[int]:
        return [self.tiered_pool.address(page) for page in ids]


def _both(one: Callable[[bytes], bool], other: Callable[[bytes], bool], page: bytes) -> bool:
    return one(page) and other(page)


def _apart(pages: Sequence[PageRef]) -> tuple[list[bytes], list[int]]:
    """Hashes of pages, and their places on the host."""
    return [page.page_hash for page in pages], [page.host_id for page in pages]


class Storage:
    """The store with a stored pool for each tiered pool.

    The caller keeps the store, and the pools as long as that is open.
    """

    def __init__(
        self,
        store: PageStore,
        namespace: Namespace,
        tiered_pools: Sequence[TieredPool],
        fleet: Fleet,
        rank: int,
        writes: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`namespace` has the fleet's pages, of all context-parallel ranks together. Raises TierError if not.

        `writes`: of which pages, by hash, this rank may be the writer; another copy of the whole fleet has the others.
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
        """Go on in `namespace`, which the store has become. Jobs that were begun find and write nothing any more."""
        self.stored_pools = [each.moved(self.store, namespace) for each in self.stored_pools]

    def whole(self, hashes: Sequence[bytes]) -> list[bool]:
        """Whether storage has all that this rank's part of each page consists of."""
        rows = [
            stored_pool.view.exists(hashes)
            for stored_pool in self.stored_pools
            if stored_pool.tiered_pool.rule == ALL_PAGES
        ]
        return [all(row[number] for row in rows) for number in range(len(hashes))]


@dataclass(slots=True, eq=False)
class StorageLookup:
    """Which of `hashes` each stored pool has whole."""

    storage: Storage
    hashes: Sequence[bytes]
    present: list[list[bool]] = field(default_factory=list[list[bool]])
    nbytes: int = 0

    @property
    def moves(self) -> bool:
        """A look-up is not held to a rate."""
        return False

    def step(self) -> bool:
        """All hashes at once."""
        self.present = [stored_pool.view.exists(self.hashes) for stored_pool in self.storage.stored_pools]
        return True


@dataclass(slots=True, eq=False)
class StorageRead:
    """Pages into the host, in order of place, until one is missing or `stopping` says so.

    `good`: places before it are all read, by this rank, whose share it is. `why`: what ended it early.
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
        """Not once it was told to stop."""
        return self._at < len(self.wanted) and not self.stopping()

    def step(self) -> bool:
        """One batch, of all pools; the last step reads nothing, and says how far it came."""
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
    """Pages from the host. One that fails fails no other; `failed` counts them by reason."""

    storage: Storage
    given: Sequence[tuple[StoredPool, PageRef]]
    stored: int = 0
    nbytes: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    _at: int = 0

    @property
    def moves(self) -> bool:
        """Every step does."""
        return True

    def step(self) -> bool:
        """One batch, of all pools."""
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


#: How long a job that has used up its rate sleeps at most: it may have been told to stop.
_ASK_S = 0.02


class Urgency(IntEnum):
    """Classes of jobs, the most urgent first."""

    LOOK = 0
    READ = 1
    WRITE = 2


class StorageJob(Protocol):
    """`step` does one batch and says whether that was the last. An exception ends the job, and is its outcome.

    `nbytes`: what all its steps have moved so far. `moves`: whether the next one will move any, if it is allowed to.
    """

    nbytes: int

    @property
    def moves(self) -> bool:
        """Asked in the storage thread, before each step."""
        ...

    def step(self) -> bool:
        """In the storage thread."""
        ...


#: Called by `StorageWorker.poll`, in the caller's thread, with what a job raised, or None.
Ended = Callable[[Exception | None], None]


class StorageWorker:
    """Close it, or the thread outlives its owner (it is a daemon)."""

    def __init__(self, rates: Mapping[Urgency, Rate] = MappingProxyType({})) -> None:
        now_s = time.monotonic()
        self._buckets = {urgency: Bucket.full(rate, now_s) for urgency, rate in rates.items()}
        self._queues: tuple[deque[tuple[StorageJob, Ended]], ...] = tuple(deque() for _ in Urgency)
        self._over: deque[tuple[Ended, Exception | None]] = deque()
        self._work, self._news = threading.Condition(), threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, job: StorageJob, urgency: Urgency, ended: Ended) -> None:
        """Queue a job. `ended` is called in `poll`, once, unless the worker is closed before."""
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmover-storage", daemon=True)
                self._thread.start()
            self._queues[urgency].append((job, ended))
            self._work.notify()

    def poll(self) -> None:
        """Tell what ended since."""
        self._news.clear()
        while self._over:
            ended, error = self._over.popleft()
            ended(error)

    def wait(self, seconds: float) -> None:
        """Sleep until a job has ended, so long at most."""
        self._news.wait(seconds)

    @property
    def queued(self) -> int:
        """Jobs that have not ended, the one under way included."""
        return sum(map(len, self._queues))

    def close(self) -> None:
        """Let the batch under way end, and no other begin. What was queued is never heard of again."""
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
            except Exception as caught:  # whatever it is, the job has ended, and its owner must hear of it
                error, over = caught, True
            if urgency in self._buckets:
                self._buckets[urgency] = self._buckets[urgency].spent(job.nbytes - before, time.monotonic())
            if over:
                with self._work:
                    queue.popleft()
                self._over.append((ended, error))
                self._news.set()

    def _next(self) -> Urgency | None:
        """The most urgent class that has work and may do it now."""
        return next((urgency for urgency in Urgency if self._queues[urgency] and not self._wait_s(urgency)), None)

    def _pause_s(self) -> float | None:
        """Until a class may go on, or is to be asked whether it was told to stop; None: until somebody brings work."""
        waits = [self._wait_s(urgency) for urgency in Urgency if self._queues[urgency]]
        return min(_ASK_S, *waits) if waits else None

    def _wait_s(self, urgency: Urgency) -> float:
        bucket = self._buckets.get(urgency)
        return bucket.wait_s(time.monotonic()) if bucket and self._queues[urgency][0][0].moves else 0.0


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._began_s
