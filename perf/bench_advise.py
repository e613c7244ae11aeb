"""What `kvmover advise` predicts beside what two fleets then take: the same requests, at the same times.

A prefill and a decode process of one host, over NIXL, and Poisson streams of requests that keep the wire a fifth and
half busy. Each is timed from when it was due until it has landed, what it waited for others included. Streams take
turns: of each pair the first calibrates the link, the second is predicted by it. `python -m perf.bench_advise` takes
four minutes, and wants a quiet machine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan import HOST, Calibration
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.advise import LinkCosts, TransferTable, transfer_table, waits
from kvmover.tools.advise.candidate import Quantiles
from kvmover.tools.advise.transfer_table import Times
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transport.nixl import NixlTransport
from perf.command_line import options
from perf.record import write

#: 64 KiB a token.
COMPONENT = Component.attention(16, 4, 256, "bfloat16")
TOKENS, REQUESTS, PAIRS, SEED = 4096, 60, 5, 7
SHAPES = {
    "other pages and order": ("page=16,order=NHD", "page=64,order=HND"),
    "equal": ("page=16,order=NHD", "page=16,order=NHD"),
    "other order": ("page=64,order=HND", "page=64,order=NHD"),
}
BUSY = (0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Due:
    """A request of so many tokens, and when it comes, in seconds from the beginning."""

    name: str
    tokens: int
    at_s: float


def built(engine: str, text: str) -> Mover:
    import torch

    torch.set_num_threads(1)
    end = FleetText.parse(text)
    fleet: Fleet = end.fleet
    shard = fleet.shard(COMPONENT, 0, TOKENS)
    pool = Pool.zeros(PoolSpec.dense(COMPONENT, shard, TOKENS // fleet.page_tokens, fleet.page_tokens, end.order))
    config = MoverConfig(arena_bytes=64 << 20, costs=HOST)
    return Mover(NixlTransport(engine), Model("bench", (COMPONENT,)), Place(engine, fleet, 0), [pool], config)


def pages_of(mover: Mover, tokens: int) -> list[list[int]]:
    """Scattered pages, as engines hold them."""
    page_tokens = mover._core.end.fleet.page_tokens
    order = np.random.default_rng(SEED).permutation(TOKENS // page_tokens)
    return [order[: -(-tokens // page_tokens)].tolist()]


def decode(pipe: Connection, text: str) -> None:
    """Ask for what it is told to, when it is due, and answer how long each took; then what the link costs."""
    mover = built("decode", text)
    pipe.send(mover.card)
    mover.connect(pipe.recv())
    mover.poll()
    for told in iter(pipe.recv, None):
        pipe.send(asked(mover, told) if told else mover.calibrations()[0])
    mover.close()


def asked(mover: Mover, requests: Sequence[Due]) -> list[float]:
    """Seconds from due to landed of each."""
    began = time.perf_counter()
    open_ones, took = dict[int, tuple[Due, object]](), dict[int, float]()
    coming = list(enumerate(requests))
    while coming or open_ones:
        mover.poll()
        now = time.perf_counter() - began
        while coming and coming[0][1].at_s <= now and (coming[0][1].at_s or not open_ones):
            number, due = coming.pop(0)
            pages = pages_of(mover, due.tokens)
            open_ones[number] = due, (mover.receive(due.name, "prefill", range(due.tokens), pages), now)
        for number, (due, (transfer, asked_s)) in list(open_ones.items()):  # pyright: ignore[reportGeneralTypeIssues]
            if transfer.ended:
                transfer.landed()
                took[number] = time.perf_counter() - began - (due.at_s or asked_s)
                del open_ones[number]
        time.sleep(50e-6)
    return [took[number] for number in range(len(requests))]


class Fleets:
    """The prefill side is this process."""

    def __init__(self, shape: tuple[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=decode, args=(theirs, shape[1]), daemon=True)
        self._process.start()
        self.mover = built("prefill", shape[0])
        self._pipe.recv()
        self._pipe.send(self.mover.card)
        while not self.mover.ranks("decode"):
            self.mover.poll()

    def took(self, requests: Sequence[Due]) -> list[float]:
        """Seconds of each request, from due to landed."""
        offered = [self.mover.send(due.name, pages_of(self.mover, due.tokens)) for due in requests]
        self._pipe.send(list(requests))
        while not self._pipe.poll() or not all(each.ended for each in offered):
            self.mover.poll()
            time.sleep(50e-6)
        return self._pipe.recv()

    def calibration(self) -> Calibration:
        """What the other side measured."""
        self._pipe.send([])
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self.mover.close()


def lengths(rng: np.random.Generator) -> list[int]:
    """Tokens as those of chats are spread: many short, some long."""
    return [int(n) for n in np.clip(rng.lognormal(6.5, 1.0, REQUESTS), 16, TOKENS)]


def predicted(table: TransferTable, requests: Sequence[Due]) -> tuple[Times, Times]:
    """Microseconds that each request waits, and takes then, as `kvmover advise` reckons them."""
    at_us = np.array([due.at_s * 1e6 for due in requests])
    us = table.us([due.tokens for due in requests])
    return waits(at_us, us, np.zeros(len(requests), np.int64), 1), us


def stream(name: str, mean_s: float, rng: np.random.Generator) -> list[Due]:
    """Requests that come every `mean_s` seconds on the mean."""
    times = rng.exponential(mean_s, REQUESTS).cumsum().tolist()
    return [Due(f"{name} {n}", tokens, at_s) for n, (tokens, at_s) in enumerate(zip(lengths(rng), times, strict=True))]


def calibrated(fleets: Fleets, shape: tuple[str, str], seen: Sequence[Due], took_s: Sequence[float]) -> TransferTable:
    """By what both movers measured; a request's own time is what those that met no other took beside their bytes."""
    src, dst = map(FleetText.parse, shape)
    here, there = fleets.mover.calibrations()[0], fleets.calibration()
    costs = replace(here.costs(HOST), scatter_rate=there.costs(HOST).scatter_rate)
    bare = transfer_table([COMPONENT], src, dst, LinkCosts(costs), TOKENS)
    waited_us, us = predicted(bare, seen)
    request_us = max(0.0, float(np.median((np.array(took_s) * 1e6 - us)[waited_us == 0])))
    return transfer_table([COMPONENT], src, dst, LinkCosts(costs, request_us=request_us), TOKENS)


