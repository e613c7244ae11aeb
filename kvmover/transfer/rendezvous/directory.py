"""Where ranks find each other's cards: the entries of a directory, which of them count, and what has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from kvmover.errors import ProtocolError

_FORMAT = "kvmover.rendezvous/1"
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """Rank `rank` of `engine` as it stands since it started the `generation`-th time, and the card to connect it by.

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
    """What an engine needs of a rendezvous. Safe to call from several threads; every call has a deadline of its own.

    All raise TransportUnavailable where the directory cannot be reached, and DeadlineExceeded.
    """

    def publish(self, entry: Entry) -> None:
        """Let others find `entry` until it is withdrawn or this process ends, however it ends.

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
    """A rank that withdrew, or whose process died and whose lease ran out. Peers still connected may yet be alive."""

    entry: Entry


Change = Appeared | Vanished


def changes(before: Iterable[Entry], after: Iterable[Entry]) -> tuple[Change, ...]:
    """What became of `before`. A generation that was replaced vanishes before its successor appears."""
    old = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(before)}
    new = {(entry.engine, entry.rank, entry.generation): entry for entry in newest(after)}
    gone = tuple(Vanished(entry) for key, entry in old.items() if key not in new)
    return gone + tuple(Appeared(entry) for key, entry in new.items() if key not in old)


class _Entries(msgspec.Struct, frozen=True):
    format: str
    entries: tuple[Entry, ...]


def write_entries(entries: Iterable[Entry]) -> bytes:
    """Entries as bytes; `read_entries` is the reverse."""
    return msgspec.msgpack.encode(_Entries(_FORMAT, tuple(entries)))


def read_entries(data: bytes) -> tuple[Entry, ...]:
    """Raises ProtocolError with what is wrong with the bytes. The cards inside are not looked at."""
    try:
        found = msgspec.msgpack.decode(data, type=_Entries)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are no entries of a directory: {error}") from error
    if found.format != _FORMAT:
        raise ProtocolError(f"entries are {found.format!r}, this side speaks {_FORMAT!r}")
    return found.entries
