"""Controller: what an engine's rank holds to keep KV on the device, on the host and in storage.

Every rank that serves a request together has one, over a tree of its own, and calls the same methods in the same order,
`poll` too: as schedulers of one engine do. Nothing here blocks but `poll`'s one collective, and none is made while no
operation is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmover.cache.prefix import FULL, Inserted, Key, Namespace, PrefixTree, Receipt, Tier, WriteBack
from kvmover.cache.prefix.events import KVEvent
from kvmover.cache.prefix.hashes import Tokens
from kvmover.cache.prefix.keys import DEFAULT, PageIds
from kvmover.cache.tiers.agreement import Alone, Consensus, Row, Tickets, checksum
from kvmover.cache.tiers.allocator import Stock
from kvmover.cache.tiers.copies import Copies
from kvmover.cache.tiers.errors import TierError
from kvmover.cache.tiers.metrics import Gauge, Meter, Snapshot, Stage
from kvmover.cache.tiers.policy import Inclusion, Policy
from kvmover.cache.tiers.restore import Restore, Restoring
from kvmover.cache.tiers.storage import Storage
from kvmover.cache.tiers.storage_events import Announced
from kvmover.cache.tiers.storage_worker import Stopwatch, Urgency, Worker
from kvmover.cache.tiers.tiered_pool import Holding
from kvmover.cache.tiers.writing import Writing

#: How long `wait` sleeps at most between two polls: a storage job that ends wakes it.
_NAP_S = 0.002


@dataclass(frozen=True, slots=True)
class Setup:
    """What a controller is made with beside its parts. `clock` is in seconds; `group_layers` see Copies."""

    policy: Policy = field(default_factory=Policy)
    consensus: Consensus = field(default_factory=Alone)
    group_layers: int = 8
    clock: Callable[[], float] = time.monotonic
    sink: Callable[[KVEvent], None] | None = None
    engine: str = "engine"
    rank: int = 0


class Controller:
    """Of one rank. The tree is this controller's; the pools and the store stay the caller's, and outlive it.

    A request: `restore` and `poll` until it is ready; `take` pages for the rest of its prompt; compute; `keep`; and
    `release` what was restored.
    """

    def __init__(
        self, tree: PrefixTree, holdings: Sequence[Holding], storage: Storage | None = None, setup: Setup | None = None
    ) -> None:
        self.setup = setup or Setup()
        policy, clock, sink = self.setup.policy, self.setup.clock, self.setup.sink
        if policy.inclusion is Inclusion.EXCLUSIVE and not isinstance(tree.shape.tiers, WriteBack):
            raise TierError(f"exclusive tiers take a tree that writes back, and this one has {tree.shape.tiers}")
        rates = {Urgency.READ: policy.read_rate, Urgency.WRITE: policy.write_rate}
        self.meter = Meter()
        self.worker = Worker({urgency: rate for urgency, rate in rates.items() if rate})
        shared = any(holding.share.count > 1 for holding in holdings)
        self.tickets = Tickets(checksum) if shared else Tickets()
        self.copies = Copies(holdings[0].device.tensors[0].device, self.setup.group_layers)
        self.stock = Stock(tree, holdings, self.copies)
        hands = self.stock, storage, self.worker, self.tickets, policy, self.meter
        self._announced = Announced(sink, storage.whole) if storage is not None and sink is not None else None
        if storage is not None and self._announced is not None:
            storage.store.watch(self._announced)
        self._writing = Writing(*hands, self._announced)
        self.stock.copied_out = self._writing.copied_out
        self._restoring = Restoring(*hands, clock, self._writing.reused)

    @property
    def tree(self) -> PrefixTree:
        return self.stock.tree

    # Requests

    def restore(
        self, tokens: Key | Tokens, *, limit_tokens: int | None = None, namespace: Namespace = DEFAULT
    ) -> Restore:
        """Begin to bring the longest prefix of a prompt to the device: of all but its last token, if no limit is given.

        The result changes in `poll`. It may be ready at once.
        """
        key = tokens if isinstance(tokens, Key) else self.tree.key(tokens, namespace)
        return self._restoring.begin(key, max(0, key.tokens - 1) if limit_tokens is None else limit_tokens)

    def want(self, restore: Restore) -> None:
        """The request is to start now: with BestEffort a read ends with what it has."""
        restore.wanted = True

    def abort(self, restore: Restore) -> None:
        """Nobody wants it any more. What is on its way lands or comes back, by itself."""
        self._restoring.abort(restore)

    def release(self, restore: Restore) -> None:
        """The request is over: its prefix may be evicted. Once, of a restore that is ready."""
        assert restore.receipt is not None
        self.unlock(restore.receipt)
        restore.receipt = None

    def unlock(self, receipt: Receipt) -> None:
        self.tree.unlock(receipt)

    def take(self, pages: int, component: str = FULL) -> list[int] | None:
        """Device pages for what is computed, from what was used least recently if need be. None: there is no room."""
        return self.stock.take(component, Tier.DEVICE, pages)

    def give(self, page_ids: Sequence[int], component: str = FULL) -> None:
        """Device pages that were taken and are not kept."""
        self.stock.give(component, Tier.DEVICE, page_ids)

    def keep(
        self,
        tokens: Key | Tokens,
        page_ids: PageIds,
        *,
        first_page: int = 0,
        held: Mapping[str, PageIds] | None = None,
        counted_tokens: int = 0,
        namespace: Namespace = DEFAULT,
    ) -> Inserted:
        """Keep computed pages, as `PrefixTree.insert` says, and begin to write through what is due. The ids are the
        tree's from here on, and duplicates are free again.
        """
        kept = self.tree.insert(
            tokens,
            page_ids,
            first_page=first_page,
            held=held,
            counted_tokens=counted_tokens,
            namespace=namespace,
        )
        self._writing.kept(kept.node, page_ids)
        self.stock.apply(kept)
        for node in kept.backups:
            self._writing.back_up(node)
        return kept

    # Progress

    def votes(self) -> Row:
        """This rank's row of the round. With `settle` the two halves of `poll`, for who agrees in another way."""
        self.copies.poll()
        self.worker.poll()
        self._restoring.poll()
        return self.tickets.votes()

    def settle(self, agreed: Row) -> None:
        """End what is done on all ranks, in one order, and go on with what follows. Raises ConsensusBroken."""
        for ticket, answer in self.tickets.settle(agreed):
            ticket.ended(answer)
        self._writing.poll()
        if self._announced is not None:
            self._announced.poll()
        if self.setup.policy.inclusion is Inclusion.EXCLUSIVE and self.idle:
            self.stock.drop_second_copies()

    def poll(self) -> None:
        """One round: with the other ranks, if any operation is open."""
        votes = self.votes()
        if self.tickets.open:
            watch = Stopwatch()
            votes = self.setup.consensus.minimum(votes)
            self.meter.stages[Stage.AGREE].add(watch.seconds)
        self.settle(votes)

    @property
    def idle(self) -> bool:
        """Whether no operation is open and none is due."""
        return not (self.tickets.open or self._writing.due or self._restoring.open)

    def wait(self, restore: Restore | None = None) -> None:
        """Poll until `restore` is done, or until all is. Ranks that wait together stop waiting together."""
        while not (self.idle if restore is None else restore.done):
            self.poll()
            if self.worker.queued:
                self.worker.wait(_NAP_S)

    def snapshot(self) -> Snapshot:
        free = self.stock.free
        gauges = {
            Gauge.OPEN_OPERATIONS: len(self.tickets.open),
            Gauge.OPEN_RESTORES: len(self._restoring.open),
            Gauge.QUEUED_JOBS: self.worker.queued,
            Gauge.FREE_DEVICE_PAGES: len(free[FULL, Tier.DEVICE]),
            Gauge.FREE_HOST_PAGES: len(free[FULL, Tier.HOST]),
            Gauge.READING_PAGES: self._restoring.reading_pages,
            Gauge.WRITING_PAGES: self._writing.writing_pages,
        }
        return Snapshot(self.setup.engine, self.setup.rank, self.meter.copy(), gauges)

    def close(self) -> None:
        """Stop the thread. What is on its way to storage is dropped: `wait` before, to have it written."""
        self.worker.close()
