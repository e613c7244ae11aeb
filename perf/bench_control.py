"""CPU of a request over NIXL beside raw NIXL for the same bytes: two agents, or two movers, of one process.

`python -m perf.bench_control [--blocks 30] [--out FOLDER]` writes `control.csv`; about two minutes. Raw NIXL is given
the descriptors, writes with a note, and answers with a note. The baseline's lists of the whole pool are prepared before
the clock runs, as engines' connectors do; `lists a request` prepares two for each request, as kvmover's transport does.
One request at a time, in blocks of 20 in turn; a ratio is one block's. The CPU is the calling thread's, of both sides.
It includes its waiting for NIXL's threads, which is most of raw NIXL's median: `least` has the least of it. Notes are
those that are not attached to a write or a read.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec
from kvmover.plan.cost import HOST, Route
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import NixlTransport, start_agent
from perf import record
from perf.command_line import options

FLEET, KV = Fleet(page_tokens=16), Component.attention(8, 2, 64, "bfloat16")
PAGES = 512
SPEC = PoolSpec.dense(KV, FLEET.shard(KV, 0, 1), PAGES, 16, "NHD")
PLANES, RUN_BYTES = KV.layers * KV.kv, 16 * KV.heads * KV.row_bytes

#: Pages of a request: with 16 planes, descriptors of one page and plane each.
PAGES_ASKED = (1, 32)
REQUESTS = 20
MEET_S = 60.0

RAW, RAW_LISTS = "raw NIXL", "raw NIXL, lists a request"
ROUTES = Route.DIRECT, Route.PACKED
WAYS = {f"{route.value} {verb.value}": (route, verb) for route in ROUTES for verb in (Verb.PUSH, Verb.PULL)}

Ids = npt.NDArray[np.int64]


def configured(route: Route, verb: Verb) -> MoverConfig:
    return MoverConfig(
        sandbox_bytes=0, arena_bytes=8 << 20, silence_s=100, resend_s=30, ping_s=20, costs=HOST, route=route, verb=verb
    )


class RawPair:
    """Two NIXL agents, each with the memory of a pool."""

    def __init__(self) -> None:
        self._here, self._there = (start_agent(name, ["UCX"], 0).nixl for name in ("here", "there"))
        self._memory = [torch.zeros(SPEC.allocation_bytes, dtype=torch.uint8) for _ in range(2)]
        for agent, memory in zip((self._here, self._there), self._memory, strict=True):
            agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")
        self._peer = self._here.add_remote_agent(self._there.get_agent_metadata()).decode()
        self._back = self._there.add_remote_agent(self._here.get_agent_metadata()).decode()
        self._planes = np.arange(PLANES)[:, None] * PAGES
        every = np.arange(PLANES * PAGES)
        self._lists = self._prepared("", 0, every), self._prepared(self._peer, 1, every)

    def _prepared(self, owner: str, side: int, runs: Ids) -> Any:
        table = np.empty((runs.size, 3), np.uint64)
        table[:, 0] = self._memory[side].data_ptr() + runs * RUN_BYTES
        table[:, 1:] = RUN_BYTES, 0
        return self._here.prep_xfer_dlist(owner, table, "DRAM")

    def of_whole_pools(self, src: Ids, dst: Ids) -> None:
        local, remote = ((self._planes + pages).reshape(-1).astype(np.int32) for pages in (src, dst))
        self._finish(self._here.make_prepped_xfer("WRITE", self._lists[0], local, self._lists[1], remote, b"written"))

    def of_lists(self, src: Ids, dst: Ids) -> None:
        local = self._prepared("", 0, (self._planes + src).reshape(-1))
        remote = self._prepared(self._peer, 1, (self._planes + dst).reshape(-1))
        runs = np.arange(PLANES * src.size, dtype=np.int32)
        handle = self._here.make_prepped_xfer("WRITE", local, runs, remote, runs, b"written")
        for prepared in (local, remote):
            prepared.release()
        self._finish(handle)

    def _finish(self, handle: Any) -> None:
        state = self._here.transfer(handle)
        while state == "PROC":
            state = self._here.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()
        while not self._there.get_new_notifs():
            pass
        self._there.send_notif(self._back, b"landed")
        while not self._here.get_new_notifs():
            pass


class MoverPair:
    """Two movers, each with a pool."""

    def __init__(self) -> None:
        config = configured(Route.DIRECT, Verb.PUSH)
        self.source, self.target = (
            Mover(NixlTransport(name), Model("m", (KV,)), Place(name, FLEET, 0), [Pool.zeros(SPEC)], config)
            for name in ("prefill", "decode")
        )
        self.target.connect(self.source.card)
        self._numbers, deadline = count(), time.monotonic() + MEET_S
        while not self.source.ranks("decode"):
            assert time.monotonic() < deadline, f"two movers have not met in {MEET_S} s"
            self.source.poll()
            self.target.poll()

    def moved(self, src: Ids, dst: Ids) -> None:
        request = f"r{next(self._numbers)}"
        sent = self.source.send(request, [src])
        landing = self.target.receive(request, "prefill", range(16 * src.size), [dst])
        while not (sent.ended and landing.ended):
            self.source.poll()
            self.target.poll()
        landing.landed()

    @property
    def notes(self) -> int:
        return sum(mover.meter.counts[Count.NOTES] for mover in (self.source, self.target))


@dataclass(slots=True)
class Samples:
    """Microseconds of CPU a request by block, its ratio to the baseline's block, and notes a request."""

    cpu_us: list[float] = field(default_factory=list[float])
    of_raw: list[float] = field(default_factory=list[float])
    notes: float = 2.0


