"""DemoRank: a rank of the demo is one process with its part of the model, a paged pool and a mover."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvmover.cache.ledger import Credit, Ledger, LedgerCollector
from kvmover.cache.tiers import Grouped
from kvmover.config.settings import Settings
from kvmover.layout.fleet import Shard
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.observe.metrics import MoverCollector
from kvmover.plan.cost import Route
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.model import Gloo, ModelShard, PagedCache, Transformer
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.stored_plane import StoredPlane, restored
from kvmover.tools.demo.watched import Watched
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Gate, Result, Transfer
from kvmover.transport import NixlTransport

if TYPE_CHECKING:
    from torch import Tensor

#: Digests of cached rows by (layer, kv, head) of the whole model: equal wherever the same rows are held.
Digests = dict[tuple[int, int, int], str]


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of a fleet that a process becomes. `store`: a file in which the fleet meets.

    `first_port`: ports after the configured one that belong to earlier fleets. `device`: place of the pool; the model
    computes on the CPU.
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
        """Make the rank's pool, model and mover, in this process."""
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
        wire = NixlTransport(f"{seat.engine}-{seat.rank}", device=self._pool.tensors[0].device)
        self._mover = Mover(wire, model, place, [self._pool], config)
        self._offered: dict[str, Transfer] = {}
        self._watched = Watched(seat.settings, seat.engine, seat.rank, seat.first_port)
        self._watched.mover(self._mover)
        self._keeps_accounts = seat.engine == "decode" and seat.rank == 0  # all ranks see the same requests
        self._ledger = Ledger(sink=self._watched.account)
        ledgers = [LedgerCollector(self._ledger)] if self._keeps_accounts else []
        self._watched.serve(MoverCollector([self._mover]), *ledgers)

    def card(self) -> bytes:
        """Returns the card that destinations connect with."""
        return self._mover.card

    def connect(self, cards: list[bytes]) -> None:
        """Connect with every source by its card."""
        for card in cards:
            self._mover.connect(card)

    def idle(self) -> None:
        """Answer peers, which take a silent rank for dead."""
        self._mover.poll()

    def prefill(self, tokens: tuple[int, ...], pages: list[int]) -> tuple[int, float]:
        """Compute and cache a prompt's rows. Returns the answer's first token, and its logit's gap to the second."""
        first = self._model.prefill(tokens, self._cache(pages))
        return first, self._model.gaps[-1]

    def send(self, request: str, pages: list[int], moved: range) -> tuple[Result, Digests]:
        """Serve every destination rank. Returns the result, and the digests of the moved rows."""
        transfer = self._mover.send(request, [pages], gates=self._computed())
        self._mover.wait([transfer])
        self._watched.look()
        return transfer.landed(), self._digests(pages, moved)

    def _computed(self) -> list[Gate] | None:
        """Returns a gate on this CUDA stream, after which the rows are in the pages; None on the CPU."""
        import torch

        if self._pool.tensors[0].device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return [Gate(event)]

    def receive(self, request: str, engine: str, moved: range, pages: list[int]) -> tuple[Result, Digests]:
        """Land the rows of `moved`. Returns the result, and their digests."""
        transfer = self._mover.receive(request, engine, moved, [pages])
        self._mover.wait([transfer])
        if self._keeps_accounts:
            self._account(request, moved)
        self._watched.look()
        return transfer.landed(), self._digests(pages, moved)

    def decode(self, first: int, position: int, count: int, pages: list[int]) -> tuple[list[int], list[float]]:
        """Compute `count` tokens after `first`, which is at `position`. Returns them and their gaps."""
        cache, answer = self._cache(pages), [first]
        for step in range(count):
            answer.append(self._model.decode(answer[-1], position + step, cache))
        return answer[1:], self._model.gaps[len(self._model.gaps) - count :]

    def score(self, tokens: tuple[int, ...], start: int, pages: list[int]) -> list[float]:
        """Compute the surprise of each of tokens[start + 1:]; the rows of [0, start) are in the pages."""
        surprises = list[float]()
        for part in self._model.score(tokens, start, self._cache(pages)):
            surprises += part
            self._mover.poll()  # peers take a silent rank for dead
        return surprises

    def close(self) -> None:
        """End the mover and its observers."""
        self._mover.close()
        self._watched.close()

    def _account(self, request: str, moved: range) -> None:
        """Account a prompt of `moved.stop` tokens: tokens before `moved` are hits, the prefill computed the rest."""
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
        """Returns the plane that the model writes and reads as numbers, in any stored form."""
        import torch

        plane = self._pool.plane(layer, kv)
        as_computed = plane.dtype == getattr(torch, self._model.config.dtype)
        return plane if as_computed or not self._form else StoredPlane(plane.view(torch.uint8), self._form)

    def _as_landed(self, rows: Tensor) -> Tensor:
        """Convert rows of this pool to the decode fleet's form, by the definition."""
        import torch

        if self._form is None or self._landed_form is None:
            return rows
        return restored(rows.view(torch.uint8).cpu(), self._form, self._landed_form)

    def _digests(self, pages: list[int], moved: range) -> Digests:
        """Returns digests of the moved rows, as they are once landed."""
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
