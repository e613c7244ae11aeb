"""Whole movers by the thousand, on paper time: what a request costs in messages and CPU, and a rank in memory.

Every rank is a real mover over a wire inside this process, with pools of a few KiB, so that what is timed is the
protocol and its bookkeeping. Engines of four ranks each: half prefill in TP4, half decode in TP2 x CP2, so a rank hears
from two. Decode engines ask whichever prefill engine chance names and connect to it when they first do; a request's
prefill takes half a second after it was asked for. 100,000 requests a minute on 1,000 and 1,000 ranks, as many a rank
on smaller fleets, and many times as many on one of them. `python -m perf.simulate_scale` takes about five minutes.
"""

from __future__ import annotations

import gc
import heapq
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import RDMA, Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.destination import destination_machine as receiver
from kvmover.transfer.destination import destination_machine as receiving
from kvmover.transfer.events import Patience
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Transfer
from kvmover.transfer.source import source_machine as sender
from kvmover.transfer.source import source_machine as sending
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport, _Flight
from perf.command_line import options
from perf.record import write

COMPONENT = Component.attention(2, 4, 8, "bfloat16")
PREFILL, DECODE = Fleet(tp=4, page_tokens=4), Fleet(tp=2, cp=2, page_tokens=4)
TOKENS, PAGES = 16, 1024
CONFIG = MoverConfig(
    arena_bytes=16 << 10, route=Route.PACKED, costs=replace(RDMA, chunk_bytes=256), sandbox_bytes=0, ping_s=0.5
)
RANKS = (40, 120, 400, 1000)
#: Times the rate, on the fleets of 120 ranks: so many more requests are open at a time.
RATES = (4, 16)
REQUESTS_A_RANK = 8
PREFILL_S = 0.5
#: Per decode rank, of four to a request: 100,000 requests a minute at 1,000 ranks.
RATE_A_RANK = 100_000 / 60 / 1000
TICK_S = 0.1
CHUNKS = (16, 64, 256, 1024, 4096)


class Wire(LoopbackNetwork):
    """Delivers at once, and knows who has mail."""

    def __init__(self) -> None:
        super().__init__()
        self.mail = dict[str, None]()

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        super().tell(sender, peer, note)
        self.mail[peer] = None

    def _land(self, sender: LoopbackTransport, flight: _Flight) -> None:
        super()._land(sender, flight)
        self.mail[flight.peer] = self.mail[sender.name] = None


