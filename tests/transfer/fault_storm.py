"""Requests between engines while their processes are killed, stopped, slowed down and made to give up, at random."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.fault_crowd import Crowd
from tests.transfer.fault_rank import CONFIG, Ending, Job, RankProcess, Seat

PREFILL, DECODE = "prefill", "decode"

#: Two ranks a side: heads split on one, positions on the other.
SEATS = [
    *(Seat(PREFILL, Fleet(tp=2, page_tokens=16), rank) for rank in range(2)),
    *(Seat(DECODE, Fleet(cp=2, page_tokens=24), rank, "HND") for rank in range(2)),
]

#: Requests under way at a time.
CROWDED = 6


@dataclass(slots=True)
class _Asked:
    """A request and the processes it was told to, by name."""

    job: Job
    told: dict[tuple[str, int], str]
    since: float


@dataclass(slots=True)
class Storm:
    """A seeded storm. `faults` counts what was done to the processes, `outcomes` how requests ended on their ranks."""

    seed: int
    crowd: Crowd
    faults: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    _random: random.Random = field(init=False)
    _open: dict[str, _Asked] = field(default_factory=dict[str, _Asked])
    _wakes: list[tuple[float, RankProcess]] = field(default_factory=list["tuple[float, RankProcess]"])
    _armed: list[tuple[RankProcess, float]] = field(default_factory=list["tuple[RankProcess, float]"])
    _names: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    _counted: int = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._counted = len(self.crowd.endings)
        self._names = {place: rank.ask("name") for place, rank in self.crowd.ranks.items()}

    def blow(self, requests: int, every: int) -> None:
        """Move so many requests, with a fault about `every` so many of them, until all have ended."""
        for number in range(requests):
            self._begin(number)
            if not self._random.randrange(every):
                self._fault()
            self._advance(lambda: len(self._open) < CROWDED)
        self._advance(lambda: not self._open and not self._wakes)
        self._armed.clear()
        for rank in self.crowd.ranks.values():
            rank.ask("calm")

    def _begin(self, number: int) -> None:
        chance = self._random
        job = Job(
            f"storm-{self.seed}-{number}",
            self.seed * 100_000 + number,
            chance.choice([1, 17, 60, 100, 250]),
            chance.choice(list(Verb)),
            chance.choice([*Route, None]),
            chance.choice([Integrity.NONE, Integrity.NONE, Integrity.DIGEST]),
            chance.choice([0, 0, 1, 3]),
            chance.choice([4 << 10, 32 << 10, 100_000]),
        )
        told = dict[tuple[str, int], str]()
        sides = [PREFILL, DECODE]
        chance.shuffle(sides)
        for engine in sides:
            for place, rank in self.crowd.ranks.items():
                if place[0] == engine:
                    rank.tell("send" if engine == PREFILL else "receive", job, *([PREFILL] if engine == DECODE else []))
                    told[place] = self._names[place]
        self._open[job.name] = _Asked(job, told, time.monotonic())
        if not chance.randrange(25):
            self._pick().tell("abort", job, "the engine gave it up")
            self.faults["abort"] += 1

    def _pick(self) -> RankProcess:
        """Somebody who listens."""
        return self._random.choice([rank for rank in self.crowd.ranks.values() if not rank.stopped])

    def _fault(self) -> None:
        """Do something to one process, unless another is asleep already."""
        kind = self._random.choice(["kill", "stop", "long stop", "slow", "stop before write", "stop before read"])
        if self._wakes or self._armed:
            return
        self.faults[kind] += 1
        rank = self._pick()
        match kind:
            case "kill":
                self._kill(rank)
            case "slow":
                rank.tell("nap", self._random.choice([0.0, 0.002, 0.02]))
            case "stop":
                self._stop(rank, self._random.uniform(0.05, 0.5))
            case "long stop":
                self._stop(rank, CONFIG.deadline_s + CONFIG.drain_s + 1)
            case _:
                verb = kind.rsplit(" ", 1)[1]
                rank = self._random.choice(self.crowd.of(PREFILL if verb == "write" else DECODE))
                rank.ask("trap", verb, self._random.randrange(5), 0, rank.pid, signal.SIGSTOP)
                self._armed.append((rank, self._random.choice([2.0, CONFIG.deadline_s + 1])))

    def _stop(self, rank: RankProcess, seconds: float) -> None:
        rank.stop()
        self._wakes.append((time.monotonic() + seconds, rank))

    def _kill(self, rank: RankProcess) -> None:
        """What a process was told is over for it; the one that takes its seat knows nothing of it."""
        seat, place = rank.seat, (rank.seat.engine, rank.seat.rank)
        self._wakes = [entry for entry in self._wakes if entry[1] is not rank]
        self._armed = [entry for entry in self._armed if entry[0] is not rank]
        self._names[place] = self.crowd.replace(seat, [DECODE if seat.engine == PREFILL else PREFILL]).ask("name")

    def _advance(self, enough: Callable[[], bool]) -> None:
        """Hear what ended and wake who slept, until there is room for more. Every request ends, whatever happens."""
        while True:
            now = time.monotonic()
            self._rouse(now)
            self.crowd.look()
            self._count()
            for place, rank in self.crowd.ranks.items():
                assert rank.alive, f"{place} died"
            if enough():
                return
            longest = max((now - asked.since for asked in self._open.values()), default=0.0)
            limit = 4 * (CONFIG.deadline_s + CONFIG.drain_s) + 10
            assert longest < limit, [a for a in self._open.values() if now - a.since >= limit]
            time.sleep(0.005)

    def _rouse(self, now: float) -> None:
        """Wake who has slept for long enough; those that stop themselves do so when they next post."""
        for when, rank in self._wakes:
            if when <= now:
                rank.wake()
        self._wakes = [entry for entry in self._wakes if entry[0] > now]
        for rank, seconds in [entry for entry in self._armed if entry[0].sleeps()]:
            self._wakes.append((now + seconds, rank))
            self._armed.remove((rank, seconds))

    def _count(self) -> None:
        for ending in self.crowd.endings[self._counted :]:
            self._note(ending)
        self._counted = len(self.crowd.endings)
        for name, asked in list(self._open.items()):
            waiting = [place for place, who in asked.told.items() if self._names[place] == who]
            if not waiting:
                del self._open[name]

    def _note(self, ending: Ending) -> None:
        """A rank lands with the right bytes, or fails with a reason, and says so once."""
        assert not ending.wrong, ending
        assert not ending.spoiled, ending
        assert ending.cause is None or ending.reason, ending
        self.outcomes[f"{ending.side} {ending.cause or 'landed'}"] += 1
        asked = self._open.get(ending.job)
        if asked is not None:
            asked.told.pop((ending.engine, ending.rank), None)


def seats() -> list[Seat]:
    """A fresh set, with room for every request that is under way."""
    return [replace(seat, pages=256) for seat in SEATS]
