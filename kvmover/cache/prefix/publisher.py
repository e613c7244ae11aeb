"""An EventPublisher sends KV events over ZMQ, and answers subscribers that ask for batches again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvmover.cache.prefix.event_history import EventHistory, Replays, Sent
from kvmover.cache.prefix.kv_events import EventForm, KVEvent
from kvmover.errors import PrefixError, TransportError, need
from kvmover.fields import member

if TYPE_CHECKING:
    from types import TracebackType

    import zmq

_CLOSE_S = 1.0

#: Replays at a time, and batches that wait in the socket for one asker: at 256 KiB each 256 MiB in all.
_MOST_REPLAYS = 16
_AHEAD = 64
#: An asker may leave its replay unread for this long.
_PATIENCE_S = 30.0
#: Between two turns of the replays, so that they leave the engine's threads most of a core, ms.
_PAUSE_MS, _LONGEST_PAUSE_MS = 2, 128


class EventPublisher:
    """A publisher of event batches over ZMQ, for any one thread; it never waits for subscribers.

    A subscriber with `most_waiting` batches queued misses the next; it sees the gap in the numbers, and can request all
    from a number on at `replay_endpoint`: the last `keep_batches`, and before them the snapshot. For port `*` the
    system chooses, and `endpoint` and `replay_endpoint` name the choice. Close it, or use it as a context. Raises
    MissingLibrary without pyzmq, PrefixError if `form` is no EventForm, TransportError if an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        rank: int = 0,
        keep_batches: int = 10_000,
        most_waiting: int = 1000,
        form: EventForm = EventForm.MAPS,
    ) -> None:
        need("zmq", "publishing KV events", "events")
        import zmq

        self._zmq: Any = zmq
        self._topic = topic.encode()
        self._history = EventHistory(rank, keep_batches, member(EventForm, form, "form", PrefixError))
        self._replays = Replays(_MOST_REPLAYS, _PATIENCE_S, _AHEAD)
        #: Malformed replay requests, which get no reply.
        self.malformed_requests = 0
        self._context = self._zmq.Context()
        try:
            self._subscribers, self.endpoint = self._bound(self._zmq.PUB, endpoint, most_waiting)
            self._askers, self.replay_endpoint = self._bound(
                self._zmq.ROUTER, replay_endpoint or "inproc://replay", _AHEAD
            )
            self._stop, _ = self._bound(self._zmq.PAIR, "inproc://stop", 1)
        except TransportError:
            self._context.destroy(linger=0)
            raise
        self._answers = threading.Thread(target=self._answer, name="kv-events-replay", daemon=True)
        self._answers.start()

    @property
    def refused_requests(self) -> int:
        """Returns the replay requests that got no answer, as 16 replays were under way."""
        return self._replays.refused

    def publish(self, events: Iterable[KVEvent]) -> int:
        """Send `events` as one batch, neighbours joined. Returns its number, from 0."""
        # Kept before it is sent, so that a subscriber that missed it can request it.
        number, payload = self._history.add(events)
        self._subscribers.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number

    @property
    def snapshot_due(self) -> bool:
        """Returns True if the next batch drops one that the last snapshot does not include."""
        return self._history.snapshot_due

    def snapshot(self, events: Iterable[KVEvent]) -> None:
        """Keep `events`, all that is cached after every batch so far, for late subscribers.

        They are `PrefixTree.resident()`, or `Controller.resident()` with storage: a reader forgets pages that they
        leave out. Subscribers without a gap do not receive it. Held encoded.
        """
        self._history.snapshot(events)

    def close(self) -> None:
        """Close sockets and replay thread. Published batches still go out, for up to 1 s."""
        if self._context.closed:
            return
        stop = self._context.socket(self._zmq.PAIR)
        stop.connect("inproc://stop")
        stop.send(b"")
        self._answers.join()
        for socket in (stop, self._stop, self._askers):
            socket.close(linger=0)
        self._subscribers.close(linger=int(_CLOSE_S * 1000))
        self._context.term()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bound(self, kind: int, endpoint: str, most_waiting: int) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(most_waiting)
        if kind == self._zmq.ROUTER:
            # Else it drops what a slow asker has no room for.
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise TransportError(f"cannot publish KV events at {endpoint}: {error}") from error
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _answer(self) -> None:
        """Serve replays in a thread of its own, sole user of the replay socket, so that no batch waits for it."""
        waiting, pause_ms = self._zmq.Poller(), _PAUSE_MS
        waiting.register(self._askers, self._zmq.POLLIN)
        waiting.register(self._stop, self._zmq.POLLIN)
        while True:
            ready = dict(waiting.poll(pause_ms if len(self._replays) else None))
            if self._stop in ready:
                return
            if self._askers in ready:
                self._asked(self._askers.recv_multipart())
            taken = self._replays.turn(self._send, time.monotonic())
            pause_ms = _PAUSE_MS if taken else min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _asked(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            self.malformed_requests += 1
            return
        batches = self._history.since(int.from_bytes(frames[2], "big"))
        self._replays.begin(frames[0], batches, time.monotonic())

    def _send(self, asker: bytes, number: bytes, payload: bytes) -> Sent:
        topic = self._topic if payload else b""
        try:
            self._askers.send_multipart((asker, b"", topic, number, payload), self._zmq.DONTWAIT)
        except self._zmq.Again:
            return Sent.FULL
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.QUEUED
