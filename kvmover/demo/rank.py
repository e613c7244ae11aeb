"""A rank of the demo is one process with its part of the model, driven over a pipe: `DemoRank` or `TieredRank`.

`DemoRank` has a paged pool and a mover. `TieredRank` keeps its KV on three tiers, and shares the last one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvmover.cache.ledger import Account, Credit, Ledger, LedgerCollector
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
from kvmover.demo.model import Gloo, ModelShard, PagedCache, Transformer
from kvmover.demo.scenarios import Scenario
from kvmover.demo.stored_plane import StoredPlane, restored
from kvmover.layout.fleet import Shard
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.observe.metrics import MoverCollector
from kvmover.observe.observers import Observers
from kvmover.plan.cost import Route
from kvmover.plan.fleet_text import FleetText
from kvmover.store import Namespace, PageStore
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Gate, Result, Transfer
from kvmover.transport import NixlTransport

if TYPE_CHECKING:
    from torch import Tensor

#: Digests of cached rows by (layer, kv, head), in whole-model numbers: equal wherever the same rows are held.
Digests = dict[tuple[int, int, int], str]


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which fleet of a scenario a process is to be. `store`: a file in which the fleet meets.

    `first_port`: how many ports behind the configured one belong to ranks of fleets before this one. `device`: where
    its pool lies; the model computes on the CPU.
    """

    scenario: Scenario
    engine: str
    fleet: FleetText
    rank: int
    pages: int
    store: str
    settings: Settings
    first_port: int = 0
    device: str = "cpu"

    def sit(self) -> DemoRank:
        """Become that rank: pool, model and mover are made here."""
        return DemoRank(self)


