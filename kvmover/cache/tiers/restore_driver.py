"""A Restore brings a request's KV back to the device: its state machine decides, the driver here carries out.

`restore_machine.py` decides. Events come from jobs of the storage thread, copies to the device and peers, as the
controller polls them, and from the rounds in which all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.peers import PeerAnswer, PeerMiss, PeerPrefix, PeerQuestion, PeerRead, PeerTier
from kvmover.cache.prefix import (
    FULL,
    NO_IDS,
    ROOT,
    InvariantBroken,
    LockHandle,
    Match,
    PageArray,
    RadixKey,
    Rule,
    Tier,
    restorable,
)
from kvmover.cache.tiers import restore_machine
from kvmover.cache.tiers.agreement import CollectiveOp
from kvmover.cache.tiers.layerwise_copier import LayerGate
from kvmover.cache.tiers.restore_machine import STORAGE, RestoreEvent, RestorePhase, RestoreTerms, Restoring
from kvmover.cache.tiers.tier_metrics import TierCount, TierStage
from kvmover.cache.tiers.tier_parts import TierParts
from kvmover.cache.tiers.tier_policy import Speed, ThroughputEstimator, TierPolicy
from kvmover.cache.tiers.tier_storage import (
    PageRef,
    Stopwatch,
    Storage,
    StorageLookup,
    StorageRead,
    StoredPool,
    Urgency,
)
from kvmover.store import Got


@dataclass(slots=True, eq=False)
class Restore:
    """The restore of one request. `tokens`, `page_ids`, `held` and `handle` count when `phase` is READY.

    `found`: the match at the request's coming. `handle` locks the device pages: see `Controller.release`. In LOAD,
    `gate` lets a forward pass start once the first layers have landed.

    Report `ledger.matched(r, prompt, restore.reusable_tokens)`, and `ledger.admitted(r, restore.credit, restore.lost)`.
    """

    key: RadixKey
    found: Match
    state: Restoring
    page_ids: PageArray = field(default_factory=lambda: NO_IDS)
    held: tuple[tuple[str, PageArray], ...] = ()
    handle: LockHandle | None = None
    gate: LayerGate | None = None
    #: The engine that the request named, and the reason if it brought no page.
    source: str | None = None
    miss: PeerMiss = PeerMiss.NEEDLESS
    #: Hashes of all pages asked for; how many pages are on the host; the question to peers.
    hashes: Sequence[bytes] = ()
    anchor: int = 0
    question: PeerQuestion | None = None
    borrow: PeerRead | None = None
    #: The tree's read operation, and the host pages that it reads into.
    reads: tuple[int, Sequence[int]] = (0, ())
    #: The latest match.
    match: Match | None = None
    #: Locks of found pages, until the restored ones are locked too.
    keeps: list[LockHandle] = field(default_factory=list[LockHandle])
    collective: CollectiveOp | None = None

    @property
    def phase(self) -> RestorePhase:
        """Returns the phase; READY and ABORTED are ends."""
        return self.state.phase

    @property
    def done(self) -> bool:
        """Returns True if ready or given up."""
        return self.state.done

    @property
    def tokens(self) -> int:
        """Returns the leading tokens on the device and locked."""
        return self.state.tokens

    @property
    def reusable_tokens(self) -> int:
        """Returns the tokens on any tier, as known so far."""
        return self.state.reusable_tokens

    @property
    def credit(self) -> Credit:
        """Returns `tokens` by their tier at the request's coming."""
        return self.state.credit

    @property
    def lost(self) -> Mapping[Loss, int]:
        """Returns the other reusable tokens by reason."""
        return self.state.lost


@dataclass(slots=True)
class _Answers:
    """Answers to one look, `waits` still due: lengths in storage, and each peer's, in pages."""

    waits: int
    pages: Sequence[int] = (0,)
    peers: tuple[int, ...] = ()


#: The ledger's reason for a read that ended early.
_LOSS = {Got.POISONED: Loss.POISONED, Got.EVICTED: Loss.CAPACITY_EVICTED, Got.ABSENT: Loss.CAPACITY_EVICTED}


