"""What plays the engines: ranks with their memory, requests with their true bytes, and orders that use pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvmover.layout import Component, Pool
from kvmover.shared_memory import MapMode
from kvmover.transfer.destination.destination_machine import Receiving
from kvmover.transfer.memory.arena import Arena
from kvmover.transfer.memory.mapped import Mapped
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Transfer
from kvmover.transfer.source.source_machine import Sending
from tests.sim.copies import SimCopier
from tests.sim.geometry import PAGES, Bytes, Geometry, Part, part_of
from tests.sim.network import SimNetwork, SimTransport
from tests.sim.scenario import Asked, Scenario, Step
from tests.transfer.releases import becomes_the_release_before, becomes_this_release


@dataclass(slots=True)
class Scorched(Arena):
    """An arena whose memory is overwritten as soon as it is given back: who still reads it shows."""

    memory: Bytes = field(kw_only=True)

    def release(self, offset: int) -> None:
        self.memory[offset : offset + self._reserved[offset]] ^= 0xFF
        Arena.release(self, offset)


@dataclass(slots=True, eq=False)
class Passing:
    """An event that passes when the engine has computed a step."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass(slots=True, eq=False)
class Request:
    """What is moved: `truth` [component], each [layer, kv, head, position, byte]. `chunks`: moved so far.

    `received` [engine, rank]: how often a destination rank has asked. `payloads` [rank]: what sources have handed over.
    """

    asked: Asked
    truth: tuple[Bytes, ...]
    retries: int
    chunks: int = 0
    received: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    payloads: dict[int, set[bytes]] = field(default_factory=dict[int, "set[bytes]"])

    @property
    def name(self) -> str:
        return self.asked.name

    @classmethod
    def of(cls, asked: Asked, components: tuple[Component, ...], filler: np.random.Generator) -> Request:
        truth = tuple(
            filler.integers(0, 256, (c.layers, c.kv, c.heads, c.extent(asked.tokens), c.row_bytes), np.uint8)
            for c in components
        )
        return cls(asked, truth, asked.retries)


