"""A prefill and a decode engine under a seeded schedule of requests, aborts and faults, checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvmover.errors import KvmoverError, PeerUnknown, PlanError
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import Costs, Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.handshake import Model, Place
from kvmover.transfer.lane import plans_between
from kvmover.transfer.mover import Mover
from kvmover.transfer.result import MoverConfig, Transfer
from tests.sim.network import PROFILES, Posted, SimNetwork, SimTransport, bytes_of, contents

Bytes = npt.NDArray[np.uint8]

PAGES = 48
HEARTBEAT_S = 0.05
DEADLINE_S, DRAIN_S = 1.0, 0.3
#: A mover acts when it is polled: half a dozen heartbeats for what must happen one after the other.
SLACK_S = 6 * HEARTBEAT_S
#: No schedule is longer than this in virtual time, so what is still open then never ends.
HORIZON_S = 15.0

FLEETS = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3)]
COMPONENTS = [Component("attention", 2, 2, 2, 16, "uint8"), Component("mla", 2, 1, 1, 32, "uint8")]


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of a rank: its mover and its pool, with what the pool must hold outside of pages in `open_to`.

    `page_of` [byte] is the page a byte of the pool belongs to. `open_to`: pages that a receive lets peers write, and
    whose receive it is; they stay after a transfer that ended `held`.
    """

    place: Place
    transport: SimTransport
    mover: Mover
    pool: Pool
    page_of: npt.NDArray[np.uint8]
    memory: Bytes
    expected: Bytes
    free: list[int]
    open_to: dict[int, Order] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    alive: bool = True
    waking: bool = False
    stalled_until: float = 0.0
    stalled_s: float = 0.0


@dataclass(slots=True, eq=False)
class Order:
    """A send or a receive of one rank, from the call until the engine has its pages back."""

    verb: Literal["send", "receive"]
    request: Request
    seat: Seat
    pages: npt.NDArray[np.int64]
    transfer: Transfer
    closed: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """What is moved: `truth` [layer, kv, head, position, byte], of which positions from `start` on are asked for."""

    name: str
    truth: Bytes
    start: int
    retries: int
    asked: Counter[int] = field(default_factory=Counter[int])

    @property
    def tokens(self) -> int:
        return self.truth.shape[3]


