"""Several ranks in processes of their own, by engine and rank: who knows whom, what was asked, and what has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from tests.transfer.fault_rank import Ending, Job, RankProcess, Seat

Place = tuple[str, int]

T = TypeVar("T")


def some(*values: T) -> list[T]:
    """All of them with `KVMOVER_FAULTS` set, else the last: each costs seconds."""
    return list(values) if os.environ.get("KVMOVER_FAULTS") else [values[-1]]


class Crowd:
    """The living ranks and everything that ranks ever told."""

    def __init__(self, seats: Iterable[Seat]) -> None:
        self.ranks = {(seat.engine, seat.rank): RankProcess(seat) for seat in seats}
        self.endings: list[Ending] = []
        self._cards = {place: rank.ask("card") for place, rank in self.ranks.items()}

    def __getitem__(self, engine: str) -> RankProcess:
        """The rank of an engine that has one."""
        return self.ranks[engine, 0]

    def of(self, engine: str) -> list[RankProcess]:
        return [rank for (name, _), rank in self.ranks.items() if name == engine]

    def meet(self, one: str, other: str) -> None:
        """Connect every rank of an engine to every rank of another, which hears of it."""
        for rank in self.of(one):
            for place in [place for place in self.ranks if place[0] == other]:
                rank.ask("connect", self._cards[place])

    def replace(self, seat: Seat, friends: Iterable[str]) -> RankProcess:
        """Kill the rank that sits there and start another, which is told to all ranks of `friends`."""
        place = seat.engine, seat.rank
        self._drop(self.ranks.pop(place))
        rank = self.ranks[place] = RankProcess(seat)
        self._cards[place] = rank.ask("card")
        for engine in friends:
            for friend in self.of(engine):
                if not friend.stopped:
                    friend.ask("connect", self._cards[place])
                    rank.ask("connect", self._cards[engine, friend.seat.rank])
        return rank

    def move(self, job: Job, source: str, target: str) -> None:
        """Have all ranks that can hear begin a request."""
        for rank in self.of(source):
            rank.tell("send", job)
        for rank in self.of(target):
            rank.tell("receive", job, source)

    def look(self) -> None:
        for rank in self.ranks.values():
            rank.look()
            self.endings += rank.endings
            rank.endings.clear()

    def until(self, so: Callable[[], object], within_s: float, what: str) -> None:
        """Take in what is told until something is so."""
        deadline = time.monotonic() + within_s
        while not so():
            assert time.monotonic() < deadline, f"{what}: not within {within_s} s, {self.endings[-8:]}"
            time.sleep(0.01)
            self.look()

    def ended(self, job: Job, engine: str, within_s: float = 30) -> list[Ending]:
        """How a request ended on every rank of an engine."""

        def found() -> list[Ending]:
            return [ending for ending in self.endings if (ending.job, ending.engine) == (job.name, engine)]

        self.until(lambda: len(found()) >= len(self.of(engine)), within_s, f"{job.name} at {engine}")
        return found()

    def landed(self, job: Job, source: str, target: str) -> None:
        """Move a request from one engine to another, to the last byte. Up to three times: on a busy machine somebody
        may be so slow that it is taken for dead."""
        for attempt in range(3):
            once = replace(job, name=f"{job.name} {attempt}")
            self.move(once, source, target)
            ends = [*self.ended(once, target), *self.ended(once, source)]
            assert not any(ending.wrong for ending in ends), ends
            if all(ending.cause is None for ending in ends):
                return
            time.sleep(1.0)
        raise AssertionError(f"{job} does not land: {ends}")

    def assert_nothing_is_left(self, within_s: float = 15, *but: str) -> None:
        """Soon every table, region and page of all engines `but` some is free, and no free page was written."""
        for (engine, number), rank in self.ranks.items():
            if engine in but or rank.stopped:
                continue
            deadline = time.monotonic() + within_s
            while left := rank.ask("left"):
                assert time.monotonic() < deadline, f"{engine} {number} still has {left}"
                time.sleep(0.05)
        self.look()
        assert not [ending for ending in self.endings if ending.wrong or ending.spoiled]

    def kill(self) -> None:
        for rank in self.ranks.values():
            rank.kill()

    def _drop(self, rank: RankProcess) -> None:
        rank.kill()
        self.endings += rank.endings
