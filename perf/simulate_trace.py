"""A million requests between 1,024 ranks, some of which die, on virtual time: messages, bytes, and hand-overs.

`python -m perf.simulate_trace [--requests N] [--deaths FILE]` takes some minutes. Sizes are those of Llama-3-70B, with
one byte for 1,280. Exact: the bytes and the messages of each rank. Each kind of request (its length, and the side that
dies while it waits for its prefill, if one does) runs once through the real planner and whole movers on a timed wire,
and the trace counts kinds. Modelled: time, by queues of bytes at NICs and of events at CPUs, beside the movers' time
alone; and Granted messages, which are fewer where more room is free at once. A small fleet runs both ways, every
request through movers; and the packed rows of wire.csv stand beside the same request on a timed wire.

`--deaths`: lines of a second and an engine that loses a rank then, `120.5 p17`; without it, one of chance in 10 s.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import RDMA, Route
from kvmover.plan.legs import Plan
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Transfer
from kvmover.transport.loopback import LoopbackTransport
from perf import bench_wire, transfer_pair
from perf.command_line import options
from perf.record import first, write
from perf.timed_wire import Speeds, TimedWire

#: 80 layers of 8 heads are 327,680 bytes a token; so many of them are one here, and rates and chunks go with it.
SCALE = 1280
COMPONENT = Component.attention(2, 4, 8, "bfloat16")
PREFILL, DECODE = Fleet(tp=4, page_tokens=16), Fleet(tp=2, cp=2, page_tokens=16)
RANKS = 4  # of an engine
#: Prompts, in tokens, and their weights: about the public trace of Mooncake, whose median is 7 thousand.
PROMPTS = {512: 6, 1024: 8, 2048: 12, 4096: 18, 8192: 30, 16384: 18, 32768: 7, 65536: 1}
#: From a request to its prefill's end, a restart, and what an orchestrator takes to tell everybody of a death.
PREFILL_S, RESTART_S, TOLD_S = 2.0, 60.0, 0.25
#: Requests that a decode engine has pages for where movers move the trace.
MOST_OPEN = 48
ARENA_BYTES = 64 << 20
SPEEDS = Speeds(
    RDMA.wire_rate / SCALE, RDMA.gather_rate / SCALE, RDMA.scatter_rate / SCALE, note_us=10.0, event_us=150.0
)
CONFIG = MoverConfig(
    arena_bytes=ARENA_BYTES // SCALE,
    route=Route.PACKED,
    costs=replace(RDMA, chunk_bytes=RDMA.chunk_bytes // SCALE),
    sandbox_bytes=0,
    ping_s=100.0,
    silence_s=200.0,
    resend_s=25.0,
    deadline_s=30.0,
)


@dataclass(frozen=True, slots=True)
class Death:
    """An engine loses a rank, and starts again as a whole."""

    at_s: float
    engine: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """Asked for at a time by a decode engine of a prefill engine, by their numbers."""

    at_s: float
    tokens: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides a request's messages and bytes. `dies`: the side of the engine that dies while it waits."""

    tokens: int
    dies: str = ""


@dataclass(slots=True)
class Cost:
    """Messages but Granted, Granted, and bytes that each rank of (prefill, decode) sends. `seconds`: from the
    prefill's end until all has landed.
    """

    messages: tuple[int, ...]
    grants: tuple[int, ...]
    nbytes: tuple[int, ...]
    seconds: float


Rank = tuple[str, int]
Sent = Counter[Rank]


def _rank(name: str) -> Rank:
    """Returns (engine, rank) of a transport's name: `p3-1.17` is rank 1 of p3."""
    engine, _, rank = name.partition(".")[0].rpartition("-")
    return engine, int(rank)


