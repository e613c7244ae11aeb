"""TransferDriver lets SGLang's threads share one mover, and tells which requests ended or are quarantined.

The messages by which prefill and decode ranks meet over SGLang's sockets are defined here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from socket import socketpair
from threading import RLock
from typing import TYPE_CHECKING, Any

import msgspec

from kvmover.errors import KvmoverError, PeerUnknown, RefusedFor
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.config import Pace
from kvmover.transfer.meter import Snapshot
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Gate, Transfer
from kvmover.transport import Transport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: First frame of every message of kvmover: SGLang's own share the socket.
TAG = b"KVMOVER"


class Call(msgspec.Struct, frozen=True, tag="Call"):
    """The introduction of a decode rank. `answer_to`: host and port; `key`: its word for the prefill engine."""

    card: bytes
    answer_to: tuple[str, int]
    key: str


class Answer(msgspec.Struct, frozen=True, tag="Answer"):
    """A prefill rank's answer: the name of its engine, or the reason not to serve the caller."""

    key: str
    engine: str
    refused: str = ""


class PagesReady(msgspec.Struct, frozen=True, tag="Asked"):
    """The news that a decode rank, one of `ranks`, has pages for a request, all but its first `prefix_tokens`.

    `content`: the prompt that it means. The tag is an earlier name, kept for other releases.
    """

    room: int
    rank: str
    ranks: int
    prefix_tokens: int
    content: Content | None = None


Message = Call | Answer | PagesReady

_decode = msgspec.msgpack.Decoder(Message).decode


def frames(message: Message) -> list[bytes]:
    """Returns the two frames of a message on SGLang's socket."""
    return [TAG, msgspec.msgpack.encode(message)]


def read(received: Sequence[bytes]) -> Message | None:
    """Returns the message; None for SGLang's own frames, or malformed frames."""
    if len(received) != 2 or received[0] != TAG:
        return None
    try:
        return _decode(received[1])
    except msgspec.MsgspecError:
        return None


