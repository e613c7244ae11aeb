"""Backup copies pages from device to host and on to storage, while nodes are split or evicted.

A tree that writes through says which backups are due; a node is stored once its whole path is on the host. A tree that
writes back copies when it evicts, leaves first, and says page ids alone: the node of kept pages is recorded, to find
them again on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from kvmover.cache.peers import PeerTier
from kvmover.cache.prefix import (
    FULL,
    BlockStored,
    CopyOut,
    InvariantBroken,
    KVEvent,
    PageArray,
    PageIds,
    PrefixError,
    StaleHandle,
    Tier,
    TierCopy,
    WriteBack,
    block_removed,
)
from kvmover.cache.tiers.agreement import VoteRow, agreed_count, counted
from kvmover.cache.tiers.tier_metrics import TierCount, TierStage
from kvmover.cache.tiers.tier_parts import TierParts
from kvmover.cache.tiers.tier_policy import Store
from kvmover.cache.tiers.tier_storage import PageRef, Stopwatch, StorageWrite, Urgency


@dataclass(frozen=True, slots=True)
class Due:
    """The pages [first, stop) of the path to `node`, to be stored; None: to the end."""

    node: int
    first: int = 0
    stop: int | None = None


@dataclass(slots=True)
class DuePaths:
    """The paths to store once they are on the host.

    With `on_eviction`, for a tree that writes back, the node of each kept device page is recorded, and its path is due
    once an eviction has copied the page to the host.
    """

    on_eviction: bool = False
    _due: deque[Due] = field(default_factory=deque[Due])
    #: By device page of attention KV, the node whose path it was kept in.
    _kept: dict[int, int] = field(default_factory=dict[int, int])

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due: Due) -> None:
        """Queue a path."""
        self._due.append(due)

    def take(self) -> list[Due]:
        """Remove and return all due paths."""
        taken, self._due = list(self._due), deque()
        return taken

    def kept(self, node: int, page_ids: PageIds) -> None:
        """Record the node of newly inserted device pages, if they are to be stored on eviction."""
        if self.on_eviction:
            self._kept.update(dict.fromkeys(np.asarray(page_ids).tolist(), node))

    def copied_out(self, action: CopyOut) -> None:
        """Queue recorded pages for storage, now that an eviction has copied them to the host."""
        if not self._kept:
            return
        reach: dict[int, tuple[int, int]] = {}
        for leg in action.legs:
            if leg.component == FULL:
                for page_id, position in zip(_ints(leg.src_page_ids), _ints(leg.positions), strict=True):
                    node = self._kept.pop(page_id, None)
                    if node is not None:
                        first, stop = reach.get(node, (position, position))
                        reach[node] = min(first, position), max(stop, position + 1)
        self._due.extend(Due(node, first, stop) for node, (first, stop) in reach.items())

    def forget(self) -> None:
        """Drop all records and due paths, after a reset of the tree."""
        self._due.clear()
        self._kept.clear()


@dataclass(slots=True)
class Backups:
    """The backups of one rank. `paths` are due to be stored; `events` reports stored pages to routers."""

    parts: TierParts
    paths: DuePaths
    events: StorageEvents | None = None
    #: Pages being written to storage, by the tree's operation.
    _writes: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def writing_pages(self) -> int:
        """Returns the pages queued for storage or being written."""
        return sum(self._writes.values())

    @property
    def writes_back(self) -> bool:
        """Returns True if the tree copies on eviction alone."""
        return isinstance(self.parts.allocator.tree.config.tiers, WriteBack)

    def back_up(self, node: int) -> None:
        """Begin to copy the path's pages that are on the device alone: one operation on every rank, room or not."""
        tree = self.parts.allocator.tree
        needs = tree.backup_needs(node)
        if not needs:
            return
        ids = self.parts.allocator.take_all(needs, Tier.HOST)
        if ids is None:
            self.parts.meter.dropped["backup", "no room on the host"] += sum(needs.values())
            self.parts.collectives.begin(lambda agreed: None, 3).done(*counted(0, 0))
            return
        transfer = tree.begin_backup(node, ids)
        total = max((int(leg.positions[-1]) + 1 for leg in transfer.legs), default=0) - transfer.first_page
        collective = self.parts.collectives.begin(
            lambda agreed: self._backed(node, transfer, agreed), 3, [i for row in ids.values() for i in row]
        )
        batches, watch = self.parts.allocator.batches(transfer.legs, Tier.HOST), Stopwatch()

        def done() -> None:
            self.parts.meter.stages[TierStage.BACKUP].add(watch.seconds)
            self.parts.meter.counts[TierCount.BACKED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.parts.meter.counts[TierCount.BACKED_BYTES] += sum(batch.nbytes for batch in batches)
            collective.done(*counted(total, total))

        self.parts.allocator.copies.begin(batches, Tier.HOST, done)

    def publish(self, node: int) -> bool:
        """Store the whole path. Returns False without storage, or if the tree writes back."""
        if self.parts.storage is None or self.writes_back:
            return False
        self.back_up(node)
        self.paths.add(Due(node))
        return True

    def reused(self, node: int, first: int) -> None:
        """Queue a path for storage if the policy is REUSED: its pages from `first` are being loaded."""
        if self.parts.policy.store is Store.REUSED and self.parts.storage is not None:
            self.paths.add(Due(node, first if self.writes_back else 0))

    def poll(self) -> None:
        """Begin to store due paths that are whole on the host."""
        for due in self.paths.take():
            try:
                ready = self.writes_back or self.parts.allocator.tree.is_backed(due.node)
                if ready:
                    self._store(due)
                elif self.parts.collectives.open:
                    self.paths.add(due)
                else:
                    self.parts.meter.dropped["store", "never came to the host"] += 1
            except StaleHandle:
                self.parts.meter.dropped["store", "evicted before it was stored"] += 1

    def check(self) -> None:
        """Raise InvariantBroken if too many pages, or more writes than operations, are under way."""
        if self.writing_pages > self.parts.policy.writing_pages or len(self._writes) > len(self.parts.collectives.open):
            raise InvariantBroken(f"{self.writing_pages} pages are written by {len(self._writes)} operations")

    def _backed(self, node: int, transfer: TierCopy, agreed: VoteRow) -> None:
        done = agreed_count(agreed, self.parts.allocator.partial)
        if done and self.parts.peers is not None:
            self._lend(self.parts.peers, node, transfer, done)
        self.parts.allocator.apply(self.parts.allocator.tree.end(transfer.op, done))
        if done and self.parts.policy.store is Store.BACKED and self.parts.storage is not None:
            self.paths.add(Due(node, transfer.first_page))

    def _lend(self, peers: PeerTier, node: int, transfer: TierCopy, done: int) -> None:
        """Lend attention KV before pages that the tree drops are freed."""
        hashes = self.parts.allocator.tree.page_hashes(node)
        for leg in transfer.legs:
            if leg.component == FULL:
                pairs = zip(_ints(leg.positions), _ints(leg.dst_page_ids), strict=True)
                came = [(hashes[at], page_id) for at, page_id in pairs if at < transfer.first_page + done]
                peers.came([page_hash for page_hash, _ in came], [page_id for _, page_id in came])

    def _store(self, due: Due) -> None:
        """Begin to store a path. Raises StaleHandle for a node that is gone."""
        tree, storage = self.parts.allocator.tree, self.parts.storage
        assert storage is not None
        try:
            transfer = tree.begin_store(due.node, due.first)
        except StaleHandle:
            raise
        except PrefixError:  # a tree that writes back has holes on the host
            self.parts.meter.dropped["store", "left the host before it was stored"] += 1
            return
        first_page = transfer.first_page
        hashes = transfer.hashes[: None if due.stop is None else max(0, due.stop - first_page)]
        pages = [
            (stored_pool, PageRef(position - first_page, hashes[position - first_page], host_id))
            for leg in transfer.legs
            for stored_pool in storage.stored_pools
            if stored_pool.tiered_pool.name == leg.component
            for position, host_id in zip(_ints(leg.positions), _ints(leg.src_page_ids), strict=True)
            if position - first_page < len(hashes)
        ]
        count = len(hashes)
        if self.writing_pages + count > self.parts.policy.writing_pages:
            self.parts.meter.dropped["store", "too many pages wait to be written"] += count
            self.parts.allocator.apply(tree.end(transfer.op))
            return
        self._writes[transfer.op] = count
        collective = self.parts.collectives.begin(lambda agreed: self._stored(due.node, transfer, hashes, agreed))
        write, watch = StorageWrite(storage, pages), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.parts.meter.stages[TierStage.STORE].add(watch.seconds)
            self.parts.meter.counts[TierCount.STORED_PAGES] += write.stored
            self.parts.meter.counts[TierCount.STORED_BYTES] += write.nbytes
            for why, failed in write.failed.items():
                self.parts.meter.dropped["store", why] += failed
            if error is not None:
                self.parts.meter.dropped["store", type(error).__name__] += count
            collective.done(int(error is None and not write.failed.total()))

        self.parts.worker.begin(write, Urgency.WRITE, ended)

    def _stored(self, node: int, transfer: TierCopy, hashes: Sequence[bytes], agreed: VoteRow) -> None:
        del self._writes[transfer.op]
        tree, first = self.parts.allocator.tree, transfer.first_page
        if agreed[0] and self.events is not None and hashes:
            self.events.stored(hashes, tree.path_stored(node, Tier.STORAGE, first, len(hashes)))
        self.parts.allocator.apply(tree.end(transfer.op))


def _ints(row: PageArray) -> list[int]:
    return row.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class _Announced:
    """Consecutive pages that one event announced."""

    hashes: tuple[bytes, ...]
    event: BlockStored


class StorageEvents:
    """The storage events of one rank. The store calls `lost`, from any thread.

    It remembers each announced page with its tokens, some 300 bytes a page of 16, for late subscribers.
    """

    def __init__(self, sink: Callable[[KVEvent], None], exists: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self._sink, self._exists = sink, exists
        self._pages = dict[bytes, _Announced]()
        self._lost: deque[bytes] = deque()

    def stored(self, hashes: Sequence[bytes], event: BlockStored) -> None:
        """Emit the event of consecutive pages with these hashes."""
        announced = _Announced(tuple(hashes), event)
        self._pages.update(dict.fromkeys(hashes, announced))
        self._sink(event)

    def resident(self) -> Iterator[KVEvent]:
        """Yield events of all announced pages that were not taken back, in the order of their announcing."""
        for announced in dict.fromkeys(self._pages.values()):
            here = [self._pages.get(page) is announced for page in announced.hashes]
            for is_here, run in groupby(range(len(here)), here.__getitem__):
                if is_here:
                    pages = list(run)
                    yield announced.event.cut(pages[0], pages[-1] + 1)

    def again(self) -> None:
        """Emit the events of announced pages that storage still has: a reset has made routers forget every medium."""
        pages = list(self._pages)
        for page, there in zip(pages, self._exists(pages), strict=True):
            if not there:
                del self._pages[page]
        for event in self.resident():
            self._sink(event)

    def lost(self, page: bytes) -> None:
        """Note that an object of `page` was lost; `poll` asks if others still make it up."""
        if page in self._pages:
            self._lost.append(page)

    def poll(self) -> None:
        """Emit, once, the removal of pages no longer whole."""
        pages = dict.fromkeys(self._lost.popleft() for _ in range(len(self._lost)))
        known = [page for page in pages if page in self._pages]
        if not known:
            return
        gone = [page for page, there in zip(known, self._exists(known), strict=True) if not there]
        for page in gone:
            del self._pages[page]
        if gone:
            self._sink(block_removed(gone, Tier.STORAGE))
