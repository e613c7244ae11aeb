"""TieredRank: a rank of the demo that keeps its KV on three tiers, and shares the last one, or lends the middle one."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvmover.cache.ledger import Account, Ledger, LedgerCollector
from kvmover.cache.peers import PeerTerms, PeerTier
from kvmover.cache.prefix import PrefixTree, WriteThrough
from kvmover.cache.tiers import (
    Controller,
    ControllerConfig,
    Grouped,
    HostTier,
    Reach,
    Storage,
    TierCollector,
    TierCount,
    TieredPool,
    TierPolicy,
    Wait,
)
from kvmover.config.settings import Settings
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.plan.fleet_text import FleetText
from kvmover.store import Namespace, PageStore
from kvmover.tools.demo.model import Gloo, ModelShard, PagedCache, Transformer
from kvmover.tools.demo.rank import Digests
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.watched import Watched
from kvmover.transfer.protocol.handshake import Place
from kvmover.transport import NixlTransport

#: Host pages for each page of the device.
_HOST_RATIO = 2

#: Pause between a doomed lender's checks for a loan, s.
_LOOK_S = 0.0005

#: A killed peer is given up soon; a peer slow on a busy machine still has time to answer.
_SILENCE_S, _DRAIN_S, _PING_S, _ASK_S = 2.0, 0.5, 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A request on a rank: tokens by tier, bytes and pages read, and digests of restored and kept rows."""

    answer: list[int]
    gaps: list[float]
    hits: dict[str, int]
    restored_tokens: int
    read_bytes: int
    read_pages: int
    seconds: float
    restored: Digests
    kept_tokens: int
    kept: Digests


@dataclass(frozen=True, slots=True)
class TieredSeat:
    """The rank of a fleet that a process becomes.

    `meet`: a file in which the fleet meets; `root`: location of the store, or None; `run`: a word of the namespace,
    unique to the run, so that other runs' pages stay unseen; `peers`: engines that `engine` borrows pages from.
    `first_port`: as in Seat.
    """

    scenario: Scenario
    fleet: FleetText
    rank: int
    pages: int
    meet: str
    root: Path | str | None
    run: str
    settings: Settings
    engine: str = "keeper"
    peers: tuple[str, ...] = ()
    first_port: int = 0

    @property
    def namespace(self) -> Namespace:
        """Returns the namespace of this run's pages."""
        model = self.scenario.model
        return Namespace(model.name, f"seed {model.seed}, run {self.run}", self.fleet.fleet.page_tokens)

    def sit(self) -> TieredRank:
        """Make the rank's pool, model, store and controller, in this process."""
        return TieredRank(self)


