"""Times of several ways to serve the same prompts, which arrive by chance: each way in turn, in one run."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from perf import record
from tests.live.answers import Prompt, Streamed, prompts_of
from tests.live.server import Server

#: How often each way serves the prompts of each rate.
ROUNDS = 3

#: Seconds in which servers that were paused find each other again.
_BACK_S = 30.0


class Machine(StrEnum):
    """The rest of the machine while a way serves: ALONE: the servers of all other ways are paused; TOGETHER: they
    run, and wait for requests; WIRE: they are paused, and 1 Gb/s joins the two halves of a way.
    """

    ALONE = "alone"
    TOGETHER = "together"
    WIRE = "alone, 1 Gb/s"


@dataclass(frozen=True, slots=True)
class Way:
    """Servers that answer a prompt together. `tokens`: of an answer."""

    servers: Sequence[Server]
    answer: Callable[[Prompt], Streamed]
    tokens: Callable[[Streamed], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """The number of prompts that arrive by chance, independent of each other, `per_s` in a second on average."""

    prompts: int
    per_s: float


@dataclass(slots=True)
class Served:
    """The answers of one way to the prompts of one rate: a list a round, each with its seconds and CPU seconds."""

    rounds: list[list[Streamed]] = field(default_factory=list[list[Streamed]])
    seconds: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])

    def row(self) -> dict[str, object]:
        """Returns the columns of its row; the spread is that of the rounds' medians."""
        first_ms = sorted(1e3 * each.first_s for answers in self.rounds for each in answers)
        medians = [median(1e3 * each.first_s for each in answers) for answers in self.rounds]
        count = len(first_ms)
        return {
            "requests": count,
            **{f"ttft_p{part}_ms": round(first_ms[min(count - 1, count * part // 100)]) for part in (50, 90, 99)},
            "ttft_p50_of_rounds_ms": f"{min(medians):.0f} to {max(medians):.0f}",
            "request_p50_ms": round(median(1e3 * each.seconds for answers in self.rounds for each in answers)),
            "requests_per_s": f"{count / sum(self.seconds):.2f}",
            "server_cpu_s_a_request": f"{sum(self.cpu_s) / count:.3f}",
        }


def measure(
    engine: str, machine: Machine, ways: Mapping[str, Way], loads: Sequence[Load], tokens: tuple[int, int]
) -> None:
    """Serve each load several times, its prompts new each time, and keep the rows in live_peers.csv.

    `tokens`: the least and the most of a prompt. The first way is the plain server whose tokens all others must give.
    Fails at the first that differ.
    """
    served = {(name, load): Served() for name in ways for load in loads}
    for number in range(ROUNDS):
        seeds = {load: zlib.crc32(f"{machine} {number} {load}".encode()) for load in loads}
        wanted = dict[Load, list[Sequence[int]]]()
        for name, way in ways.items():
            with _others_paused(way, () if machine is Machine.TOGETHER else ways.values()):
                for load, seed in seeds.items():
                    prompts = prompts_of(load.prompts, seed, least_tokens=tokens[0], most_tokens=tokens[1])
                    answers = _serve(way, prompts, load.per_s, seed, served[name, load])
                    got = [way.tokens(answer) for answer in answers]
                    assert got == wanted.setdefault(load, got), f"{name} gave other tokens"
    about = {"engine": engine, "prompt_tokens": f"{tokens[0]} to {tokens[1]}", "machine": machine.value}
    rows = [{**about, "way": name, "arrivals_per_s": load.per_s, **each.row()} for (name, load), each in served.items()]
    record.replace("live_peers", rows, ("engine", "way", "machine", "arrivals_per_s"))


def _serve(way: Way, prompts: Sequence[Prompt], rate_per_s: float, seed: int, served: Served) -> list[Streamed]:
    """Returns the answers, in order; adds them and their times to `served`. All ways see the same arrivals."""
    chance, before, began = random.Random(seed), _cpu_s(way), time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        coming = []
        for prompt in prompts:
            time.sleep(chance.expovariate(rate_per_s))
            coming.append(pool.submit(way.answer, prompt))
        answers = [each.result() for each in coming]
    served.rounds.append(answers)
    served.seconds.append(time.monotonic() - began)
    served.cpu_s.append(_cpu_s(way) - before)
    return answers


@contextmanager
def _others_paused(way: Way, ways: Iterable[Way]) -> Iterator[None]:
    """Pause the servers of all other ways, and resume them at the end."""
    others = [server for other in ways for server in other.servers if server not in way.servers]
    for server in others:
        server.pause()
    try:
        meet(way)
        yield
    finally:
        for server in others:
            server.resume()


def meet(way: Way) -> None:
    """Answer prompts until three in a row succeed: halves that met for the first time, or were paused, fail some."""
    stop, well = time.monotonic() + _BACK_S, 0
    while well < 3:
        try:
            way.answer(range(50 + well))
            well += 1
        except (OSError, AssertionError):
            well = 0
            if time.monotonic() > stop:
                raise
            time.sleep(0.5)


def _cpu_s(way: Way) -> float:
    return sum(server.cpu_s() for server in way.servers)
