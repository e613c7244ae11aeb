"""A Controller keeps the KV of an engine's rank on the device, on the host and in storage.

Every rank that serves a request together has its own, over its own tree, and calls the same methods, `poll` included,
in the same order. Other ranks are waited for only in `poll`, and only while an operation is open.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvmover.cache.peers import PeerTier
from kvmover.cache.prefix import (
    DEFAULT_NAMESPACE,
    FULL,
    ActionList,
    Inserted,
    KVEvent,
    LockHandle,
    PageIds,
    PrefixNamespace,
    PrefixTree,
    RadixKey,
    StaleHandle,
    Tier,
    TokenIds,
    WriteBack,
)
from kvmover.cache.tiers.agreement import CollectiveOps, Consensus, LocalConsensus, VoteRow, checksum
from kvmover.cache.tiers.allocator import DevicePages, PageAllocator, PageListeners
from kvmover.cache.tiers.backup import Backups, DuePaths, StorageEvents
from kvmover.cache.tiers.gated_loads import GatedLoads
from kvmover.cache.tiers.layerwise_copier import LayerwiseCopier
from kvmover.cache.tiers.restore_driver import Restore, Restores
from kvmover.cache.tiers.restore_machine import GivenUp, Hurry
from kvmover.cache.tiers.tier_metrics import TierCount, TierGauge, TierMeter, TierSnapshot, TierStage
from kvmover.cache.tiers.tier_parts import TierParts
from kvmover.cache.tiers.tier_policy import Inclusion, Store, TierPolicy
from kvmover.cache.tiers.tier_storage import Stopwatch, Storage, StorageWorker, Urgency
from kvmover.cache.tiers.tiered_pool import TieredPool
from kvmover.errors import TierError

if TYPE_CHECKING:
    import torch


#: The most prefixes on their way up at a time.
MOST_BROUGHT = 8


@dataclass(slots=True)
class AskedMoves:
    """The moves of prefixes without a waiting request: down to the host, or up from storage and host.

    Other requests do not pay for them: demoted pages are unused, their copies to the host are ordinary backups, and
    prefetched pages take only free pages of the device. `prefetch` begins a restore that ends on the host.
    """

    allocator: PageAllocator
    collectives: CollectiveOps
    backups: Backups
    loads: GatedLoads
    meter: TierMeter
    prefetch: Callable[[RadixKey], Restore]
    #: Nodes whose paths are to leave the device once they are on the host.
    _leaving: deque[int] = field(default_factory=deque[int])
    _coming: list[Restore] = field(default_factory=list[Restore])

    @property
    def open(self) -> int:
        """Returns the number of moves not done."""
        return len(self._leaving) + len(self._coming)

    def demote(self, node: int) -> bool:
        """Demote a path: see HintedTiers. Raises StaleHandle for a node that is gone."""
        if self.backups.writes_back or self.allocator.tree.is_backed(node):
            return self._give_up(node) > 0
        self.backups.back_up(node)
        self._leaving.append(node)
        return True

    def bring(self, key: RadixKey) -> bool:
        """Prefetch a prompt: see HintedTiers."""
        if len(self._coming) >= MOST_BROUGHT:
            return False
        self._coming.append(self.prefetch(key))
        return True

    def poll(self) -> None:
        """Demote paths that are on the host, and load prefixes prefetched to it."""
        for _ in range(len(self._leaving)):
            node = self._leaving.popleft()
            try:
                if self.allocator.tree.is_backed(node):
                    self._give_up(node)
                elif self.collectives.open:
                    self._leaving.append(node)
                else:
                    self.meter.dropped["demote", "never came to the host"] += 1
            except StaleHandle:
                self.meter.dropped["demote", "evicted before it was demoted"] += 1
        for restore in [each for each in self._coming if each.done]:
            self._coming.remove(restore)
            self._load(restore)

    def forget(self) -> None:
        """Drop pending demotions."""
        self._leaving.clear()

    def _give_up(self, node: int) -> int:
        given = self.allocator.demote(node)
        pages = len(given.page_ids())
        self.meter.counts[TierCount.DEMOTED_PAGES] += pages
        return pages

    def _load(self, restore: Restore) -> None:
        """Load the prefix if enough device pages are free."""
        allocator, tree = self.allocator, self.allocator.tree
        assert restore.handle is not None
        tree.unlock(restore.handle)
        restore.handle = None
        found = tree.match(restore.key)
        if found.best_tokens == found.tokens or found.waits:
            return
        needs = tree.load_needs(found.best_node)
        if all(len(allocator.free[name, Tier.DEVICE]) >= count for name, count in needs.items()):
            self.loads.begin(found.best_node)


#: Longest sleep of `wait` between polls, s; a storage job's end wakes it.
_NAP_S = 0.002

#: The same while only peers are awaited, whose answers wake it: every round costs all ranks a collective.
_PEER_NAP_S = 0.02


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The settings of a controller. `clock`: in seconds. `sink` gets storage events. `group_layers`, `fences`: see
    LayerwiseCopier.
    """

    policy: TierPolicy = field(default_factory=TierPolicy)
    consensus: Consensus = field(default_factory=LocalConsensus)
    group_layers: int = 8
    fences: Sequence[torch.cuda.Stream] = ()
    clock: Callable[[], float] = time.monotonic
    sink: Callable[[KVEvent], None] | None = None
    engine: str = "engine"
    rank: int = 0