def compare(name: str, shape: tuple[str, str], rng: np.random.Generator) -> list[dict[str, object]]:
    fleets = Fleets(shape)
    fleets.took([Due(f"warm {n}", TOKENS, 0) for n in range(5)])
    mean_s = float(np.mean(fleets.took([Due(f"alone {n}", tokens, 0) for n, tokens in enumerate(lengths(rng))])))
    seen: dict[float, list[tuple[Any, Any]]] = {busy: [] for busy in BUSY}
    for pair in range(PAIRS):
        for busy in BUSY:
            first, second = (stream(f"{each} {pair} {busy}", mean_s / busy, rng) for each in ("first", "second"))
            table = calibrated(fleets, shape, first, fleets.took(first))
            seen[busy].append((sum(predicted(table, second)), 1e6 * np.array(fleets.took(second))))
    fleets.close()
    return [row(name, shape, busy, seen[busy]) for busy in BUSY]


def row(name: str, shape: tuple[str, str], busy: float, seen: Sequence[tuple[Any, Any]]) -> dict[str, object]:
    """The quantiles over all predicted streams of one load."""
    expected, measured = (Quantiles.of(np.concatenate(each)) for each in zip(*seen, strict=True))
    found: dict[str, object] = {"shape": name, "src": shape[0], "dst": shape[1], "busy": busy}
    found["requests"] = PAIRS * REQUESTS
    for quantile in ("p50", "p99"):
        took_us, predicted_us = (getattr(each, f"{quantile}_us") for each in (measured, expected))
        found[f"{quantile}_ms"], found[f"predicted_{quantile}_ms"] = (
            round(took_us / 1e3, 3),
            round(predicted_us / 1e3, 3),
        )
        found[f"{quantile}_ratio"] = round(predicted_us / took_us, 3)
    print(found, flush=True)
    return found


def main() -> None:
    options(__doc__).parse_args()
    rng = np.random.default_rng(SEED)
    rows = [row for name, shape in SHAPES.items() for row in compare(name, shape, rng)]
    print(f"wrote {write('advise', rows)}")


if __name__ == "__main__":
    main()