@dataclass(slots=True)
class Stage:
    """Whole movers of prefill engines p0, p1 ... and decode engines d0, d1 ... on a timed wire."""

    engines: int
    wire: TimedWire = field(default_factory=lambda: TimedWire(SPEEDS))
    movers: dict[str, list[Mover]] = field(default_factory=dict[str, list[Mover]])
    took: list[float] = field(default_factory=list[float])
    failed: int = 0
    down: set[str] = field(default_factory=set[str])
    next_page: Counter[str] = field(default_factory=Counter[str])
    pages: int = 0

    def start(self, tokens: int, most_open: int = 1) -> None:
        """Make all engines, with pages for so many prompts of so many tokens, and have every two meet."""
        self.pages = most_open * tokens // PREFILL.page_tokens
        for number in range(self.engines):
            self._engine(f"p{number}", PREFILL)
            self._engine(f"d{number}", DECODE)
        for mine in range(self.engines):
            for mover in self.movers[f"d{mine}"]:
                for other in (m for theirs in range(self.engines) for m in self.movers[f"p{theirs}"]):
                    mover.connect(other.card)
        self.wake_all()
        self.wire.run(self.wire.now + 1.0)
        for source, target in product(range(self.engines), repeat=2):  # what is said once in a life
            self.ask(f"first {source} {target}", Request(0.0, min(PROMPTS), source, target))
        self.wire.run(self.wire.now + PREFILL_S + 1.0)
        self.took.clear()

    def _engine(self, name: str, fleet: Fleet) -> None:
        self.movers[name] = [self._mover(name, fleet, rank) for rank in range(RANKS)]

    def _mover(self, name: str, fleet: Fleet, rank: int) -> Mover:
        transport = LoopbackTransport(self.wire, f"{name}-{rank}", self.wire.clock)
        shard = fleet.shard(COMPONENT, rank, 1)
        spec = PoolSpec.dense(COMPONENT, shard, self.pages, fleet.page_tokens, "NHD")
        pool, place = Pool.zeros(spec), Place(name, fleet, rank)
        mover = Mover(transport, Model("llama", (COMPONENT,)), place, [pool], CONFIG, self.wire.clock)
        self.wire.movers[transport.name] = mover
        return mover

    def wake_all(self) -> None:
        """Have every rank poll."""
        for name in list(self.wire.movers):
            self.wire.wake(name)

    def sent(self) -> tuple[Sent, Sent, Sent]:
        """Returns by rank: messages but Granted, Granted, and bytes."""
        messages, grants, nbytes = Counter[Rank](), Counter[Rank](), Counter[Rank]()
        for (name, kind), count in self.wire.said.items():
            (grants if kind == wire.Granted.__name__ else messages)[_rank(name)] += count
        for name, count in self.wire.sent_bytes.items():
            nbytes[_rank(name)] += count
        return messages, grants, nbytes

    def ask(self, name: str, request: Request) -> None:
        """Decode asks now; prefill has the request when it is computed, unless either side died meanwhile."""
        source, target = f"p{request.source}", f"d{request.target}"
        pages = request.tokens // PREFILL.page_tokens
        due = pages // DECODE.cp
        into, held = [(self.next_page[target] + np.arange(due)) % self.pages], [np.arange(pages)]
        self.next_page[target] += due
        begun = [mover.receive(name, source, range(request.tokens), into) for mover in self.movers[target]]
        self._wake(target)

        def send() -> None:
            if {source, target} & self.down:
                self.failed += 1
                return
            began = self.wire.now
            begun.extend(mover.send(name, held) for mover in self.movers[source])
            self._wake(source)
            self._watch(begun, began)

        self.wire.at(self.wire.now + PREFILL_S, send)

    def _watch(self, begun: Sequence[Transfer], began: float) -> None:
        """Look every 100 us of virtual time, which is what a time is known to."""
        if all(transfer.ended for transfer in begun):
            for transfer in begun:
                transfer.landed()
            self.took.append(self.wire.now - began)
        else:
            self.wire.at(self.wire.now + 1e-4, lambda: self._watch(begun, began))

    def _wake(self, engine: str) -> None:
        for mover in self.movers[engine]:
            self.wire.wake(mover._transport.name)

    def die(self, death: Death) -> None:
        """The rank is gone, and its engine with it; every rank of another engine is told a little later."""
        self.down.add(death.engine)
        for mover in self.movers[death.engine]:
            self.wire.end(mover._transport.name)
        others = [movers for engine, movers in self.movers.items() if engine[0] != death.engine[0]]

        def told() -> None:
            for movers in others:
                for mover in movers:
                    if mover._transport.name in self.wire.movers:
                        for rank in range(RANKS):
                            mover.forget(death.engine, rank)
                        self.wire.wake(mover._transport.name)

        self.wire.at(self.wire.now + TOLD_S, told)


