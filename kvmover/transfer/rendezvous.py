"""A Directory is where ranks find each other's cards: its entries, the newest of each rank, the changes in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """The card of rank `rank` of `engine`, in the `generation`-th life of that rank.

    A generation grows with every start of the same rank. `time.time_ns()` at start will do where the clocks of the
    machines that a rank may start on differ by less than a restart takes.
    """

    engine: Annotated[str, msgspec.Meta(min_length=1)]
    rank: _Natural
    generation: _Natural
    card: bytes

    def text(self) -> str:
        """Engine, rank and generation in words, for messages."""
        return f"rank {self.rank} of {self.engine}, generation {self.generation}"


class Directory(Protocol):
    """The interface of a rendezvous, for an engine to implement over its own service discovery.

    All calls are safe from several threads and have a deadline of their own. They raise TransportUnavailable where the
    directory cannot be reached, and DeadlineExceeded.
    """

    def publish(self, entry: Entry) -> None:
        """Let other engines find `entry` until it is withdrawn or this process ends, however it ends.

        Raises PeerLost when a newer generation of the same rank is there: this process has been replaced.
        """
        ...

    def withdraw(self, entry: Entry) -> None:
        """Take `entry` back. One that is not there is no error."""
        ...

    def ranks(self, engine: str) -> tuple[Entry, ...]:
        """The newest entry of every rank of `engine` that is there now, by rank; all empty is no error."""
        ...

    def close(self) -> None:
        """Withdraw all that was published here. Safe to call twice."""
        ...


def newest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Each rank's entry of the highest generation, by engine and rank; others are of processes that were replaced."""
    best: dict[tuple[str, int], Entry] = {}
    for entry in entries:
        known = best.setdefault((entry.engine, entry.rank), entry)
        if entry.generation > known.generation:
            best[entry.engine, entry.rank] = entry
    return tuple(best[place] for place in sorted(best))


@dataclass(frozen=True, slots=True)
class Appeared:
    """A rank that was not there, or another generation of one that was: connect it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Vanished:
    """A rank that withdrew, or whose process is gone from the directory. It may be alive for those connected to it."""

    entry: Entry


def changes(before: Iterable[Entry], after: Iterable[Entry]) -> tuple[Appeared | Vanished, ...]:
    """The changes from `before` to `after`. A generation that was replaced vanishes before its successor appears."""
    old = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(before)}
    new = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(after)}
    gone = tuple(Vanished(entry) for key, entry in old.items() if key not in new)
    return gone + tuple(Appeared(entry) for key, entry in new.items() if key not in old)
