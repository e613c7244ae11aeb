"""KV events arrive at routers as vLLM's and SGLang's own would: decoded here by definitions written from theirs."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix import PrefixTree
from kvmover.cache.prefix.event_history import END_OF_REPLAY, EventHistory, Replays, Sent
from kvmover.cache.prefix.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventForm,
    KVEvent,
    KVEventBatch,
    Medium,
    coalesce,
)
from kvmover.cache.prefix.packed_rows import packed
from kvmover.cache.prefix.publisher import EventPublisher
from kvmover.errors import TransportError

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: nothing can be published")


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """As vllm 0.33.0 `distributed/kv_events.py`: without these keys its decoder refuses an event."""


class VllmStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    session_id: str | None = None


class VllmRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


class SglangEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """As sglang 0.5.23 `srt/disaggregation/kv_events.py`."""


class SglangStored(SglangEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SglangRemoved(SglangEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class SglangCleared(SglangEvent, tag="AllBlocksCleared"):
    pass


class SglangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[SglangStored | SglangRemoved | SglangCleared]
    attn_dp_rank: int | None = None


def stored(
    *hashes: int, parent: int | None = None, medium: Medium = Medium.GPU, salt: str | None = None
) -> BlockStored:
    """Pages of two tokens, which are made from the page's hash."""
    tokens = tuple(token for name in hashes for token in (10 * abs(name) % 2**32, 10 * abs(name) % 2**32 + 1))
    return BlockStored(packed(hashes), parent, packed(tokens), 2, None, medium, None, salt)


def removed(*hashes: int, medium: Medium = Medium.GPU) -> BlockRemoved:
    return BlockRemoved(packed(hashes), medium)


HISTORY: tuple[KVEvent, ...] = (
    stored(-5, 2**63 - 1, salt="tenant"),
    removed(-5, medium=Medium.CPU_PINNED),
    AllBlocksCleared(),
)


@pytest.mark.parametrize("batch", [VllmBatch, SglangBatch], ids=["vllm", "sglang"])
def test_a_batch_is_decoded_by_routers_definitions(batch: type[VllmBatch] | type[SglangBatch]) -> None:
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, HISTORY, 3)), type=batch)
    store, remove, cleared = got.events
    assert (got.ts, msgspec.structs.astuple(got)[2]) == (1.5, 3)
    assert (store.block_hashes, store.parent_block_hash, store.block_size) == ([-5, 2**63 - 1], None, 2)
    assert (store.token_ids, store.medium, store.lora_id) == ([50, 51, *stored(2**63 - 1).token_ids], "GPU", None)
    assert (remove.block_hashes, remove.medium) == ([-5], "CPU_PINNED")
    assert type(cleared).__name__.endswith("Cleared")
    if isinstance(store, SglangStored):
        assert store.cache_salt == "tenant"


def test_an_event_is_a_map_tagged_by_its_name_and_leaves_out_what_says_nothing() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(0.0, (stored(7), *HISTORY[1:]))))
    assert sent == [
        0.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [70, 71],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [-5], "medium": "CPU_PINNED"},
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]


def test_a_chain_that_was_stored_page_by_page_becomes_one_event() -> None:
    pages = [stored(1), stored(2, parent=1), stored(3, 4, parent=2)]
    assert coalesce(pages) == [stored(1, 2, 3, 4)]


def test_removals_from_one_medium_join_and_others_do_not() -> None:
    events = [
        removed(1),
        removed(2, 3),
        removed(1, medium=Medium.DISK),
    ]
    assert coalesce(events) == [removed(1, 2, 3), removed(1, medium=Medium.DISK)]