@cache
def cost_of(kind: Kind) -> Cost:
    """Returns what a kind of request costs, by whole movers that do nothing else."""
    stage = Stage(1)
    stage.start(kind.tokens)
    before, began = stage.sent(), stage.wire.now
    stage.wire.at(began, lambda: stage.ask("r", Request(began, kind.tokens, 0, 0)))
    if kind.dies:
        stage.wire.at(began + PREFILL_S / 2, lambda: stage.die(Death(0.0, f"{kind.dies}0")))
    stage.wire.run(began + PREFILL_S + 10.0)
    ranks = [(f"{side}0", rank) for side in "pd" for rank in range(RANKS)]
    messages, grants, nbytes = (
        tuple(after[rank] - was[rank] for rank in ranks) for after, was in zip(stage.sent(), before, strict=True)
    )
    return Cost(messages, grants, nbytes, stage.took[0] if stage.took else math.nan)


@cache
def demands_of(tokens: int) -> tuple[float, ...]:
    """Returns the microseconds that a request takes of each of 16 resources: CPU of the four prefill ranks, their NICs,
    CPU of the four decode ranks, their NICs. Bytes are those of the planner's legs.
    """
    plan, sent, received = Plan(COMPONENT, PREFILL, DECODE, 0, tokens), [0.0] * RANKS, [0.0] * RANKS
    for leg in plan.legs():
        sent[leg.src_rank] += leg.nbytes(COMPONENT) / SPEEDS.wire_rate
        received[leg.dst_rank] += leg.nbytes(COMPONENT) / SPEEDS.wire_rate
    cost = cost_of(Kind(tokens))
    cpu = [sum(counts) * SPEEDS.event_us for counts in zip(cost.messages, cost.grants, strict=True)]
    return (*cpu[:RANKS], *sent, *cpu[RANKS:], *received)


@dataclass(slots=True)
class Replayed:
    """Totals of a trace. `messages` (but Granted), `grants`, `nbytes`: by rank; `took`: seconds of each hand-over that
    landed. `failed`: requests that waited when an engine died; `cut`: those that a death met later, which count as
    landed. `busy_s`: of the busiest CPU and NIC.
    """

    messages: Sent = field(default_factory=Counter[Rank])
    grants: Sent = field(default_factory=Counter[Rank])
    nbytes: Sent = field(default_factory=Counter[Rank])
    took: list[float] = field(default_factory=list[float])
    failed: int = 0
    cut: int = 0
    busy_s: dict[str, float] = field(default_factory=dict[str, float])


def replay(requests: Sequence[Request], deaths: Sequence[Death], engines: int) -> Replayed:
    """Count every request by its kind, and let its bytes wait at NICs and its events at CPUs, in the order of sends."""
    found, kinds, dead = Replayed(), Counter[tuple[int, int, Kind]](), by_engine(deaths)
    width = 2 * RANKS
    free_us, busy_us = ([0.0] * (2 * engines * width) for _ in range(2))
    for request in requests:
        names, ready = (f"p{request.source}", f"d{request.target}"), request.at_s + PREFILL_S
        dies = first_death(dead, names, request.at_s, ready) if dead else None
        kind = Kind(request.tokens, dies.engine[0] if dies else "")
        kinds[request.source, request.target, kind] += 1
        if dies:
            found.failed += 1
            continue
        needed, now_us, ends_us = demands_of(request.tokens), ready * 1e6, 0.0
        at = request.source * width
        for number, us in enumerate(needed):
            if number == width:
                at = (engines + request.target) * width - width
            ends = max(now_us, free_us[at + number]) + us
            free_us[at + number] = ends
            busy_us[at + number] += us
            ends_us = max(ends_us, ends)
        seconds = cost_of(kind).seconds + (ends_us - now_us - max(needed)) / 1e6
        found.took.append(seconds)
        found.cut += bool(dead and first_death(dead, names, ready, ready + seconds))
    for (source, target, kind), count in kinds.items():
        cost = cost_of(kind)
        for number in range(width):
            key = (f"p{source}", number) if number < RANKS else (f"d{target}", number - RANKS)
            found.messages[key] += count * cost.messages[number]
            found.grants[key] += count * cost.grants[number]
            found.nbytes[key] += count * cost.nbytes[number]
    for name, offset in (("CPU", 0), ("NIC", RANKS)):
        found.busy_s[name] = max(max(busy_us[offset + rank :: width]) for rank in range(RANKS)) / 1e6
    return found


def by_engine(deaths: Sequence[Death]) -> dict[str, list[Death]]:
    """Returns the deaths of each engine."""
    found = dict[str, list[Death]]()
    for death in deaths:
        found.setdefault(death.engine, []).append(death)
    return found