@dataclass(slots=True, eq=False)
class Order:
    """A send or a receive of one rank, from the call until the engine has its pages back.

    `pages` [component], of each of which so many are `named`, and `numbers`, those of them as the geometry counts them
    that a receive may be written to, and a send is made of. `generation` of a receive's attempt. Of a send, `computed`
    so far; `seen` are chunks that were found ready; `waited` are engines of which a rank had asked before.
    """

    verb: Literal["send", "receive"]
    request: Request
    seat: Seat
    pages: tuple[npt.NDArray[np.int64], ...]
    numbers: list[int]
    transfer: Transfer
    generation: int = 0
    closed: bool = False
    computed: list[Step] = field(default_factory=list[Step])
    named: list[int] = field(default_factory=list[int])
    seen: set[tuple[str, int, int]] = field(default_factory=set["tuple[str, int, int]"])
    waited: set[str] = field(default_factory=set[str])

    def part(self, share: float) -> list[npt.NDArray[np.int64]]:
        """The pages of each table that come to `share` of it, behind those named; they are named from here on."""
        stop = [max(named, round(len(table) * share)) for named, table in zip(self.named, self.pages, strict=True)]
        tables = [table[a:b] for table, a, b in zip(self.pages, self.named, stop, strict=True)]
        self.named = stop
        return tables

    @property
    def name(self) -> str:
        return f"{self.seat.name}: {self.verb} {self.request.name}"


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of a rank: its mover and its pools, with what they must hold outside of pages in `open_to`.

    `open_to` [page]: the receive that lets peers write it; it stays after a transfer that ended `quarantined`. `dirty`:
    memory was touched since it was last checked. `stops`: (since, until) when it is not polled. `sound`: states of its
    attempts, and `sitting`: who sat where, as they were checked last. `heard`: kinds of messages, if it is of a
    make-believe release.
    """

    place: Place
    transport: SimTransport
    mover: Mover
    geometry: Geometry
    memory: Bytes
    expected: Bytes
    free: list[list[int]]
    pace_s: float
    open_to: dict[int, Order] = field(default_factory=dict[int, Order])
    orders: list[Order] = field(default_factory=list[Order])
    alive: bool = True
    waking: bool = False
    dirty: bool = False
    sitting: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    sound: dict[int, Receiving | Sending] = field(default_factory=dict[int, "Receiving | Sending"])
    stops: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    heard: Counter[str] = field(default_factory=Counter[str])

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def busy_until(self) -> float:
        """When what it copies now has ended, or what it copied last had."""
        copier = self.mover._core.copier
        assert isinstance(copier, SimCopier)
        return copier.busy_until

    @property
    def base(self) -> int:
        """Address of the first byte of its pools."""
        return self.memory.ctypes.data

    def part(self, component: Component, tokens: int) -> Part:
        return part_of(self.place.fleet, self.place.rank, component, tokens)

    def take(self, scenario: Scenario, tokens: int) -> tuple[npt.NDArray[np.int64], ...] | None:
        """Page tables of a request, or None while there are not enough pages."""
        fleet, rank = self.place.fleet, self.place.rank
        counts = list[int]()
        for component in scenario.components:
            held = fleet.shard(component, rank, tokens).positions
            counts.append(-(-held.tokens // fleet.page_rows(component)) if held else 0)
        if any(count > len(free) for count, free in zip(counts, self.free, strict=True)):
            return None
        return tuple(np.array(free[:count], np.int64) for count, free in zip(counts, self.free, strict=True))

    def put(self, arrays: tuple[Bytes, ...], order: Order, step: Step) -> None:
        """Lay what is computed of a request into an order's pages, in memory shaped as the seat's."""
        asked = order.request.asked
        for number, truth in enumerate(order.request.truth):
            component = self.geometry.specs[number].component
            part = self.part(component, asked.tokens)
            if component.states:  # states are final when all tokens were
                chosen = np.full(len(part.positions), step.tokens >= asked.tokens)
            else:
                chosen = part.positions < component.extent(step.tokens)
            layers = part.layers < step.layers
            if chosen.any() and layers.any():
                rows = self.geometry.rows(number, order.pages[number][part.pages[chosen]], part.tokens[chosen])
                for array in arrays:
                    array[rows[layers]] = part.of(truth, chosen)[layers]

    def put_wanted(self, array: Bytes, order: Order) -> None:
        """Lay what a receive asked for where it must land."""
        for number, chosen, rows in self.wanted(order):
            part = self.part(self.geometry.specs[number].component, order.request.asked.tokens)
            array[rows] = part.of(order.request.truth[number], chosen)

    def wanted(self, order: Order) -> list[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
        """(component, mask of the rank's positions, bytes of their rows) that a receive asked for."""
        asked, found = order.request.asked, list[tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]()
        for number, spec in enumerate(self.geometry.specs):
            part = self.part(spec.component, asked.tokens)
            own = spec.component.wanted(range(asked.start, asked.tokens))
            chosen = (part.positions >= own.start) & (part.positions < own.stop)
            if chosen.any():
                rows = self.geometry.rows(number, order.pages[number][part.pages[chosen]], part.tokens[chosen])
                found.append((number, chosen, rows))
        return found

    def stopped_until(self, now: float) -> float | None:
        """When it will be polled again, where it is stopped now."""
        return next((until for since, until in self.stops if since <= now < until), None)

    def stopped_within(self, since: float, until: float) -> float:
        """For how long it was stopped between two times."""
        return sum(max(0.0, min(until, b) - max(since, a)) for a, b in self.stops)


@dataclass(slots=True, eq=False)
class SimProcess:
    """Stands in for a Maker."""

    seat: Seat

    def lives(self) -> bool:
        return self.seat.alive


@dataclass(slots=True, eq=False)
class SimMappings:
    """Stands in for a mover's Mappings: all processes of a scenario that shares its pools are on one host.

    `written`: peers whose pools we may write. `lent`: addresses of pools that we may read.
    """

    ours: bool
    seats: dict[str, Seat]
    machine: str = ""
    written: set[str] = field(default_factory=set[str])
    lent: set[int] = field(default_factory=set[int])

    def reach(self, peer: Peer, verb: Verb) -> bool:
        return self.ours

    def pools(self, peer: Peer, access: MapMode) -> Mapped | None:
        if not self.ours:
            return None
        pools = self.seats[peer.name].mover._core.bound
        if access is MapMode.WRITE:
            self.written.add(peer.name)
        else:
            self.lent.update(tensor.data_ptr() for pool in pools for tensor in pool.tensors)
        return pools

    def maker(self, peer: Peer) -> SimProcess | None:
        return SimProcess(self.seats[peer.name]) if self.ours else None

    def forget(self, peer: str) -> None:
        """A mapping outlives its peer."""


def seated(
    scenario: Scenario,
    network: SimNetwork,
    engine: str,
    rank: int,
    noise: tuple[Random, np.random.Generator],
    seats: dict[str, Seat],
) -> Seat:
    """A process with pools of noise, not connected to anybody. `seats`: all that ever were, by name."""
    fleet, random, filler = scenario.fleets[engine], *noise
    order, separate = ("NHD", scenario.separate) if engine == "p" else ("HND", ())
    geometry = Geometry.of(scenario.components, fleet, rank, order, separate)
    memory = filler.integers(0, 256, len(geometry.page_of), np.uint8)
    pools = [
        Pool(spec, tuple(torch.from_numpy(part) for part in parts))
        for spec, parts in zip(geometry.specs, geometry.slices(memory), strict=True)
    ]
    transport = SimTransport(network, f"{engine}{rank}")
    place = Place(engine, fleet, rank, scenario.generation(network.births(f"{engine}{rank}")))
    mover = Mover(transport, Model("toy", scenario.components), place, pools, scenario.config, network.clock)
    free = [list(range(PAGES)) for _ in scenario.components]
    for pages in free:
        random.shuffle(pages)
    pace = scenario.pace_s[engine != "p"]
    made = Seat(place, transport, mover, geometry, memory, memory.copy(), free, pace)
    mappings = SimMappings(scenario.shared, seats)

    def touched() -> None:
        for seat in (made, *(seats[name] for name in mappings.written)):
            seat.dirty = True

    mover._core.mappings = mappings  # pyright: ignore[reportAttributeAccessIssue]
    mover._core.copier = SimCopier(network, transport.name, scenario.copy_s, touched, mappings.lent)
    for staging in (mover._core.outgoing, mover._core.incoming):
        arena = staging.arena
        staging.arena = Scorched(arena.nbytes, arena.slab_bytes, memory=staging.tensor.numpy())
    births = network.births(f"{engine}{rank}")
    mover._destination.generation = births * 1_000_000
    if scenario.mixed:  # a process that is born again is of the other release
        becomes = becomes_this_release if (births + rank + (engine == "p")) % 2 else becomes_the_release_before
        made.heard = becomes(mover)
    return made
