"""KV events tell a router a cache's contents, in the encoding that vLLM, SGLang and Dynamo share.

An event is a msgpack map with its class's name under `type`; a batch is an array `[ts, events, rank]`. Fields that vLLM
0.33 requires are always present, others if set; consumers ignore unknown fields.
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

from kvmover.cache.prefix.hashes import PrefixNamespace, as_int64, as_int64s
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.results import Action, ActionList, CopyOut, Tier
from kvmover.cache.prefix.tree_config import TreeConfig
from kvmover.errors import PrefixError, TransportError, need
from kvmover.fields import member

if TYPE_CHECKING:
    from types import TracebackType

    import zmq


class Medium(StrEnum):
    """A place of pages, as SGLang spells it. vLLM 0.33 says CPU and STORAGE for the second and third."""

    GPU = "GPU"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"
    #: A pool shared with other machines.
    EXTERNAL = "EXTERNAL"


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An immutable event, compared by value."""


class BlockStored(_Event, frozen=True, tag="BlockStored"):
    """The pages that can now be read from `medium`, by position, each after the one before.

    "Block" is the routers' word for a page. `block_hashes` are `hashes.as_int64` of page hashes, `token_ids` the tokens
    of all pages, `block_size` the tokens a page. `parent_block_hash` names the page before the first, None at the
    beginning.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    #: Superseded by `lora_name`, but required by decoders.
    lora_id: int | None
    medium: Medium | None
    lora_name: str | None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event, frozen=True, tag="BlockRemoved"):
    """The pages that can no longer be read from `medium`; other media may still have them."""

    block_hashes: tuple[int, ...]
    medium: Medium | None


class AllBlocksCleared(_Event, frozen=True, tag="AllBlocksCleared"):
    """An event that empties the cache on every medium."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch of events in order of occurrence; `ts` in s since 1970. vLLM names the rank differently."""

    ts: float
    events: tuple[KVEvent, ...]
    attn_dp_rank: int | None = None


def coalesce(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Returns the same history in fewer events: a page stored right after its parent joins it, as do removals.

    Only neighbours on one medium join: a page removed and stored again stays two events.

    >>> a = BlockStored((1,), None, (5, 6), 2, None, Medium.GPU, None)
    >>> coalesce([a, BlockStored((2,), 1, (7, 8), 2, None, Medium.GPU, None)])[0].block_hashes
    (1, 2)
    """
    return [_joined(run) for run in _runs(events)]


def _runs(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield lists of neighbours that may join; linear in a prefix's length, as tuples are made at the end."""
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
    """Returns the event of pages stored on a tier, by position, named by their 32-byte hashes.

    `parent` is the hash of the page before them, None at the beginning. A tree passes `tokens` and `namespace`;
    storage, whose pages were in a tree before, does not. Raises PrefixError if `tier` is no Tier.
    """
    adapter, salt = (namespace.adapter, namespace.salt) if namespace is not None else ("", "")
    above, medium = None if parent is None else as_int64(parent), MEDIA[member(Tier, tier, "tier", PrefixError)]
    return BlockStored(
        as_int64s(hashes), above, tuple(tokens), page_tokens, None, medium, adapter or None, salt or None
    )


def block_removed(hashes: Sequence[bytes], tier: Tier) -> BlockRemoved:
    """Returns the event of pages removed from a tier. Raises PrefixError if `tier` is no Tier."""
    return BlockRemoved(as_int64s(hashes), MEDIA[member(Tier, tier, "tier", PrefixError)])


Given = TypeVar("Given", bound=ActionList)


class Journal:
    """The events of a tree, for one sink. A split makes no event: page hashes stay the same."""

    def __init__(self, config: TreeConfig, sink: Sink) -> None:
        self._config = config
        self._sink = sink
        self._waiting = deque[KVEvent]()
        self._owed: tuple[Action, ...] = ()

    @property
    def owes_copies(self) -> bool:
        """Returns True if the caller has not received a CopyOut that was decided."""
        return any(isinstance(action, CopyOut) for action in self._owed)

    def told(self, given: Given) -> Given:
        """Deliver waiting events to the sink. Returns `given`, after any actions that earlier calls could not return.

        If the sink raises, undelivered events and the actions are kept for the next call.
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
        """Record that all pages of a node have come to a tier."""
        config, parent = self._config, node.parent
        above = page_hashes(parent, config.page_words) if parent is not None else ()
        # A bigram's second token is the next one's first: the first of each are the tokens.
        tokens = tuple(memoryview(node.tokens).cast("I")[:: int(config.units)])
        hashes = page_hashes(node, config.page_words)
        last = above[-1] if above else None
        self._waiting.append(block_stored(hashes, last, tier, config.page_tokens, tokens, _namespace(node)))

    def removed(self, hashes: Sequence[bytes], tier: Tier) -> None:
        """Record that pages have left a tier."""
        self._waiting.append(block_removed(hashes, tier))

    def cleared(self) -> None:
        """Record that all tiers were cleared."""
        self._waiting.append(AllBlocksCleared())


def _namespace(node: Node) -> PrefixNamespace:
    while node.parent is not None:
        node = node.parent
    assert node.namespace is not None
    return node.namespace


END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_CLOSE_S = 1.0
#: The approximate size of a snapshot's batch of whole events.
_SNAPSHOT_BATCH_BYTES = 1 << 20


class _Snapshot(NamedTuple):
    """A cache's contents, as encoded events, when batch `number` was next."""

    number: int
    taken_s: float
    events: tuple[bytes, ...]


class EventPublisher:
    """A publisher of event batches over ZMQ, for any one thread; it never waits for subscribers.

    A subscriber with `most_waiting` batches queued misses the next; it sees the gap in the numbers, and can request the
    last `keep_batches` at `replay_endpoint`. For port `*` the system chooses, and `endpoint` and `replay_endpoint` name
    the choice. Close it, or use it as a context. Raises MissingLibrary without pyzmq, TransportError if an endpoint
    cannot be bound.
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
        #: Malformed replay requests, which get no reply.
        self.malformed_requests = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = self._zmq.Context()
        try:
            self._subscribers, self.endpoint = self._bound(self._zmq.PUB, endpoint, most_waiting)
            # Room for a snapshot and all kept batches: beyond it a socket drops messages to a slow reader.
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
        """Send `events` as one batch, neighbours joined. Returns its number, from 0."""
        number = self._next
        batch = KVEventBatch(time.time(), tuple(coalesce(events)), self._rank)
        payload = self._encoder.encode(batch)
        # Kept before it is sent, so that a subscriber that missed it can request it.
        with self._keeping:
            self._kept.append((number, payload))
        self._next += 1
        self._subscribers.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number

    @property
    def snapshot_due(self) -> bool:
        """Returns True if the next batch drops one that the last snapshot does not include."""
        return self._next - self._snapshot.number >= self._keep_batches

    def snapshot(self, events: Iterable[KVEvent]) -> None:
        """Keep `events`, all that is cached after every batch so far, for late subscribers.

        They are `PrefixTree.resident()` and other pages announced to routers, such as those in storage: a reader
        forgets pages that they leave out. Subscribers without a gap do not receive it. Held encoded.
        """
        encoded = tuple(map(self._encoder.encode, events))
        with self._keeping:
            self._snapshot = _Snapshot(self._next, time.time(), encoded)

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
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise TransportError(f"cannot publish KV events at {endpoint}: {error}") from error
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _answer(self) -> None:
        """Serve replays in a thread of its own, sole user of the replay socket, so that no batch waits for it."""
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
        """Returns a snapshot in at most `most` encoded batches, since each needs a number."""
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