class World:
    """One schedule. `run` raises Broken at the first step after which an invariant does not hold."""

    def __init__(self, seed: int, profile: str = "default", trace: bool = False) -> None:
        self.seed, self.random = seed, Random(f"world {seed}")
        self.filler = np.random.default_rng(seed)
        random = self.random
        self.calm = random.random() < 0.15
        wire = PROFILES[profile]
        self.lossless = wire.ordered and not wire.loss
        self.network = SimNetwork(seed, replace(wire, late_writes=0.0) if self.calm else wire)
        self.network.wake, self.network.before_landing = self._wake, self._before_landing
        self.network.trace = [] if trace else None
        self.component = random.choice(COMPONENTS)
        costs = Costs(1.0, 1e3, 1e3, 1e3, 10.0, chunk_bytes=random.choice([128, 256, 512]))
        self.config = MoverConfig(
            arena_bytes=256 * random.choice([2, 3, 5, 8]),
            deadline_s=DEADLINE_S,
            drain_s=DRAIN_S,
            ping_s=0.1,
            costs=costs,
            route=random.choice([Route.DIRECT, Route.PACKED, None]),
            replicas=random.choice(list(Replicas)),
        )
        self.polls = 0
        self.lonely = False
        self.ended: Counter[str] = Counter()
        self.seats: dict[str, Seat] = {}
        self.at: dict[tuple[str, int], Seat] = {}
        self.orders: list[Order] = []
        self.targets: dict[Posted, tuple[Seat, frozenset[int]]] = {}
        self.fleets = {
            engine: Fleet(*random.choice(FLEETS), page_tokens=random.choice([2, 4])) for engine in ("p", "d")
        }
        for engine, fleet in self.fleets.items():
            for rank in range(fleet.size):
                self._start(engine, rank)
        self._script()

    def run(self) -> World:
        network, started = self.network, self.network.now
        while not self._quiet():
            if network.now > started + HORIZON_S:
                raise Broken(f"still busy after {HORIZON_S} s: {self._left()}")
            network.step()
        if left := self._left():
            raise Broken(f"left behind when all had ended: {left}")
        self._check_reasons()
        return self

    # The schedule.

    def _script(self) -> None:
        random, network = self.random, self.network
        network.log(lambda: f"{self.component} {self.fleets} {self.config} calm={self.calm}")
        for number in range(random.randint(1, 4)):
            shape = (self.component.layers, self.component.kv, self.component.heads)
            tokens = random.randint(1, 12)
            truth = self.filler.integers(0, 256, (*shape, tokens, self.component.row_bytes), np.uint8)
            start = random.choice([0, 0, 0, random.randint(0, tokens)])
            request = Request(f"r{number}", truth, start, 0 if self.calm else random.choice([0, 1, 3]))
            begin = random.uniform(0, 0.3)
            for engine in ("p", "d"):
                self._order_all(request, engine, begin + random.choice([0, random.uniform(0, 0.3)]))
            if not self.calm and random.random() < 0.3:
                engine = random.choice("pd")
                network.after(begin + random.uniform(0, 0.5), lambda r=request, e=engine: self._abort(r, e))
        if self.calm:
            return
        for engine, fleet in self.fleets.items():
            for rank in range(fleet.size):
                if random.random() < 0.12:
                    back = random.uniform(0.02, 0.6)
                    network.after(
                        random.uniform(0, 0.9), lambda e=engine, r=rank, b=back: self._crash(self.at[e, r], b)
                    )
                if random.random() < 0.2:
                    length = random.choice([random.uniform(0.02, 0.3), random.uniform(0.8, 2.0)])
                    network.after(
                        random.uniform(0, 0.8), lambda e=engine, r=rank, s=length: self._stall(self.at[e, r], s)
                    )
        if random.random() < 0.08:
            network.after(random.uniform(0, 0.6), self._cut)

    def _order_all(self, request: Request, engine: str, delay: float) -> None:
        """Every rank of an engine gets its call, not quite at once."""
        for rank in range(self.fleets[engine].size):
            late = delay + self.random.uniform(0, 0.02)
            self.network.after(late, lambda r=rank: self._order(request, engine, r))

    def _order(self, request: Request, engine: str, rank: int) -> None:
        seat = self.at[engine, rank]
        if not seat.alive:
            return
        shard = self.fleets[engine].shard(self.component, rank, request.tokens)
        count = -(-shard.positions.tokens // seat.place.fleet.page_tokens) if shard.positions else 0
        if count > len(seat.free):
            return
        pages = np.array([seat.free[i] for i in range(count)], np.int64)
        verb = "send" if engine == "p" else "receive"
        if verb == "send":
            for memory in (seat.memory, seat.expected):
                self._put(seat, memory, request, pages, 0)
        try:
            if verb == "send":
                transfer = seat.mover.send(request.name, [pages])
            else:
                transfer = seat.mover.receive(request.name, "p", range(request.start, request.tokens), [pages])
        except (PlanError, PeerUnknown) as error:  # it runs already, or a peer is down: nothing was asked
            self.network.log(lambda e=error: f"{seat.transport.alias}: {verb} {request.name} refused: {e}")
            return
        self.network.log(lambda: f"{seat.transport.alias}: {verb} {request.name}, pages {pages.tolist()}")
        del seat.free[:count]
        order = Order(verb, request, seat, pages, transfer)
        if verb == "receive":
            request.asked[rank] += 1
            seat.open_to.update(dict.fromkeys(pages.tolist(), order))
        self.orders.append(order)
        seat.orders.append(order)
        self._look(seat)

    def _abort(self, request: Request, engine: str) -> None:
        for order in [o for o in self.orders if o.request is request and o.seat.place.engine == engine]:
            if order.seat.alive and not order.transfer.ended:
                self.network.log(lambda o=order: f"{o.seat.transport.alias}: abort {request.name}")
                order.seat.mover.abort(order.transfer, "the user left")
                self._look(order.seat)

    def _crash(self, seat: Seat, back: float) -> None:
        if not seat.alive:
            return
        self.network.log(lambda: f"{seat.transport.alias}: CRASH")
        seat.alive, self.lonely = False, True
        self.network.crash(seat.transport.name)
        self.network.after(back, lambda: self._start(seat.place.engine, seat.place.rank))

    def _stall(self, seat: Seat, seconds: float) -> None:
        self.network.log(lambda: f"{seat.transport.alias}: not polled for {seconds:.3f} s")
        seat.stalled_until, seat.stalled_s = self.network.now + seconds, seat.stalled_s + seconds

    def _cut(self) -> None:
        self.lonely = True
        one, other = self.at["p", 0], self.at["d", 0]
        self.network.log(lambda: f"{one.transport.alias} and {other.transport.alias}: CUT OFF from each other")
        self.network.cut_link(one.transport.name, other.transport.name)

    def _start(self, engine: str, rank: int) -> None:
        """A process with a pool of noise, which connects to every rank of the other engine that is alive."""
        fleet = self.fleets[engine]
        order = "NHD" if engine == "p" else "HND"
        shard = fleet.shard(self.component, rank, 1)
        spec = PoolSpec.dense(self.component, shard, PAGES, fleet.page_tokens, order)
        numbers, pool = Pool.zeros(spec), Pool.zeros(spec)
        for layer in range(shard.layers.count):
            for kv in range(self.component.kv):
                numbers.plane(layer, kv)[:] = torch.arange(PAGES, dtype=torch.uint8).view(-1, 1, 1, 1)
        memory: Bytes = pool.tensors[0].numpy()
        memory[:] = self.filler.integers(0, 256, len(memory), np.uint8)
        transport = SimTransport(self.network, f"{engine}{rank}")
        place = Place(engine, fleet, rank)
        mover = Mover(transport, Model("toy", (self.component,)), place, [pool], self.config, self.network.clock)
        free = list(range(PAGES))
        self.random.shuffle(free)
        seat = Seat(place, transport, mover, pool, numbers.tensors[0].numpy(), memory, memory.copy(), free)
        self.network.log(lambda: f"{transport.alias}: starts")
        self.seats[transport.name] = self.at[engine, rank] = seat
        for other in self.at.values():
            if other.place.engine != engine and other.alive:
                seat.mover.connect(other.mover.card)
        self._poll_in(seat, HEARTBEAT_S)

    # Time.

    def _wake(self, name: str) -> None:
        seat = self.seats[name]
        if seat.alive and not seat.waking:
            seat.waking = True
            self._poll_in(seat, 0.001, again=False)

    def _poll_in(self, seat: Seat, seconds: float, again: bool = True) -> None:
        self.polls += 1
        self.network.after(seconds, lambda: self._poll(seat, again))

    def _poll(self, seat: Seat, again: bool) -> None:
        self.polls -= 1
        if not seat.alive:
            return
        wait = seat.stalled_until - self.network.now
        if wait > 0:
            self._poll_in(seat, wait + 1e-6, again)
            return
        if again:
            self._poll_in(seat, HEARTBEAT_S)
        else:
            seat.waking = False
        try:
            seat.mover.poll()
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{seat.transport.alias}: poll raised {error!r}") from error
        self._look(seat)

    def _quiet(self) -> bool:
        """Nothing is under way but heartbeats, every order has ended, and no mover still waits for a deadline."""
        if len(self.network._agenda) > self.polls or self.network.in_flight:
            return False
        return not any(o.seat.alive and not o.transfer.ended for o in self.orders) and not self._left()

    # The invariants.

    def _look(self, seat: Seat) -> None:
        """After every step of a mover."""
        now = self.network.now
        for order in [order for order in seat.orders if not order.closed]:
            if order.transfer.ended:
                self._close(order)
            elif now > order.transfer.started + DEADLINE_S + DRAIN_S + SLACK_S + seat.stalled_s:
                raise Broken(f"{seat.transport.alias}: {order.verb} {order.request.name} is open after its deadline")
        self._check_memory(seat)
        self._check_arena(seat)
        for posted in self.network.in_flight:
            self._check_flight(posted)

    def _close(self, order: Order) -> None:
        """The engine hears of the end of a transfer, and uses its pages for something else."""
        order.closed = True
        seat, request, result = order.seat, order.request, order.transfer.result
        assert result is not None
        name = f"{seat.transport.alias}: {order.verb} {request.name}"
        self.network.log(lambda: f"{name} ended: {result.reason or 'landed'}{', held' if result.held else ''}")
        self.ended[f"{order.verb} {'landed' if result.landed else 'held' if result.held else 'failed'}"] += 1
        if result.reason is not None and not result.reason.strip():
            raise Broken(f"{name} failed without a reason")
        if self.calm and self.lossless and not result.landed:
            raise Broken(f"{name} failed though nothing went wrong: {result.reason}")
        if result.held:
            return
        seat.orders.remove(order)
        for page in order.pages.tolist() if order.verb == "receive" else ():
            del seat.open_to[page]
        if result.landed and order.verb == "receive":
            self._land(order, name)
            self.network.after(self.random.uniform(0, 0.2), lambda: self._recycle(order))
            return
        self._recycle(order)
        if order.verb == "receive" and request.retries > 0:
            request.retries -= 1
            delay = self.random.choice([0.0, self.random.uniform(0, 0.3)])
            self._order_all(request, "p", delay)
            self._order_all(request, "d", delay)

    def _land(self, order: Order, name: str) -> None:
        """The pages hold the source's bytes, and what they held before where nothing was asked for."""
        seat = order.seat
        self._put(seat, seat.expected, order.request, order.pages, order.request.start)
        mine = np.isin(seat.page_of, order.pages)
        if not np.array_equal(seat.memory[mine], seat.expected[mine]):
            wrong = int((seat.memory[mine] != seat.expected[mine]).sum())
            raise Broken(f"{name} landed with {wrong} wrong bytes")

    def _recycle(self, order: Order) -> None:
        """Other bytes in the same pages: a late write shows, and so does a late read."""
        seat = order.seat
        if seat.alive:
            mine = np.isin(seat.page_of, order.pages)
            seat.memory[mine] = seat.expected[mine] = self.filler.integers(0, 256, int(mine.sum()), np.uint8)
            seat.free[:0] = order.pages.tolist()  # used first: the next request gets them at once

    def _check_memory(self, seat: Seat) -> None:
        """Outside of the pages that a receive laid open, every byte is what the engine knows it to be."""
        wrong = seat.memory != seat.expected
        if not wrong.any():
            return
        pages = set(np.unique(seat.page_of[wrong]).tolist()) - seat.open_to.keys()
        if pages:
            raise Broken(f"{seat.transport.alias}: pages {sorted(pages)} were written and are nobody's to write")

    def _check_arena(self, seat: Seat) -> None:
        arena = seat.mover._core.incoming.arena
        regions = [at for a in seat.mover._inbound._attempts.values() for at in a.state.regions.values()]
        if len(set(regions)) < len(regions):
            raise Broken(f"{seat.transport.alias}: a region is leased twice: {sorted(regions)}")
        known = arena._quarantined | set(regions)
        if known != arena._leased.keys():
            raise Broken(f"{seat.transport.alias}: leased {sorted(arena._leased)}, known to attempts {sorted(known)}")

    def _check_flight(self, posted: Posted) -> None:
        """Where a write will land is still its own: the region it was granted, or pages of its request."""
        message = posted.message
        if posted not in self.targets:
            seat = self.seats[posted.flight.peer]
            where = bytes_of(posted.flight.remote) - seat.pool.tensors[0].data_ptr()
            inside = where[(where >= 0) & (where < len(seat.memory))]
            self.targets[posted] = seat, frozenset(np.unique(seat.page_of[inside]).tolist())
        seat, pages = self.targets[posted]
        if not seat.alive or message is None:
            return
        name = f"{posted.sender.alias} => {seat.transport.alias} {message}"
        for page in pages:
            order = seat.open_to.get(page)
            if order is None or order.request.name != message.request:
                raise Broken(f"{name}: in flight to page {page}, which is not open to it any more")
        if pages:
            return
        core = seat.mover._core
        offset = int(posted.flight.remote.table[0, 0]) - core.incoming.memory.address
        attempt = seat.mover._inbound._attempts.get((message.request, message.generation))
        granted = attempt.state.regions.get((posted.sender.name, message.chunk)) if attempt else None
        if granted != offset and offset not in core.incoming.arena._quarantined:
            raise Broken(f"{name}: in flight to the region at {offset}, which is not leased to it any more")

    def _before_landing(self, posted: Posted) -> None:
        self._check_flight(posted)
        if posted.sender.name in self.network._dead:
            return
        if contents(posted.flight.local) != posted.before:
            raise Broken(f"{posted.sender.alias}: {posted.message}: its memory changed while it was in flight")

    def _check_reasons(self) -> None:
        """A request that fails at its destination did not end well at any source that owed it something."""
        if self.lonely or not self.lossless:
            return
        for order in self.orders:
            result, rank = order.transfer.result, order.seat.place.rank
            assert result is not None
            if order.verb == "send" or result.landed or order.request.asked[rank] > 1:
                continue
            span = range(order.request.start, order.request.tokens) or range(
                order.request.start, order.request.start + 1
            )
            plans = plans_between(
                (order.seat.pool.spec,), self.fleets["p"], self.fleets["d"], span, self.config.replicas
            )
            for other in self.orders:
                source = other.seat.place.rank
                if other.verb == "send" and other.request is order.request and source in plans[0].sources_of(rank):
                    assert other.transfer.result is not None
                    if other.transfer.result.landed:
                        raise Broken(
                            f"{order.seat.transport.alias}: {order.request.name} failed ({result.reason}),"
                            f" but {other.seat.transport.alias} was told that it landed"
                        )

    def _left(self) -> list[str]:
        """What movers still remember. Quarantined regions are the only thing that may stay."""
        left: list[str] = []
        for seat in self.at.values():
            if not seat.alive:
                continue
            mover = seat.mover
            arena = mover._core.incoming.arena
            tables = {
                "attempts": mover._inbound._attempts,
                "queue": mover._inbound._queue,
                "requests": mover._outbound._requests,
                "early": mover._outbound._early,
                "posts": mover._poster._queue,
                "writes": mover._poster._writes,
                "unsettled": mover._poster._unsettled,
                "later": mover._core.later,
                "staged": mover._core.outgoing.arena._leased,
                "leased": arena._leased.keys() - arena._quarantined,
            }
            left += [f"{seat.transport.alias} {name}: {len(table)}" for name, table in tables.items() if table]
        return left

    def _put(self, seat: Seat, memory: Bytes, request: Request, pages: npt.NDArray[np.int64], start: int) -> None:
        """Lay positions from `start` on of a request into a rank's pages, in `memory`, which is shaped as its pool."""
        fleet = seat.place.fleet
        shard = fleet.shard(self.component, seat.place.rank, request.tokens)
        held = shard.positions
        chosen = [p for p in held if start <= p < request.tokens] if held else []
        if held is None or not chosen:
            return
        page, token = np.divmod([held.index(p) for p in chosen], fleet.page_tokens)
        rows = request.truth[:, :, list(shard.heads)][:, :, :, chosen].swapaxes(2, 3)
        layout = seat.pool.spec.layout
        axes = ("page", "token", "head", "dim")
        shape, stride = [layout.extent_of(a) for a in axes], [layout.stride_of(a) for a in axes]
        for local, layer in enumerate(shard.layers):
            for kv in range(self.component.kv):
                first = seat.pool.spec.planes()[local * self.component.kv + kv][1]
                plane = np.lib.stride_tricks.as_strided(memory[first:], shape, stride)
                plane[pages[page], token] = rows[layer, kv]


def simulate(seed: int, profile: str = "default", trace: bool = False) -> World:
    """Run one schedule. Raises Broken, with the command that shows it again."""
    world = World(seed, profile, trace)
    try:
        return world.run()
    except (Broken, KvmoverError) as error:
        lines = "\n".join(world.network.trace or [])
        replay = f"python -m tests.sim.replay {seed} {profile}"
        raise Broken(f"{lines}\nseed {seed}, profile {profile}: {error} (replay: {replay})") from error
