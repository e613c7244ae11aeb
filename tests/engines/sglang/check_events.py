"""KV events by SGLang's own scheduler component, through kvmover's publisher: who comes late knows what others do."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from scheduling import Server, parameters, publish, unified

from kvmover.cache.prefix import AllBlocksCleared
from kvmover.cache.prefix.event_history import END_OF_REPLAY
from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang import sglang_plugin
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache

zmq: Any = import_module("zmq")
encoding: Any = import_module("msgspec").msgpack
kv_events: Any = import_module("sglang.srt.disaggregation.kv_events")
component: Any = import_module("sglang.srt.managers.scheduler_components.kv_events_publisher")

#: Batches that the publisher keeps, of some hundred that it sends.
KEPT = 40


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    publish(tmp_path_factory.mktemp("serving"))
    sglang_plugin.register_event_publisher()
    sglang_plugin.register_event_publisher()


class Events:
    """A server's cache behind SGLang's own publishing, and a subscriber that has been there from the first batch."""

    def __init__(self, make: Any) -> None:
        self.server = Server(make(parameters(4, 160, enable_kv_cache_events=True)))
        told = {"publisher": "kvmover", "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
        self.component = component.SchedulerKvEventsPublisher(
            kv_events_config=json.dumps({**told, "buffer_steps": KEPT, "topic": "kv"}),
            tree_cache=self.server.cache,
            send_metrics_from_scheduler=None,
            max_running_requests=1,
            max_total_num_tokens=160,
            get_stats=None,
        )
        (source,) = self.component.local_kv_event_sources(4)
        assert (source["dp_rank"], source["topic"], source["block_size"]) == (0, "kv", 4)
        self.context = zmq.Context()
        self.live, self.again = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket in (self.live, self.again):
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.live.subscribe("kv")
        self.live.connect(source["endpoint"])
        self.again.connect(source["replay_endpoint"])
        self.known: set[tuple[Any, ...]] = set()
        self.sent = 0

    def step(self) -> None:
        """As at the end of each step of SGLang's scheduler."""
        before = self.component.kv_event_publisher._publisher._history._next
        self.component.publish_kv_events()
        if self.component.kv_event_publisher._publisher._history._next > before:
            self.sent += 1
            topic, number, payload = self.live.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (b"kv", self.sent - 1)
            self.known = believed(encoding.decode(payload), self.known)

    def late(self) -> tuple[set[tuple[Any, ...]], int]:
        """What a subscriber believes that comes now and asks for all, and how many batches with events that took."""
        self.again.send_multipart((b"", bytes(8)))
        known, batches = set(), 0
        while (frames := self.again.recv_multipart())[2] != END_OF_REPLAY:
            batch = encoding.decode(frames[3])
            known, batches = believed(batch, known), batches + bool(batch[1])
        return known, batches

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.component.kv_event_publisher.shutdown()
        self.component.kv_event_publisher.shutdown()


def believed(batch: Any, before: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """What a router knows after a batch: names, parents, tokens and media of pages."""
    pages = set(before)
    for event in batch[1]:
        if event["type"] == "AllBlocksCleared":
            pages.clear()
        elif event["type"] == "BlockRemoved":
            gone = set(event["block_hashes"])
            pages = {page for page in pages if page[0] not in gone or page[-1] != event["medium"]}
        else:
            parent, size = event["parent_block_hash"], event["block_size"]
            for at, name in enumerate(event["block_hashes"]):
                tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                pages.add((name, parent, tokens, event["medium"]))
                parent = name
    return pages


@pytest.fixture
def events(request: pytest.FixtureRequest) -> Iterator[Events]:
    made = Events(request.param)
    yield made
    made.close()


def serve(server: Server, prompt: list[int]) -> None:
    req = server.request(prompt)
    assert server.prefill(req)
    server.finish(req)


@pytest.mark.parametrize("events", [KvmoverRadixCache], indirect=True)
def test_a_subscriber_that_comes_late_knows_what_one_that_was_there_does(events: Events) -> None:
    chance = random.Random(5)
    subscribe(events)
    for number in range(300):
        serve(events.server, [chance.randrange(3) for _ in range(chance.randrange(4, 40))])
        events.step()
        if number % 29 == 0:
            known, batches = events.late()
            assert known == events.known
            assert batches <= 2 * KEPT
    known, _ = events.late()
    assert known == events.known
    assert events.sent > 5 * KEPT
    pages = {page[0] for page in known}
    assert len(pages) * 4 == events.server.cache.total_size() > 0


@pytest.mark.parametrize("events", [unified.UnifiedRadixCache], indirect=True)
def test_of_sglangs_own_cache_the_batches_that_are_kept_are_told_again(events: Events) -> None:
    subscribe(events)
    for first in range(KEPT - 20):
        serve(events.server, [first] * 9)
        events.step()
    assert events.late()[0] == events.known


def subscribe(events: Events) -> None:
    """ZeroMQ drops what is sent before a subscription arrived: one batch a time until one comes."""
    sent = 0
    while not events.live.poll(50):
        serve(events.server, [1000 + sent] * 9)
        events.component.publish_kv_events()
        sent += 1
    while events.live.poll(50):
        events.live.recv_multipart()
    events.sent, events.known = sent, events.late()[0]


def test_by_its_second_name_the_publisher_sends_arrays() -> None:
    told = {"publisher": "kvmover-arrays", "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    publisher = kv_events.EventPublisherFactory.create(json.dumps(told))
    publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(publisher.describe_local_source(16)["replay_endpoint"])
    asking.send_multipart((b"", bytes(8)))
    assert encoding.decode(asking.recv_multipart()[3])[1] == [["AllBlocksCleared"]]
    context.destroy(linger=0)
    publisher.shutdown()


def test_an_endpoint_that_is_to_be_connected_is_refused() -> None:
    told = json.dumps({"publisher": "kvmover", "endpoint": "tcp://127.0.0.1:5557", "bind": False})
    with pytest.raises(EngineUnsupported, match="binds its endpoint"):
        kv_events.EventPublisherFactory.create(told)


def test_data_parallel_ranks_have_ports_one_behind_the_other() -> None:
    first = kv_events.EventPublisherFactory.create(json.dumps({"publisher": "kvmover", "endpoint": "tcp://*:*"}))
    source = first.describe_local_source(16)
    first.shutdown()
    port = int(source["endpoint"].rpartition(":")[2])
    assert source == {"dp_rank": 0, "endpoint": f"tcp://127.0.0.1:{port}", "topic": "", "block_size": 16}
    told = json.dumps({"publisher": "kvmover", "endpoint": f"tcp://*:{port}"})
    second = kv_events.EventPublisherFactory.create(told, 1)
    assert second.describe_local_source(16)["endpoint"] == f"tcp://127.0.0.1:{port + 1}"
    second.shutdown()
