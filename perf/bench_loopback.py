"""64 MiB between two processes of one host: packed and direct routes against one contiguous NIXL write of the bytes.

All copies run on the same cores: packed copies the bytes three times (gather, write, scatter), so half of the
contiguous write is about the most it can reach. Rows are 512 B, NHD to HND, so going direct is one descriptor for each.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Route
from kvmover.transfer.handshake import Model, Place
from kvmover.transfer.mover import Mover
from kvmover.transfer.result import MoverConfig
from kvmover.transport.base import Completed, Descriptors, Memory
from kvmover.transport.memory import memory_of
from kvmover.transport.nixl import NixlTransport
from perf.record import Spread, write

NBYTES = 64 << 20
LAYERS, HEADS, TOKENS, PAGE_TOKENS = 16, 4, 1024, 64
COMPONENT = Component.attention(LAYERS, HEADS, 256, "bfloat16")
FLEET = Fleet(page_tokens=PAGE_TOKENS)
PAGES = TOKENS // PAGE_TOKENS
CHUNKS = {"packed, 64 MiB chunks": 64 << 20, "packed, 8 MiB chunks": 8 << 20, "packed, 1 MiB chunks": 1 << 20}
ROUNDS = 9


def config(name: str) -> MoverConfig:
    return MoverConfig(
        arena_bytes=NBYTES + (1 << 20),
        route=Route.PACKED if name in CHUNKS else Route.DIRECT,
        costs=replace(HOST, chunk_bytes=CHUNKS.get(name, NBYTES)),
    )


@dataclass(slots=True)
class Side:
    """One process: a mover on a pool, and a plain buffer in the same agent. One agent: each has a thread that polls."""

    mover: Mover
    transport: NixlTransport
    buffer: Memory
    keep: object


def build(engine: str, order: str) -> Side:
    import torch

    torch.set_num_threads(1)  # two teams of spinning workers on two cores starve each other
    shard = FLEET.shard(COMPONENT, 0, TOKENS)
    spec = PoolSpec.dense(COMPONENT, shard, PAGES, PAGE_TOKENS, order)
    assert spec.allocation_bytes == NBYTES
    pool = Pool(spec, (torch.randint(0, 255, (NBYTES,), dtype=torch.uint8),))
    buffer = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8)
    transport = NixlTransport(engine)
    transport.register(memory_of(buffer))
    mover = Mover(transport, Model("bench", (COMPONENT,)), Place(engine, FLEET, 0), [pool], config("direct"))
    return Side(mover, transport, memory_of(buffer), (pool, buffer))


def destination(pipe: Connection) -> None:
    """Receive what it is told to, and answer how long it took from asking to landed."""
    side = build("decode", "HND")
    pipe.send((side.transport.name, side.buffer))
    side.mover.connect(pipe.recv())
    pages = np.arange(PAGES)
    for name, request in iter(pipe.recv, None):
        side.mover.configure(config(name))
        transfer = side.mover.receive(request, "prefill", range(TOKENS), [pages])
        side.mover.wait([transfer])
        pipe.send(transfer.landed().seconds)


def main() -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=destination, args=(there,), daemon=True)
    process.start()
    side = build("prefill", "NHD")
    peer, remote = here.recv()
    here.send(side.mover.card)
    pages = np.random.default_rng(0).permutation(PAGES)

    def contiguous() -> float:
        began = time.perf_counter()
        ends = [Descriptors.runs(memory.kind, [memory.address], NBYTES) for memory in (side.buffer, remote)]
        side.transport.write(peer, ends[0], ends[1], b"", 60.0)
        while not any(isinstance(event, Completed) for event in side.transport.poll()):
            time.sleep(50e-6)
        return time.perf_counter() - began

    def moved(name: str) -> Callable[[], float]:
        def once() -> float:
            request = f"{name} {time.monotonic_ns()}"
            offered = side.mover.send(request, [pages])
            here.send((name, request))
            side.mover.wait([offered])
            return float(here.recv())

        return once

    moved("direct")()  # the first request meets the peer
    cases = {"one contiguous write": contiguous, **{name: moved(name) for name in (*CHUNKS, "direct")}}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(ROUNDS + 1):
        for name, case in cases.items():
            if name == "direct" and number % 3:
                continue  # seconds each: a third of the rounds
            seconds = case()
            if number:
                samples[name].append(seconds)
    here.send(None)
    process.join(30)
    report({name: Spread.of(times) for name, times in samples.items()})


def report(spreads: dict[str, Spread]) -> None:
    plain, direct = spreads["one contiguous write"].median, spreads["direct"].median
    rows: list[dict[str, object]] = [
        {
            "what": name,
            "mib": NBYTES >> 20,
            "row_bytes": COMPONENT.row_bytes,
            "gb_per_s": round(NBYTES / spread.median / 1e9, 3),
            "p10_gb_per_s": round(NBYTES / spread.high / 1e9, 3),
            "p90_gb_per_s": round(NBYTES / spread.low / 1e9, 3),
            "of_contiguous": round(plain / spread.median, 3),
            "of_direct": round(direct / spread.median, 2),
        }
        for name, spread in spreads.items()
    ]
    for row in rows:
        print(
            f"{row['what']:<24} {row['gb_per_s']:>7} GB/s ({row['p10_gb_per_s']} to {row['p90_gb_per_s']}),"
            f" {row['of_contiguous']} of contiguous, {row['of_direct']} x direct"
        )
    print(f"wrote {write('bench_loopback', rows)}")


if __name__ == "__main__":
    main()