@pytest.mark.parametrize(
    "second",
    [
        stored(3, parent=1),
        stored(3),
        stored(3, parent=2, medium=Medium.DISK),
        stored(3, parent=2, salt="tenant"),
        msgspec.structs.replace(stored(3, parent=2), lora_name="adapter"),
        msgspec.structs.replace(stored(3, parent=2), block_size=1),
        msgspec.structs.replace(stored(3, parent=2), session_id="s"),
        msgspec.structs.replace(stored(3, parent=2), extra_keys=(("image",),)),
    ],
)
def test_a_page_that_does_not_follow_in_the_same_place_stays_apart(second: BlockStored) -> None:
    events = [stored(1, 2), second]
    assert coalesce(events) == events


def test_pages_with_keys_join_with_a_key_each_and_are_read_as_vllm_does() -> None:
    one, more = (
        msgspec.structs.replace(stored(1), extra_keys=(("image",),)),
        msgspec.structs.replace(stored(2, 3, parent=1), extra_keys=(("image",), ("image",))),
    )
    (both,) = coalesce([one, more])
    assert isinstance(both, BlockStored)
    assert (both.block_hashes, both.extra_keys) == ((1, 2, 3), (("image",),) * 3)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, (both,), 3)), type=VllmBatch)
    assert [store.extra_keys for store in got.events if isinstance(store, VllmStored)] == [[["image"]] * 3]


def test_a_page_removed_and_stored_again_stays_two_events() -> None:
    events: list[KVEvent] = [removed(1), stored(1), removed(1)]
    assert coalesce(events) == events
    assert coalesce([AllBlocksCleared(), AllBlocksCleared()]) == [AllBlocksCleared()] * 2


EVENTS = st.one_of(
    st.builds(
        lambda name, parent, medium: stored(name, parent=parent, medium=medium),
        st.integers(0, 5),
        st.one_of(st.none(), st.integers(0, 5)),
        st.sampled_from([Medium.GPU, Medium.DISK]),
    ),
    st.builds(lambda name, medium: removed(name, medium=medium), st.integers(0, 5), st.sampled_from(list(Medium))),
    st.just(AllBlocksCleared()),
)


def facts(events: list[KVEvent]) -> Iterator[tuple[object, ...]]:
    """What each page was told to do, one by one: the meaning that joining must keep."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield ("cleared",)
        elif isinstance(event, BlockRemoved):
            yield from (("removed", name, event.medium) for name in event.block_hashes)
        else:
            parent = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                yield ("stored", name, parent, tokens, event.medium)
                parent = name


@given(st.lists(EVENTS, max_size=30))
def test_joining_keeps_every_fact_and_its_place(events: list[KVEvent]) -> None:
    joined = coalesce(events)
    assert list(facts(joined)) == list(facts(events))
    assert len(joined) <= len(events)
    assert coalesce(joined) == joined


class Router:
    """A subscriber as a router has one, on real sockets."""

    def __init__(self, publisher: EventPublisher, topic: str = "") -> None:
        self.context = zmq.Context()
        self.live, self.again = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket in (self.live, self.again):
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.setsockopt(zmq.LINGER, 0)
        self.live.subscribe(topic)
        self.live.connect(publisher.endpoint)
        self.again.connect(publisher.replay_endpoint)

    def await_subscription(self, publisher: EventPublisher) -> int:
        """ZeroMQ drops what is sent before a subscription arrived: publish until one batch comes. Its number."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            publisher.publish([AllBlocksCleared()])
            if self.live.poll(50):
                number = publisher.publish([AllBlocksCleared()])
                while self.next()[0] != number:
                    pass
                return number
        raise AssertionError("no subscription within 20 s")

    def next(self) -> tuple[int, VllmBatch]:
        _, number, payload = self.live.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=VllmBatch)

    def replay(self, first: int) -> list[tuple[int, bytes, VllmBatch]]:
        self.again.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            _, topic, number, payload = self.again.recv_multipart()
            if number == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(number, "big"), topic, msgspec.msgpack.decode(payload, type=VllmBatch)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", rank=2, keep_batches=40) as running:
        yield running


@pytest.fixture
def router(publisher: EventPublisher) -> Iterator[Router]:
    subscriber = Router(publisher)
    yield subscriber
    subscriber.close()


