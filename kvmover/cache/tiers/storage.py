"""Storage: the page store as one rank's pools see it, and the jobs that look up, read and write pages in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvmover.cache.tiers.errors import TierError
from kvmover.cache.tiers.hostmem import host_pool
from kvmover.cache.tiers.policy import Pace
from kvmover.cache.tiers.rules import ALL_PAGES
from kvmover.cache.tiers.storage_worker import Stopwatch
from kvmover.cache.tiers.tiered_pool import Holding, page_tokens, region
from kvmover.kernels import reference
from kvmover.kernels.region import Region
from kvmover.layout import PACKED_ORDER, Fleet, Pool, PoolSpec, Span
from kvmover.layout.fleet import Shard
from kvmover.store import Got, GotResult, Namespace, PageStore, Put, elected
from kvmover.store.view import PartView
from kvmover.transport.memory import memory_of

#: The most pages and bytes of a batch, and its pages however large they are: between two, a more urgent job goes first,
#: and a stop is noticed. 8 MiB take a disk of 2 GB/s 4 ms. Pages of 16 KiB were stored at 0.87 GB/s in batches of 256,
#: at 0.64 in batches of 32.
BATCH_PAGES, _BATCH_BYTES, _LEAST_PAGES = 256, 8 << 20, 4


@dataclass(frozen=True, slots=True)
class Page:
    """A page of one holding: its place in a batch of the tree's, its hash, and its page on the host."""

    place: int
    page_hash: bytes
    host_id: int


@dataclass(slots=True, eq=False)
class Shelf:
    """One holding in the store. `bounce`: packed pages on the way, where the host's order is another."""

    holding: Holding
    view: PartView
    bounce: Pool | None = None
    #: Of the last batch: pages that were not there yet.
    written: int = 0

    def put(self, pages: Sequence[Page]) -> list[bool]:
        ids = self._packed(pages)
        if self.bounce:
            reference.move([self._region(self.holding.host, self.bounce, [page.host_id for page in pages], ids)])
        results = self.view.put([page.page_hash for page in pages], [self._address(page) for page in ids])
        self.written = sum(result.outcome is Put.WRITTEN for result in results)
        return [result.ok for result in results]

    def get(self, pages: Sequence[Page]) -> list[GotResult]:
        ids = self._packed(pages)
        results = self.view.get([page.page_hash for page in pages], [self._address(page) for page in ids])
        if self.bounce:
            good = [place for place, result in enumerate(results) if result.ok]
            host = [pages[place].host_id for place in good]
            reference.move([self._region(self.bounce, self.holding.host, good, host)])
        return results

    def _packed(self, pages: Sequence[Page]) -> list[int]:
        return list(range(len(pages))) if self.bounce else [page.host_id for page in pages]

    def _address(self, page: int) -> int:
        if self.bounce:
            return self.bounce.tensors[0].data_ptr() + page * self.holding.part.nbytes
        return self.holding.address(page)

    def _region(self, src: Pool, dst: Pool, src_ids: Sequence[int], dst_ids: Sequence[int]) -> Region:
        return region(src, dst, src_ids, dst_ids, Span(0, self.holding.part.box.layers.count))


class Storage:
    """The store with a shelf for each holding. The caller keeps the store, and the pools as long as that is open."""

    def __init__(
        self, store: PageStore, namespace: Namespace, holdings: Sequence[Holding], fleet: Fleet, rank: int
    ) -> None:
        """`namespace` has the fleet's pages, of all context-parallel ranks together. Raises TierError if not."""
        if namespace.page_tokens != page_tokens(fleet):
            raise TierError(f"pages of {namespace.page_tokens} tokens in {namespace}, and of {page_tokens(fleet)} here")
        self.store, self.reads = store, Pace()
        self.shelves: list[Shelf] = []
        largest = max((holding.part.nbytes for holding in holdings), default=1)
        self.batch_pages = min(BATCH_PAGES, max(_LEAST_PAGES, _BATCH_BYTES // largest))
        for holding in holdings:
            bounce = None if holding.packed else _bounce(holding, self.batch_pages)
            for tensor in (bounce or holding.host).tensors:
                store.register(memory_of(tensor))
            writes = partial(elected, holding.part.component, fleet, rank)
            self.shelves.append(Shelf(holding, store.view(namespace, holding.part, writes), bounce))

    def whole(self, hashes: Sequence[bytes]) -> list[bool]:
        """Whether storage has all that this rank's part of each page consists of."""
        rows = [shelf.view.exists(hashes) for shelf in self.shelves if shelf.holding.rule == ALL_PAGES]
        return [all(row[number] for row in rows) for number in range(len(hashes))]


def _bounce(holding: Holding, pages: int) -> Pool:
    part, spec = holding.part, holding.host.spec
    shard = Shard(part.box.layers, part.box.heads, part.box.tokens)
    return host_pool(PoolSpec.dense(part.component, shard, pages, spec.page_tokens, PACKED_ORDER))


@dataclass(slots=True, eq=False)
class Look:
    """Which of `hashes` each shelf has whole."""

    storage: Storage
    hashes: Sequence[bytes]
    present: list[list[bool]] = field(default_factory=list[list[bool]])
    nbytes: int = 0

    @property
    def moves(self) -> bool:
        return False

    def step(self) -> bool:
        self.present = [shelf.view.exists(self.hashes) for shelf in self.storage.shelves]
        return True


@dataclass(slots=True, eq=False)
class Read:
    """Pages into the host, in order of place, until one is missing or `stopping` says so.

    `good`: places before it are all read, by this rank, whose share it is. `why`: what ended it early.
    """

    storage: Storage
    wanted: Sequence[tuple[Shelf, Page]]
    places: int
    stopping: Callable[[], bool]
    good: int = 0
    nbytes: int = 0
    pages: int = 0
    why: Got | None = None
    _at: int = 0

    @property
    def moves(self) -> bool:
        return self._at < len(self.wanted) and not self.stopping()

    def step(self) -> bool:
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
        for shelf in self.storage.shelves:
            pages = [page for each, page in batch if each is shelf]
            if not pages:
                continue
            results = shelf.get(pages)
            nbytes += shelf.holding.part.nbytes * sum(result.ok for result in results)
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
class Write:
    """Pages from the host. One that fails fails no other; `failed` counts them by reason."""

    storage: Storage
    given: Sequence[tuple[Shelf, Page]]
    stored: int = 0
    nbytes: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    _at: int = 0

    @property
    def moves(self) -> bool:
        return True

    def step(self) -> bool:
        batch = self.given[self._at : self._at + self.storage.batch_pages]
        self._at += len(batch)
        for shelf in self.storage.shelves:
            pages = [page for each, page in batch if each is shelf]
            if pages:
                good = shelf.put(pages)
                self.stored += shelf.written
                self.nbytes += shelf.written * shelf.holding.part.nbytes
                if not all(good):
                    self.failed["write failed"] += len(good) - sum(good)
        return self._at >= len(self.given)