class Controller:
    """A controller of one rank's KV on all tiers. Pools, store and peer tier are the caller's, and outlive it.

    A request: `restore`, `poll` until ready, `take` pages for the rest, compute, `keep`, `release`.

    An engine that allocates and inserts itself gives `device_pages`, and calls only `prefetch` while a request waits,
    `load` on admission, `kept` after an insert, `evict` for room.

    Raises TierError if policy, tree, pools and peers contradict each other.
    """

    def __init__(
        self,
        tree: PrefixTree,
        tiered_pools: Sequence[TieredPool],
        storage: Storage | None = None,
        config: ControllerConfig | None = None,
        device_pages: Mapping[str, DevicePages] = MappingProxyType({}),
        peers: PeerTier | None = None,
    ) -> None:
        self.config = config or ControllerConfig()
        policy, clock, sink = self.config.policy, self.config.clock, self.config.sink
        if peers is not None:
            _check_lends(tree)
        self.peers = peers
        if policy.inclusion is Inclusion.EXCLUSIVE and not isinstance(tree.config.tiers, WriteBack):
            raise TierError(f"exclusive tiers take a tree that writes back, and this one has {tree.config.tiers}")
        rates = {Urgency.READ: policy.read_rate, Urgency.WRITE: policy.write_rate}
        self.meter = TierMeter()
        self.worker = StorageWorker({urgency: rate for urgency, rate in rates.items() if rate})
        shared = any(tiered_pool.share.count > 1 for tiered_pool in tiered_pools)
        self.collectives = CollectiveOps(checksum) if shared else CollectiveOps()
        self.copies = LayerwiseCopier(
            tiered_pools[0].device.tensors[0].device, self.config.group_layers, self.config.fences
        )
        self._paths = DuePaths(
            isinstance(tree.config.tiers, WriteBack) and policy.store is Store.BACKED and storage is not None
        )
        copied_out = self._paths.copied_out
        listeners = PageListeners(copied_out) if peers is None else PageListeners(copied_out, peers.freed)
        self.allocator = PageAllocator(tree, tiered_pools, self.copies, device_pages, listeners)
        parts = TierParts(self.allocator, storage, self.worker, self.collectives, policy, self.meter, peers)
        self._events = StorageEvents(sink, storage.whole) if storage is not None and sink is not None else None
        if storage is not None and self._events is not None:
            storage.store.watch(self._events)
        self._backups = Backups(parts, self._paths, self._events)
        self._restores = Restores(parts, clock, self._backups.reused)
        self.loads = GatedLoads(self.allocator, self.collectives, self.meter, self._backups.reused)
        self._asked = AskedMoves(
            self.allocator,
            self.collectives,
            self._backups,
            self.loads,
            self.meter,
            lambda key: self._restores.begin(key, key.tokens, replace(self._to_the_host(key.tokens), least_tokens=1)),
        )

    @property
    def tree(self) -> PrefixTree:
        """Returns the prefix tree; change it only through the controller."""
        return self.allocator.tree

    # Requests

    def restore(
        self,
        tokens: RadixKey | TokenIds,
        *,
        limit_tokens: int | None = None,
        namespace: PrefixNamespace = DEFAULT_NAMESPACE,
    ) -> Restore:
        """Begin to bring a prompt's longest cached prefix to the device, by default without its last token.

        It advances in `poll`, and may be ready at once.
        """
        key = tokens if isinstance(tokens, RadixKey) else self.tree.key(tokens, namespace)
        limit = key.tokens - 1 if limit_tokens is None else min(limit_tokens, key.tokens)
        return self._restores.begin(key, max(0, limit), self.config.policy)

    def prefetch(self, key: RadixKey, limit_tokens: int, source: str | None = None) -> Restore:
        """Begin a restore that ends on the host, for `load`. `source`: the only engine to ask of peers."""
        return self._restores.begin(key, limit_tokens, self._to_the_host(limit_tokens), source)

    def _to_the_host(self, limit_tokens: int) -> TierPolicy:
        return replace(self.config.policy, least_load_tokens=limit_tokens + 1)

    def load(self, node: int) -> int | None:
        """Begin to load the path to `node`: see `GatedLoads.begin`."""
        return self.loads.begin(node)

    def want(self, restore: Restore) -> None:
        """Hurry a restore: with BestEffort a read ends with the pages it has."""
        self._restores.tell(restore, Hurry())

    def abort(self, restore: Restore) -> None:
        """Give up a restore; copies under way end by themselves."""
        self._restores.tell(restore, GivenUp())

    def release(self, restore: Restore) -> None:
        """Unlock the prefix of a ready restore, once."""
        assert restore.handle is not None
        self.unlock(restore.handle)
        restore.handle = None

    def unlock(self, handle: LockHandle) -> None:
        """Return a lock of the tree, once. Raises StaleHandle otherwise."""
        self.tree.unlock(handle)

    def take(self, pages: int, component: str = FULL) -> list[int] | None:
        """Return device pages, evicting least recently used ones; None without room."""
        return self.allocator.take(component, Tier.DEVICE, pages)

    def give(self, page_ids: Sequence[int], component: str = FULL) -> None:
        """Free pages taken and not kept. Raises TierError if one is free."""
        self.allocator.give(component, Tier.DEVICE, page_ids)

    def keep(
        self,
        tokens: RadixKey | TokenIds,
        page_ids: PageIds,
        *,
        first_page: int = 0,
        held: Mapping[str, PageIds] | None = None,
        counted_tokens: int = 0,
        namespace: PrefixNamespace = DEFAULT_NAMESPACE,
    ) -> Inserted:
        """Insert computed pages as `PrefixTree.insert`, free duplicates, and begin due backups. The ids are the tree's
        now.
        """
        kept = self.tree.insert(
            tokens,
            page_ids,
            first_page=first_page,
            held=held,
            counted_tokens=counted_tokens,
            namespace=namespace,
        )
        self.kept(kept, page_ids)
        return kept

    def kept(self, kept: Inserted, page_ids: PageIds) -> None:
        """Do the rest of `keep` for pages already in the tree."""
        self._paths.kept(kept.node, page_ids)
        self.allocator.apply(kept)
        for node in kept.backups:
            self._backups.back_up(node)

    def evict(self, pages: int, component: str = FULL) -> ActionList:
        """Free at least `pages` device pages, or all unlocked ones. Returns the actions done."""
        return self.allocator.evict(component, Tier.DEVICE, pages)

    def evict_pools(self, pages: Mapping[str, int]) -> ActionList:
        """Evict for several components: see `PageAllocator.evict_pools`."""
        return self.allocator.evict_pools(pages)

    def reset(self) -> None:
        """Empty device and host, and announce storage anew. Raises PrefixError while a lock or an operation is out."""
        self.allocator.apply(self.tree.reset())
        if self._events is not None:
            self._events.again()
        self._paths.forget()
        self._asked.forget()

    # Moves without a waiting request

    @property
    def stores(self) -> bool:
        """Returns True if there is storage."""
        return self._backups.parts.storage is not None

    def publish(self, node: int) -> bool:
        """Begin to store the path to `node`. Returns False without storage, or if the tree writes back."""
        return self._backups.publish(node)

    def demote(self, node: int) -> bool:
        """Begin to move the path's unused end to the host, pages without a host copy later. Returns False if no page
        can go.
        """
        return self._asked.demote(node)

    def bring(self, key: RadixKey) -> bool:
        """Begin to prefetch a prompt to host and free device pages; readers wait in `loads.wait`. Returns False if too
        many are open.
        """
        return self._asked.bring(key)

    # Progress

    def votes(self) -> VoteRow:
        """Return this rank's row. `votes` and `settle` are halves of `poll`, for ranks that agree elsewhere."""
        self._hear()
        return self.collectives.votes()

    def settle(self, agreed: VoteRow) -> None:
        """End the operations done on all ranks, and begin due ones. Raises ConsensusBroken."""
        for collective, answer in self.collectives.settle(agreed):
            collective.ended(answer)
        self._go_on()

    def poll(self) -> None:
        """Run one round, with the other ranks if an operation is open. Raises ConsensusBroken."""
        self._hear()
        if not self.collectives.open:
            self._go_on()
            return
        watch = Stopwatch()
        agreed = self.config.consensus.minimum(self.collectives.votes())
        self.meter.stages[TierStage.AGREE].add(watch.seconds)
        if agreed is not None:
            self.settle(agreed)

    def _hear(self) -> None:
        self.copies.poll()
        self.worker.poll()
        if self.peers is not None:
            self.peers.poll()
        self._restores.poll()

    def _go_on(self) -> None:
        self._backups.poll()
        self._asked.poll()
        if self._events is not None:
            self._events.poll()
        if self.config.policy.inclusion is Inclusion.EXCLUSIVE and self.idle:
            self.allocator.drop_second_copies()

    @property
    def idle(self) -> bool:
        """Returns True if no operation is open or due."""
        return not (self.collectives.open or len(self._paths) or self._restores.open or self._asked.open)

    def wait(self, restore: Restore | None = None) -> None:
        """Poll until `restore` is done, or idle; ranks that wait together return in the same round."""
        while not (self.idle if restore is None else restore.done):
            self.poll()
            if self.peers is not None and self.peers.queued:
                self.peers.wait(_NAP_S if self.worker.queued else _PEER_NAP_S)
            elif self.worker.queued:
                self.worker.wait(_NAP_S)

    def resident(self) -> Iterator[KVEvent]:
        """Yield what a new router has to know: the tree's contents, then the pages that were announced in storage.

        Consume all before the next poll.
        """
        yield from self.tree.resident()
        if self._events is not None:
            yield from self._events.resident()

    def snapshot(self) -> TierSnapshot:
        """Return a copy of current counts, times and gauges."""
        free, lent = self.allocator.free, self.peers.counts() if self.peers is not None else None
        gauges = {
            TierGauge.OPEN_OPERATIONS: len(self.collectives.open),
            TierGauge.OPEN_RESTORES: len(self._restores.open),
            TierGauge.QUEUED_JOBS: self.worker.queued,
            TierGauge.FREE_DEVICE_PAGES: len(free[FULL, Tier.DEVICE]),
            TierGauge.FREE_HOST_PAGES: len(free[FULL, Tier.HOST]),
            TierGauge.READING_PAGES: self._restores.reading_pages,
            TierGauge.WRITING_PAGES: self._backups.writing_pages,
            TierGauge.LENDABLE_PAGES: lent.pages if lent else 0,
            TierGauge.OPEN_LOANS: lent.loans if lent else 0,
        }
        return TierSnapshot(self.config.engine, self.config.rank, self.meter.copy(), gauges)

    def check(self, out: Mapping[tuple[str, Tier], Collection[int]]) -> None:
        """Raise InvariantBroken if its parts disagree. O(pages).

        `out`: pages that the caller took and has not given or kept.
        """
        self.tree.check()
        self.allocator.check(out)
        self.collectives.check()
        self.copies.check()
        self._restores.check()
        self._backups.check()
        self.loads.check()
        if self.peers is not None:
            self.peers.check()

    def close(self) -> None:
        """Stop the storage thread and drop queued writes."""
        self.worker.close()


def _check_lends(tree: PrefixTree) -> None:
    if isinstance(tree.config.tiers, WriteBack) or tree.config.components:
        held = [tree.config.tiers, *(component.name for component in tree.config.components)]
        raise TierError(f"peers share attention KV alone, of trees that write through; this one has {held}")
