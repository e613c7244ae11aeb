"""A tiered rank is one process of the demo that keeps its KV on three tiers, and shares the last one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmover.cache.ledger import Account, Ledger, LedgerCollector
from kvmover.cache.prefix import PrefixTree, WriteThrough
from kvmover.cache.tiers import (
    Controller,
    ControllerConfig,
    Grouped,
    HostTier,
    Storage,
    TierCollector,
    TierCount,
    TieredPool,
    TierPolicy,
    Wait,
)
from kvmover.config.settings import Settings
from kvmover.demo.model import Gloo, ModelShard, PagedCache, Transformer
from kvmover.demo.rank import Digests, Watched
from kvmover.demo.scenarios import Scenario
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.plan.fleet_text import FleetText
from kvmover.store import Namespace, PageStore

#: Host pages for each page of the device.
_HOST_RATIO = 2


@dataclass(frozen=True, slots=True)
class Served:
    """One request on one rank: tokens by the tier they came from, what was read, and the rows of the restored ones."""

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
    """Which rank of a fleet a process is to be. `meet`: a file in which the fleet meets; `root`: the store's."""

    scenario: Scenario
    fleet: FleetText
    rank: int
    pages: int
    meet: str
    root: str
    settings: Settings

    def sit(self) -> TieredRank:
        """Become that rank: pool, model, store and controller are made here."""
        return TieredRank(self)


class TieredRank:
    """A seated process, which decides for itself what it keeps: as all ranks are asked alike, all decide alike."""

    def __init__(self, seat: TieredSeat) -> None:
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        fleet, component, model = seat.fleet.fleet, seat.scenario.component, seat.scenario.model
        at, self._page = fleet.coordinate(seat.rank), fleet.page_tokens
        self._shard = fleet.shard(component, seat.rank, fleet.page_tokens)
        spec = PoolSpec.dense(component, self._shard, seat.pages, fleet.page_tokens, seat.fleet.order)
        self._pool = Pool.zeros(spec)
        comm = Gloo.join(FileStore(seat.meet, fleet.size), seat.rank, fleet.tp, fleet.pp)
        share = ModelShard.of_rank(model, fleet.tp, fleet.pp, at.tp, at.pp)
        self._model = Transformer(model, share, comm)
        tiered_pool = TieredPool.of(component, fleet, seat.rank, self._pool, HostTier(seat.pages * _HOST_RATIO))
        space = Namespace(model.name, f"seed {model.seed}", fleet.page_tokens)
        self._store = PageStore.open(Path(seat.root), space)
        storage = Storage(self._store, space, [tiered_pool], fleet, seat.rank)
        config = ControllerConfig(TierPolicy(prefetch=Wait(), least_tokens=1), Grouped(comm.group))
        self._controller = Controller(
            PrefixTree(fleet.page_tokens, tiers=WriteThrough()), [tiered_pool], storage, config
        )
        self._watched = Watched(seat.settings, "keeper", seat.rank)
        self._keeps_accounts = seat.rank == 0  # all ranks see the same requests
        self._ledger = Ledger(sink=self._account)
        ledgers = [LedgerCollector(self._ledger)] if self._keeps_accounts else []
        self._watched.serve(TierCollector(self._controller.snapshot), *ledgers)

    def _account(self, account: Account) -> None:
        if self._keeps_accounts:
            self._watched.account(account)

    def serve(self, request: str, prompt: tuple[int, ...], answer_tokens: int) -> Served:
        """Restore what any tier has, compute the rest, answer, and keep all of it on every tier."""
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
        hits = {tier: getattr(account, f"{tier}_tokens") for tier in ("device", "host", "storage")}
        return Served(
            answer,
            list(self._model.gaps),
            hits,
            restore.tokens,
            counts[TierCount.FETCHED_BYTES] - before[TierCount.FETCHED_BYTES],
            counts[TierCount.FETCHED_PAGES] - before[TierCount.FETCHED_PAGES],
            restored_s,
            digests,
            whole * self._page,
            kept,
        )

    def close(self) -> dict[str, Any]:
        """The ledger's sums of this fleet's life."""
        self._controller.close()
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
        """Of every page's rows, by (layer, kv, head) and page number: the layer's number counts pages above it."""
        layers = self._pool.spec.component.layers
        digests: Digests = {}
        for number, layer in enumerate(self._shard.layers):
            for plane in range(self._pool.spec.component.kv):
                view = self._pool.plane(number, plane)
                for place, page in enumerate(pages):
                    for local, head in enumerate(self._shard.heads):
                        rows = view[page, :, local].contiguous().numpy().tobytes()
                        digests[place * layers + layer, plane, head] = hashlib.sha256(rows).hexdigest()
        return digests