class DemoRank:
    """A seated process. Page tables come from outside: all ranks of a fleet use the same page ids."""

    def __init__(self, seat: Seat) -> None:
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        fleet, component = seat.fleet.fleet, seat.scenario.component
        at = fleet.coordinate(seat.rank)
        self._shard: Shard = fleet.shard(component, seat.rank, 1)
        component = seat.fleet.stored(component)
        self._form, self._landed_form = component.form, seat.scenario.dst.stored(component.meant).form
        spec = PoolSpec.dense(component, self._shard, seat.pages, fleet.page_tokens, seat.fleet.order)
        config = seat.settings.mover_config()
        lossy = max(config.lossy, seat.scenario.lossy)
        config = replace(config, route=config.route or seat.scenario.route, lossy=lossy)
        shared = config.route is Route.MAPPED and seat.device == "cpu"
        self._pool = Pool.shared(spec) if shared else Pool.zeros(spec, seat.device)
        comm = Gloo.join(FileStore(seat.store, fleet.size), seat.rank, fleet.tp, fleet.pp)
        share = ModelShard.of_rank(seat.scenario.model, fleet.tp, fleet.pp, at.tp, at.pp)
        self._model, self._agree = Transformer(seat.scenario.model, share, comm), Grouped(comm.group)
        model = Model(seat.scenario.name, (component,))
        place = Place(seat.engine, fleet, seat.rank)
        self._mover = Mover(NixlTransport(f"{seat.engine}-{seat.rank}"), model, place, [self._pool], config)
        self._offered: dict[str, Transfer] = {}
        self._watched = Watched(seat.settings, seat.engine, seat.rank, seat.first_port)
        self._watched.mover(self._mover)
        self._keeps_accounts = seat.engine == "decode" and seat.rank == 0  # all ranks see the same requests
        self._ledger = Ledger(sink=self._watched.account)
        ledgers = [LedgerCollector(self._ledger)] if self._keeps_accounts else []
        self._watched.serve(MoverCollector([self._mover]), *ledgers)

    def card(self) -> bytes:
        """What destinations connect with."""
        return self._mover.card

    def connect(self, cards: list[bytes]) -> None:
        """Connect with every source by its card."""
        for card in cards:
            self._mover.connect(card)

    def prefill(self, tokens: tuple[int, ...], pages: list[int]) -> tuple[int, float]:
        """Compute and cache the rows of a prompt: the first token of the answer, and its logit's gap to the second."""
        first = self._model.prefill(tokens, self._cache(pages))
        return first, self._model.gaps[-1]

    def send(self, request: str, pages: list[int], moved: range) -> tuple[Result, Digests]:
        """Serve every destination rank, and say what the moved rows were."""
        transfer = self._mover.send(request, [pages], gates=self._computed())
        self._mover.wait([transfer])
        self._watched.look()
        return transfer.landed(), self._digests(pages, moved)

    def _computed(self) -> list[Gate] | None:
        """On a GPU the rows are in the pages once this stream has come to here."""
        import torch

        if self._pool.tensors[0].device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return [Gate(event)]

    def receive(self, request: str, engine: str, moved: range, pages: list[int]) -> tuple[Result, Digests]:
        """Land the rows of `moved`, and say what they are."""
        transfer = self._mover.receive(request, engine, moved, [pages])
        self._mover.wait([transfer])
        if self._keeps_accounts:
            self._account(request, moved)
        self._watched.look()
        return transfer.landed(), self._digests(pages, moved)

    def decode(self, first: int, position: int, count: int, pages: list[int]) -> tuple[list[int], list[float]]:
        """`count` more tokens after `first`, which lies at `position`, and their gaps."""
        cache, answer = self._cache(pages), [first]
        for step in range(count):
            answer.append(self._model.decode(answer[-1], position + step, cache))
        return answer[1:], self._model.gaps[len(self._model.gaps) - count :]

    def close(self) -> None:
        """End the mover and its observers."""
        self._mover.close()
        self._watched.close()

    def _account(self, request: str, moved: range) -> None:
        """A prompt of `moved.stop` tokens: what was here is a hit, the rest the prefill computed."""
        ledger = self._ledger
        ledger.matched(request, moved.stop, moved.start, time.monotonic())
        ledger.admitted(request, Credit(device_tokens=moved.start))
        ledger.computed(request, len(moved))
        ledger.finished(request, time.monotonic())

    def _cache(self, pages: list[int]) -> PagedCache:
        kv = self._pool.spec.component.kv
        planes = {
            layer: [self._plane(number, plane) for plane in range(kv)]
            for number, layer in enumerate(self._shard.layers)
        }
        return PagedCache(planes, pages, self._pool.spec.page_tokens)

    def _plane(self, layer: int, kv: int) -> Tensor | StoredPlane:
        """Where the model writes and reads: numbers, in whatever form they are stored."""
        import torch

        plane = self._pool.plane(layer, kv)
        return StoredPlane(plane.view(torch.uint8), self._form) if self._form else plane

    def _as_landed(self, rows: Tensor) -> Tensor:
        """Rows of this pool as the decode fleet must hold them, by the definition."""
        import torch

        if self._form is None or self._landed_form is None:
            return rows
        return restored(rows.view(torch.uint8).cpu(), self._form, self._landed_form)

    def _digests(self, pages: list[int], moved: range) -> Digests:
        """Of the moved rows, as they are when they have landed."""
        import torch

        positions = torch.arange(moved.start, moved.stop)
        page_tokens = self._pool.spec.page_tokens
        where = torch.tensor(pages)[positions // page_tokens], positions % page_tokens
        digests: Digests = {}
        for number, layer in enumerate(self._shard.layers):
            for plane in range(self._pool.spec.component.kv):
                rows = self._as_landed(self._pool.plane(number, plane)[where])
                for local, head in enumerate(self._shard.heads):
                    digests[layer, plane, head] = hashlib.sha256(rows[:, local].cpu().numpy().tobytes()).hexdigest()
        return digests


def main(pipe: Connection) -> None:
    """Answer (verb, arguments) with (value, None) or (None, traceback) until the pipe closes. `seat` takes who can sit:
    a Seat here, or that of another kind of process.

    Ctrl-C goes to all processes of a terminal, and is for the parent alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):  # who is killed on purpose is no news; UCX would tell stdout of it
        os.environ.setdefault(name, "FATAL")
    import torch

    torch.set_num_threads(1)
    rank: Any = None
    while True:
        try:
            verb, arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # NIXL's and Gloo's threads are not waited for: nothing is left to save
        try:
            value: Any = None
            if verb == "seat":
                (seat,) = arguments
                rank = seat.sit()
            else:
                value = getattr(rank, verb)(*arguments)
            said: tuple[Any, str | None] = (value, None)
        except Exception:
            said = (None, traceback.format_exc())
        try:
            pipe.send(said)
        except OSError:
            os._exit(0)  # nobody is there to hear it


class Collector(Protocol):
    """As prometheus_client wants one."""

    def collect(self) -> Iterator[Any]:
        """The metric families at this moment."""
        ...


@dataclass(slots=True, eq=False)
class _Still:
    """What some collectors said last. A demo process works without being asked, so nobody may look while it does."""

    collectors: Sequence[Collector]
    said: Sequence[Any] = ()

    def look(self) -> None:
        self.said = [family for collector in self.collectors for family in collector.collect()]

    def collect(self) -> Sequence[Any]:
        return self.said


class Watched:
    """The observers of one seated process. `first_port`: how many ports its fleet leaves to others before it."""

    def __init__(self, settings: Settings, engine: str, rank: int, first_port: int = 0) -> None:
        metrics = settings.metrics
        if metrics.port:
            settings = replace(settings, metrics=replace(metrics, port=metrics.port + first_port))
        self._observers = Observers(settings, engine, rank)
        self._is_served = metrics.port is not None
        self._still = _Still(())

    def mover(self, mover: Mover) -> None:
        """Observe a mover, from now on."""
        self._observers.watch(mover)

    def account(self, account: Account) -> None:
        """Write an account to the run log, where one is configured."""
        self._observers.account(account)

    def serve(self, *collectors: Collector) -> None:
        """Serve to Prometheus what these say between two requests."""
        self._still = _Still(collectors if self._is_served else ())
        self._still.look()
        self._observers.serve(self._still)

    def look(self) -> None:
        """A request is over: what is served from now on says so."""
        self._still.look()

    def close(self) -> None:
        """End the endpoint and the run log."""
        self._observers.close()


#: Host pages for each page of the device.
_HOST_RATIO = 2

#: How often who is to die looks whether it lends.
_LOOK_S = 0.0005

#: Who was killed is given up so soon; who is slow, as all are on a busy machine, has the time to answer.
_SILENCE_S, _DRAIN_S, _PING_S, _ASK_S = 2.0, 0.5, 0.2, 5.0


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
    """Which rank of a fleet a process is to be. `meet`: a file in which the fleet meets; `root`: where the store is, if
    there is one; `run`: its namespace's own word, so that nothing is found there that another run left; `peers`: whose
    pages it borrows, as a rank of `engine`, if any. `first_port`: as of Seat.
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
        """Where the pages of this run are."""
        model = self.scenario.model
        return Namespace(model.name, f"seed {model.seed}, run {self.run}", self.fleet.fleet.page_tokens)

    def sit(self) -> TieredRank:
        """Become that rank: pool, model, store and controller are made here."""
        return TieredRank(self)


class TieredRank:
    """A seated process, which decides for itself what it keeps: as all ranks are asked alike, all decide alike."""

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
        """What borrowers connect with."""
        assert self._peers is not None
        return self._peers.card

    def connect(self, cards: list[bytes]) -> None:
        """Connect with all that may be borrowed from."""
        assert self._peers is not None
        for card in cards:
            self._peers.connect(card)

    def die_lending(self) -> None:
        """Be killed as soon as a peer has been promised pages."""
        peers = self._peers
        assert peers is not None

        def wait() -> None:
            while not peers.counts().loans:
                time.sleep(_LOOK_S)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, daemon=True).start()

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
        """The ledger's sums of this fleet's life."""
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
        """Of every unit's rows, by (layer, kv, head) and the unit's number: the layer's number counts units above it.

        A unit is as many tokens as pages of all fleets are whole numbers of.
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
    """Of a rank whose fleet borrows from others, and lends."""
    model = seat.scenario.model
    place, name = Place(seat.engine, seat.fleet.fleet, seat.rank), f"{model.name}, seed {model.seed}"
    config = replace(seat.settings.mover_config(), silence_s=_SILENCE_S, drain_s=_DRAIN_S, ping_s=_PING_S)
    wire = NixlTransport(f"{seat.engine}-{seat.rank}")
    return PeerTier(wire, name, place, [host], PeerTerms(seat.peers, ask_s=_ASK_S), config)