@dataclass(slots=True)
class World:
    """Engines of four movers, a clock, and what is to be done when. `asked` [engine]: pages that it received into."""

    now: float = 0.0
    wire: Wire = field(default_factory=Wire)
    movers: dict[str, Mover] = field(default_factory=dict[str, Mover])
    engines: dict[str, list[Mover]] = field(default_factory=dict[str, list[Mover]])
    met: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    busy: Counter[Mover] = field(default_factory=Counter[Mover])
    asked: Counter[str] = field(default_factory=Counter[str])
    _due: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list["tuple[float, int, Callable[[], None]]"]
    )
    _numbers: count[int] = field(default_factory=count)

    def engine(self, name: str, fleet: Fleet) -> None:
        self.engines[name] = [self._mover(name, fleet, rank) for rank in range(fleet.size)]

    def _mover(self, engine: str, fleet: Fleet, rank: int) -> Mover:
        transport = LoopbackTransport(self.wire, f"{engine}-{rank}", lambda: self.now)
        spec = PoolSpec.dense(COMPONENT, fleet.shard(COMPONENT, rank, 1), PAGES, fleet.page_tokens, "NHD")
        place = Place(engine, fleet, rank)
        mover = Mover(transport, Model("toy", (COMPONENT,)), place, [Pool.zeros(spec)], CONFIG, lambda: self.now)
        self.movers[transport.name] = mover
        return mover

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def run(self) -> None:
        """Until nothing is to be done. Who is waiting for something is polled ten times a second beside."""
        tick = self.now
        while self._due or self.wire.mail:
            self._deliver()
            if not self._due:
                continue
            when, _, call = heapq.heappop(self._due)
            while tick + TICK_S <= when:
                tick = self.now = tick + TICK_S
                for mover in list(self.busy):
                    mover.poll()
                self._deliver()
            self.now = when
            call()

    def _deliver(self) -> None:
        while self.wire.mail:
            name, _ = self.wire.mail.popitem()
            self.movers[name].poll()

    def meet(self, source: str, target: str) -> None:
        if (source, target) in self.met:
            return
        self.met.add((source, target))
        for mover in self.engines[target]:
            for other in self.engines[source]:
                mover.connect(other.card)
        self._deliver()

    def ask(self, request: str, source: str, target: str) -> list[Transfer]:
        """Decode asks; prefill has the request half a second later."""
        self.meet(source, target)
        due = -(-TOKENS // 4 // 2)
        self.asked[target] += due
        into, held = [(self.asked[target] + np.arange(due)) % PAGES], [np.arange(TOKENS // 4)]
        begun = [mover.receive(request, source, range(TOKENS), into) for mover in self.engines[target]]
        self.busy.update([*self.engines[target], *self.engines[source]])

        def send() -> None:
            self._deliver()
            begun.extend(mover.send(request, held) for mover in self.engines[source])
            self.at(self.now + TICK_S, done)

        def done() -> None:
            assert all(transfer.landed() for transfer in begun), "a request is still under way"
            self.busy.subtract([*self.engines[target], *self.engines[source]])
            self.busy += Counter()  # drops who waits for nothing

        self.at(self.now + PREFILL_S, send)
        return begun


def fleet(ranks: int, times: int = 1) -> dict[str, object]:
    """`ranks` prefill and as many decode ranks, and what their requests took at so many times the rate."""
    world, random = World(), Random(ranks)
    for number in range(ranks // 4):
        world.engine(f"p{number}", PREFILL)
        world.engine(f"d{number}", DECODE)
    requests = REQUESTS_A_RANK * ranks // 4 * times
    names = [(f"p{random.randrange(ranks // 4)}", f"d{random.randrange(ranks // 4)}") for _ in range(requests)]
    began = time.process_time()
    for source, target in names:
        world.meet(source, target)
    met_s = time.process_time() - began
    greetings = messages(world)
    spacing = 1 / (RATE_A_RANK * ranks * times)
    for number, (source, target) in enumerate(names):
        world.at(number * spacing, lambda n=number, s=source, t=target: world.ask(f"r{n}", s, t))  # type: ignore[misc]
    began = time.process_time()
    world.run()
    seconds, said = time.process_time() - began, messages(world) - greetings
    peers = [len(mover._core.peers) for mover in world.movers.values()]
    row: dict[str, object] = {
        "what": "fleet",
        "ranks": 2 * ranks,
        "requests": requests,
        "requests_a_minute": round(60 / spacing),
        "peers_a_rank": round(sum(peers) / len(peers), 1),
        "messages_a_request": round(said / requests, 2),
        "cpu_us_a_request": round(seconds / requests * 1e6, 1),
        "cpu_us_a_message": round(seconds / said * 1e6, 2),
        "connect_us": round(met_s / max(1, 16 * len(world.met)) * 1e6, 1),
    }
    for mover in world.movers.values():
        mover.close()
    return row


def messages(world: World) -> int:
    return sum(
        mover.meter.counts[Count.MESSAGES] + mover.meter.counts[Count.SENT_CHUNKS] for mover in world.movers.values()
    )


def memory() -> dict[str, object]:
    """Bytes of Python objects that one more peer, and one more open request, cost a decode rank."""
    world = World()
    for number in range(101):
        world.engine(f"p{number}", PREFILL)
    world.engine("d", DECODE)
    target = world.engines["d"][0]
    world.meet("p0", "d")
    tracemalloc.start()
    before = traced()
    for number in range(1, 101):
        for other in world.engines[f"p{number}"]:
            target.connect(other.card)
    peer_bytes = (traced() - before) / 400 / 2  # both ends of each
    world._deliver()
    before = traced()
    for number in range(200):
        target.receive(f"r{number}", "p0", range(TOKENS), [2 * number + np.arange(2)])
    request_bytes = (traced() - before) / 200
    tracemalloc.stop()
    return {"what": "memory", "bytes_a_peer": round(peer_bytes), "bytes_an_open_request": round(request_bytes)}


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def machines(chunks: int) -> dict[str, object]:
    """Both state machines of one request of `chunks` chunks, all under way at once: CPU for each event."""
    patience = Patience(30.0, 2.0, 1.0)
    dst = receiving.Receiving("r", 1, {"p": receiving.Source(chunks)}, patience, 30.0)
    src = sending.Sending("r", 1, (256,) * chunks, patience, 30.0)
    to_src: list[Callable[[int], sending.Event]] = [
        lambda chunk: wire.Granted("r", 1, (wire.Grant(chunk, 256 * chunk),)),
        lambda chunk: sending.Posted(chunk, 7),
        sending.Written,
    ]
    to_dst: list[Callable[[int], receiving.Event]] = [
        lambda chunk: receiving.Reserved("p", ((chunk, 256 * chunk),)),
        lambda chunk: receiving.Heard("p", wire.Chunk("r", 1, chunk, 0, 7)),
        lambda chunk: receiving.Scattered("p", chunk, 7),
    ]
    began = time.process_time()
    src, _ = sender.step(src, sending.Ready(tuple(range(chunks))), 0.0)
    dst, _ = receiver.step(dst, receiving.Heard("p", wire.Offered("r", 1, ((0, chunks),))), 0.0)
    for at_dst, at_src in zip(to_dst, to_src, strict=True):
        for chunk in range(chunks):
            dst, _ = receiver.step(dst, at_dst(chunk), 0.0)
        for chunk in range(chunks):
            src, _ = sender.step(src, at_src(chunk), 0.0)
    src, _ = sender.step(src, wire.Done("r", 1), 0.0)
    seconds = time.process_time() - began
    assert dst.finished
    assert src.finished
    return {"what": "machines", "chunks": chunks, "cpu_us_an_event": round(seconds / (6 * chunks) * 1e6, 2)}


def main() -> None:
    options(__doc__).parse_args()
    rows: list[dict[str, object]] = [machines(chunks) for chunks in CHUNKS]
    rows.append(memory())
    for row in rows:
        print(row)
    gc.disable()  # its passes grow with all that lives in this one process
    for ranks, times in [*((ranks, 1) for ranks in RANKS), *((120, times) for times in RATES)]:
        rows.append(fleet(ranks, times))
        print(rows[-1], flush=True)
        gc.collect()
    columns = dict.fromkeys(key for row in rows for key in row)
    print(f"wrote {write('scale', [{key: row.get(key, '') for key in columns} for row in rows])}")


if __name__ == "__main__":
    main()
