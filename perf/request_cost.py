"""CPU of both sides of a request, loopback in one process, copies left out. Prints JSON; started by `bench_request`.

Prompts of 1 to 512 tokens at random, pages of 16, one request at a time; 64 chunks of one 16-token page each for the
cost of a chunk. It runs on any tree of the last months, so it uses nothing but what `kvmover` exports.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time

from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec, Transfer
from kvmover.kernels import reference
from kvmover.plan.cost import Costs, Route
from kvmover.transport import LoopbackNetwork, LoopbackTransport

PATIENT = {"sandbox_bytes": 0, "deadline_s": 1e4, "silence_s": 1e4, "resend_s": 1e4, "ping_s": 1e4}


def fleets(sources: int, targets: int, heads: int, config: MoverConfig) -> tuple[list[Mover], list[Mover]]:
    """Two connected engines of so many ranks each."""
    component, network = Component.attention(2, heads, 8, "bfloat16"), LoopbackNetwork()

    def engine(name: str, fleet: Fleet) -> list[Mover]:
        movers: list[Mover] = []
        for rank in range(fleet.size):
            spec = PoolSpec.dense(component, fleet.shard(component, rank, 1), 512, 16, "NHD")
            transport = LoopbackTransport(network, f"{name}-{rank}")
            movers.append(
                Mover(transport, Model("m", (component,)), Place(name, fleet, rank), [Pool.zeros(spec)], config)
            )
        return movers

    prefill, decode = (engine(n, Fleet(tp=tp, page_tokens=16)) for n, tp in (("p", sources), ("d", targets)))
    for target in decode:
        for source in prefill:
            target.connect(source.card)
    for _ in range(3):
        for mover in (*prefill, *decode):
            mover.poll()
    gc.collect()
    gc.freeze()  # a full collection that happens to fall into twelve calls would double what they take
    return prefill, decode


def finish(movers: list[Mover], transfers: list[Transfer]) -> None:
    """Poll until all have landed."""
    while not all(transfer.ended for transfer in transfers):
        for mover in movers:
            mover.poll()
    for transfer in transfers:
        transfer.landed()


def requests(sources: int, targets: int, route: str, count: int) -> tuple[float, float]:
    """(us a request on all ranks, us a `receive()`)."""
    config = MoverConfig(arena_bytes=4 << 20, route=Route(route), **PATIENT)
    prefill, decode = fleets(sources, targets, max(8, sources, targets), config)
    random_ = random.Random(1)
    asking, began = 0.0, time.process_time()
    for number in range(count):
        tokens = random_.randint(1, 512)
        pages = [random_.sample(range(512), -(-tokens // 16))]
        transfers = [mover.send(f"r{number}", pages) for mover in prefill]
        asked = time.process_time()
        transfers += [mover.receive(f"r{number}", "p", range(tokens), pages) for mover in decode]
        asking += time.process_time() - asked
        finish([*prefill, *decode], transfers)
    return (time.process_time() - began) / count * 1e6, asking / count / targets * 1e6


def chunk(route: str, chunks: int, count: int) -> float:
    """us a chunk and side."""
    config = MoverConfig(arena_bytes=1 << 20, route=Route(route), costs=Costs(1, 1e3, 1e3, 1e3, 10, 4096), **PATIENT)
    prefill, decode = fleets(1, 1, 8, config)
    spent = 0.0
    for number in range(count):
        transfers = [mover.send(f"r{number}", [range(chunks)]) for mover in prefill]
        transfers += [mover.receive(f"r{number}", "p", range(16 * chunks), [range(chunks)]) for mover in decode]
        began = time.process_time()
        finish([*prefill, *decode], transfers)
        spent += time.process_time() - began
    return spent / count / chunks / 2 * 1e6


def measured() -> dict[str, float]:
    """Everything, in microseconds."""
    found: dict[str, float] = {}
    for route in ("packed", "direct"):
        found[f"request TP1 to TP1 {route}"], found[f"receive over 1 lane {route}"] = requests(1, 1, route, 300)
        found[f"chunk and side {route}"] = chunk(route, 64, 6)
    found["request TP8 to TP2 packed"], _ = requests(8, 2, "packed", 20)
    found["request TP8 to TP8 packed"], _ = requests(8, 8, "packed", 20)
    _, found["receive over 64 lanes packed"] = requests(64, 1, "packed", 12)
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    reference.move = lambda regions: None
    print(json.dumps(measured()))
