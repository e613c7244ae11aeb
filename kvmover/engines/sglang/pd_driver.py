"""A rank of prefill or decode: the messages by which it is met over SGLang's sockets, and TransferDriver, which lets
SGLang's threads use one mover and tells how requests ended and which are held, by number."""

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

#: First frame of every message of ours: SGLang's own share the socket.
TAG = b"KVMOVER"


class Call(msgspec.Struct, frozen=True, tag="Call"):
    """A decode rank introduces itself. `answer_to`: host and port; `key`: how it knows the prefill engine."""

    card: bytes
    answer_to: tuple[str, int]
    key: str


class Answer(msgspec.Struct, frozen=True, tag="Answer"):
    """A prefill rank says what its engine is called, or why it does not serve the caller."""

    key: str
    engine: str
    refused: str = ""


class PagesReady(msgspec.Struct, frozen=True, tag="Asked"):
    """A decode rank, one of `ranks` that will ask, has pages for a request, all but its first `prefix_tokens`.

    `content`: the prompt that it means. The tag is the name that it had first: other releases know it by that.
    """

    room: int
    rank: str
    ranks: int
    prefix_tokens: int
    content: Content | None = None


Message = Call | Answer | PagesReady

_decode = msgspec.msgpack.Decoder(Message).decode


def frames(message: Message) -> list[bytes]:
    """The two frames of a message on SGLang's socket."""
    return [TAG, msgspec.msgpack.encode(message)]


def read(received: Sequence[bytes]) -> Message | None:
    """The message, or None for frames that are not ours or make no sense."""
    if len(received) != 2 or received[0] != TAG:
        return None
    try:
        return _decode(received[1])
    except msgspec.MsgspecError:
        return None