def test_a_subscriber_gets_numbered_batches_with_the_rank_in_order(publisher: EventPublisher, router: Router) -> None:
    last = router.await_subscription(publisher)
    numbers = [publisher.publish([stored(name), stored(name + 1, parent=name)]) for name in range(10)]
    assert numbers == list(range(last + 1, last + 11))
    for name, number in enumerate(numbers):
        got, batch = router.next()
        assert (got, batch.data_parallel_rank) == (number, 2)
        assert [event.block_hashes for event in batch.events] == [[name, name + 1]]


def test_who_missed_batches_gets_them_again_with_their_numbers(publisher: EventPublisher, router: Router) -> None:
    for name in range(100):
        publisher.publish([stored(name)])
    again = router.replay(97)
    assert [(number, topic, batch.events[0].block_hashes) for number, topic, batch in again] == [
        (number, b"kv", [number]) for number in (97, 98, 99)
    ]
    assert [number for number, _, _ in router.replay(0)] == list(range(60, 100)), "the last 40 are kept"
    assert router.replay(100) == []


def test_who_reads_an_answer_late_gets_all_of_it() -> None:
    """A socket of a thousand messages would drop the rest."""
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=9000) as running:
        slow, quick = Router(running), Router(running)
        for name in range(9000):
            running.publish([stored(name)])
        slow.replay(8999)  # it is connected
        slow.again.send_multipart((b"", bytes(8)))
        time.sleep(0.2)
        assert [number for number, _, _ in quick.replay(8999)] == [8999]
        numbers = [int.from_bytes(slow.again.recv_multipart()[2], "big", signed=True) for _ in range(9001)]
        assert numbers == [*range(9000), -1]
        for router in (slow, quick):
            router.close()


def known(batches: Iterable[VllmBatch], before: set[tuple[object, ...]] | None = None) -> set[tuple[object, ...]]:
    """What a router that had `before` believes to be cached: names, parents, tokens and media."""
    pages = set(before or ())
    for batch in batches:
        for event in batch.events:
            if isinstance(event, VllmCleared):
                pages.clear()
            elif isinstance(event, VllmRemoved):
                pages = {page for page in pages if page[0] not in event.block_hashes or page[-1] != event.medium}
            else:
                parent, size = event.parent_block_hash, event.block_size
                for at, name in enumerate(event.block_hashes):
                    pages.add((name, parent, tuple(event.token_ids[at * size : (at + 1) * size]), event.medium))
                    parent = name
    return pages


