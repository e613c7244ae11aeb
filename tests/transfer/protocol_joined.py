"""One Receiving and some Sendings joined by a wire in memory: the protocol with nothing around it, on virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.destination import destination_machine as receiver
from kvmover.transfer.destination import destination_machine as receiving
from kvmover.transfer.destination.credits import Credits
from kvmover.transfer.destination.destination_machine import Receiving, Source, WriterChunk
from kvmover.transfer.events import Cancel, Patience, Tick
from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source import source_machine as sender
from kvmover.transfer.source import source_machine as sending
from kvmover.transfer.source.source_machine import Sending

PATIENCE = Patience(deadline_s=30.0, drain_s=2.0, resend_s=1.0)
TICK_S = 0.05
WANT = wire.Want("r", 7, 0, 1, Route.PACKED, Replicas.STRIPE, 1)
SLOT = ALIGN_BYTES

#: What becomes of a message: how long it takes, in seconds, once for each copy that arrives. Nothing: it is lost.
Fate = Callable[[str, str, wire.AnyMessage], list[float]]


def on_time(source: str, target: str, message: wire.AnyMessage) -> list[float]:
    """Both ways alike, some peers farther off than others."""
    return [0.01 + 0.001 * (ord(max(source, target)) - ord("a"))]


@dataclass(slots=True)
class _End:
    """A source: its state once it was asked, staging memory by offset, and chunks that wait for some."""

    source: Source
    room: list[int]
    state: Sending | None = None
    staging: dict[int, str] = field(default_factory=dict[int, str])
    of_chunk: dict[int, int] = field(default_factory=dict[int, int])
    queue: deque[sending.Post] = field(default_factory=deque[sending.Post])
    finish: sending.EndSend | None = None
    closed: str | None = None


class Joined:
    """A destination `d` and its sources. Every chunk has a text of its own, and `pages` is what landed.

    `slots`: regions of the destination's arena; `staging`: of each source's. A source has half of its chunks when it
    is asked and the rest half a second later, with its payload. `spoil`: (peer, chunk, round) that are damaged on the
    way. Everything is counted: `said` by type of message, `log` in order.
    """

    def __init__(
        self,
        sources: dict[str, Source],
        slots: int = 3,
        staging: int = 2,
        fate: Fate = on_time,
        digests: bool = False,
        spoil: frozenset[tuple[str, int, int]] = frozenset(),
    ) -> None:
        self.now, self.fate, self.digests, self.spoil = 0.0, fate, digests, spoil
        self.state = Receiving("r", 7, sources, PATIENCE, PATIENCE.deadline_s)
        self.ends = {peer: _End(source, [n * SLOT for n in range(staging)]) for peer, source in sources.items()}
        self.arena, self.credits = Arena(slots * SLOT), Credits[str, WriterChunk]()
        self.reserved: dict[int, WriterChunk] = {}
        self.asked: set[WriterChunk] = set()
        self.regions: dict[int, str] = {}
        self.pages: dict[WriterChunk, str] = {}
        self.aux: Counter[str] = Counter()
        self.finish: receiving.EndReceive | None = None
        self.mismatches = 0
        self.said: Counter[type] = Counter()
        self.log: list[wire.AnyMessage] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for peer in sources:
            self._send("d", peer, WANT)
        self._apply(*receiver.start(self.state))

    def run(self, until: float = 40.0) -> Joined:
        """Until everybody has ended, or `until`."""
        self._tick()
        while self._events and self._events[0][0] <= until and not self._over():
            self.now, _, call = heapq.heappop(self._events)
            call()
        return self

    def cancel(self, after: float, reason: str) -> None:
        self._at(after, lambda: self._step(Cancel(reason)))

    def refuse(self, peer: str, after: float, reason: str) -> None:
        self._at(after, lambda: self._refuse(peer, self.ends[peer], reason))

    def _refuse(self, peer: str, end: _End, reason: str) -> None:
        if end.state is None:
            end.closed = reason
        else:
            self._source(peer, Cancel(reason))

    @property
    def lost(self) -> dict[str, Sending]:
        """Sources that were asked and have not ended."""
        return {peer: end.state for peer, end in self.ends.items() if end.state and not end.state.finished}

    def whole(self) -> bool:
        return self.pages == {key: _text(*key) for key in self._keys()}

    def _keys(self) -> list[WriterChunk]:
        return [(peer, chunk) for peer, end in self.ends.items() for chunk in range(end.source.chunks)]

    def _over(self) -> bool:
        return self.state.finished and not any(end.state and _live(end.state) for end in self.ends.values())

    def _at(self, after: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after, next(self._order), call))

    def _tick(self) -> None:
        self._step(Tick())
        for peer, end in self.ends.items():
            if end.state is not None:
                self._source(peer, Tick())
        self._at(TICK_S, self._tick)

    def _send(self, source: str, target: str, message: wire.AnyMessage) -> None:
        self.said[type(message)] += 1
        self.log.append(message)
        message = wire.decode(wire.encode(message))
        for delay in self.fate(source, target, message):
            self._at(delay, lambda: self._hear(source, target, message))

    def _hear(self, source: str, target: str, message: wire.AnyMessage) -> None:
        if target == "d":
            self._destination_hears(source, message)
        else:
            self._source_hears(target, message)

    # The destination, as DestinationDriver runs it

    def _destination_hears(self, peer: str, message: wire.AnyMessage) -> None:
        if self.state.finished:
            if not isinstance(message, wire.Drained | wire.Kept):
                reason = self.state.reason
                self._send("d", peer, wire.Done("r", 7) if reason is None else wire.Abort("r", 7, reason))
            return
        assert isinstance(message, wire.ToDestination | wire.Abort), f"a source said {message}"
        if isinstance(message, wire.Aux):
            self.aux[peer] += peer not in self.state.aux
        self._step(receiving.Heard(peer, message))

    def _step(self, event: receiving.Event) -> None:
        self._apply(*receiver.step(self.state, event, self.now))

    def _apply(self, state: Receiving, actions: list[receiving.Action]) -> None:
        self.state = state
        for action in actions:
            match action:
                case receiving.Send(peer, message):
                    self._send("d", peer, message)
                case receiving.Ask(peer):
                    self._send("d", peer, WANT)
                case receiving.Reserve(peer, chunk):
                    assert (peer, chunk) not in self.asked, "reserved twice"
                    self.asked.add((peer, chunk))
                    self.credits.ask(peer, peer, (peer, chunk), SLOT)
                case receiving.Read():
                    self._at(0.02, lambda a=action: self._read(a))
                case receiving.Scatter(peer, chunk, offset):
                    if offset is not None:
                        assert self.reserved[offset] == (peer, chunk)
                        self.pages[peer, chunk] = self.regions[offset]
                    digest = hash(self.pages[peer, chunk])
                    self._at(0.005, lambda p=peer, c=chunk, d=digest: self._step(receiving.Scattered(p, c, d)))
                case receiving.Free(offset):
                    del self.reserved[offset]
                    self.arena.release(offset)
                case receiving.Isolate(_, offset):
                    self.arena.quarantine(offset)
                case receiving.Mismatch():
                    self.mismatches += 1
                case receiving.EndReceive():
                    assert self.finish is None, "ended twice"
                    self.finish = action
        self._reserve()

    def _reserve(self) -> None:
        """Sources take turns here, as requests do in a mover."""
        while self.state.reason is None and (granted := self.credits.reserve(self.arena)) is not None:
            _, key, offset = granted
            self.reserved[offset] = key
            self._step(receiving.Reserved(key[0], ((key[1], offset),)))

    def _read(self, read: receiving.Read) -> None:
        """The bytes are those that lie there when the read takes place, whoever's they are by then."""
        end, key = self.ends[read.peer], (read.peer, read.chunk)
        found = _text(*key) if end.source.direct else end.staging.get(read.remote, "reused")
        found += "?" * ((*key, read.round) in self.spoil)
        if end.source.direct:
            self.pages[key] = found
        else:
            self.regions[read.offset] = found
        self._send("d", read.peer, read.after)
        self._step(receiving.ReadEnded(*key))

    # A source, as SourceDriver and Writes run it

    def _source_hears(self, peer: str, message: wire.AnyMessage) -> None:
        end = self.ends[peer]
        if end.state is None:
            if isinstance(message, wire.Abort):
                end.closed = message.reason
                self._send(peer, "d", wire.Drained("r", 7))
            elif isinstance(message, wire.Want) and end.closed is None:
                self._begin(peer, end)
            elif end.closed is not None:
                self._send(peer, "d", wire.Abort("r", 7, end.closed))
            return
        assert isinstance(message, wire.ToSource | wire.Abort), f"the destination said {message}"
        self._source(peer, message)

    def _begin(self, peer: str, end: _End) -> None:
        source, deadline = end.source, self.now + PATIENCE.deadline_s
        end.state = Sending("r", 7, (SLOT,) * source.chunks, PATIENCE, deadline, source.direct, source.verb)
        half = (source.chunks + 1) // 2
        self._source(peer, sending.Ready(tuple(range(half))))
        self._at(0.5, lambda: self._source(peer, sending.Ready(tuple(range(half, source.chunks)))))
        if source.aux:
            self._at(0.5, lambda: self._source(peer, sending.Attached(b"token")))

    def _source(self, peer: str, event: sending.Event) -> None:
        end = self.ends[peer]
        assert end.state is not None
        end.state, actions = sender.step(end.state, event, self.now)
        for action in actions:
            match action:
                case sending.Post():
                    end.queue.append(action)
                case sending.Unstage(chunk):
                    self._give_back(end, chunk)
                case sending.Say(message):
                    self._send(peer, "d", message)
                case sending.EndSend():
                    assert end.finish is None, "ended twice"
                    end.finish = action
                    end.queue.clear()
        self._post(peer, end)

    def _post(self, peer: str, end: _End) -> None:
        while end.queue and (end.room or end.source.direct):
            post = end.queue.popleft()
            if not end.source.direct:
                end.of_chunk[post.chunk] = end.room.pop()
                end.staging[end.of_chunk[post.chunk]] = _text(peer, post.chunk)
            self._source(peer, sending.Posted(post.chunk))
            digest = hash(_text(peer, post.chunk)) if self.digests else None
            if end.source.verb is Verb.PULL:
                place = end.of_chunk.get(post.chunk, 0)
                self._at(0.005, lambda p=post, at=place, d=digest: self._source(peer, sending.Gathered(p.chunk, at, d)))
            else:
                self._write(peer, end, post, digest)

    def _write(self, peer: str, end: _End, post: sending.Post, digest: int | None) -> None:
        """The bytes land whatever becomes of the note; this side learns of it later than the other."""
        text = _text(peer, post.chunk) + "?" * ((peer, post.chunk, post.round) in self.spoil)

        def lands() -> None:
            if end.source.direct:
                self.pages[peer, post.chunk] = text
            else:
                assert self.reserved.get(post.offset) == (peer, post.chunk), "a write into a region of others"
                self.regions[post.offset] = text
            self._send(peer, "d", wire.Chunk("r", 7, post.chunk, post.round, digest))

        def told() -> None:
            self._give_back(end, post.chunk)
            self._source(peer, sending.Posted(post.chunk, digest))
            self._source(peer, sending.Written(post.chunk))

        self._at(0.02, lands)
        self._at(0.06, told)

    def _give_back(self, end: _End, chunk: int) -> None:
        offset = end.of_chunk.pop(chunk, None)
        if offset is not None:
            del end.staging[offset]
            end.room.append(offset)


def _live(state: Sending) -> bool:
    return not state.finished or bool(state.in_flight)


def _text(peer: str, chunk: int) -> str:
    return f"{peer}{chunk}"