#: Number of a request, why it failed or None, and the payloads that came with it by source rank.
Ended = Callable[[int, str | None, dict[int, bytes]], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to fetch as soon as the engine it is asked of is known and connected.

    `engine`: its name, or None while it has not said it. `positions`, `pages` and `content` as `Mover.receive` takes
    them.
    """

    engine: Callable[[], str | None]
    positions: range
    pages: Sequence[npt.NDArray[np.int64]]
    aux_from: int
    deadline: float
    content: Content | None = None


@dataclass(slots=True)
class TransferDriver:
    """Every call may come from any thread. `ended` is called by `turn`, once a request: of one that is received when it
    has ended, though its pages may be written for longer (`has`); of one that is sent when nothing reads its pages.
    `lost` is, too, with the name of an engine that was asked for requests and some of whose ranks are connected no
    more. `pace` says how long `turn` may be left alone, and `wake` ends that sooner, because there is a call to act
    upon."""

    mover: Mover
    ended: Ended
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.monotonic
    wake: Callable[[], object] = lambda: None
    lost: Callable[[str], object] = lambda _engine: None
    _sends: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _receives: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _held: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    _wanted: dict[int, Wanted] = field(default_factory=dict[int, Wanted])
    _connected: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    _lock: RLock = field(default_factory=RLock)
    _busy: float = field(init=False)

    def __post_init__(self) -> None:
        self._busy = self.clock()

    def snapshot(self) -> Snapshot:
        """What the mover did and has under way, between two turns."""
        with self._lock:
            return self.mover.snapshot()

    def connect(self, card: bytes) -> None:
        """Raises PeerRefused or TransportError."""
        with self._lock:
            self.mover.connect(card)
            self._called()

    def expect(self, room: int) -> None:
        """A request of this number will be sent, whatever became of one before: who asks for it waits."""
        with self._lock:
            self.mover.reopen(str(room))

    def waiting(self, room: int) -> list[tuple[Place, range, Content | None]]:
        """See `Mover.waiting`."""
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
        """Offer a request's pages, a table a component, or those of its first chunk. Raises PlanError."""
        with self._lock:
            self._sends[room] = self.mover.send(str(room), pages, gates, aux, content=content)
            self._called()

    def produced(self, room: int, gate: Gate, pages: Sequence[npt.NDArray[np.int64]], aux: bytes | None) -> None:
        """More of a request that is being sent: the pages of a chunk, and with the last what goes beside the cache.

        Nothing of one that is over."""
        with self._lock:
            if room in self._sends:
                self.mover.produced(self._sends[room], gate, pages)
                if aux is not None:
                    self.mover.attach(self._sends[room], aux)
                self._called()

    def receive(self, room: int, wanted: Wanted) -> None:
        """Fetch a request once its engine is connected; `turn` begins it, and tells how it ended.

        The page tables are copied here. Raises PlanError for what is none."""
        wanted = replace(wanted, pages=page_tables(wanted.pages))
        with self._lock:
            self._wanted[room] = wanted
            self._called()

    def abort(self, room: int, reason: str) -> None:
        """The request ends with `reason`; one that was not begun is refused to whoever asks for it."""
        with self._lock:
            transfer = self._sends.get(room) or self._receives.get(room)
            if room in self._wanted:
                self._unbegun(room, reason)
            elif transfer is not None:
                self.mover.abort(transfer, reason)
            elif room not in self._held:
                self.mover.refuse(str(room), reason)
            self._called()

    def turned_away(self, refused_for: RefusedFor) -> None:
        """Count a request that was turned away before the mover had it."""
        with self._lock:
            self.mover.meter.turned_away(refused_for)

    def has(self, room: int) -> bool:
        """Whether the request's pages may still be read or written."""
        with self._lock:
            return any(room in those for those in (self._sends, self._receives, self._held, self._wanted))

    def turn(self) -> float:
        """Advance everything; seconds until the next turn, unless there is a call before."""
        with self._lock:
            moved = self.mover.poll()
            self._tell_of_the_lost()
            for room, wanted in list(self._wanted.items()):
                self._begin(room, wanted)
            released = [room for room, transfer in self._held.items() if not transfer.held]
            for room in released:
                del self._held[room]
            sent = [(room, transfer) for room, transfer in self._sends.items() if transfer.ended and not transfer.held]
            received = [(room, transfer) for room, transfer in self._receives.items() if transfer.ended]
            for room, transfer in received:
                del self._receives[room]
                if transfer.held:
                    self._held[room] = transfer
            for room, _ in sent:
                del self._sends[room]
            for room, transfer in [*sent, *received]:
                self._tell(room, transfer)
            now = self.clock()
            if moved or released or sent or received:
                self._busy = now
                return 0.0
            under_way = len(self._sends) + len(self._receives) + len(self._held) + len(self._wanted)
            return self.pace.nap_s(now - self._busy, under_way)

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """Give up all requests, wait until peers have let go of their pages or their time is up, and join anew: see
        Mover.rejoin, whose errors this raises. Blocks the caller, who begins nothing meanwhile.
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
        if transfer.result.reason is None:  # rooms are the router's: decode may hear of the next one first
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
        """Ask, unless the engine has not answered our call yet."""
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
        """A request that was wanted ends before anybody was asked for it."""
        del self._wanted[room]
        self.mover.meter.never_began("receive")
        self.ended(room, reason, {})


class Bell:
    """What the thread that turns a TransferDriver sleeps on: SGLang's socket, and other threads' calls meanwhile.

    `nap` is for one thread, `ring` for all others. The ZeroMQ socket is the engine's, and outlives this."""

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
        """Sleep until there is a message or somebody has rung since the last nap, at most so long.

        Whether there is a message. ZeroMQ counts in milliseconds: naps below one are not cut short.
        """
        whole_ms = int(seconds * 1000)
        if not whole_ms:
            time.sleep(seconds)
        woken: dict[Any, int] = dict(self._poller.poll(whole_ms))
        with suppress(OSError):  # nothing was rung
            self._ear.recv(4096)
        return self._socket in woken

    def ring(self) -> None:
        """End the nap of the other thread, or its next one."""
        with suppress(OSError):  # it rings already, or nobody sleeps here any more
            self._hand.send(b"!")

    def close(self) -> None:
        """Give back what `ring` goes through; the engine's socket stays open."""
        self._ear.close()
        self._hand.close()