@dataclass(slots=True)
class Restores:
    """The restores of one rank. `reused` gets a node and the first page on its path being loaded.

    `leaving`: given up, with an operation still open. `quarantined`: failed reads from peers that may still write
    to the host.
    """

    parts: TierParts
    clock: Callable[[], float]
    reused: Callable[[int, int], None]
    open: list[Restore] = field(default_factory=list[Restore])
    leaving: list[Restore] = field(default_factory=list[Restore])
    quarantined: list[tuple[PeerRead, CollectiveOp]] = field(default_factory=list["tuple[PeerRead, CollectiveOp]"])
    loads: ThroughputEstimator = field(default_factory=ThroughputEstimator)
    borrows: ThroughputEstimator = field(default_factory=ThroughputEstimator)
    terms: RestoreTerms = field(init=False)

    def __post_init__(self) -> None:
        parts, allocator = self.parts, self.parts.allocator
        page_tokens = allocator.tree.config.page_tokens
        token_bytes = sum(pool.part.nbytes for pool in allocator.tiered_pools) // page_tokens
        stored, peers = parts.storage is not None, parts.peers.terms.most_asked if parts.peers is not None else 0
        self.terms = RestoreTerms(page_tokens, token_bytes, parts.policy, allocator.partial, stored, peers)

    @property
    def reading_pages(self) -> int:
        """Returns the host pages of attention KV being read into."""
        states = [restore.state for restore in (*self.open, *self.leaving)]
        return sum(state.op_pages for state in states if state.asked is RestorePhase.READ)

    def begin(self, key: RadixKey, limit_tokens: int, policy: TierPolicy, source: str | None = None) -> Restore:
        """Begin to restore the cached part of the first `limit_tokens`. It may be ready at once.

        `source`: the only engine to ask of peers.
        """
        match = self.parts.allocator.tree.match(key, limit_tokens=limit_tokens)
        terms = structs.replace(self.terms, policy=policy)
        state, actions = restore_machine.start(terms, limit_tokens, match.tokens, match.best_tokens, self.clock())
        restore = Restore(key, match, state, source=source)
        self._lock(restore, match)
        self.open.append(restore)
        self._carry_out(restore, actions)
        return restore

    def tell(self, restore: Restore, event: RestoreEvent) -> None:
        """Advance by an event, and by all that follows at once."""
        restore.state, actions = restore_machine.step(restore.state, event, self.clock())
        self._carry_out(restore, actions)

    def poll(self) -> None:
        """End quarantined reads that are over, and advance open restores by the time."""
        for read, collective in [each for each in self.quarantined if each[0].over]:
            self.quarantined.remove((read, collective))
            collective.done(1)
        for restore in list(self.open):
            self.tell(restore, restore_machine.TimePassed())

    def check(self) -> None:
        """Raise InvariantBroken if states, operations and lists disagree."""
        for restore in (*self.open, *self.leaving):
            restore.state.check()
            under_way = restore.collective is not None
            if under_way != (restore.state.asked is not None):
                raise InvariantBroken(f"a restore is at {restore.state.asked}, and at no operation of all ranks")
            if under_way and restore.collective not in self.parts.collectives.open:
                raise InvariantBroken(f"a restore waits for an operation that is over: {restore.state}")
        if any(restore.done for restore in self.open) or any(restore.keeps for restore in self.leaving):
            raise InvariantBroken("a restore that is done is open, or keeps its locks")
        if not all(restore.done and not restore.state.over for restore in self.leaving):
            raise InvariantBroken("a restore is leaving, and was not given up or has ended")

    def _carry_out(self, restore: Restore, actions: Sequence[restore_machine.RestoreAction]) -> None:
        for action in actions:
            event = self._do(restore, action)
            if event is not None:
                self.tell(restore, event)

    def _do(self, restore: Restore, action: restore_machine.RestoreAction) -> RestoreEvent | None:
        """Carry out an action. Returns its event if known."""
        match action:
            case restore_machine.LookUp(pages):
                self._look(restore, pages)
            case restore_machine.BeginFetch(pages, source):
                return self._fetch(restore, pages, source)
            case restore_machine.Decline():
                assert restore.question is not None
                self._peers.decline(restore.question)
            case restore_machine.BeginLoad(tokens):
                return self._load(restore, tokens)
            case restore_machine.BeginNothing():
                self._join(restore)
            case restore_machine.Vote(answer):
                assert restore.collective is not None
                restore.collective.done(*answer)
            case restore_machine.AskToStop():
                assert restore.collective is not None
                restore.collective.stop = True
            case restore_machine.EndCopy(op, pages):
                self._lend(restore, op, pages)
                self.parts.allocator.apply(self.parts.allocator.tree.end(op, pages))
            case restore_machine.Abandon(op):
                self._abandon(restore, op)
            case restore_machine.Rematch():
                return self._rematch(restore)
            case restore_machine.Secure():
                return self._secure(restore)
            case restore_machine.LetGo():
                self._let_go(restore)
        return None

    # All ranks

    def _join(self, restore: Restore, width: int = 3, ids: Sequence[int] = ()) -> None:
        restore.collective = self.parts.collectives.begin(
            lambda agreed: self._agreed(restore, agreed.tolist()), width, ids
        )

    def _agreed(self, restore: Restore, answer: list[int]) -> None:
        stopped = restore.collective is not None and restore.collective.stopping
        restore.collective = restore.gate = None
        self.tell(restore, restore_machine.RanksAgreed(answer, stopped))
        if restore in self.leaving:
            self.leaving.remove(restore)

    # Peers and storage

    def _look(self, restore: Restore, pages: int) -> None:
        """Ask peers and storage for pages not on the host, and storage for windows before them."""
        tree, key, node = self.parts.allocator.tree, restore.key, restore.found.host_node
        restore.hashes = hashes = key.page_hashes(tree.config.page_words)[:pages]
        restore.anchor = anchor = len(tree.page_hashes(node)) if node != ROOT and tree.is_backed(node) else 0
        self._join(restore, pages + 1 + self.terms.peer_votes)
        assert restore.collective is not None
        if self.terms.peers:
            name = f"{restore.collective.serial}-{hashes[-1].hex()[:16]}"
            restore.question = self._peers.question(name, hashes[0], restore.source)
        answers = _Answers((self.parts.storage is not None) + (self.terms.peers > 0))
        if self.terms.peers:
            self._ask(restore, pages, answers)
        if self.parts.storage is not None:
            self._look_up(restore, self.parts.storage, anchor, answers)

    def _looked(self, restore: Restore, answers: _Answers) -> None:
        answers.waits -= 1
        if not answers.waits:
            ways = self._way(), self._peer_way()
            mark = restore.question.mark if restore.question is not None else 0
            self.tell(restore, restore_machine.LookedUp(answers.pages, ways[0], answers.peers, ways[1], mark))

    def _ask(self, restore: Restore, pages: int, answers: _Answers) -> None:
        page_tokens, watch, anchor = self.terms.page_tokens, Stopwatch(), restore.anchor
        assert restore.question is not None

        def ended(said: Sequence[PeerAnswer]) -> None:
            self.parts.meter.stages[TierStage.ASK].add(watch.seconds)
            answers.peers = tuple(min(pages, each.tokens // page_tokens) for each in said)
            if restore.source is not None:
                restore.miss = said[0].miss or PeerMiss.NEEDLESS
            self._looked(restore, answers)

        self._peers.look(restore.question, PeerPrefix(restore.key, anchor * page_tokens, pages * page_tokens), ended)

    def _look_up(self, restore: Restore, storage: Storage, anchor: int, answers: _Answers) -> None:
        reach = max((pool.rule.reach_tokens or 0 for pool in self.parts.allocator.tiered_pools), default=0)
        first = max(0, anchor - -(-reach // self.terms.page_tokens))
        look, watch = StorageLookup(storage, restore.hashes[first:]), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.parts.meter.stages[TierStage.LOOK].add(watch.seconds)
            self.parts.meter.counts[TierCount.LOOKED_UP_PAGES] += len(look.hashes)
            legal = [0]
            if error is None:
                legal = np.flatnonzero(self._legal(storage, look, first, anchor)).tolist()
            nearer = restore.found.best_tokens // self.terms.page_tokens
            self.parts.meter.counts[TierCount.FOUND_PAGES] += max(0, legal[-1] - nearer)
            answers.pages = tuple(legal)
            self._looked(restore, answers)

        self.parts.worker.begin(look, Urgency.LOOK, ended)

    def _legal(self, storage: Storage, look: StorageLookup, first: int, anchor: int) -> np.ndarray:
        rules, present = dict[str, Rule](), dict[str, Sequence[bool]]()
        for number, (stored_pool, row) in enumerate(zip(storage.stored_pools, look.present, strict=True)):
            rules[str(number)] = stored_pool.tiered_pool.rule
            present[str(number)] = [False] * first + row
        return restorable(rules, present, self.terms.page_tokens, anchor)

    def _way(self) -> tuple[Speed, ...]:
        """Return the speeds from storage to the device; () if unmeasured."""
        read, load = self.parts.storage.reads.speed() if self.parts.storage is not None else None, self.loads.speed()
        return () if read is None else (read.within(self.parts.policy.read_rate), *((load,) if load else ()))

    def _peer_way(self) -> tuple[Speed, ...]:
        borrow, load = self.borrows.speed(), self.loads.speed()
        return () if borrow is None else (borrow, *((load,) if load else ()))

    def _fetch(self, restore: Restore, pages: int, source: int) -> RestoreEvent:
        allocator, hashes, anchor = self.parts.allocator, restore.hashes, restore.anchor
        tree = allocator.tree
        needs = {FULL: range(anchor, pages)}
        for pool in allocator.tiered_pools:
            if pool.name != FULL:
                needs[pool.name] = pool.rule.needs(pages, self.terms.page_tokens)
        ids = None
        if self.reading_pages + pages - anchor <= self.parts.policy.reading_share * allocator.host[FULL].pages:
            ids = allocator.take_all({name: len(where) for name, where in needs.items()}, Tier.HOST)
        if ids is None:
            return restore_machine.HostFull(pages * self.terms.page_tokens - restore.found.best_tokens)
        key = RadixKey(restore.key.data[: pages * tree.config.page_bytes], restore.key.namespace, restore.key.units)
        op = tree.begin_fetch(key, anchor, ids[FULL], {name: ids[name] for name in needs if name != FULL})
        restore.reads = op, ids[FULL]
        self._join(restore, 3, [page for row in ids.values() for page in row])
        if source != STORAGE:
            self._borrow(restore, source, range(anchor, pages), ids[FULL])
            return restore_machine.FetchBegun(op, pages - anchor)
        wanted = [
            (stored_pool, PageRef(max(0, position - anchor), hashes[position], ids[pool.name][place]))
            for stored_pool in self._storage.stored_pools
            for pool in (stored_pool.tiered_pool,)
            for place, position in enumerate(needs[pool.name])
            if pool.share.mine(place)
        ]
        self._read(restore, wanted, pages - anchor)
        return restore_machine.FetchBegun(op, pages - anchor)

    def _read(self, restore: Restore, wanted: list[tuple[StoredPool, PageRef]], total: int) -> None:
        collective = restore.collective
        assert collective is not None
        wanted.sort(key=lambda each: each[1].place)
        read, watch = StorageRead(self._storage, wanted, total, lambda: collective.stopping), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.parts.meter.stages[TierStage.FETCH].add(watch.seconds)
            self.parts.meter.counts[TierCount.FETCHED_PAGES] += read.pages
            self.parts.meter.counts[TierCount.FETCHED_BYTES] += read.nbytes
            good, loss = (0, Loss.READ_FAILED) if error is not None else (read.good, Loss.LATE)
            if error is None and read.why is not None:
                loss = _LOSS.get(read.why, Loss.READ_FAILED)
            if good < total:
                self.parts.meter.dropped["fetch", str(loss)] += total - good
            self.tell(restore, restore_machine.FetchEnded(good, loss))

        self.parts.worker.begin(read, Urgency.READ, ended)

    def _borrow(self, restore: Restore, source: int, pages: range, ids: Sequence[int]) -> None:
        """Read `pages` from a peer, all or not at all."""
        collective, page_tokens, watch = restore.collective, self.terms.page_tokens, Stopwatch()
        assert collective is not None
        assert restore.question is not None

        def ended(outcome: int | BaseException) -> None:
            self.parts.meter.stages[TierStage.BORROW].add(watch.seconds)
            if isinstance(outcome, int):
                self.parts.meter.counts[TierCount.BORROWED_PAGES] += len(pages)
                self.parts.meter.counts[TierCount.BORROWED_BYTES] += outcome
                self.borrows.add(outcome, watch.seconds)
                self.tell(restore, restore_machine.FetchEnded(len(pages)))
                return
            loss = Loss.LATE if collective.stopping else Loss.READ_FAILED
            self.parts.meter.dropped["borrow", str(loss)] += len(pages)
            restore.miss = PeerMiss.READ_FAILED
            self.tell(restore, restore_machine.FetchEnded(0, loss))

        table = [0] * pages.start + list(ids)  # pages before the range are not read into
        tables = [table] * len(self.parts.allocator.tiered_pools)
        positions = range(pages.start * page_tokens, pages.stop * page_tokens)
        restore.borrow = PeerRead(lambda: collective.stopping, ended)
        self._peers.read(restore.question, source, positions, tables, restore.borrow)

    def _abandon(self, restore: Restore, op: int) -> None:
        """Free a failed peer read's pages at one time on all ranks, once no rank's can be written."""
        read, restore.borrow = restore.borrow, None
        collective = self.parts.collectives.begin(lambda agreed: self._abandoned(op))
        if read is None or read.over:
            collective.done(1)
        else:
            self.quarantined.append((read, collective))

    def _abandoned(self, op: int) -> None:
        if op:
            self.parts.allocator.apply(self.parts.allocator.tree.end(op, 0))

    def _lend(self, restore: Restore, op: int, pages: int) -> None:
        """Lend pages read, before those the tree drops are freed."""
        if self.parts.peers is not None and restore.reads[0] == op:
            ids = list(restore.reads[1])[:pages]
            self.parts.peers.came(restore.hashes[restore.anchor : restore.anchor + len(ids)], ids)

    @property
    def _peers(self) -> PeerTier:
        assert self.parts.peers is not None
        return self.parts.peers

    @property
    def _storage(self) -> Storage:
        assert self.parts.storage is not None
        return self.parts.storage

    # Host to device

    def _lock(self, restore: Restore, match: Match) -> None:
        allocator = self.parts.allocator
        if match.best_tokens > match.tokens:
            restore.keeps += allocator.lock_for_load(match.best_node)
        restore.keeps.append(allocator.tree.lock(match.device_node))

    def _rematch(self, restore: Restore) -> RestoreEvent:
        match = restore.match = self.parts.allocator.tree.match(restore.key, limit_tokens=restore.state.limit_tokens)
        if not match.waits:
            self._lock(restore, match)
        return restore_machine.Rematched(match.tokens, match.best_tokens, bool(match.waits))

    def _load(self, restore: Restore, tokens: int) -> RestoreEvent:
        allocator, tree, match = self.parts.allocator, self.parts.allocator.tree, restore.match
        if match is None or match.best_tokens != tokens:
            match = tree.match(restore.key, limit_tokens=tokens)
        more = match.best_tokens > match.tokens
        ids = allocator.take_all(tree.load_needs(match.best_node), Tier.DEVICE) if more else None
        if ids is None:
            room = allocator.room(FULL, Tier.DEVICE) * self.terms.page_tokens
            return restore_machine.DeviceFull(match.tokens, tokens - match.tokens, room)
        transfer = tree.begin_load(match.best_node, ids)
        total = match.best_tokens // self.terms.page_tokens - transfer.first_page
        batches, watch = allocator.batches(transfer.legs, Tier.DEVICE), Stopwatch()
        self._join(restore)

        def done() -> None:
            nbytes = sum(batch.nbytes for batch in batches)
            self.parts.meter.stages[TierStage.LOAD].add(watch.seconds)
            self.parts.meter.counts[TierCount.LOADED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.parts.meter.counts[TierCount.LOADED_BYTES] += nbytes
            self.loads.add(nbytes, watch.seconds)
            self.tell(restore, restore_machine.LoadEnded())

        restore.gate = allocator.copies.begin(batches, Tier.DEVICE, done)
        self.reused(match.best_node, transfer.first_page)
        return restore_machine.LoadBegun(transfer.op, total)

    # The end

    def _secure(self, restore: Restore) -> RestoreEvent:
        tree = self.parts.allocator.tree
        match = tree.match(restore.key, limit_tokens=restore.state.limit_tokens)
        restore.handle = tree.lock(match.device_node)
        restore.page_ids, restore.held = match.page_ids, match.held
        self.parts.meter.stages[TierStage.RESTORE].add(self.clock() - restore.state.began_s)
        return restore_machine.Secured(match.tokens)

    def _let_go(self, restore: Restore) -> None:
        for handle in restore.keeps:
            self.parts.allocator.tree.unlock(handle)
        restore.keeps.clear()
        self.open.remove(restore)
        if not restore.state.over:
            self.leaving.append(restore)
