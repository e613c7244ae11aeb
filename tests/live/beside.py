"""Times of several ways to serve the same prompts, in turn, so that the machine's noise falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from perf import record
from tests.live.answers import Prompt, Streamed
from tests.live.server import Server

#: How often a crowd of prompts is asked at once.
_CROWDS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """Servers that answer a prompt together. `tokens`: of an answer."""

    servers: Sequence[Server]
    answer: Callable[[Prompt], Streamed]
    tokens: Callable[[Streamed], Sequence[int]]


def measure(engine: str, ways: Mapping[str, Way], prompts: Sequence[Prompt], crowd: Sequence[Prompt]) -> None:
    """Answer prompts alone and in crowds, every way in turn, and keep the rows in perf/results/live_peers.csv.

    The first way is the plain server whose tokens all others must give. Fails at the first that differ.
    """
    alone: dict[str, list[Streamed]] = {name: [] for name in ways}
    for prompt in prompts:
        wanted: Sequence[int] | None = None
        for name, way in ways.items():
            got = way.answer(prompt)
            alone[name].append(got)
            wanted = way.tokens(got) if wanted is None else wanted
            assert way.tokens(got) == wanted, f"{name} gave other tokens"
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_CROWDS):
        for name, way in ways.items():
            before, began = _cpu_s(way), time.monotonic()
            with ThreadPoolExecutor(len(crowd)) as pool:
                list(pool.map(way.answer, crowd))
            rates[name].append(len(crowd) / (time.monotonic() - began))
            cpu[name].append((_cpu_s(way) - before) / len(crowd))
    rows = [
        {
            "engine": engine,
            "way": name,
            "requests": len(prompts),
            "prompt_tokens": round(median(map(len, prompts))),
            **_times("ttft", [each.first_s for each in alone[name]]),
            **_times("request", [each.seconds for each in alone[name]]),
            "crowd": len(crowd),
            "requests_per_s": f"{median(rates[name]):.2f}",
            "server_cpu_s_a_request": f"{median(cpu[name]):.3f}",
        }
        for name in ways
    ]
    record.replace("live_peers", rows, ("engine", "way"))


def _cpu_s(way: Way) -> float:
    return sum(server.cpu_s() for server in way.servers)


def _times(what: str, seconds: Sequence[float]) -> dict[str, object]:
    spread = sorted(seconds)
    return {
        f"{what}_p50_ms": round(1e3 * median(spread)),
        f"{what}_p99_ms": round(1e3 * spread[min(len(spread) - 1, len(spread) * 99 // 100)]),
    }
