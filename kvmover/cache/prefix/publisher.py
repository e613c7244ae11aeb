"""EventPublisher sends KV events over ZeroMQ in numbered batches, and recent ones again to those who missed some.

The frames are those of vLLM's and SGLang's publishers, so that their subscribers, and Dynamo's, need no change:
`topic`, eight bytes of sequence number (big-endian), the batch in msgpack. Who sees a gap sends the first number it
misses to the replay endpoint, `b""` before it. The answer is those batches, each after `b""`; number -1 ends them.

Who asks for batches that are not kept any more gets a snapshot in their place, if one was made in time: all is cleared,
then what was cached is stored, under the last numbers of the batches that this stands for. Then come the batches since.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvmover.cache.prefix.events import AllBlocksCleared, KVEvent, KVEventBatch, coalesce
from kvmover.errors import TransportError, need

if TYPE_CHECKING:
    from types import TracebackType

    import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_CLOSE_S = 1.0
#: A batch of a snapshot holds whole events up to about here.
_SNAPSHOT_BATCH_BYTES = 1 << 20


class _Snapshot(NamedTuple):
    """All that was cached when the batch of this number was next, an encoded event each."""

    number: int
    taken_s: float
    events: tuple[bytes, ...]


class EventPublisher:
    """Publishes from any one thread without waiting for anybody. Close it, or use it as a context.

    A subscriber for whom `most_waiting` batches wait misses the next: it sees so by the numbers, and the last
    `keep_batches` can be had again. A port of `*` lets the system choose: `endpoint` and `replay_endpoint` say which.
    Raises MissingLibrary without pyzmq and TransportError when an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        rank: int = 0,
        keep_batches: int = 10_000,
        most_waiting: int = 1000,
    ) -> None:
        need("zmq", "publishing KV events", "events")
        import zmq

        self._zmq: Any = zmq
        self._topic, self._rank = topic.encode(), rank
        self._kept = deque[tuple[int, bytes]](maxlen=keep_batches)
        self._keep_batches = keep_batches
        self._snapshot = _Snapshot(0, time.time(), ())
        self._keeping = threading.Lock()
        self._next = 0
        #: Requests for a replay that could not be read, and were not answered.
        self.malformed_requests = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = self._zmq.Context()
        try:
            self._subscribers, self.endpoint = self._bound(self._zmq.PUB, endpoint, most_waiting)
            # Room for a snapshot and all that is kept: a socket drops what is too much for an asker that reads slowly.
            self._askers, self.replay_endpoint = self._bound(
                self._zmq.ROUTER, replay_endpoint or "inproc://replay", 2 * (keep_batches + 1)
            )
            self._stop, _ = self._bound(self._zmq.PAIR, "inproc://stop", 1)
        except TransportError:
            self._context.destroy(linger=0)
            raise
        self._answers = threading.Thread(target=self._answer, name="kv-events-replay", daemon=True)
        self._answers.start()

    def publish(self, events: Iterable[KVEvent]) -> int:
        """Send `events` as one batch, neighbours joined. Returned is its number; the first one is 0."""
        number = self._next
        batch = KVEventBatch(time.time(), tuple(coalesce(events)), self._rank)
        payload = self._encoder.encode(batch)
        # Kept before it is sent: who asks after missing it must find it.
        with self._keeping:
            self._kept.append((number, payload))
        self._next += 1
        self._subscribers.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number

    @property
    def snapshot_due(self) -> bool:
        """Whether the next batch drops one that the last snapshot does not stand for."""
        return self._next - self._snapshot.number >= self._keep_batches

    def snapshot(self, events: Iterable[KVEvent]) -> None:
        """Keep `events` for those who come late: all that is cached now, as after every batch so far.

        They are `PrefixTree.resident()`, and what else routers were told of, such as pages in storage: who reads them
        forgets what they leave out. Subscribers that miss nothing see nothing of it. It is held encoded.
        """
        encoded = tuple(map(self._encoder.encode, events))
        with self._keeping:
            self._snapshot = _Snapshot(self._next, time.time(), encoded)

    def close(self) -> None:
        """What was published still goes out, for up to a second."""
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
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise TransportError(f"cannot publish KV events at {endpoint}: {error}") from error
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _answer(self) -> None:
        """Runs in a thread of its own, which alone uses the replay socket: no batch waits for an answer."""
        waiting = self._zmq.Poller()
        waiting.register(self._askers, self._zmq.POLLIN)
        waiting.register(self._stop, self._zmq.POLLIN)
        while True:
            ready = dict(waiting.poll())
            if self._stop in ready:
                return
            self._replay(self._askers.recv_multipart())

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            self.malformed_requests += 1
            return
        asker, first = frames[0], int.from_bytes(frames[2], "big")
        with self._keeping:
            kept, snapshot = tuple(self._kept), self._snapshot
        oldest = kept[0][0] if kept else self._next
        if first < oldest <= snapshot.number:
            payloads = self._payloads(snapshot, snapshot.number - first)
            begin = snapshot.number - len(payloads)
            kept = (*enumerate(payloads, begin), *(each for each in kept if each[0] >= snapshot.number))
        for number, payload in kept:
            if number >= first:
                self._askers.send_multipart((asker, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._askers.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))

    def _payloads(self, snapshot: _Snapshot, most: int) -> list[bytes]:
        """A snapshot in batches: at most so many, as there are numbers for."""
        encoder = msgspec.msgpack.Encoder()  # the other one is the publishing thread's
        total = sum(map(len, snapshot.events))
        batch_bytes = max(_SNAPSHOT_BATCH_BYTES, -(-2 * total // most))
        batches, size = [[msgspec.Raw(encoder.encode(AllBlocksCleared()))]], 0
        for event in snapshot.events:
            if size and size + len(event) > batch_bytes and len(batches) < most:
                batches.append([])
                size = 0
            batches[-1].append(msgspec.Raw(event))
            size += len(event)
        return [encoder.encode((snapshot.taken_s, events, self._rank)) for events in batches]