def test_a_late_subscriber_knows_what_one_that_missed_nothing_does(publisher: EventPublisher, router: Router) -> None:
    """40 batches are kept of hundreds, and the tree is far smaller than its history."""
    tree, room = PrefixTree(2, sink=(told := list[KVEvent]()).append), iter(range(10**6))
    chance, everything = random.Random(7), list[VllmBatch]()
    late = router.await_subscription(publisher) + 1
    due = 0
    for _ in range(300):
        tokens = [chance.randint(0, 3) for _ in range(2 * chance.randint(1, 5))]
        tree.insert(tokens, [next(room) for _ in range(len(tokens) // 2)])
        if tree.sizes().evictable > 20:
            tree.evict(tree.sizes().evictable - 20)
        if told:
            number = publisher.publish(told)
            told.clear()
            got, batch = router.next()
            assert got == number
            everything.append(batch)
        if publisher.snapshot_due:
            publisher.snapshot(tree.resident())
            due += 1
        if number % 37 == 0:
            answers = router.replay(0)
            assert known(each for _, _, each in answers) == known(everything)
            numbers = [each for each, _, _ in answers]
            assert numbers == list(range(number + 1)), "llm-d takes a missing number for a loss"
    assert due == number // 40
    assert sum(1 for _, _, each in answers if each.events) < 100
    # Who knew the beginning, or a state that is gone, ends with the same, and who misses what is kept gets just that.
    for first in (late, number - 60, number - 39, number):
        answers = router.replay(first)
        assert known((each for _, _, each in answers), known(everything[: first - late])) == known(everything)
        assert all(each >= first for each, _, _ in answers)
    assert [each for each, _, _ in router.replay(number - 3)] == list(range(number - 3, number + 1))


def test_a_snapshot_has_as_many_batches_as_there_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover.cache.prefix.event_history._SNAPSHOT_BATCH_BYTES", 1)
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=2) as running:
        router = Router(running)
        for name in range(6):
            running.publish([stored(name)])
        running.snapshot(stored(name) for name in range(6))
        for first in (0, 1, 3, 4, 5):
            answers = router.replay(first)
            numbers = [number for number, _, _ in answers]
            assert numbers == list(range(first, 6))
            assert sum(bool(each.events) for _, _, each in answers) > 1 or first > 3
            if first < 4:
                names = {page[0] for page in known(each for _, _, each in answers)}
                assert names == set(range(6))
        router.close()


def test_a_snapshot_that_is_too_old_to_join_the_batches_that_are_kept_is_not_sent(
    publisher: EventPublisher, router: Router
) -> None:
    publisher.publish([stored(0)])
    publisher.snapshot([stored(0)])
    for name in range(1, 100):
        publisher.publish([stored(name)])
    assert publisher.snapshot_due
    assert [number for number, _, _ in router.replay(0)] == list(range(60, 100))


def test_a_history_longer_than_the_bound_begins_with_fewer_empty_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover.cache.prefix.event_history._MOST_EMPTY", 10)
    history = EventHistory(0, 2, EventForm.MAPS)
    for name in range(100):
        history.add([stored(name)])
    history.snapshot([stored(1)])
    assert [number for number, _ in history.since(0)] == list(range(89, 100))
    assert [number for number, _ in history.since(95)] == list(range(95, 100))


def test_an_asker_that_never_reads_holds_few_batches_and_delays_nobody() -> None:
    """Its batches wait in the history, which all askers share, and not in a queue of its own."""
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=4000) as running:
        big = stored(*range(4000))
        for _ in range(4000):
            running.publish([big])
        stalled, quick = Router(running), Router(running)
        stalled.again.setsockopt(zmq.RCVHWM, 1)
        before = resident_bytes()
        for _ in range(40):
            stalled.again.send_multipart((b"", bytes(8)))
        assert [number for number, _, _ in quick.replay(3990)] == list(range(3990, 4000))
        assert resident_bytes() - before < 64 << 20, "4,000 batches of 60 KB are 240 MB"
        for router in (stalled, quick):
            router.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Askers:
    """Sockets in the hands of a test: each asker takes as many batches as it has room for."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = {}
        self.got: dict[bytes, list[int]] = {}

    def send(self, asker: bytes, number: bytes, payload: bytes) -> Sent:
        if asker not in self.room:
            return Sent.GONE
        if not self.room[asker]:
            return Sent.FULL
        self.room[asker] -= 1
        self.got.setdefault(asker, []).append(int.from_bytes(number, "big", signed=True))
        return Sent.QUEUED


def batches(count: int) -> Iterator[tuple[int, bytes]]:
    return ((number, b"batch") for number in range(count))


def test_replays_take_turns_and_a_batch_that_found_no_room_is_sent_later() -> None:
    askers, replays = Askers(), Replays(most=2, patience_s=30, in_turn=3)
    askers.room.update({b"a": 100, b"b": 2, b"gone": 0})
    del askers.room[b"gone"]
    replays.begin(b"a", batches(4), 0.0)
    replays.begin(b"b", batches(4), 0.0)
    replays.begin(b"c", batches(4), 0.0)
    assert (len(replays), replays.refused) == (2, 1)
    assert replays.turn(askers.send, 1.0) == 5
    assert askers.got == {b"a": [0, 1, 2], b"b": [0, 1]}
    askers.room[b"b"] = 100
    while len(replays):
        replays.turn(askers.send, 2.0)
    assert askers.got == {b"a": [0, 1, 2, 3, -1], b"b": [0, 1, 2, 3, -1]}
    replays.begin(b"gone", batches(4), 3.0)
    replays.turn(askers.send, 3.0)
    assert not len(replays), "an asker that left has no replay"


def test_a_replay_that_is_left_unread_is_cut_short_and_one_that_is_asked_for_again_begins_anew() -> None:
    askers, replays = Askers(), Replays(most=1, patience_s=30, in_turn=3)
    askers.room[b"a"] = 1
    replays.begin(b"a", batches(9), 0.0)
    for now in (0.0, 29.0, 31.0, 40.0):
        replays.turn(askers.send, now)
    askers.room[b"a"] = 9
    replays.turn(askers.send, 41.0)
    assert askers.got.pop(b"a") == [0, -1]
    for _ in range(2):
        replays.begin(b"a", batches(2), 50.0)
        replays.turn(askers.send, 50.0)
    assert (askers.got[b"a"], replays.refused) == ([0, 1, -1, 0, 1, -1], 0)


def as_llm_d_reads(event: list[Any]) -> tuple[object, ...]:
    """By position, as llm-d-router of 2026-08-22 does in `engineadapter/sglang_adapter.go`: missing fields are nil."""
    tag, *fields = event
    if tag == "BlockStored":
        hashes, parent, tokens, size, lora_id, medium, lora_name, *_ = [*fields, None, None, None]
        return tag, hashes, parent or 0, tokens, size, lora_id, medium, lora_name
    return (tag, *fields)


def test_in_arrays_llm_d_finds_each_field_at_its_place_and_pages_of_a_salt_or_an_image_are_left_out() -> None:
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=1, form=EventForm.ARRAYS) as running:
        adapter = msgspec.structs.replace(stored(7, parent=3), lora_name="adapter")
        running.publish([adapter, *HISTORY])
        image = msgspec.structs.replace(stored(11), extra_keys=(("image",),))
        running.snapshot([adapter, stored(9, salt="tenant"), image])
        running.publish([stored(8)])
        router = Router(running)
        router.again.send_multipart((b"", bytes(8)))
        payloads = [router.again.recv_multipart()[3] for _ in range(3)]
        router.close()
        told = [as_llm_d_reads(event) for each in payloads[:2] for event in msgspec.msgpack.decode(each)[1]]
        assert told == [
            ("AllBlocksCleared",),
            ("BlockStored", [7], 3, [70, 71], 2, None, "GPU", "adapter"),
            ("BlockStored", [8], 0, [80, 81], 2, None, "GPU", None),
        ]
        live = EventHistory(0, 1, EventForm.ARRAYS).add([adapter, *HISTORY])[1]
        assert [event[0] for event in msgspec.msgpack.decode(live)[1]] == [
            "BlockStored",
            "BlockRemoved",
            "AllBlocksCleared",
        ]


def test_a_topic_filters(publisher: EventPublisher) -> None:
    other, mine = Router(publisher, topic="else"), Router(publisher, topic="kv")
    mine.await_subscription(publisher)
    assert not other.live.poll(0)
    other.close()
    mine.close()


def test_a_malformed_request_is_counted_and_the_next_one_answered(publisher: EventPublisher, router: Router) -> None:
    publisher.publish([stored(1)])
    router.again.send_multipart((b"", b"short"))
    router.again.send_multipart((b"one frame too many", b"", b"", bytes(8)))
    assert len(router.replay(0)) == 1
    assert publisher.malformed_requests == 2


def test_an_endpoint_in_use_is_refused_with_its_name(publisher: EventPublisher) -> None:
    with pytest.raises(TransportError, match=publisher.endpoint):
        EventPublisher(publisher.endpoint)


def test_closing_twice_is_no_error_and_frees_the_port() -> None:
    first = EventPublisher("tcp://127.0.0.1:*")
    first.close()
    first.close()
    EventPublisher(first.endpoint).close()
