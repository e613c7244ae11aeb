"""Restore: one request's way back to the device, from storage to the host and from there on, as all ranks agree.

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
from kvmover.cache.prefix import FULL, ROOT, Key, Match, Receipt, Tier
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.prefix.keys import NO_IDS, WORD_BYTES
from kvmover.cache.prefix.results import PageArray
from kvmover.cache.tiers.agreement import Row, Ticket, Tickets, agreed_count, counted
from kvmover.cache.tiers.allocator import Stock
from kvmover.cache.tiers.copies import Gate
from kvmover.cache.tiers.metrics import Count, Meter, Stage
from kvmover.cache.tiers.policy import BestEffort, Pace, Policy, patience_s, pays
from kvmover.cache.tiers.rules import Rule, restorable
from kvmover.cache.tiers.storage import Look, Page, Read, Shelf, Storage
from kvmover.cache.tiers.storage_worker import Stopwatch, Urgency, Worker
from kvmover.store import Got


class Phase(StrEnum):
    """LOOK: asking storage. READ: from storage to the host. LOAD: to the device, or waiting for another's load."""

    LOOK = "look"
    READ = "read"
    LOAD = "load"
    READY = "ready"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Restore:
    """What a request gets. `tokens`, `page_ids`, `held` and `receipt` count when `phase` is READY.

    `receipt` keeps the pages on the device: give it back by `Controller.release`. While in LOAD, `gate` lets a forward
    pass start on `loading`, the match of `best_tokens` that the load makes true, once its first layers are there.

    Two sums for the ledger: `ledger.matched(r, prompt, restore.reusable_tokens)`, and
    `ledger.admitted(r, restore.credit, restore.lost)`.
    """

    key: Key
    limit_tokens: int
    began_s: float
    found: Match
    phase: Phase = Phase.LOOK
    tokens: int = 0
    page_ids: PageArray = field(default_factory=lambda: NO_IDS)
    held: tuple[tuple[str, PageArray], ...] = ()
    receipt: Receipt | None = None
    credit: Credit = field(default_factory=Credit)
    lost: dict[Loss, int] = field(default_factory=dict[Loss, int])
    reusable_tokens: int = 0
    gate: Gate | None = None
    #: Locks of what was found, until what is brought is locked too.
    keeps: list[Receipt] = field(default_factory=list[Receipt])
    ticket: Ticket | None = None
    reasons: Counter[Loss] = field(default_factory=Counter[Loss])
    patience_s: float | None = None
    wanted: bool = False
    loads: int = 0

    @property
    def done(self) -> bool:
        return self.phase in (Phase.READY, Phase.ABORTED)

    def ready(self, match: Match, receipt: Receipt) -> None:
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
        self.receipt, self.phase = receipt, Phase.READY


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

    stock: Stock
    storage: Storage | None
    worker: Worker
    tickets: Tickets
    policy: Policy
    meter: Meter
    clock: Callable[[], float]
    reused: Callable[[int, int], None]
    open: list[Restore] = field(default_factory=list[Restore])
    reading_pages: int = 0
    loads: Pace = field(default_factory=Pace)

    def begin(self, key: Key, limit_tokens: int) -> Restore:
        tree = self.stock.tree
        match = tree.match(key, limit_tokens=limit_tokens)
        restore = Restore(key, limit_tokens, self.clock(), match, reusable_tokens=match.best_tokens)
        restore.keeps.append(tree.lock(match.device_node))
        if match.best_tokens > match.tokens and tree.is_backed(match.best_node):
            restore.keeps.append(tree.lock_host(match.best_node))
        self.open.append(restore)
        missing = limit_tokens // tree.shape.page_tokens * tree.shape.page_tokens - match.best_tokens
        if self.storage is None or missing < max(1, self.policy.least_tokens):
            self._load(restore)
        else:
            self._look(restore, self.storage)
        return restore

    def poll(self) -> None:
        """Ask for an end of reads that took too long, and go on where another's load was waited for."""
        for restore in list(self.open):
            if restore.phase is Phase.READ and restore.ticket is not None:
                late = restore.patience_s is not None and self.clock() - restore.began_s >= restore.patience_s
                wanted = restore.wanted and isinstance(self.policy.prefetch, BestEffort)
                restore.ticket.stop |= late or wanted
            if restore.phase is Phase.LOAD and restore.ticket is None:
                self._load(restore)

    def abort(self, restore: Restore) -> None:
        if restore.done:
            return
        restore.phase = Phase.ABORTED
        if restore.ticket is not None:
            restore.ticket.stop = True
        self._let_go(restore)

    # Storage: look up

    def _look(self, restore: Restore, storage: Storage) -> None:
        shape = self.stock.tree.shape
        pages = restore.limit_tokens // shape.page_tokens
        words = np.frombuffer(restore.key.data, "<u4")
        hashes = chain(restore.key.namespace.digest, words, shape.page_tokens * shape.units)[:pages]
        node = restore.found.host_node
        anchor = len(self.stock.tree.page_hashes(node)) if node != ROOT and self.stock.tree.is_backed(node) else 0
        reach = max((h.rule.reach_tokens or 0 for h in self.stock.holdings), default=0)
        first = max(0, anchor - -(-reach // shape.page_tokens))
        look, watch = Look(storage, hashes[first:]), Stopwatch()
        restore.ticket = ticket = self.tickets.begin(
            lambda agreed: self._looked(restore, storage, hashes, anchor, agreed), width=pages + 1
        )

        def ended(error: Exception | None) -> None:
            self.meter.stages[Stage.LOOK].add(watch.seconds)
            self.meter.counts[Count.LOOKED_UP_PAGES] += len(look.hashes)
            legal = np.zeros(pages + 1, bool)
            if error is None:
                legal = self._legal(storage, look, first, anchor)
            ticket.done(*self._wanted(restore, legal))

        self.worker.begin(look, Urgency.LOOK, ended)

    def _legal(self, storage: Storage, look: Look, first: int, anchor: int) -> np.ndarray:
        rules, present = dict[str, Rule](), dict[str, Sequence[bool]]()
        for number, (shelf, row) in enumerate(zip(storage.shelves, look.present, strict=True)):
            rules[str(number)] = shelf.holding.rule
            present[str(number)] = [False] * first + row
        return restorable(rules, present, self.stock.tree.shape.page_tokens, anchor)

    def _wanted(self, restore: Restore, legal: np.ndarray) -> list[int]:
        """This rank's vote, 1 for a number of pages that it can and would fetch; and why not for those it would not."""
        page_tokens = self.stock.tree.shape.page_tokens
        best = restore.found.best_tokens // page_tokens
        most = longest(legal, best)
        restore.reusable_tokens = max(restore.reusable_tokens, most * page_tokens)
        self.meter.counts[Count.FOUND_PAGES] += max(0, most - best)
        tokens = most * page_tokens - restore.found.best_tokens
        token_bytes = sum(h.part.nbytes for h in self.stock.holdings) // page_tokens
        assert self.storage is not None
        read, load = self.storage.reads.speed(), self.loads.speed()
        known = () if read is None else (read.within(self.policy.read_rate), *((load,) if load else ()))
        if most and (tokens < self.policy.least_tokens or not pays(self.policy.prefetch, tokens, token_bytes, known)):
            restore.reasons[Loss.THRESHOLD] += tokens
            legal = np.zeros_like(legal)
        votes = legal.astype(np.int64)
        votes[: best + 1] = 0
        return votes.tolist()

    def _looked(self, restore: Restore, storage: Storage, hashes: list[bytes], anchor: int, agreed: Row) -> None:
        restore.ticket = None
        if restore.phase is Phase.ABORTED:
            return
        pages, page_tokens = longest(agreed), self.stock.tree.shape.page_tokens
        mine = restore.reusable_tokens - restore.reasons[Loss.THRESHOLD]
        if mine > max(pages * page_tokens, restore.found.best_tokens):
            restore.reasons[Loss.RANK_MINIMUM] += mine - max(pages * page_tokens, restore.found.best_tokens)
        if pages:
            self._read(restore, storage, hashes[:pages], anchor)
        else:
            self._load(restore)

    # Storage: read

    def _read(self, restore: Restore, storage: Storage, hashes: list[bytes], anchor: int) -> None:
        stock, pages, shape = self.stock, len(hashes), self.stock.tree.shape
        restore.phase = Phase.READ
        restore.patience_s = patience_s(self.policy.prefetch, pages * shape.page_tokens - restore.found.best_tokens)
        needs = {FULL: range(anchor, pages)}
        for holding in stock.holdings:
            if holding.name != FULL:
                needs[holding.name] = holding.rule.needs(pages, shape.page_tokens)
        if self.reading_pages + pages - anchor > self.policy.reading_share * stock.free[FULL, Tier.HOST].pages:
            ids = None
        else:
            ids = stock.take_all({name: len(where) for name, where in needs.items()}, Tier.HOST)
        op, total = 0, pages - anchor
        if ids is not None:
            page_bytes = WORD_BYTES * shape.units * shape.page_tokens
            key = Key(restore.key.data[: pages * page_bytes], restore.key.namespace, restore.key.units)
            op = stock.tree.begin_fetch(key, anchor, ids[FULL], {name: ids[name] for name in needs if name != FULL})
            self.reading_pages += total
        restore.ticket = ticket = self.tickets.begin(
            lambda agreed: self._read_ended(restore, op, total, agreed),
            3,
            _flat(ids or {}),
        )
        if ids is None:
            restore.reasons[Loss.HOST_CAPACITY] += pages * shape.page_tokens - restore.found.best_tokens
            ticket.done(*counted(0, 0))
            return
        wanted = [
            (shelf, Page(max(0, position - anchor), hashes[position], ids[shelf.holding.name][place]))
            for shelf in storage.shelves
            for place, position in enumerate(needs[shelf.holding.name])
            if shelf.holding.share.mine(place)
        ]
        self._begin_read(storage, restore, ticket, wanted, total)

    def _begin_read(
        self, storage: Storage, restore: Restore, ticket: Ticket, wanted: list[tuple[Shelf, Page]], total: int
    ) -> None:
        wanted.sort(key=lambda each: each[1].place)
        read, watch = Read(storage, wanted, total, lambda: ticket.stopping), Stopwatch()

        def ended(error: Exception | None) -> None:
            self.meter.stages[Stage.FETCH].add(watch.seconds)
            self.meter.counts[Count.FETCHED_PAGES] += read.pages
            self.meter.counts[Count.FETCHED_BYTES] += read.nbytes
            good = 0 if error is not None else read.good
            if good < total:
                failed = read.why is not None or error is not None
                loss = _LOSS.get(read.why, Loss.READ_FAILED) if read.why and error is None else Loss.READ_FAILED
                loss = loss if failed else Loss.LATE
                restore.reasons[loss] += (total - good) * self.stock.tree.shape.page_tokens
                self.meter.dropped["fetch", str(loss)] += total - good
            ticket.done(*counted(good, total))

        self.worker.begin(read, Urgency.READ, ended)

    def _read_ended(self, restore: Restore, op: int, total: int, agreed: Row) -> None:
        ticket, restore.ticket = restore.ticket, None
        if op:
            tree = self.stock.tree
            fetched = agreed_count(agreed, parts=not tree.shape.components)
            restore.reasons[Loss.RANK_MINIMUM] += (_own(ticket) - fetched) * tree.shape.page_tokens
            self.reading_pages -= total
            self.stock.apply(tree.end(op, fetched))
        if restore.phase is not Phase.ABORTED:
            self._load(restore)

    # Host to device

    def _load(self, restore: Restore) -> None:
        """Load what the host has, as much of it as the device has room for; or wait for somebody else's load of it."""
        tree, restore.phase = self.stock.tree, Phase.LOAD
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
        ids = self.stock.take_all(needs, Tier.DEVICE)
        if ids is None and not tree.shape.components:
            match = self._shorter(restore, match)
            needs = tree.load_needs(match.best_node) if match.best_tokens > match.tokens else {}
            ids = self.stock.take_all(needs, Tier.DEVICE) if needs else None
        if ids is None:
            restore.reasons[Loss.DEVICE_CAPACITY] += missing
        self._begin_load(restore, match, ids)

    def _shorter(self, restore: Restore, match: Match) -> Match:
        """The match of as much as there is room for."""
        tree = self.stock.tree
        room = self.stock.room(FULL, Tier.DEVICE) * tree.shape.page_tokens
        restore.reasons[Loss.DEVICE_CAPACITY] += max(0, match.best_tokens - match.tokens - room)
        return tree.match(restore.key, limit_tokens=match.tokens + room)

    def _begin_load(self, restore: Restore, match: Match, ids: dict[str, list[int]] | None) -> None:
        tree = self.stock.tree
        if ids is None:
            restore.ticket = self.tickets.begin(lambda agreed: self._loaded(restore, 0, 0, agreed), 3)
            restore.ticket.done(*counted(0, 0))
            return
        transfer = tree.begin_load(match.best_node, ids)
        total = match.best_tokens // tree.shape.page_tokens - transfer.first_page
        batches, watch = self.stock.batches(transfer.legs, Tier.DEVICE), Stopwatch()
        restore.ticket = ticket = self.tickets.begin(
            lambda agreed: self._loaded(restore, transfer.op, total, agreed), 3
        )

        def done() -> None:
            nbytes = sum(batch.nbytes for batch in batches)
            self.meter.stages[Stage.LOAD].add(watch.seconds)
            self.meter.counts[Count.LOADED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.meter.counts[Count.LOADED_BYTES] += nbytes
            self.loads.add(nbytes, watch.seconds)
            ticket.done(*counted(total, total))

        restore.gate = self.stock.copies.begin(batches, Tier.DEVICE, done)
        self.reused(match.best_node, transfer.first_page)

    def _loaded(self, restore: Restore, op: int, total: int, agreed: Row) -> None:
        restore.ticket = restore.gate = None
        if op:
            loaded = agreed_count(agreed, parts=not self.stock.tree.shape.components)
            restore.reasons[Loss.RANK_MINIMUM] += (total - loaded) * self.stock.tree.shape.page_tokens
            self.stock.apply(self.stock.tree.end(op, loaded))
        if restore.phase is not Phase.ABORTED:
            self._load(restore)

    def _finish(self, restore: Restore) -> None:
        tree = self.stock.tree
        match = tree.match(restore.key, limit_tokens=restore.limit_tokens)
        receipt = tree.lock(match.device_node)
        restore.ready(match, receipt)
        self.meter.stages[Stage.RESTORE].add(self.clock() - restore.began_s)
        self._let_go(restore)

    def _let_go(self, restore: Restore) -> None:
        for receipt in restore.keeps:
            self.stock.tree.unlock(receipt)
        restore.keeps.clear()
        self.open.remove(restore)


def _own(ticket: Ticket | None) -> int:
    """What this rank had done of what is agreed on now."""
    return int(ticket.answer[0]) if ticket is not None and ticket.answer is not None else 0


def _flat(ids: Mapping[str, list[int]]) -> list[int]:
    return [page for row in ids.values() for page in row]
