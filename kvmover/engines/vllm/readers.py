"""Readers are the requests of a decode engine that fetch one prompt from one place.

Of `n` > 1 answers to a prompt one fetches, and the others find its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from kvmover.engines.common import Remote
from kvmover.transfer.protocol.content import Content

#: Prompts that are remembered as fetched, the latest ones.
MOST_READ = 4096

Key = tuple[Remote, Content]


class ReaderTurn(Enum):
    """A reader's turn: it fetches, waits for one that does, or computes what the prefix cache lacks."""

    FETCH = auto()
    WAIT = auto()
    COMPUTE = auto()


@dataclass(slots=True)
class _Reading:
    """A prompt of a source that serves `readers` requests, `came` of which have come.

    `members` are those present; `waiting` those that have not begun; `fetching` the one whose blocks cannot be found
    yet. `read`: one has had its turn. `released`: the source was told that no more requests come.
    """

    readers: int
    came: int = 0
    members: set[str] = field(default_factory=set[str])
    waiting: set[str] = field(default_factory=set[str])
    fetching: str | None = None
    read: bool = False
    released: bool = False


@dataclass(slots=True)
class Readers:
    """The readers of an engine. `is_cached` is True if a request finds the blocks of one before it.

    >>> readers, key = Readers(), (Remote("prefill", "p", "host", 1), Content(3, b"digest"))
    >>> readers.came(key, "a"), readers.came(key, "b")
    (None, None)
    >>> readers.turn(key), readers.begun(key, "a"), readers.turn(key)
    (<ReaderTurn.FETCH: 1>, None, <ReaderTurn.WAIT: 2>)
    >>> readers.settled(key, "a"), readers.turn(key)
    (False, <ReaderTurn.COMPUTE: 3>)
    """

    is_cached: bool = True
    _open: dict[Key, _Reading] = field(default_factory=dict[Key, _Reading])
    _read: OrderedDict[Key, None] = field(default_factory=OrderedDict[Key, None])

    def came(self, key: Key, name: str, readers: int = 1) -> None:
        """Add a request that is to fetch a prompt. `readers` is the number of requests that its source serves."""
        reading = self._open.setdefault(key, _Reading(readers, read=key in self._read, released=key in self._read))
        reading.came += 1
        reading.members.add(name)
        reading.waiting.add(name)

    def turn(self, key: Key) -> ReaderTurn:
        """Returns the turn of a reader that has not begun."""
        reading = self._open[key]
        if reading.fetching is not None:
            return ReaderTurn.WAIT
        serves_again = reading.readers > 1 and not self.is_cached and not reading.released
        return ReaderTurn.COMPUTE if reading.read and not serves_again else ReaderTurn.FETCH

    def begun(self, key: Key, name: str) -> None:
        """Note that a reader fetches: the others wait until its blocks can be found."""
        reading = self._open[key]
        reading.waiting.discard(name)
        reading.fetching = name

    def spared(self, key: Key, name: str) -> None:
        """Note that a reader has all blocks already, and that its source is released."""
        reading = self._open[key]
        reading.waiting.discard(name)
        reading.read = reading.released = True

    def settled(self, key: Key, name: str) -> bool:
        """Note that the blocks of a reader that fetched can be found. Returns True if the source is to be released."""
        reading = self._open[key]
        if reading.fetching == name:
            reading.fetching, reading.read = None, True
        return self._is_over(reading)

    def gone(self, key: Key, name: str) -> bool:
        """Note that a reader has ended, or computes. Returns True if the source is to be released."""
        reading = self._open[key]
        reading.members.discard(name)
        reading.waiting.discard(name)
        over = self.settled(key, name)
        if not reading.members:
            del self._open[key]
            if reading.read:
                self._read[key] = None
                if len(self._read) > MOST_READ:
                    self._read.popitem(last=False)
        return over

    def _is_over(self, reading: _Reading) -> bool:
        """Returns True if the source must be told that no more requests come. A source that serves once knows it by
        itself.
        """
        more = reading.waiting or (reading.members and reading.came < reading.readers)  # the others are on their way
        waits = more and not (self.is_cached and reading.read)
        is_due = reading.readers > 1 or not reading.read
        if reading.fetching is not None or reading.released or waits or not is_due:
            return False
        reading.released = True
        return True
