"""A Restore brings a request's KV back to the device, from storage by way of the host, as all ranks agree.

Each of the three steps is an operation of all ranks: a look-up, answered with the prefix lengths that this rank could
restore; a read; a load. What a rank cannot begin, for want of room, it answers with nothing, so that all end with
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.prefix import FULL, ROOT, LockHandle, Match, RadixKey, Tier
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.prefix.keys import NO_IDS
from kvmover.cache.prefix.results import PageArray
from kvmover.cache.tiers.agreement import CollectiveOp, CollectiveOps, VoteRow, agreed_count, counted
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.copies import LayerGate
from kvmover.cache.tiers.metrics import TierCount, TierMeter, TierStage
from kvmover.cache.tiers.policy import BestEffort, ThroughputEstimator, TierPolicy, patience_s, pays
from kvmover.cache.tiers.rules import Rule, restorable
from kvmover.cache.tiers.storage import PageRef, Storage, StorageLookup, StorageRead, StoredPool
from kvmover.cache.tiers.storage_worker import Stopwatch, StorageWorker, Urgency
from kvmover.store import Got


class RestorePhase(StrEnum):
    """LOOK: asking storage. READ: from storage to the host. LOAD: to the device, or waiting for another's load."""

    LOOK = "look"
    READ = "read"
    LOAD = "load"
    READY = "ready"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Restore:
    """What a request gets. `tokens`, `page_ids`, `held` and `handle` count when `phase` is READY.

    `handle` keeps the pages on the device: give it back by `Controller.release`. While in LOAD, `gate` lets a forward
    pass start on `loading`, the match of `best_tokens` that the load makes true, once its first layers are there.

    Two sums for the ledger: `ledger.matched(r, prompt, restore.reusable_tokens)`, and
    `ledger.admitted(r, restore.credit, restore.lost)`.
    """

    key: RadixKey
    limit_tokens: int
    began_s: float
    found: Match
    phase: RestorePhase = RestorePhase.LOOK
    tokens: int = 0
    page_ids: PageArray = field(default_factory=lambda: NO_IDS)
    held: tuple[tuple[str, PageArray], ...] = ()
    handle: LockHandle | None = None
    credit: Credit = field(default_factory=Credit)
    lost: dict[Loss, int] = field(default_factory=dict[Loss, int])
    reusable_tokens: int = 0
    gate: LayerGate | None = None
    #: Locks of what was found, until what is brought is locked too.
    keeps: list[LockHandle] = field(default_factory=list[LockHandle])
    collective: CollectiveOp | None = None
    reasons: Counter[Loss] = field(default_factory=Counter[Loss])
    patience_s: float | None = None
    wanted: bool = False
    loads: int = 0

    @property
    def done(self) -> bool:
        return self.phase in (RestorePhase.READY, RestorePhase.ABORTED)

    def ready(self, match: Match, handle: LockHandle) -> None:
        """The end: credit what is on the device by where it was when the request came, and say why the rest is lost."""
        device, best = self.found.tokens, self.found.best_tokens
        # More than was found anywhere is what other requests have computed meanwhile.
        more = max(0, match.tokens - max(self.reusable_tokens, best))
        self.reusable_tokens = max(self.reusable_tokens, best) + more
        here = match.tokens - more
        on_device = min(here, device)
        on_host = min(here, best) - on_device
        self.credit = Credit(on_device + more, on_host, here - on_device - on_host)
        self.lost = balanced(self.reasons, self.reusable_tokens - match.tokens)
        self.tokens, self.page_ids, self.held = match.tokens, match.page_ids, match.held
        self.handle, self.phase = handle, RestorePhase.READY


def balanced(reasons: Counter[Loss], due: int) -> dict[Loss, int]:
    """Reasons that add up to `due` tokens: the first to apply first, and what none explains was taken meanwhile.

    >>> balanced(Counter({Loss.LATE: 32, Loss.THRESHOLD: 16}), 40)
    {<Loss.THRESHOLD: 'threshold'>: 16, <Loss.LATE: 'late'>: 24}
    """
    lost: dict[Loss, int] = {}
    for reason in Loss:
        tokens = min(reasons[reason], due)
        if tokens > 0:
            lost[reason] = tokens
            due -= tokens
    if due:
        lost[Loss.CAPACITY_EVICTED] = lost.get(Loss.CAPACITY_EVICTED, 0) + due
    return lost


def longest(legal: np.ndarray, over: int = 0) -> int:
    """The largest legal number of pages above `over`, or 0."""
    found = np.flatnonzero(legal[over + 1 :])
    return int(found[-1]) + over + 1 if len(found) else 0