class TieredRank:
    """A seated process that chooses itself the pages to keep: all ranks are asked alike, so all choose alike."""

    def __init__(self, seat: TieredSeat) -> None:
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        fleet, component, model = seat.fleet.fleet, seat.scenario.component, seat.scenario.model
        at, self._page, self._unit = fleet.coordinate(seat.rank), fleet.page_tokens, seat.scenario.unit_tokens
        self._shard = fleet.shard(component, seat.rank, fleet.page_tokens)
        self._pool = Pool.zeros(PoolSpec.dense(component, self._shard, seat.pages, self._page, seat.fleet.order))
        comm = Gloo.join(FileStore(seat.meet, fleet.size), seat.rank, fleet.tp, fleet.pp)
        share = ModelShard.of_rank(model, fleet.tp, fleet.pp, at.tp, at.pp)
        self._model = Transformer(model, share, comm)
        host = HostTier(seat.pages * _HOST_RATIO, reach=Reach.PEERS if seat.peers else Reach.OWN)
        tiered_pool = TieredPool.of(component, fleet, seat.rank, self._pool, host)
        space = seat.namespace
        self._store = PageStore.open(seat.root, space) if seat.root is not None else None
        storage = Storage(self._store, space, [tiered_pool], fleet, seat.rank) if self._store else None
        config = ControllerConfig(TierPolicy(prefetch=Wait(), least_tokens=1), Grouped(comm.group))
        self._peers = _peers(seat, tiered_pool.host) if seat.peers else None
        tree = PrefixTree(fleet.page_tokens, tiers=WriteThrough())
        self._controller = Controller(tree, [tiered_pool], storage, config, peers=self._peers)
        self._watched = Watched(seat.settings, seat.engine, seat.rank, seat.first_port)
        self._keeps_accounts = seat.rank == 0  # all ranks see the same requests
        self._ledger = Ledger(sink=self._account)
        ledgers = [LedgerCollector(self._ledger)] if self._keeps_accounts else []
        self._watched.serve(TierCollector(self._controller.snapshot), *ledgers)

    def _account(self, account: Account) -> None:
        if self._keeps_accounts:
            self._watched.account(account)

    def card(self) -> bytes:
        """Returns the card that borrowers connect with."""
        assert self._peers is not None
        return self._peers.card

    def connect(self, cards: list[bytes]) -> None:
        """Connect with all peers to borrow from."""
        assert self._peers is not None
        for card in cards:
            self._peers.connect(card)

    def idle(self) -> None:
        """Do no work: a thread answers the peers."""

    def die_lending(self) -> None:
        """Kill this process (SIGKILL) as soon as a peer has a loan."""
        peers = self._peers
        assert peers is not None

        def wait() -> None:
            while not peers.counts().loans:
                time.sleep(_LOOK_S)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, daemon=True).start()

    def serve(self, request: str, prompt: tuple[int, ...], answer_tokens: int) -> Served:
        """Restore pages from any tier, compute the rest, answer, and keep all whole pages on every tier."""
        controller, ledger = self._controller, self._ledger
        began_s, before = time.monotonic(), controller.meter.copy().counts
        restore = controller.restore(prompt)
        controller.wait(restore)
        restored_s = time.monotonic() - began_s
        ledger.matched(request, len(prompt), restore.reusable_tokens, began_s)
        ledger.admitted(request, restore.credit, restore.lost)
        restored: list[int] = restore.page_ids.tolist()
        fresh = controller.take(-(-(len(prompt) + answer_tokens) // self._page) - len(restored))
        assert fresh is not None, "the demo's pools hold all of its requests"
        pages = [*restored, *fresh]
        digests = self._digests(restored)
        cache = self._cache(pages)
        self._model.gaps.clear()
        answer = self._model.generate(prompt, answer_tokens, cache, restore.tokens)
        ledger.computed(request, len(prompt) - restore.tokens)
        account = ledger.finished(request, time.monotonic())
        assert account is not None
        whole = (len(prompt) + answer_tokens - 1) // self._page
        kept = self._digests(pages[:whole])
        controller.keep([*prompt, *answer[:-1]], pages[len(restored) : whole], first_page=len(restored))
        controller.give(pages[whole:])
        controller.release(restore)
        controller.wait()
        self._watched.look()
        counts = controller.meter.counts
        tiers = ("device", "host", "storage", "peer") if self._peers else ("device", "host", "storage")
        hits = {tier: getattr(account, f"{tier}_tokens") for tier in tiers}
        return Served(
            answer,
            list(self._model.gaps),
            hits,
            restore.tokens,
            sum(counts[each] - before[each] for each in (TierCount.FETCHED_BYTES, TierCount.BORROWED_BYTES)),
            sum(counts[each] - before[each] for each in (TierCount.FETCHED_PAGES, TierCount.BORROWED_PAGES)),
            restored_s,
            digests,
            whole * self._page,
            kept,
        )

    def close(self) -> dict[str, Any]:
        """Close the rank. Returns the ledger's sums of this fleet's life."""
        self._controller.close()
        if self._peers is not None:
            self._peers.close()
        if self._store is not None:
            self._store.close()
        self._watched.close()
        return asdict(self._ledger.total().first)

    def _cache(self, pages: list[int]) -> PagedCache:
        kv = self._pool.spec.component.kv
        planes = {
            layer: [self._pool.plane(number, plane) for plane in range(kv)]
            for number, layer in enumerate(self._shard.layers)
        }
        return PagedCache(planes, pages, self._page)

    def _digests(self, pages: Sequence[int]) -> Digests:
        """Returns digests of every unit's rows by (unit * layers + layer, kv, head).

        A unit is the largest number of tokens that divides the pages of all fleets.
        """
        layers, units = self._pool.spec.component.layers, self._page // self._unit
        digests: Digests = {}
        for number, layer in enumerate(self._shard.layers):
            for plane in range(self._pool.spec.component.kv):
                view = self._pool.plane(number, plane)
                for place, (page, unit) in enumerate((page, unit) for page in pages for unit in range(units)):
                    tokens = slice(unit * self._unit, (unit + 1) * self._unit)
                    for local, head in enumerate(self._shard.heads):
                        rows = view[page, tokens, local].contiguous().numpy().tobytes()
                        digests[place * layers + layer, plane, head] = hashlib.sha256(rows).hexdigest()
        return digests


def _peers(seat: TieredSeat, host: Pool) -> PeerTier:
    """Make the peer tier of a rank whose fleet borrows and lends."""
    model = seat.scenario.model
    place, name = Place(seat.engine, seat.fleet.fleet, seat.rank), f"{model.name}, seed {model.seed}"
    config = replace(seat.settings.mover_config(), silence_s=_SILENCE_S, drain_s=_DRAIN_S, ping_s=_PING_S)
    wire = NixlTransport(f"{seat.engine}-{seat.rank}")
    return PeerTier(wire, name, place, [host], PeerTerms(seat.peers, ask_s=_ASK_S), config)
