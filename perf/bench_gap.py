"""LRU, HAZARD and ARC between LRU and Belady, on a public trace and on made ones, and the CPU time of each.

    KVMOVER_TRACES=FOLDER python -m perf.bench_gap [--seed N] [--trace NAME]

A cell is the part of the way from LRU to Belady that a policy closes: 0.1 is a tenth of it. Belady knows the future,
and evicts the leaf whose next use is the furthest. Targets: 0.1 on the public trace at each capacity, -0.01 or more
anywhere, no less than ARC, and 1.2 of LRU's time. The made traces are of a seed that nothing was chosen by.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path

import numpy as np

from kvmover.cache.prefix import HAZARD, LRU
from kvmover.tools.replay import ReplayConfig, ReplayRequest, read_trace, replay
from kvmover.tools.replay.ideal import new_ideal
from perf.command_line import options
from perf.made_traces import BLOCK, TRACES, made
from perf.prefix_arc import arc_hit_rate
from perf.record import Spread, write

PUBLIC = "conversation"
#: Pages, and capacities in tokens, of the public trace and of the others.
ON_PUBLIC = 64, (1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000)
ON_MADE = BLOCK, (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000)
SEED = 20261128
ROUNDS = 3


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("--seed", type=int, default=SEED, help=f"of the made traces; {SEED}")
    asked.add_argument("--trace", choices=(PUBLIC, *TRACES), action="append", help="all")
    given = asked.parse_args()
    path = Path(os.environ.get("KVMOVER_TRACES", "traces")) / "mooncake_conversation_trace.jsonl"
    names: list[str] = given.trace or [PUBLIC, *TRACES]
    if PUBLIC in names and not path.exists():
        sys.exit(f"there is no {path}: KVMOVER_TRACES names the folder of the trace")
    rows = list[dict[str, object]]()
    for name in names:
        requests = list(read_trace(path)) if name == PUBLIC else made(name, given.seed)
        rows += _compared(name, requests, *(ON_PUBLIC if name == PUBLIC else ON_MADE))
    write("prefix_gap", rows)


def _compared(
    name: str, requests: Sequence[ReplayRequest], page_tokens: int, capacities: Sequence[int]
) -> Iterator[dict[str, object]]:
    pages = _pages(requests, page_tokens)
    longest = max(request.input_length for request in requests)
    for capacity in capacities:
        if capacity < longest + page_tokens:
            continue
        best = belady(pages, capacity // page_tokens) * page_tokens / sum(each.input_length for each in requests)
        rates, spent = dict[str, float](), dict[str, list[float]]()
        for _ in range(ROUNDS):
            for policy in (LRU, HAZARD):
                rate, seconds = _replayed(requests, ReplayConfig(page_tokens, capacity, policy=policy))
                rates[policy.name] = rate
                spent.setdefault(policy.name, []).append(seconds)
        rates["arc"] = arc_hit_rate(requests, page_tokens, capacity)
        gap, base = best - rates["lru"], Spread.of(spent["lru"]).median
        for policy, rate in rates.items():
            took = Spread.of(spent[policy]).median / base if policy in spent else float("nan")
            row = {"trace": name, "capacity_tokens": capacity, "policy": policy, "hit_rate": round(rate, 5)}
            row |= {"belady_hit_rate": round(best, 5), "of_gap": round((rate - rates["lru"]) / gap if gap else 0.0, 4)}
            row["of_lru_time"] = round(took, 3)
            print(f"{name:<18} {capacity:>10,} {policy:<7} {row['of_gap']:>8} of the gap of {gap:.4f}", flush=True)
            yield row


def _replayed(requests: Sequence[ReplayRequest], config: ReplayConfig) -> tuple[float, float]:
    """Returns the hit rate, and the seconds of thread CPU time."""
    began = time.thread_time()
    rate = replay(requests, config).totals.hit_rate
    return rate, time.thread_time() - began


def _pages(requests: Sequence[ReplayRequest], page_tokens: int) -> list[tuple[list[int], int]]:
    """Returns the numbers of each prompt's whole pages, and how many of them can be hits."""
    ideal, found = new_ideal(), list[tuple[list[int], int]]()
    for each in requests:
        _, row = ideal.serve(each.hash_ids, each.lengths(), each.block_tokens, page_tokens)
        found.append((np.frombuffer(row, np.int64).tolist(), (each.input_length - 1) // page_tokens))
    return found


def belady(prompts: Sequence[tuple[list[int], int]], capacity: int) -> int:
    """Returns the pages that a cache of `capacity` pages finds which knows all prompts to come.

    A page's next use is never after that of a page behind it, so the page whose next use is the last, the deepest of
    equals, is a leaf.
    """
    next_use, later = list[list[int]](), dict[int, int]()
    for number in range(len(prompts) - 1, -1, -1):
        pages = prompts[number][0]
        next_use.append([later.get(page, len(prompts)) for page in pages])
        later.update(dict.fromkeys(pages, number))
    next_use.reverse()
    held, heap, hits = dict[int, tuple[int, int]](), list[tuple[int, int, int]](), 0
    for (pages, limit), uses in zip(prompts, next_use, strict=True):
        hits += min(limit, sum(1 for _ in takewhile(held.__contains__, pages)))
        for depth, (page, use) in enumerate(zip(pages, uses, strict=True)):
            held[page] = use, depth
            heappush(heap, (-use, -depth, page))
        while len(held) > capacity:
            use, depth, page = heappop(heap)
            if held.get(page) == (-use, -depth):
                del held[page]
    return hits


if __name__ == "__main__":
    main()