#: Why a read ended early, as the ledger says it.
_LOSS = {Got.POISONED: Loss.POISONED, Got.EVICTED: Loss.CAPACITY_EVICTED, Got.ABSENT: Loss.CAPACITY_EVICTED}


@dataclass(slots=True)
class Restoring:
    """Of one rank. `reused` hears of a node, and from which page on its path is loaded from the host."""

    allocator: PageAllocator
    storage: Storage | None
    worker: StorageWorker
    collectives: CollectiveOps
    policy: TierPolicy
    meter: TierMeter
    clock: Callable[[], float]
    reused: Callable[[int, int], None]
    open: list[Restore] = field(default_factory=list[Restore])
    reading_pages: int = 0
    loads: ThroughputEstimator = field(default_factory=ThroughputEstimator)

    def begin(self, key: RadixKey, limit_tokens: int) -> Restore:
        tree = self.allocator.tree
        match = tree.match(key, limit_tokens=limit_tokens)
        restore = Restore(key, limit_tokens, self.clock(), match, reusable_tokens=match.best_tokens)
        restore.keeps.append(tree.lock(match.device_node))
        if match.best_tokens > match.tokens and tree.is_backed(match.best_node):
            restore.keeps.append(tree.lock_host(match.best_node))
        self.open.append(restore)
        missing = limit_tokens // tree.config.page_tokens * tree.config.page_tokens - match.best_tokens
        if self.storage is None or missing < max(1, self.policy.least_tokens):
            self._load(restore)
        else:
            self._look(restore, self.storage)
        return restore

    def poll(self) -> None:
        """Ask for an end of reads that took too long, and go on where another's load was waited for."""
        for restore in list(self.open):
            if restore.phase is RestorePhase.READ and restore.collective is not None:
                late = restore.patience_s is not None and self.clock() - restore.began_s >= restore.patience_s
                wanted = restore.wanted and isinstance(self.policy.prefetch, BestEffort)
                restore.collective.stop |= late or wanted
            if restore.phase is RestorePhase.LOAD and restore.collective is None:
                self._load(restore)

    def abort(self, restore: Restore) -> None:
        if restore.done:
            return
        restore.phase = RestorePhase.ABORTED
        if restore.collective is not None:
            restore.collective.stop = True
        self._let_go(restore)

    # Storage: look up

    def _look(self, restore: Restore, storage: Storage) -> None:
        config = self.allocator.tree.config
        pages = restore.limit_tokens // config.page_tokens
        words = np.frombuffer(restore.key.data, "<u4")
        hashes = chain(restore.key.namespace.digest, words, config.page_words)[:pages]
        node = restore.found.host_node
        anchor = (
            len(self.allocator.tree.page_hashes(node)) if node != ROOT and self.allocator.tree.is_backed(node) else 0
        )
        reach = max((h.rule.reach_tokens or 0 for h in self.allocator.tiered_pools), default=0)
        first = max(0, anchor - -(-reach // config.page_tokens))
        look, watch = StorageLookup(storage, hashes[first:]), Stopwatch()
        restore.collective = collective = self.collectives.begin(
            lambda agreed: self._looked(restore, storage, hashes, anchor, agreed), width=pages + 1
        )

        def ended(error: Exception | None) -> None:
            self.meter.stages[TierStage.LOOK].add(watch.seconds)
            self.meter.counts[TierCount.LOOKED_UP_PAGES] += len(look.hashes)
            legal = np.zeros(pages + 1, bool)
            if error is None:
                legal = self._legal(storage, look, first, anchor)
            collective.done(*self._wanted(restore, legal))

        self.worker.begin(look, Urgency.LOOK, ended)

    def _legal(self, storage: Storage, look: StorageLookup, first: int, anchor: int) -> np.ndarray:
        rules, present = dict[str, Rule](), dict[str, Sequence[bool]]()
        for number, (stored_pool, row) in enumerate(zip(storage.stored_pools, look.present, strict=True)):
            rules[str(number)] = stored_pool.tiered_pool.rule
            present[str(number)] = [False] * first + row
        return restorable(rules, present, self.allocator.tree.config.page_tokens, anchor)

    def _wanted(self, restore: Restore, legal: np.ndarray) -> list[int]:
        """This rank's vote, 1 for a number of pages that it can and would fetch; and why not for those it would not."""
        page_tokens = self.allocator.tree.config.page_tokens
        best = restore.found.best_tokens // page_tokens
        most = longest(legal, best)
        restore.reusable_tokens = max(restore.reusable_tokens, most * page_tokens)
        self.meter.counts[TierCount.FOUND_PAGES] += max(0, most - best)
        tokens = most * page_tokens - restore.found.best_tokens
        token_bytes = sum(h.part.nbytes for h in self.allocator.tiered_pools) // page_tokens
        assert self.storage is not None
        read, load = self.storage.reads.speed(), self.loads.speed()
        known = () if read is None else (read.within(self.policy.read_rate), *((load,) if load else ()))
        if most and (tokens < self.policy.least_tokens or not pays(self.policy.prefetch, tokens, token_bytes, known)):
            restore.reasons[Loss.THRESHOLD] += tokens
            legal = np.zeros_like(legal)
        votes = legal.astype(np.int64)
        votes[: best + 1] = 0
        return votes.tolist()

    def _looked(self, restore: Restore, storage: Storage, hashes: list[bytes], anchor: int, agreed: VoteRow) -> None:
        restore.collective = None
        if restore.phase is RestorePhase.ABORTED:
            return
        pages, page_tokens = longest(agreed), self.allocator.tree.config.page_tokens
        mine = restore.reusable_tokens - restore.reasons[Loss.THRESHOLD]
        if mine > max(pages * page_tokens, restore.found.best_tokens):
            restore.reasons[Loss.RANK_MINIMUM] += mine - max(pages * page_tokens, restore.found.best_tokens)
        if pages:
            self._read(restore, storage, hashes[:pages], anchor)
        else:
            self._load(restore)

    # Storage: read

    def _read(self, restore: Restore, storage: Storage, hashes: list[bytes], anchor: int) -> None:
        allocator, pages, config = self.allocator, len(hashes), self.allocator.tree.config
        restore.phase = RestorePhase.READ
        restore.patience_s = patience_s(self.policy.prefetch, pages * config.page_tokens - restore.found.best_tokens)
        needs = {FULL: range(anchor, pages)}
        for tiered_pool in allocator.tiered_pools:
            if tiered_pool.name != FULL:
                needs[tiered_pool.name] = tiered_pool.rule.needs(pages, config.page_tokens)
        if self.reading_pages + pages - anchor > self.policy.reading_share * allocator.free[FULL, Tier.HOST].pages:
            ids = None
        else:
            ids = allocator.take_all({name: len(where) for name, where in needs.items()}, Tier.HOST)
        op, total = 0, pages - anchor
        if ids is not None:
            key = RadixKey(restore.key.data[: pages * config.page_bytes], restore.key.namespace, restore.key.units)
            op = allocator.tree.begin_fetch(key, anchor, ids[FULL], {name: ids[name] for name in needs if name != FULL})
            self.reading_pages += total
        restore.collective = collective = self.collectives.begin(
            lambda agreed: self._read_ended(restore, op, total, agreed),
            3,
            _flat(ids or {}),
        )
        if ids is None:
            restore.reasons[Loss.HOST_CAPACITY] += pages * config.page_tokens - restore.found.best_tokens
            collective.done(*counted(0, 0))
            return
        wanted = [
            (
                stored_pool,
                PageRef(max(0, position - anchor), hashes[position], ids[stored_pool.tiered_pool.name][place]),
            )
            for stored_pool in storage.stored_pools
            for place, position in enumerate(needs[stored_pool.tiered_pool.name])
            if stored_pool.tiered_pool.share.mine(place)
        ]
        self._begin_read(storage, restore, collective, wanted, total)

    def _begin_read(
        self,
        storage: Storage,
        restore: Restore,
        collective: CollectiveOp,
        wanted: list[tuple[StoredPool, PageRef]],
        total: int,
    ) -> None:
        wanted.sort(key=lambda each: each[1].place)
        read, watch = StorageRead(storage, wanted, total, lambda: collective.stopping), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.meter.stages[TierStage.FETCH].add(watch.seconds)
            self.meter.counts[TierCount.FETCHED_PAGES] += read.pages
            self.meter.counts[TierCount.FETCHED_BYTES] += read.nbytes
            good = 0 if error is not None else read.good
            if good < total:
                failed = read.why is not None or error is not None
                loss = _LOSS.get(read.why, Loss.READ_FAILED) if read.why and error is None else Loss.READ_FAILED
                loss = loss if failed else Loss.LATE
                restore.reasons[loss] += (total - good) * self.allocator.tree.config.page_tokens
                self.meter.dropped["fetch", str(loss)] += total - good
            collective.done(*counted(good, total))

        self.worker.begin(read, Urgency.READ, ended)

    def _read_ended(self, restore: Restore, op: int, total: int, agreed: VoteRow) -> None:
        collective, restore.collective = restore.collective, None
        if op:
            tree = self.allocator.tree
            fetched = agreed_count(agreed, parts=not tree.config.components)
            restore.reasons[Loss.RANK_MINIMUM] += (_own(collective) - fetched) * tree.config.page_tokens
            self.reading_pages -= total
            self.allocator.apply(tree.end(op, fetched))
        if restore.phase is not RestorePhase.ABORTED:
            self._load(restore)

    # Host to device

    def _load(self, restore: Restore) -> None:
        """Load what the host has, as much of it as the device has room for; or wait for somebody else's load of it."""
        tree, restore.phase = self.allocator.tree, RestorePhase.LOAD
        match = tree.match(restore.key, limit_tokens=restore.limit_tokens)
        if match.waits:
            return
        if match.best_tokens > match.tokens and tree.is_backed(match.best_node):
            restore.keeps.append(tree.lock_host(match.best_node))
        restore.keeps.append(tree.lock(match.device_node))
        missing = match.best_tokens - match.tokens
        if not missing or restore.loads:
            self._finish(restore)
            return
        restore.loads += 1
        if missing < self.policy.least_load_tokens:
            restore.reasons[Loss.THRESHOLD] += missing
            self._finish(restore)
            return
        needs, ids = tree.load_needs(match.best_node), None
        ids = self.allocator.take_all(needs, Tier.DEVICE)
        if ids is None and not tree.config.components:
            match = self._shorter(restore, match)
            needs = tree.load_needs(match.best_node) if match.best_tokens > match.tokens else {}
            ids = self.allocator.take_all(needs, Tier.DEVICE) if needs else None
        if ids is None:
            restore.reasons[Loss.DEVICE_CAPACITY] += missing
        self._begin_load(restore, match, ids)

    def _shorter(self, restore: Restore, match: Match) -> Match:
        """The match of as much as there is room for."""
        tree = self.allocator.tree
        room = self.allocator.room(FULL, Tier.DEVICE) * tree.config.page_tokens
        restore.reasons[Loss.DEVICE_CAPACITY] += max(0, match.best_tokens - match.tokens - room)
        return tree.match(restore.key, limit_tokens=match.tokens + room)

    def _begin_load(self, restore: Restore, match: Match, ids: dict[str, list[int]] | None) -> None:
        tree = self.allocator.tree
        if ids is None:
            restore.collective = self.collectives.begin(lambda agreed: self._loaded(restore, 0, 0, agreed), 3)
            restore.collective.done(*counted(0, 0))
            return
        transfer = tree.begin_load(match.best_node, ids)
        total = match.best_tokens // tree.config.page_tokens - transfer.first_page
        batches, watch = self.allocator.batches(transfer.legs, Tier.DEVICE), Stopwatch()
        restore.collective = collective = self.collectives.begin(
            lambda agreed: self._loaded(restore, transfer.op, total, agreed), 3
        )

        def done() -> None:
            nbytes = sum(batch.nbytes for batch in batches)
            self.meter.stages[TierStage.LOAD].add(watch.seconds)
            self.meter.counts[TierCount.LOADED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.meter.counts[TierCount.LOADED_BYTES] += nbytes
            self.loads.add(nbytes, watch.seconds)
            collective.done(*counted(total, total))

        restore.gate = self.allocator.copies.begin(batches, Tier.DEVICE, done)
        self.reused(match.best_node, transfer.first_page)

    def _loaded(self, restore: Restore, op: int, total: int, agreed: VoteRow) -> None:
        restore.collective = restore.gate = None
        if op:
            loaded = agreed_count(agreed, parts=not self.allocator.tree.config.components)
            restore.reasons[Loss.RANK_MINIMUM] += (total - loaded) * self.allocator.tree.config.page_tokens
            self.allocator.apply(self.allocator.tree.end(op, loaded))
        if restore.phase is not RestorePhase.ABORTED:
            self._load(restore)

    def _finish(self, restore: Restore) -> None:
        tree = self.allocator.tree
        match = tree.match(restore.key, limit_tokens=restore.limit_tokens)
        handle = tree.lock(match.device_node)
        restore.ready(match, handle)
        self.meter.stages[TierStage.RESTORE].add(self.clock() - restore.began_s)
        self._let_go(restore)

    def _let_go(self, restore: Restore) -> None:
        for handle in restore.keeps:
            self.allocator.tree.unlock(handle)
        restore.keeps.clear()
        self.open.remove(restore)


def _own(collective: CollectiveOp | None) -> int:
    """What this rank had done of what is agreed on now."""
    return int(collective.answer[0]) if collective is not None and collective.answer is not None else 0


def _flat(ids: Mapping[str, list[int]]) -> list[int]:
    return [page for row in ids.values() for page in row]