#: Takes a request's number, the reason of its failure or None, and its payloads beside the cache by source rank.
Ended = Callable[[int, str | None, dict[int, bytes]], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to fetch once its prefill engine is known and connected.

    `engine`: returns the engine's name, or None until it has answered. `positions`, `pages`, `content`: as for
    `Mover.receive`. `deadline`: by the driver's clock, s.
    """

    engine: Callable[[], str | None]
    positions: range
    pages: Sequence[npt.NDArray[np.int64]]
    aux_from: int
    deadline: float
    content: Content | None = None


@dataclass(slots=True)
class TransferDriver:
    """A mover's driver, to be called from any thread.

    `turn` calls `ended` once per request: a received one when it has ended, though its pages may be written for longer
    (`has`); a sent one when its pages are no longer read. `lost` is called with the name of an engine, asked before,
    when a rank of it disconnects. `pace` bounds the time between turns; `wake` is called when a call needs a turn
    sooner.
    """

    mover: Mover
    ended: Ended
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.monotonic
    wake: Callable[[], object] = lambda: None
    lost: Callable[[str], object] = lambda _engine: None
    _sends: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _receives: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _quarantined: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _wanted: dict[int, Wanted] = field(default_factory=dict[int, Wanted])
    _connected: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    _lock: RLock = field(default_factory=RLock)
    _busy: float = field(init=False)

    def __post_init__(self) -> None:
        self._busy = self.clock()

    def snapshot(self) -> Snapshot:
        """Returns the mover's counts and open transfers, between two turns."""
        with self._lock:
            return self.mover.snapshot()

    def connect(self, card: bytes) -> None:
        """Connect the peer of `card`. Raises PeerRefused or TransportError."""
        with self._lock:
            self.mover.connect(card)
            self._called()

    def expect(self, room: int) -> None:
        """Announce a request of this number, whatever the end of its predecessor: peers that ask for it wait."""
        with self._lock:
            self.mover.reopen(str(room))

    def waiting(self, room: int) -> list[tuple[Place, range, Content | None]]:
        """Returns the peers that wait for the request: see `Mover.waiting`."""
        with self._lock:
            return self.mover.waiting(str(room))

    def send(
        self,
        room: int,
        pages: Sequence[npt.NDArray[np.int64]],
        gates: Sequence[Gate],
        aux: bytes | None,
        content: Content | None = None,
    ) -> None:
        """Offer a request's pages, or those of its first chunk, a table per component. Raises PlanError."""
        with self._lock:
            self._sends[room] = self.mover.send(str(room), pages, gates, aux, content=content)
            self._called()

    def produced(self, room: int, gate: Gate, pages: Sequence[npt.NDArray[np.int64]], aux: bytes | None) -> None:
        """Add a chunk's pages to a request that is being sent, and with the last its payload beside the cache.

        Ignored once the request is over.
        """
        with self._lock:
            if room in self._sends:
                self.mover.produced(self._sends[room], gate, pages)
                if aux is not None:
                    self.mover.attach(self._sends[room], aux)
                self._called()

    def receive(self, room: int, wanted: Wanted) -> None:
        """Fetch a request once its engine is connected; `turn` begins it and tells its end.

        Copies the page tables. Raises PlanError for malformed tables.
        """
        wanted = replace(wanted, pages=page_tables(wanted.pages))
        with self._lock:
            self._wanted[room] = wanted
            self._called()

    def abort(self, room: int, reason: str) -> None:
        """End the request with `reason`; a request that was not begun is refused to peers that ask for it."""
        with self._lock:
            transfer = self._sends.get(room) or self._receives.get(room)
            if room in self._wanted:
                self._unbegun(room, reason)
            elif transfer is not None:
                self.mover.abort(transfer, reason)
            elif room not in self._quarantined:
                self.mover.refuse(str(room), reason)
            self._called()

    def turned_away(self, refused_for: RefusedFor) -> None:
        """Count a request that was turned away before it reached the mover."""
        with self._lock:
            self.mover.meter.turned_away(refused_for)

    def has(self, room: int) -> bool:
        """Returns True while the request's pages may be read or written."""
        with self._lock:
            return any(room in those for those in (self._sends, self._receives, self._quarantined, self._wanted))

    def turn(self) -> float:
        """Advance all transfers. Returns the seconds until the next turn, if no call comes before."""
        with self._lock:
            moved = self.mover.poll()
            self._tell_of_the_lost()
            for room, wanted in list(self._wanted.items()):
                self._begin(room, wanted)
            released = [room for room, transfer in self._quarantined.items() if not transfer.quarantined]
            for room in released:
                del self._quarantined[room]
            sent = [
                (room, transfer)
                for room, transfer in self._sends.items()
                if transfer.ended and not transfer.quarantined
            ]
            received = [(room, transfer) for room, transfer in self._receives.items() if transfer.ended]
            for room, transfer in received:
                del self._receives[room]
                if transfer.quarantined:
                    self._quarantined[room] = transfer
            for room, _ in sent:
                del self._sends[room]
            for room, transfer in [*sent, *received]:
                self._tell(room, transfer)
            now = self.clock()
            if moved or released or sent or received:
                self._busy = now
                return 0.0
            under_way = len(self._sends) + len(self._receives) + len(self._quarantined) + len(self._wanted)
            return self.pace.nap_s(now - self._busy, under_way)

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """End all requests with `reason`, wait until peers have released their pages or timed out, and join anew.

        Blocks the caller, which begins no request meanwhile. Raises the errors of `Mover.rejoin`.
        """
        with self._lock:
            for room in list(self._wanted):
                self._unbegun(room, reason)
            open_ones = [*self._sends.values(), *self._receives.values()]
            for transfer in open_ones:
                self.mover.abort(transfer, reason)
        while not all(transfer.ended for transfer in open_ones):
            time.sleep(min(self.turn(), self.pace.idle_s))
        with self._lock:
            self.mover.rejoin(make, model, reason)
            self._tell_of_the_lost()
            self._called()

    def close(self) -> None:
        """Close the mover: see `Mover.close`."""
        with self._lock:
            self.mover.close()

    def _tell(self, room: int, transfer: Transfer) -> None:
        assert transfer.result is not None
        if transfer.result.reason is None:  # the router may reuse the room, and decode ask for the next request first
            self.mover.reopen(str(room))
        self.ended(room, transfer.result.reason, transfer.result.aux)

    def _tell_of_the_lost(self) -> None:
        for engine, before in list(self._connected.items()):
            self._connected[engine] = now = self.mover.ranks(engine)
            if before - now:
                self.lost(engine)

    def _called(self) -> None:
        self._busy = self.clock()
        self.wake()

    def _begin(self, room: int, wanted: Wanted) -> None:
        """Ask for the request, unless the engine has not answered this rank's call yet."""
        engine, reason = wanted.engine(), ""
        try:
            if engine is not None:
                self._connected.setdefault(engine, frozenset())
                self._receives[room] = self.mover.receive(
                    str(room), engine, wanted.positions, wanted.pages, [wanted.aux_from], content=wanted.content
                )
                del self._wanted[room]
                self._busy = self.clock()
                return
        except PeerUnknown as error:
            reason = str(error)
        except KvmoverError as error:
            self._unbegun(room, str(error))
            return
        if self.clock() > wanted.deadline:
            self._unbegun(room, reason or "the prefill engine has not answered")

    def _unbegun(self, room: int, reason: str) -> None:
        """End a wanted request before any rank was asked for it."""
        del self._wanted[room]
        self.mover.meter.never_began("receive")
        self.ended(room, reason, {})


class Bell:
    """The bell that wakes the thread that turns a TransferDriver, on a message of SGLang's or another thread's call.

    One thread calls `nap`, all others `ring`. The ZeroMQ socket is the engine's, and outlives the bell.
    """

    def __init__(self, socket: Any) -> None:
        zmq = import_module("zmq")
        self._socket = socket
        self._ear, self._hand = socketpair()
        for end in (self._ear, self._hand):
            end.setblocking(False)
        self._poller: Any = zmq.Poller()
        for source in (socket, self._ear):
            self._poller.register(source, zmq.POLLIN)

    def nap(self, seconds: float) -> bool:
        """Sleep until a message arrives or `ring` is called (also since the last nap), at most `seconds`.

        Returns True if there is a message. ZeroMQ counts in milliseconds: naps below 1 ms are not cut short.
        """
        whole_ms = int(seconds * 1000)
        if not whole_ms:
            time.sleep(seconds)
        woken: dict[Any, int] = dict(self._poller.poll(whole_ms))
        with suppress(OSError):  # the bell has not rung
            self._ear.recv(4096)
        return self._socket in woken

    def ring(self) -> None:
        """End the nap of the other thread, or its next one."""
        with suppress(OSError):  # the bell rings already, or is closed
            self._hand.send(b"!")

    def close(self) -> None:
        """Close the sockets behind `ring`; the engine's stays open."""
        self._ear.close()
        self._hand.close()