def first_death(
    dead: Mapping[str, Sequence[Death]], engines: Sequence[str], after: float, until: float
) -> Death | None:
    """Returns the first death of these engines in that time, None if there is none."""
    found = [death for engine in engines for death in dead.get(engine, ()) if after <= death.at_s < until]
    return min(found, key=lambda death: death.at_s, default=None)


def requests_of(count: int, rate: float, engines: int, deaths: Sequence[Death], random: Random) -> list[Request]:
    """Returns requests in the order of their times: arrivals of chance, at engines that are up, and again elsewhere
    where an engine died before the prefill was done.
    """
    dead, lengths, weights = by_engine(deaths), list(PROMPTS), list(PROMPTS.values())
    prompts = random.choices(lengths, weights, k=count)
    waiting, now = list[tuple[float, int, int]](), 0.0
    for number, tokens in enumerate(prompts):
        now += random.expovariate(rate)
        waiting.append((now, number, tokens))
    found = list[Request]()
    while waiting:
        at, number, tokens = heapq.heappop(waiting)
        source, target = (_up(dead, side, engines, at, random) for side in "pd")
        found.append(Request(at, tokens, source, target))
        dies = first_death(dead, (f"p{source}", f"d{target}"), at, at + PREFILL_S) if dead else None
        if dies:
            heapq.heappush(waiting, (dies.at_s + TOLD_S, number, tokens))
    return found


def _up(dead: Mapping[str, Sequence[Death]], side: str, engines: int, at: float, random: Random) -> int:
    while True:
        number = random.randrange(engines)
        if not any(death.at_s <= at < death.at_s + RESTART_S for death in dead.get(f"{side}{number}", ())):
            return number


def moved(requests: Sequence[Request], deaths: Sequence[Death], engines: int) -> Replayed:
    """The same trace, every request by whole movers on the timed wire. For small ones: some 50 ms of CPU a request."""
    stage, found = Stage(engines), Replayed()
    stage.start(max(request.tokens for request in requests), MOST_OPEN)
    before, began = stage.sent(), stage.wire.now
    for number, request in enumerate(requests):
        stage.wire.at(began + request.at_s, lambda n=number, r=request: stage.ask(f"r{n}", r))  # type: ignore[misc]
    for death in deaths:
        stage.wire.at(began + death.at_s, lambda d=death: stage.die(d))  # type: ignore[misc]
    stage.wire.run(began + requests[-1].at_s + PREFILL_S + 10.0)
    for total, after, was in zip((found.messages, found.grants, found.nbytes), stage.sent(), before, strict=True):
        total.update({rank: count - was[rank] for rank, count in after.items()})
    found.took, found.failed = stage.took, stage.failed
    return found


def live() -> Iterator[dict[str, object]]:
    """Yield the packed rows of wire.csv beside the same request by movers on a timed wire of the cable's delay and of
    the rate that raw NIXL had.
    """
    for cable, laid in bench_wire.CABLES.items():
        for way, raw in (("packed", bench_wire.RAW), ("packed, pulled", bench_wire.READ)):
            raw_ms = float(first("wire", cable=cable, way=raw)["ms"])
            speeds = Speeds(
                bench_wire.TOKENS * transfer_pair.COMPONENT.token_bytes / raw_ms / 1e3,
                bench_wire.PACKED.costs.gather_rate,
                bench_wire.PACKED.costs.scatter_rate,
                note_us=getattr(laid, "delay_s", 0.0) * 1e6 + 100.0,
                event_us=SPEEDS.event_us,
            )
            predicted_ms = _on_a_cable(speeds, bench_wire.CASES[way].config) * 1e3
            measured_ms = float(first("wire", cable=cable, way=way)["ms"])
            yield {
                "what": f"{way}, {cable}",
                "predicted_ms": f"{predicted_ms:.1f}",
                "measured_ms": measured_ms,
                "predicted_by_measured": f"{predicted_ms / measured_ms:.2f}",
            }


