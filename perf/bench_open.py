"""Measures the CPU time of a mover's calls beside open requests, connected engines and other chunks.

`python -m perf.bench_open [--rounds 15] [--out FOLDER]`. The baseline, in the same run and in turn: a mover with
nothing open, with one engine, or a request of 16 chunks. Movers of one process, without a device and a wire.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import kvmover.kernels.cpu as kernels
from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec
from kvmover.plan.cost import Costs, Route
from kvmover.transfer import Transfer
from kvmover.transport import LoopbackNetwork, LoopbackTransport
from perf import record
from perf.command_line import options

OPEN, ENGINES, CHUNKS = (0, 1_000, 10_000), (1, 100, 1_000), (16, 256, 4_096)

#: Calls of a sample, and pages of a request.
CALLS, PAGES = 20, 4

FLEET, KV = Fleet(page_tokens=16), Component.attention(2, 8, 8, "bfloat16")

#: A chunk of one page.
SMALL = Costs(1, 1e3, 1e3, 1e3, 10, 2048)

#: Time enough that nothing falls due.
CONFIG = MoverConfig(
    arena_bytes=1 << 20, sandbox_bytes=0, deadline_s=1e4, silence_s=1e4, resend_s=1e4, ping_s=1e4, costs=SMALL
)

_numbers = count()


@dataclass(slots=True)
class Rank:
    """A decode rank and its prefill ranks, connected."""

    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    target: Mover = field(init=False)
    sources: list[Mover] = field(default_factory=list[Mover])
    config: MoverConfig = CONFIG
    pages: int = CALLS * PAGES

    def __post_init__(self) -> None:
        self.target = self.mover("decode", self.pages)

    def mover(self, engine: str, pages: int) -> Mover:
        pool = Pool.zeros(PoolSpec.dense(KV, FLEET.shard(KV, 0, 1), pages, 16, "NHD"))
        wire = LoopbackTransport(self.network, engine)
        return Mover(wire, Model("toy", (KV,)), Place(engine, FLEET, 0), [pool], self.config)

    def with_engines(self, engines: int, pages: int = 1) -> Rank:
        self.sources = [self.mover(f"prefill-{number}", pages) for number in range(engines)]
        for source in self.sources:
            self.target.connect(source.card)
        self.turn(6)
        return self

    def with_open(self, requests: int) -> Rank:
        for _ in range(requests):
            self.receive(None)
        self.turn(6 + requests // 100)
        return self

    def turn(self, rounds: int) -> None:
        for _ in range(rounds):
            for mover in (self.target, *self.sources):
                mover.poll()

    def receive(self, pages: list[list[int]] | None) -> Transfer:
        return self.target.receive(f"r{next(_numbers)}", "prefill-0", range(16 * PAGES), pages)


def calls(rank: Rank) -> dict[str, float]:
    """CPU microseconds of each call. All that is begun here is over at the end."""
    tables = [[[*range(first, first + PAGES)]] for first in range(0, CALLS * PAGES, PAGES)]
    found, begun = dict[str, float](), list[Transfer]()
    found["receive"] = _each_us(lambda at: begun.append(rank.receive(tables[at])))
    found["abort"] = _each_us(lambda at: rank.target.abort(begun[at], "enough"))
    rank.turn(4)
    growing = [rank.receive(None) for _ in range(CALLS)]
    found["allocated"] = _each_us(lambda at: rank.target.allocated(growing[at], tables[at]))
    for transfer in growing:
        rank.target.abort(transfer, "enough")
    rank.turn(4)
    found["idle poll"] = _each_us(lambda _: rank.target.poll())
    found["ranks of an engine"] = _each_us(lambda _: rank.target.ranks("prefill-0"))
    return found


def _each_us(call: Callable[[int], object]) -> float:
    began = time.process_time()
    for at in range(CALLS):
        call(at)
    return (time.process_time() - began) / CALLS * 1e6


def losses(requests: int) -> dict[str, float]:
    """CPU of the loss of a peer with open requests: a request's part, and the longest poll."""
    rank = Rank().with_engines(1).with_open(requests)
    name, polls = rank.sources[0]._core.transport.name, list[float]()
    began = time.process_time()
    rank.target._lose(name, "gone")
    polls.append(time.process_time() - began)
    while rank.target._core.losses:
        before = time.process_time()
        rank.target.poll()
        polls.append(time.process_time() - before)
    return {"a request of a lost peer": sum(polls) / requests * 1e6, "longest poll after a loss": max(polls) * 1e6}


def chunk_us(chunks: int) -> float:
    """CPU microseconds of a chunk on both sides, without its copies."""
    config = MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0, deadline_s=1e4, costs=SMALL, route=Route.PACKED)
    rank = Rank(config=config, pages=chunks).with_engines(1, chunks)
    name, table = f"r{next(_numbers)}", [[*range(chunks)]]
    sent = rank.sources[0].send(name, table)
    landing = rank.target.receive(name, "prefill-0", range(16 * chunks), table)
    began = time.process_time()
    while not (sent.ended and landing.ended):
        rank.turn(1)
    spent = time.process_time() - began
    assert landing.landed().writes == chunks
    return spent / chunks * 1e6


def measured(rounds: int) -> Iterator[tuple[str, str, Mapping[int, float]]]:
    """Yield (call, what grows, median microseconds by how many there are)."""
    by_open = {number: Rank().with_engines(1).with_open(number) for number in OPEN}
    by_engines = {number: Rank().with_engines(number) for number in ENGINES}
    for grows, ranks in (("open requests", by_open), ("engines", by_engines)):
        samples = dict[tuple[str, int], list[float]]()
        for _ in range(rounds):
            for number, rank in ranks.items():
                for call, us in calls(rank).items():
                    samples.setdefault((call, number), []).append(us)
        for call in dict.fromkeys(call for call, _ in samples):
            yield call, grows, {number: median(samples[call, number]) for number in ranks}
    lost = {number: [losses(number) for _ in range(3)] for number in (OPEN[1] // 10, *OPEN[1:])}
    for call in lost[OPEN[1]][0]:
        yield call, "open requests", {number: median(each[call] for each in of) for number, of in lost.items()}
    chunks = {number: list[float]() for number in CHUNKS}
    for _ in range(max(1, rounds // 5)):
        for number, found in chunks.items():
            found.append(median(chunk_us(number) for _ in range(max(1, 64 // number))))
    yield "a chunk, both sides", "chunks of its request", {number: median(found) for number, found in chunks.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    chosen: argparse.Namespace = parser.parse_args()
    kernels.move = lambda *_, **__: None  # a chunk's copy is not its control
    rows = list[dict[str, object]]()
    for call, grows, found in measured(chosen.rounds):
        (least, few), *_, (most, many) = found.items()
        rows.append({"call": call, "grows": grows, "few": least, "many": most, "few_us": f"{few:.3g}"})
        rows[-1] |= {"many_us": f"{many:.3g}", "ratio": f"{many / few:.2f}"}
        said = ", ".join(f"{number:,}: {us:.1f} us" for number, us in found.items())
        print(f"{call:28s} {grows:22s} {said}  {many / few:.2f}")
    print(record.write("open", rows, chosen.out))


if __name__ == "__main__":
    main()
