"""KV events tell a router what a cache has, in the encoding that vLLM, SGLang and Dynamo share.

An event is a msgpack map with its class's name under `type`; a batch is an array `[ts, events, rank]`. Fields that vLLM
0.33 demands are always present, others only when they say something, and consumers ignore what they do not know.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import structs

from kvmover.cache.prefix.config import TreeConfig
from kvmover.cache.prefix.hashes import PrefixNamespace, as_int64, as_int64s
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.results import Action, ActionList, CopyOut, Tier
from kvmover.errors import PrefixError, TransportError, need
from kvmover.fields import member

if TYPE_CHECKING:
    from types import TracebackType

    import zmq


class Medium(StrEnum):
    """Where pages are, as SGLang spells it. vLLM 0.33 says CPU and STORAGE for the second and third."""

    GPU = "GPU"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"
    #: A pool that other machines share.
    EXTERNAL = "EXTERNAL"


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Values: equal events are equal, and none is changed after it was made."""


class BlockStored(_Event, frozen=True, tag="BlockStored"):
    """Pages that can now be read from `medium`, in order of position and each after the one before.

    "Block" is the routers' word for a page. `block_hashes` are `hashes.as_int64` of page hashes, `token_ids` the tokens
    of all these pages, `block_size` the tokens of one. The parent is the page before the first, none at the beginning.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    #: Superseded by `lora_name`, but a key that decoders ask for.
    lora_id: int | None
    medium: Medium | None
    lora_name: str | None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, frozen=True, tag="BlockRemoved"):
    """Pages that can no longer be read from `medium`; other media may still have them."""

    block_hashes: tuple[int, ...]
    medium: Medium | None


class AllBlocksCleared(_Event, frozen=True, tag="AllBlocksCleared"):
    """Nothing is cached any more, on any medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events in the order in which they happened; `ts` in seconds since 1970. vLLM's name of the rank is another."""

    ts: float
    events: tuple[KVEvent, ...]
    attn_dp_rank: int | None = None


def coalesce(events: Iterable[KVEvent]) -> list[KVEvent]:
    """The same history in fewer events: a page stored right after its parent joins it, as do removals from one medium.

    Order is kept, and only neighbours join: a page that is removed and stored again stays two events.

    >>> a = BlockStored((1,), None, (5, 6), 2, None, Medium.GPU, None)
    >>> coalesce([a, BlockStored((2,), 1, (7, 8), 2, None, Medium.GPU, None)])[0].block_hashes
    (1, 2)
    """
    return [_joined(run) for run in _runs(events)]


def _runs(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Neighbours that may join. Lists first, one tuple at the end: a long prefix costs its length, not its square."""
    run = list[KVEvent]()
    for event in events:
        if run and not _follows(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _follows(before: KVEvent, event: KVEvent) -> bool:
    match before, event:
        case BlockRemoved(), BlockRemoved():
            return before.medium == event.medium
        case BlockStored(), BlockStored():
            return event.parent_block_hash == before.block_hashes[-1] and _shared(before) == _shared(event)
        case _:
            return False


def _shared(event: BlockStored) -> tuple[object, ...]:
    return event.block_size, event.lora_id, event.medium, event.lora_name, event.cache_salt, event.session_id


def _joined(run: list[KVEvent]) -> KVEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, AllBlocksCleared):
        return first
    hashes = tuple(name for event in run if not isinstance(event, AllBlocksCleared) for name in event.block_hashes)
    if isinstance(first, BlockRemoved):
        return BlockRemoved(hashes, first.medium)
    tokens = tuple(token for event in run if isinstance(event, BlockStored) for token in event.token_ids)
    return msgspec.structs.replace(first, block_hashes=hashes, token_ids=tokens)


#: Called with each event as it happens, in the caller's thread.
Sink: TypeAlias = Callable[[KVEvent], None]

MEDIA = {Tier.DEVICE: Medium.GPU, Tier.HOST: Medium.CPU_PINNED, Tier.STORAGE: Medium.DISK}


def block_stored(
    hashes: Sequence[bytes],
    parent: bytes | None,
    tier: Tier,
    page_tokens: int,
    tokens: Sequence[int] = (),
    namespace: PrefixNamespace | None = None,
) -> BlockStored:
    """Pages in order of position, named by their hashes of 32 bytes; `parent` is the page before them, None at first.

    A tree tells `tokens` and `namespace` too; storage, whose pages were in a tree before, does not.
    """
    adapter, salt = (namespace.adapter, namespace.salt) if namespace is not None else ("", "")
    above, medium = None if parent is None else as_int64(parent), MEDIA[member(Tier, tier, "tier", PrefixError)]
    return BlockStored(
        as_int64s(hashes), above, tuple(tokens), page_tokens, None, medium, adapter or None, salt or None
    )


def block_removed(hashes: Sequence[bytes], tier: Tier) -> BlockRemoved:
    """Pages that are not on a tier any more."""
    return BlockRemoved(as_int64s(hashes), MEDIA[member(Tier, tier, "tier", PrefixError)])


Given = TypeVar("Given", bound=ActionList)


class Journal:
    """A tree's events, to one sink. Splits say nothing: a page's hash is that of the tokens up to its end."""

    def __init__(self, config: TreeConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink
        self._waiting = deque[KVEvent]()
        self._owed: tuple[Action, ...] = ()

    @property
    def owes_copies(self) -> bool:
        """Returns whether a copy was decided that nobody was told to carry out."""
        return any(isinstance(action, CopyOut) for action in self._owed)

    def told(self, given: Given) -> Given:
        """The sink has all events now; returned is `given`, behind what earlier calls could not return.

        What the sink raises keeps the event that it was given, those behind it, and the actions for the next call.
        """
        self._owed += given.actions
        while self._waiting:
            event = self._waiting.popleft()
            try:
                self._sink(event)
            except BaseException:
                self._waiting.appendleft(event)
                raise
        owed, self._owed = self._owed, ()
        return given if len(owed) == len(given.actions) else structs.replace(given, actions=owed)

    def stored(self, node: Node, tier: Tier) -> None:
        """All pages of a node, which have come to a tier."""
        config, parent = self._config, node.parent
        above = page_hashes(parent, config.page_words) if parent is not None else ()
        # Of a bigram the second token is the next one's first: the first of each are the tokens.
        tokens = tuple(memoryview(node.tokens).cast("I")[:: int(config.units)])
        hashes = page_hashes(node, config.page_words)
        last = above[-1] if above else None
        self._waiting.append(block_stored(hashes, last, tier, config.page_tokens, tokens, _namespace(node)))

    def removed(self, hashes: Sequence[bytes], tier: Tier) -> None:
        """Pages that have left a tier."""
        self._waiting.append(block_removed(hashes, tier))

    def cleared(self) -> None:
        """Everything, of all tiers."""
        self._waiting.append(AllBlocksCleared())


def _namespace(node: Node) -> PrefixNamespace:
    while node.parent is not None:
        node = node.parent
    assert node.namespace is not None
    return node.namespace


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
