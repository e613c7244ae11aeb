"""What a progress thread costs: against polling in the caller's own loop, between two processes of one host.

Requests of 1 MiB and of 64 MiB in 8 MiB chunks, on CPUs, where a poll copies. Then how long a call waits for the
thread while it sleeps and while it packs, and what the thread does with nothing to do.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.threads.progress import Progress
from kvmover.transfer.threads.wrappers import SharedMover
from kvmover.transport.nixl import NixlTransport
from perf.command_line import options
from perf.record import Spread, write

COMPONENT = Component.attention(16, 4, 256, "bfloat16")
FLEET = Fleet(page_tokens=16)
PAGES = 64
LARGE, SMALL = PAGES * 16, 16
CONFIG = MoverConfig(arena_bytes=(64 << 20) + 4096, route=Route.PACKED, costs=replace(HOST, chunk_bytes=8 << 20))
#: Who drives the movers; in the last row a thread that never lets go of Python works beside each of them.
WAYS = ("own loop", "progress thread", "own loop, busy beside", "progress thread, busy beside")
ROUNDS = {SMALL: 60, LARGE: 24}
CALLS = 2000


@dataclass(slots=True)
class Side:
    """A mover that is polled where it is waited for, and one that has a thread. Neither costs the other anything."""

    polled: Mover
    threaded: SharedMover

    @classmethod
    def build(cls, name: str, order: str) -> Side:
        import torch

        torch.set_num_threads(1)  # two teams of spinning workers on two cores starve each other
        return cls(mover(f"{name} polled", order), SharedMover(Progress(mover(f"{name} threaded", order))))

    def of(self, way: str) -> Mover | SharedMover:
        return self.polled if way.startswith("own loop") else self.threaded


def mover(engine: str, order: str) -> Mover:
    spec = PoolSpec.dense(COMPONENT, FLEET.shard(COMPONENT, 0, LARGE), PAGES, FLEET.page_tokens, order)
    return Mover(
        NixlTransport(engine.replace(" ", "-")),
        Model("bench", (COMPONENT,)),
        Place(engine, FLEET, 0),
        [Pool.zeros(spec)],
        CONFIG,
    )


def source(way: str) -> str:
    return f"prefill {'polled' if way.startswith('own loop') else 'threaded'}"


@contextmanager
def beside(way: str) -> Iterator[None]:
    """An engine's Python, where the way has one."""
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    if way.endswith("busy beside"):
        busy.start()
    yield
    stop.set()
    if busy.is_alive():
        busy.join()


def destination(pipe: Connection) -> None:
    """Receive what it is told to, and answer how long it took from asking to landed."""
    side = Side.build("decode", "HND")
    for card in pipe.recv():
        side.polled.connect(card)
        side.threaded.connect(card)
    pipe.send(None)
    for way, request, tokens in iter(pipe.recv, None):
        with beside(way):
            here = side.of(way)
            began = time.perf_counter()
            transfer = here.receive(request, source(way), range(tokens), [np.arange(tokens // FLEET.page_tokens)])
            here.wait([transfer])
            seconds = time.perf_counter() - began
        transfer.landed()
        pipe.send(seconds)
    side.threaded.close()


def main() -> None:
    options(__doc__).parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=destination, args=(there,), daemon=True)
    process.start()
    side = Side.build("prefill", "NHD")
    here.send([side.polled.card, side.threaded.card])
    while not here.poll(1e-3):
        side.polled.poll()
    here.recv()
    pages = np.random.default_rng(0).permutation(PAGES)

    def move(way: str, tokens: int) -> float:
        request = f"{way} {time.monotonic_ns()}"
        with beside(way):
            offered = side.of(way).send(request, [pages[: tokens // FLEET.page_tokens]])
            here.send((way, request, tokens))
            side.of(way).wait([offered])
            return float(here.recv())

    samples: dict[tuple[int, str], list[float]] = {(tokens, way): [] for tokens in ROUNDS for way in WAYS}
    for tokens, rounds in ROUNDS.items():
        for number in range(rounds + 2):
            for way in WAYS:
                seconds = move(way, tokens)
                if number > 1:
                    samples[tokens, way].append(seconds)
    rows = [row for tokens in ROUNDS for row in moved(tokens, {way: samples[tokens, way] for way in WAYS})]
    rows += calls(side.threaded, lambda: move("progress thread", LARGE))
    rows.append(idle(side.threaded))
    here.send(None)
    process.join(30)
    side.threaded.close()
    for row in rows:
        print(
            f"{row['what']:<44} {row['median_us']:>10} us ({row['p10_us']} to {row['p90_us']}, most {row['most_us']})"
        )
        print(f"{'':<44} {row['ratio']} {row['of_what']}")
    print(f"wrote {write('bench_progress', rows)}")


def row(what: str, samples: list[float], ratio: float, of_what: str) -> dict[str, object]:
    spread = Spread.of(samples)
    times = {"median_us": spread.median, "p10_us": spread.low, "p90_us": spread.high, "most_us": max(samples)}
    return {
        "what": what,
        **{name: round(seconds * 1e6, 1) for name, seconds in times.items()},
        "ratio": round(ratio, 4),
        "of_what": of_what,
    }


def moved(tokens: int, by_way: dict[str, list[float]]) -> Iterator[dict[str, object]]:
    plain = Spread.of(by_way[WAYS[0]]).median
    for way, samples in by_way.items():
        mib = tokens * COMPONENT.token_bytes >> 20
        yield row(f"{mib} MiB, {way}", samples, Spread.of(samples).median / plain, f"of the time in an {WAYS[0]}")


def calls(threaded: SharedMover, busy: Callable[[], float]) -> list[dict[str, object]]:
    """How long a call takes on a thread that sleeps, and on one that packs;"""
    asleep = [waited(threaded) for _ in range(CALLS)]
    packing: list[float] = []
    for _ in range(6):
        worker = threading.Thread(target=busy)
        worker.start()
        while worker.is_alive():
            packing.append(waited(threaded))
        worker.join()
    base = Spread.of(asleep).median
    return [
        row("a call, nothing under way", asleep, 1.0, "of a call with nothing under way"),
        row("a call while 64 MiB are packed", packing, Spread.of(packing).median / base, "of the same with nothing"),
    ]


def waited(threaded: SharedMover) -> float:
    time.sleep(200e-6)
    began = time.perf_counter()
    threaded.snapshot()
    return time.perf_counter() - began


def idle(threaded: SharedMover) -> dict[str, object]:
    """CPU time of the thread, a poll, with nothing to do. NIXL's own threads are not counted."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "the mover of prefill threaded rank 0")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before, cpu, began = threaded.snapshot().meter.counts[Count.POLLS], time.clock_gettime(clock), time.perf_counter()
    time.sleep(3)
    polls = threaded.snapshot().meter.counts[Count.POLLS] - before
    seconds, took = time.clock_gettime(clock) - cpu, time.perf_counter() - began
    what = f"of a core, {polls / took:.0f} polls a second"
    return row("CPU of a poll with nothing to do", [seconds / polls], seconds / took, what)


if __name__ == "__main__":
    main()
