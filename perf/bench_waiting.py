"""What waiting costs: CPU of a poll where nothing happens, and notes and CPU while requests wait for their prefill.

`python -m perf.bench_waiting [--before TREE] [--open 1000] [--out FOLDER]`: TREE is a checkout of an earlier commit,
measured in the same run, in turn with this one, each pass in a process of its own. CPU time; times are virtual.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from perf import record

HERE = Path(__file__).parent.parent
#: Polls of a second of waiting, and for how many seconds each case waits.
POLLS_PER_S, SECONDS = 100, 5
TOKENS = 2048
#: Pages of a request, and of the decode rank's pool: those of as many requests as it waits for at once.
PAGES, MOST_PAGES = TOKENS // 16, 4096 * TOKENS // 16


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Never:
    """An event of the engine that does not pass."""

    def query(self) -> bool:
        return False


class Fleets:
    """A prefill engine of `tp` ranks and a decode rank, connected, on virtual time; their notes are counted."""

    def __init__(self, tp: int) -> None:
        from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec
        from kvmover.plan.cost import Route
        from kvmover.transport import LoopbackNetwork, LoopbackTransport

        class Counted(LoopbackTransport):
            notes = 0

            def notify(self, peer: str, note: bytes) -> None:
                self.notes += 1
                super().notify(peer, note)

        self.clock, network = Clock(), LoopbackNetwork()
        kv = Component.attention(2, 8, 8, "bfloat16")
        config = MoverConfig(arena_bytes=8 << 20, sandbox_bytes=0, deadline_s=300, route=Route.PACKED)
        source, target = Fleet(tp=tp, page_tokens=16), Fleet(page_tokens=16)
        self.wires: list[Counted] = []
        self.movers: list[Any] = []
        for engine, fleet in (("decode", target), ("prefill", source)):
            for rank in range(fleet.size):
                pages = MOST_PAGES if engine == "decode" else 256
                pool = Pool.zeros(PoolSpec.dense(kv, fleet.shard(kv, rank, 1), pages, 16, "NHD"))
                self.wires.append(Counted(network, f"{engine}{rank}", self.clock))
                model, place = Model("toy", (kv,)), Place(engine, fleet, rank)
                self.movers.append(Mover(self.wires[-1], model, place, [pool], config, self.clock))
        self.decode, *self.prefill = self.movers
        for mover in self.prefill:
            self.decode.connect(mover.card)
        self.turn(4)

    def turn(self, rounds: int) -> None:
        for _ in range(rounds):
            for mover in self.movers:
                mover.poll()

    def receive(self, requests: int) -> None:
        for number in range(requests):
            pages = list(range(number * PAGES, (number + 1) * PAGES))
            self.decode.receive(f"r{number}", "prefill", range(TOKENS), [pages])

    def idle_us(self, mover: Any) -> float:
        """CPU of one poll in which nothing happens and nothing falls due."""
        samples = list[float]()
        for _ in range(40):
            began = time.process_time()
            for _ in range(5):
                mover.poll()
            samples.append((time.process_time() - began) / 5 * 1e6)
        return median(samples)


def idle(requests: int) -> dict[str, float]:
    """CPU microseconds of an idle poll, by what is open."""
    from kvmover.transfer.result import Gate

    nothing, early, gated, unasked = Fleets(1), Fleets(1), Fleets(1), Fleets(1)
    early.receive(requests)
    for number in range(requests):
        gated.prefill[0].send(f"r{number}", [list(range(TOKENS // 16))], gates=[Gate(Never())])
        unasked.prefill[0].send(f"r{number}", [list(range(TOKENS // 16))], gates=[])
    gated.receive(requests)
    for fleets in (early, gated, unasked):
        fleets.turn(requests // 20 + 20)
        for _ in range(200):  # what falls due in the first two seconds is over
            fleets.clock.now += 0.01
            fleets.turn(1)
        fleets.turn(20)
    return {
        "nothing open": nothing.idle_us(nothing.decode),
        "destination, not offered": early.idle_us(early.decode),
        "source, not offered": early.idle_us(early.prefill[0]),
        "destination, gated": gated.idle_us(gated.decode),
        "source, gated": gated.idle_us(gated.prefill[0]),
        "source, nobody asked": unasked.idle_us(unasked.prefill[0]),
    }


def waiting(requests: int, tp: int) -> dict[str, float]:
    """Of a decode rank whose requests wait: notes a second, share of a core, and its longest poll."""
    fleets = Fleets(tp)
    fleets.receive(requests)
    asking = 0.0
    for _ in range(6):  # what is answered to so many Wants at once is not what waiting costs
        began = time.process_time()
        fleets.decode.poll()
        asking = max(asking, time.process_time() - began)
        for mover in fleets.prefill:
            mover.poll()
    notes, busy, longest = fleets.wires[0].notes, 0.0, 0.0
    for _ in range(SECONDS * POLLS_PER_S):
        fleets.clock.now += 1 / POLLS_PER_S
        began = time.process_time()
        fleets.decode.poll()
        spent = time.process_time() - began
        busy, longest = busy + spent, max(longest, spent)
        for mover in fleets.prefill:
            mover.poll()
    return {
        "notes a second": (fleets.wires[0].notes - notes) / SECONDS,
        "% of a core": busy / SECONDS * 100,
        "longest poll, ms": longest * 1e3,
        "longest poll as all are asked for at once, ms": asking * 1e3,
    }


def measured(requests: int) -> dict[str, float]:
    """Everything, in this process and with the kvmover that it finds."""
    found = {f"idle poll, us: {what}": us for what, us in idle(requests).items()}
    for tp in (1, 8):
        found |= {f"waiting, TP{tp} to TP1, {what}": value for what, value in waiting(requests, tp).items()}
    return found


def passes(trees: dict[str, Path], requests: int, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Each tree in turn, in a process of its own."""
    for _ in range(rounds):
        for name, tree in trees.items():
            path = os.pathsep.join([str(tree), str(HERE)])
            command = [sys.executable, "-P", __file__, "--pass", str(requests)]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
            yield name, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--pass", type=int, dest="requests", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.requests is not None:
        print(json.dumps(measured(chosen.requests)))
        return
    trees = {**({"before": chosen.before.resolve()} if chosen.before else {}), "now": HERE}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for name, values in passes(trees, chosen.open, chosen.rounds):
        for what, value in values.items():
            samples[name].setdefault(what, []).append(value)
    rows = list[dict[str, object]]()
    for what, values in samples["now"].items():
        now, before = median(values), median(samples.get("before", {}).get(what, [float("nan")]))
        rows.append({"case": what, "open": chosen.open, "before": f"{before:.4g}", "now": f"{now:.4g}"})
        ratio = f"{before / now:8.1f} x less" if now else "gone"
        print(f"{what:60s} {before:12.4g} {now:12.4g} {ratio}")
    print(record.write("waiting", rows, chosen.out))


if __name__ == "__main__":
    main()