def _on_a_cable(speeds: Speeds, config: MoverConfig) -> float:
    """Returns the seconds of the request of bench_wire, the second of two, from asking to landed."""
    cable, tokens, movers = TimedWire(speeds), bench_wire.TOKENS, dict[str, Mover]()
    component, fleet, pages = (
        transfer_pair.COMPONENT,
        transfer_pair.FLEET,
        bench_wire.TOKENS // transfer_pair.PAGE_TOKENS,
    )
    config = replace(config, sandbox_bytes=0, ping_s=9.0, resend_s=20.0)
    for engine, order in (("prefill", "NHD"), ("decode", "HND")):
        transport = LoopbackTransport(cable, engine, cable.clock)
        spec = PoolSpec.dense(component, fleet.shard(component, 0, tokens), pages, transfer_pair.PAGE_TOKENS, order)
        place = Place(engine, fleet, 0)
        movers[engine] = Mover(transport, Model("bench", (component,)), place, [Pool.zeros(spec)], config, cable.clock)
        cable.movers[transport.name] = movers[engine]
    movers["decode"].connect(movers["prefill"].card)
    took = 0.0
    for request in ("first", "second"):
        began = cable.now = cable.now + 1.0
        movers["prefill"].send(request, [np.arange(pages)])
        landing = movers["decode"].receive(request, "prefill", range(tokens), [np.arange(pages)])
        for name in cable.movers:
            cable.wake(name)
        cable.run_until(lambda landing=landing: landing.ended)
        landing.landed()
        took = cable.now - began
    return took


def deaths_of(path: Path | None, engines: int, until: float, random: Random) -> list[Death]:
    """Returns the deaths of a file, or one in ten seconds of any engine."""
    if path is not None:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
        return sorted((Death(float(at), engine) for at, engine in lines), key=lambda death: death.at_s)
    count = int(until / 10)
    return [
        Death((n + random.random()) * 10, f"{random.choice('pd')}{random.randrange(engines)}") for n in range(count)
    ]


def row(
    what: str, requests: Sequence[Request], deaths: Sequence[Death], found: Replayed, engines: int
) -> dict[str, object]:
    """Returns a row of simulated_trace.csv."""
    seconds, took = requests[-1].at_s, np.array(found.took) * 1e3
    at_most = {name: len(requests) / busy for name, busy in found.busy_s.items()}
    breaks = min(at_most, key=at_most.__getitem__) if at_most else ""
    return {
        "what": what,
        "ranks": 2 * RANKS * engines,
        "requests": len(requests),
        "requests_a_s": round(len(requests) / seconds),
        "deaths": len(deaths),
        "asked_again": found.failed,
        "cut": found.cut,
        "messages": found.messages.total(),
        "grants": found.grants.total(),
        "messages_a_rank_s": round((found.messages + found.grants).total() / seconds / (2 * RANKS * engines)),
        "tib": f"{found.nbytes.total() * SCALE / 2**40:.2f}",
        "busiest_sender_gib": f"{max(found.nbytes.values()) * SCALE / 2**30:.1f}",
        "p50_ms": f"{np.percentile(took, 50):.1f}",
        "p99_ms": f"{np.percentile(took, 99):.1f}",
        "breaks_first": breaks,
        **{f"{name.lower()}_full_at_requests_a_s": round(each) for name, each in at_most.items()},
    }


#: Requests a second to 128 engines a side, the last more than they bear.
RATES = (2000, 4000, 6000, 8000)
ENGINES = 128


def main() -> None:
    """Simulate, print, and write simulated_trace.csv."""
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--deaths", type=Path)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # every death is one
    rows = list[dict[str, object]]()

    def add(each: dict[str, object]) -> None:
        rows.append(each)
        print(", ".join(f"{name} {value}" for name, value in each.items()), flush=True)

    for each in live():
        add(each)
    small, deaths = 4, [Death(3.0, "p1"), Death(4.0, "d2")]
    requests = requests_of(120, 12.0, small, deaths, Random(1))
    ways = {"movers": moved(requests, deaths, small), "replayed": replay(requests, deaths, small)}
    for name, found in ways.items():
        add(row(f"small fleet, {name}", requests, deaths, found, small))
    one, other = ways.values()
    exact = (one.messages, one.nbytes, one.failed) == (other.messages, other.nbytes, other.failed)
    print(f"messages and bytes of each rank are {'equal' if exact else 'UNEQUAL'}")
    assert exact
    for rate in RATES:
        count = chosen.requests if rate == RATES[1] else chosen.requests // 10
        deaths = deaths_of(chosen.deaths, ENGINES, count / rate, Random(rate))
        requests = requests_of(count, rate, ENGINES, deaths, Random(count))
        add(row("trace", requests, deaths, replay(requests, deaths, ENGINES), ENGINES))
    columns = dict.fromkeys(key for each in rows for key in each)
    print(f"wrote {write('simulated_trace', [{key: each.get(key, '') for key in columns} for each in rows])}")


if __name__ == "__main__":
    main()
