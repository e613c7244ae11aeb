"""A Directory holds ranks' cards as entries; `newest` selects an entry for each rank, `changes` compares two lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """The card of rank `rank` of `engine`, in the `generation`-th life of that rank.

    A generation grows with every start of the same rank. `time.time_ns()` at start will do if the clocks of the
    machines that a rank may start on differ by less than a restart takes.
    """

    engine: Annotated[str, msgspec.Meta(min_length=1)]
    rank: _Natural
    generation: _Natural
    card: bytes

    def text(self) -> str:
        """Return engine, rank and generation in words, for messages."""
        return f"rank {self.rank} of {self.engine}, generation {self.generation}"


class Directory(Protocol):
    """The interface of a rendezvous, for an engine to implement over its own service discovery.

    All calls are safe from several threads and have a deadline of their own. They raise TransportUnavailable if the
    directory cannot be reached, and DeadlineExceeded.
    """

    def publish(self, entry: Entry) -> None:
        """Let other engines find `entry` until it is withdrawn or this process ends, however it ends.

        Raises PeerLost if a newer generation of the same rank is there: this process has been replaced.
        """
        ...

    def withdraw(self, entry: Entry) -> None:
        """Withdraw `entry`. An absent entry is no error."""
        ...

    def ranks(self, engine: str) -> tuple[Entry, ...]:
        """Returns the newest entry of every rank of `engine` that is there now, by rank; empty is no error."""
        ...

    def close(self) -> None:
        """Withdraw all entries published here. Safe to call twice."""
        ...


def newest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return each rank's entry of the highest generation, by engine and rank; others are of replaced processes."""
    best: dict[tuple[str, int], Entry] = {}
    for entry in entries:
        known = best.setdefault((entry.engine, entry.rank), entry)
        if entry.generation > known.generation:
            best[entry.engine, entry.rank] = entry
    return tuple(best[place] for place in sorted(best))


@dataclass(frozen=True, slots=True)
class Appeared:
    """A rank that is new, or a new generation of a known rank: connect it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Vanished:
    """A rank that withdrew, or left the directory with its process. It may be alive for connected peers."""

    entry: Entry


def changes(before: Iterable[Entry], after: Iterable[Entry]) -> tuple[Appeared | Vanished, ...]:
    """Return the changes from `before` to `after`. A replaced generation vanishes before its successor appears."""
    old = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(before)}
    new = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(after)}
    gone = tuple(Vanished(entry) for key, entry in old.items() if key not in new)
    return gone + tuple(Appeared(entry) for key, entry in new.items() if key not in old)
