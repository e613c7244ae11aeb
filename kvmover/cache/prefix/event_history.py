"""An EventHistory keeps the batches for late subscribers: the last ones, and before them a snapshot of the cache.

A replay has a batch for every number from the one that was asked for, since routers such as llm-d's take a missing
number for a loss: before the snapshot's batches go empty ones. `Replays` shares the sending among the askers; neither
has a socket or a clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import chain
from typing import NamedTuple, TypeAlias

import msgspec

from kvmover.cache.prefix.kv_events import AllBlocksCleared, EventForm, KVEvent, as_form, coalesce

#: The number behind the last batch of a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

#: The approximate size of a snapshot's batch of whole events.
_SNAPSHOT_BATCH_BYTES = 1 << 18
#: Empty batches of a replay at most: llm-d gives up after 120 s, which is 8,400 a second.
_MOST_EMPTY = 1_000_000

#: A number and its payload, encoded.
Batch: TypeAlias = tuple[int, bytes]


class _Snapshot(NamedTuple):
    """A cache's contents, as encoded events, when batch `number` was next."""

    number: int
    taken_s: float
    events: tuple[bytes, ...]


class EventHistory:
    """The numbered batches of one publisher, encoded. One thread adds, another reads."""

    def __init__(self, rank: int, keep_batches: int, form: EventForm) -> None:
        self._rank, self._form = rank, form
        self._keep_batches = keep_batches
        self._kept = deque[Batch](maxlen=keep_batches)
        self._snapshot = _Snapshot(0, time.time(), ())
        self._keeping = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0

    def add(self, events: Iterable[KVEvent]) -> Batch:
        """Keep `events` as the next batch, neighbours joined. Returns it."""
        told = as_form(coalesce(events), self._form)
        batch = self._next, self._encoder.encode((time.time(), told, self._rank))
        with self._keeping:
            self._kept.append(batch)
            self._next += 1
        return batch

    @property
    def snapshot_due(self) -> bool:
        """Returns True if the next batch drops one that the last snapshot does not include."""
        return self._next - self._snapshot.number >= self._keep_batches

    def snapshot(self, events: Iterable[KVEvent]) -> None:
        """Keep `events`, all that is cached after every batch so far."""
        encoded = tuple(map(self._encoder.encode, as_form(events, self._form)))
        with self._keeping:
            self._snapshot = _Snapshot(self._next, time.time(), encoded)

    def since(self, first: int) -> Iterator[Batch]:
        """Returns the batches from `first` on, in order; each is encoded as it is taken.

        Without a gap they are the kept ones. Else the snapshot stands before those that follow it, in the numbers just
        below them, and empty batches before the snapshot, a million at most. A snapshot that is too old to join the
        kept ones is left out.
        """
        with self._keeping:
            kept, snapshot, following = tuple(self._kept), self._snapshot, self._next
        oldest = kept[0][0] if kept else following
        if first < oldest <= snapshot.number:
            later = (batch for batch in kept if batch[0] >= snapshot.number)
            return chain(self._told(snapshot, first), later)
        return (batch for batch in kept if batch[0] >= first)

    def _told(self, snapshot: _Snapshot, first: int) -> Iterator[Batch]:
        """Yield empty batches from `first` on and the snapshot's, in the numbers up to its own."""
        groups = _groups([len(event) for event in snapshot.events], snapshot.number - first)
        encoder, begin = msgspec.msgpack.Encoder(), snapshot.number - len(groups)  # the other one has its thread
        empty = encoder.encode((snapshot.taken_s, (), self._rank))
        for number in range(max(first, begin - _MOST_EMPTY), begin):
            yield number, empty
        cleared: list[object] = as_form([AllBlocksCleared()], self._form)
        for number, group in enumerate(groups, begin):
            events = [*cleared, *map(msgspec.Raw, snapshot.events[group.start : group.stop])]
            cleared = []
            yield number, encoder.encode((snapshot.taken_s, events, self._rank))


def _groups(sizes: list[int], most: int) -> list[range]:
    """Returns how events of these sizes are cut into `most` batches at most, one at least.

    >>> _groups([10, 10, 10], 2)
    [range(0, 3)]
    """
    batch_bytes = max(_SNAPSHOT_BATCH_BYTES, -(-2 * sum(sizes) // most))
    starts, size = [0], 0
    for at, nbytes in enumerate(sizes):
        if size and size + nbytes > batch_bytes and len(starts) < most:
            starts.append(at)
            size = 0
        size += nbytes
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


class Sent(Enum):
    """An outcome of handing a batch to a socket."""

    QUEUED = auto()
    #: The asker has not read enough of those before; the batch was not taken.
    FULL = auto()
    #: The asker has left.
    GONE = auto()


#: Hands an asker one batch: its name, the number in 8 bytes, the payload.
Send: TypeAlias = Callable[[bytes, bytes, bytes], Sent]


class _Replay:
    """One asker's batches. `waiting` was not taken; `unread_s`: since when the asker has taken none."""

    __slots__ = ("batches", "unread_s", "waiting")

    def __init__(self, batches: Iterator[Batch], now: float) -> None:
        self.batches, self.unread_s = batches, now
        self.waiting: tuple[bytes, bytes] | None = None

    def take(self) -> tuple[bytes, bytes]:
        if self.waiting is not None:
            return self.waiting
        number, payload = next(self.batches, (-1, b""))
        return number.to_bytes(8, "big", signed=True), payload


class Replays:
    """The replays under way, in turns: no asker waits for another, and none is sent more than it reads.

    An asker has one replay; a new request begins it anew. Askers beyond `most` get no answer. One that leaves its
    batches unread for `patience_s` gets no more of them, just the end, whose numbers say what is missing.
    """

    def __init__(self, most: int, patience_s: float, in_turn: int) -> None:
        self._most, self._patience_s, self._in_turn = most, patience_s, in_turn
        self._open = dict[bytes, _Replay]()
        #: Requests of askers beyond `most`.
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, asker: bytes, batches: Iterator[Batch], now: float) -> None:
        """Begin an asker's replay."""
        if asker not in self._open and len(self._open) >= self._most:
            self.refused += 1
            return
        self._open[asker] = _Replay(batches, now)

    def turn(self, send: Send, now: float) -> int:
        """Send each asker some batches. Returns how many were taken."""
        return sum(self._serve(asker, replay, send, now) for asker, replay in list(self._open.items()))

    def _serve(self, asker: bytes, replay: _Replay, send: Send, now: float) -> int:
        for taken in range(self._in_turn):
            number, payload = replay.take()
            outcome = send(asker, number, payload)
            if outcome is Sent.FULL:
                replay.waiting = number, payload
                if taken:
                    replay.unread_s = now
                elif now - replay.unread_s > self._patience_s:
                    replay.batches, replay.waiting = iter(()), None
                return taken
            replay.waiting = None
            if outcome is Sent.GONE or number == END_OF_REPLAY:
                del self._open[asker]
                return taken + 1
        replay.unread_s = now
        return self._in_turn