def measured(pages: int, blocks: int, raw: RawPair, pair: MoverPair) -> Iterator[dict[str, object]]:
    """Yield a row a way."""
    random = np.random.default_rng(1)
    calls: dict[str, Callable[[Ids, Ids], None]] = {RAW: raw.of_whole_pools, RAW_LISTS: raw.of_lists}
    found = {name: Samples() for name in (*calls, *WAYS)}
    for block in range(blocks + 1):
        for name, samples in found.items():
            if name in WAYS:
                pair.target.configure(configured(*WAYS[name]))
            call, before = calls.get(name, pair.moved), pair.notes
            tables = [(random.permutation(PAGES)[:pages], random.permutation(PAGES)[:pages]) for _ in range(REQUESTS)]
            began = time.thread_time()
            for src, dst in tables:
                call(src, dst)
            spent_us = (time.thread_time() - began) / REQUESTS * 1e6
            if name in WAYS:
                samples.notes = (pair.notes - before) / REQUESTS
            if block:  # the first is not measured
                samples.cpu_us.append(spent_us)
                samples.of_raw.append(spent_us / found[RAW].cpu_us[-1])
    for name, samples in found.items():
        low, *_, high = quantiles(samples.of_raw, n=10, method="inclusive")
        yield {
            "way": name,
            "descriptors": pages * PLANES,
            "kib": pages * PLANES * RUN_BYTES >> 10,
            "cpu_us": round(median(samples.cpu_us)),
            "least_us": round(min(samples.cpu_us)),
            "of_raw": f"{median(samples.of_raw):.2f}",
            "p10_of_raw": f"{low:.2f}",
            "p90_of_raw": f"{high:.2f}",
            "notes": f"{samples.notes:.1f}",
        }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    chosen: argparse.Namespace = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    raw, pair = RawPair(), MoverPair()
    rows = list[dict[str, object]]()
    for pages in PAGES_ASKED:
        for row in measured(pages, chosen.blocks, raw, pair):
            rows.append(row)
            print(
                f"{row['way']:<26} {row['descriptors']:>4} descriptors {row['cpu_us']:>6} us of CPU, least"
                f" {row['least_us']:>6}; {row['of_raw']} of raw ({row['p10_of_raw']} to {row['p90_of_raw']}),"
                f" {row['notes']} notes"
            )
    print(f"wrote {record.write('control', rows, chosen.out)}", flush=True)
    os._exit(0)  # four agents' threads are joined for seconds otherwise


if __name__ == "__main__":
    main()
