"""Writing: pages from the device to the host, and from there to storage, whatever is split or evicted meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmover.prefix import StaleHandle, Tier, Transfer
from kvmover.prefix.actions import PageArray
from kvmover.prefix.events import BlockStored, KVEvent, Medium
from kvmover.prefix.hashes import as_int64, as_int64s
from kvmover.tiers.consensus import Row
from kvmover.tiers.meter import Count, Meter, Stage
from kvmover.tiers.policy import Policy, Store
from kvmover.tiers.stock import Stock
from kvmover.tiers.storage import Page, Storage, Write
from kvmover.tiers.tickets import Tickets, agreed_count, counted
from kvmover.tiers.worker import Stopwatch, Urgency, Worker


@dataclass(slots=True)
class Writing:
    """Of one rank. `sink` hears what has come to storage, without its tokens: the device's events had them."""

    stock: Stock
    storage: Storage | None
    worker: Worker
    tickets: Tickets
    policy: Policy
    meter: Meter
    sink: Callable[[KVEvent], None] | None = None
    writing_pages: int = 0
    #: Nodes to store, with the first page that is not there yet, until their whole path is on the host.
    _due: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])

    @property
    def due(self) -> int:
        return len(self._due)

    def back_up(self, node: int) -> None:
        """Copy what the path has on the device alone. One ticket on every rank, room or not."""
        tree = self.stock.tree
        needs = tree.backup_needs(node)
        if not needs:
            return
        ids = self.stock.take_all(needs, Tier.HOST)
        if ids is None:
            self.meter.dropped["backup", "no room on the host"] += sum(needs.values())
            self.tickets.begin(lambda agreed: None, 3).done(*counted(0, 0))
            return
        transfer = tree.begin_backup(node, ids)
        total = max((int(leg.positions[-1]) + 1 for leg in transfer.legs), default=0) - transfer.first_page
        ticket = self.tickets.begin(
            lambda agreed: self._backed(node, transfer, agreed), 3, [i for row in ids.values() for i in row]
        )
        batches, watch = self.stock.batches(transfer.legs, Tier.HOST), Stopwatch()

        def done() -> None:
            self.meter.stages[Stage.BACKUP].add(watch.seconds)
            self.meter.counts[Count.BACKED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.meter.counts[Count.BACKED_BYTES] += sum(batch.nbytes for batch in batches)
            ticket.done(*counted(total, total))

        self.stock.copies.begin(batches, Tier.HOST, done)

    def reused(self, node: int) -> None:
        if self.policy.store is Store.REUSED and self.storage is not None:
            self._due.append((node, 0))

    def poll(self) -> None:
        """Begin to store what has come to the host whole."""
        for _ in range(len(self._due)):
            node, first = self._due.popleft()
            try:
                backed = self.stock.tree.is_backed(node)
            except StaleHandle:
                self.meter.dropped["store", "evicted before it was stored"] += 1
                continue
            if backed:
                self._store(node, first)
            elif self.tickets.open:
                self._due.append((node, first))
            else:
                self.meter.dropped["store", "never came to the host"] += 1

    def _backed(self, node: int, transfer: Transfer, agreed: Row) -> None:
        done = agreed_count(agreed, parts=not self.stock.tree.shape.components)
        self.stock.apply(self.stock.tree.end(transfer.op, done))
        if done and self.policy.store is Store.BACKED and self.storage is not None:
            self._due.append((node, transfer.first_page))

    def _store(self, node: int, first: int) -> None:
        tree, storage = self.stock.tree, self.storage
        assert storage is not None
        transfer = tree.begin_store(node, first)
        first_page = transfer.first_page
        pages = [
            (shelf, Page(position - first_page, transfer.hashes[position - first_page], host_id))
            for leg in transfer.legs
            for shelf in storage.shelves
            if shelf.holding.name == leg.component
            for position, host_id in zip(_ints(leg.positions), _ints(leg.src_page_ids), strict=True)
        ]
        count = len(transfer.hashes)
        if self.writing_pages + count > self.policy.writing_pages:
            self.meter.dropped["store", "too many pages wait to be written"] += count
            self.stock.apply(tree.end(transfer.op))
            return
        self.writing_pages += count
        ticket = self.tickets.begin(lambda agreed: self._stored(node, transfer, agreed))
        write, watch = Write(storage, pages), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.meter.stages[Stage.STORE].add(watch.seconds)
            self.meter.counts[Count.STORED_PAGES] += write.stored
            self.meter.counts[Count.STORED_BYTES] += write.nbytes
            for why, failed in write.failed.items():
                self.meter.dropped["store", why] += failed
            if error is not None:
                self.meter.dropped["store", type(error).__name__] += count
            ticket.done(int(error is None and not write.failed.total()))

        self.worker.begin(write, Urgency.WRITE, ended)

    def _stored(self, node: int, transfer: Transfer, agreed: Row) -> None:
        self.writing_pages -= len(transfer.hashes)
        tree = self.stock.tree
        if agreed[0] and self.sink is not None and transfer.hashes:
            parent = as_int64(tree.page_hashes(node)[transfer.first_page - 1]) if transfer.first_page else None
            hashes = as_int64s(transfer.hashes)
            self.sink(BlockStored(hashes, parent, (), tree.shape.page_tokens, None, Medium.DISK, None))
        self.stock.apply(tree.end(transfer.op))


def _ints(row: PageArray) -> list[int]:
    return row.tolist()
