"""Made traces of requests: chats, agents, scans, documents that are asked about, and mixtures, each of a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvmover.tools.replay import ReplayRequest

BLOCK = 512
#: The most requests of a trace.
MOST = 12_000


@dataclass(slots=True)
class _Maker:
    """A trace in the making: new blocks, and requests by their time in seconds."""

    chance: np.random.Generator
    requests: list[ReplayRequest] = field(default_factory=list)
    blocks: int = 0

    def new(self, count: int) -> tuple[int, ...]:
        """Returns ids of blocks that are in no other prompt."""
        self.blocks += count
        return tuple(range(self.blocks - count, self.blocks))

    def ask(self, at_s: float, ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Add a request that lengthens a prompt of whole blocks to `tokens`. Returns its whole blocks."""
        ids = ids + self.new(-(-tokens // BLOCK) - len(ids))
        self.requests.append(ReplayRequest(at_s * 1000, tokens, 10, ids))
        return ids[: tokens // BLOCK]

    def arrivals(self, rate: float, until_s: float, from_s: float = 0.0) -> Iterator[float]:
        """Yield times of a Poisson process."""
        while (from_s := from_s + self.chance.exponential(1 / rate)) < until_s:
            yield from_s

    def spread(self, median: float, sigma: float) -> float:
        """Returns a number of a lognormal distribution."""
        return float(self.chance.lognormal(np.log(median), sigma))

    def ranked(self, count: int, power: float) -> int:
        """Returns one of `count` by Zipf's law."""
        weights = 1 / np.arange(1, count + 1) ** power
        return int(self.chance.choice(count, p=weights / weights.sum()))


def _chats(
    make: _Maker, rate: float, seconds: float, first: int, grow: int, think_s: float, goes_on: Callable[[int], float]
) -> None:
    """Conversations behind one system prompt; after turn n another comes with the chance `goes_on(n)`."""
    system = make.new(4)
    for at_s in make.arrivals(rate, seconds):
        ids, now_s, turn = system, at_s, 0
        while True:
            ids = make.ask(now_s, ids, len(ids) * BLOCK + max(1, int(make.spread(grow if turn else first, 1.0))))
            turn += 1
            if make.chance.random() > goes_on(turn):
                break
            now_s += make.spread(think_s, 0.8)


def _agents(make: _Maker, rate: float, seconds: float, kinds: int, steps: int, from_s: float = 0.0) -> None:
    """Agents of several kinds, each with a long system prompt, that ask again every few seconds."""
    systems = [make.new(10) for _ in range(kinds)]
    for at_s in make.arrivals(rate, from_s + seconds, from_s):
        ids, now_s = systems[make.ranked(kinds, 1.0)], at_s
        for _ in range(1 + make.chance.geometric(1 / steps)):
            ids = make.ask(now_s, ids, len(ids) * BLOCK + max(1, int(make.spread(1500, 0.7))))
            now_s += make.spread(10, 0.5)


def _scan(make: _Maker, count: int, documents: int, blocks: int, rate: float) -> None:
    """Questions about one document after the other, round and round."""
    held = [make.new(blocks) for _ in range(documents)]
    for number in range(count):
        make.ask(number / rate, held[number % documents], blocks * BLOCK + 200)


def _documents(make: _Maker, count: int, documents: int, rate: float) -> None:
    """Questions about documents, a few of which are asked about often."""
    system = make.new(2)
    held = [system + make.new(int(make.chance.integers(4, 30))) for _ in range(documents)]
    for number in range(count):
        ids = held[make.ranked(documents, 0.9)]
        make.ask(number / rate, ids, len(ids) * BLOCK + 400)


def _rising(turn: int) -> float:
    return min(0.9, 0.3 + 0.1 * turn)


def _steady(make: _Maker) -> None:
    _chats(make, 2, 3600, 3000, 800, 40, lambda _: 0.8)


def _loyal(make: _Maker) -> None:
    _chats(make, 3, 3600, 6000, 1500, 90, _rising)


def _memoryless(make: _Maker) -> None:
    _chats(make, 4, 3600, 8000, 800, 60, lambda _: 0.35)


def _scan_and_chat(make: _Maker) -> None:
    _scan(make, 4000, 5000, 30, 1.2)
    _chats(make, 1.2, 3300, 3000, 800, 40, lambda _: 0.8)


def _shift(make: _Maker) -> None:
    _chats(make, 3, 1800, 6000, 1500, 90, _rising)
    _agents(make, 0.5, 1800, 12, 15, from_s=1900)


def _mixture(make: _Maker) -> None:
    _documents(make, 4000, 2000, 1.5)
    _agents(make, 0.12, 3000, 12, 15)
    _chats(make, 1, 3000, 4000, 900, 60, lambda _: 0.6)


def _all_new(make: _Maker) -> None:
    for number in range(5000):
        make.ask(number / 3, (), 10_200)


TRACES: dict[str, Callable[[_Maker], None]] = {
    "chats, steady": _steady,
    "chats, loyal": _loyal,
    "chats, memoryless": _memoryless,
    "agents, long": lambda make: _agents(make, 0.25, 3600, 12, 15),
    "agents, short": lambda make: _agents(make, 1.0, 3600, 60, 4),
    "scan": lambda make: _scan(make, 6000, 400, 24, 3),
    "scan and chats": _scan_and_chat,
    "documents": lambda make: _documents(make, 9000, 3000, 3),
    "chats, then agents": _shift,
    "mixture": _mixture,
    "all new": _all_new,
}


def made(name: str, seed: int) -> list[ReplayRequest]:
    """Returns the requests of a trace in order of time, at most `MOST`."""
    make = _Maker(np.random.default_rng(seed))
    TRACES[name](make)
    return sorted(make.requests, key=lambda request: request.timestamp)[:MOST]
