"""Dynamo's own indexer, a program in Rust, hears kvmover's events and answers every prompt as the prefix tree does."""

from __future__ import annotations

import json
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmover.cache.prefix import (
    DEFAULT_NAMESPACE,
    FULL,
    EventPublisher,
    KVEvent,
    PrefixNamespace,
    PrefixTree,
    Tier,
    Tiers,
    WriteThrough,
)
from tests.live.server import free_port

HOME = Path(__file__).parents[3] / ".orchestrators" / "indexer"

pytestmark = pytest.mark.skipif(not (HOME / ".ready").exists(), reason="needs Dynamo's indexer: `make indexer`")

_PAGE = 16
_MODEL = "model"
#: An answer may come before the event that it follows from: asked again until it is right, for so long.
_PATIENCE_S = 20.0


class Indexer:
    """The program, and questions to it."""

    def __init__(self, log: Path) -> None:
        self._port = free_port()
        self._log = log.open("w")
        command = [HOME / "bin" / "python", "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def until_it_serves(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.ask("/workers")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError(f"the indexer does not serve: {Path(self._log.name).read_text()}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._log.close()


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    running = Indexer(tmp_path_factory.mktemp("indexer") / "log")
    try:
        running.until_it_serves()
        yield running
    finally:
        running.close()


class Engine:
    """A tree and its publisher, registered as a worker."""

    def __init__(self, indexer: Indexer, worker: int, tiers: Tiers | None = None, keep_batches: int = 10_000) -> None:
        self.indexer, self.worker = indexer, worker
        self.told: list[KVEvent] = []
        self.tree = PrefixTree(_PAGE, sink=self.told.append, tiers=tiers)
        self.publisher = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keep_batches=keep_batches)
        self.free = iter(range(1 << 30))

    def insert(self, tokens: Sequence[int], namespace: PrefixNamespace = DEFAULT_NAMESPACE) -> int:
        """Keep a prompt. Returns its node."""
        known = self.tree.look(tokens, namespace=namespace)
        count = len(tokens) // _PAGE - known.tokens // _PAGE
        ids = [*known.page_ids.tolist(), *(next(self.free) for _ in range(count))]
        return self.tree.insert(tokens, ids, namespace=namespace).node

    def publish(self) -> None:
        if self.publisher.snapshot_due:
            self.publisher.snapshot(list(self.tree.resident()))
        if self.told:
            self.publisher.publish(self.told)
            self.told.clear()

    def register(self) -> None:
        """Until it has heard what is published from then on: ZeroMQ drops what is sent before it has subscribed."""
        where = {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        self.indexer.ask("/register", {"instance_id": self.worker, "model_name": _MODEL, "block_size": _PAGE, **where})
        end, page = time.monotonic() + _PATIENCE_S, self.prompt(random.Random(self.worker), 1)
        while time.monotonic() < end:
            self.insert(page)
            self.publish()
            if self.answer(page).get("gpu"):
                return
            self.tree.evict(1)
            self.publish()
        raise AssertionError("the indexer heard nothing")

    @staticmethod
    def prompt(chance: random.Random, pages: int) -> list[int]:
        return [chance.randrange(32_000) for _ in range(_PAGE * pages)]

    def answer(self, tokens: Sequence[int], **more: str) -> dict[str, Any]:
        """What the indexer knows of this engine for a prompt: tokens by medium."""
        said = self.indexer.ask("/query", {"token_ids": list(tokens), "model_name": _MODEL, **more})
        return said["instances"].get(str(self.worker), {})

    def close(self) -> None:
        self.indexer.ask("/unregister", {"instance_id": self.worker, "model_name": _MODEL})
        self.publisher.close()


def settled(answer: Callable[[], object], right: object) -> object:
    """The answer, asked again while it is not right yet."""
    end = time.monotonic() + _PATIENCE_S
    while (said := answer()) != right and time.monotonic() < end:
        time.sleep(0.02)
    return said


@pytest.fixture
def engine(indexer: Indexer, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(indexer, **getattr(request, "param", {"worker": 1}))
    yield made
    made.close()


def test_it_answers_every_prompt_of_a_history_as_the_tree_does(engine: Engine) -> None:
    engine.register()
    chance = random.Random(5)
    prompts, asked = [engine.prompt(chance, 8)], 0
    for step in range(300):
        if chance.random() < 0.7:
            known = chance.choice(prompts)
            prompts.append(known[: chance.randrange(len(known) + 1)] + engine.prompt(chance, chance.randrange(1, 5)))
            engine.insert(prompts[-1])
        else:
            engine.tree.evict(chance.randrange(1, 12))
        engine.publish()
        if step % 10 == 9:
            for tokens in chance.sample(prompts, min(15, len(prompts))):
                right = engine.tree.look(tokens).tokens
                assert settled(lambda tokens=tokens: engine.answer(tokens).get("gpu", 0), right) == right
                asked += 1
    assert asked > 400
    engine.tree.reset()
    engine.publish()
    assert settled(lambda: engine.answer(prompts[0]), {}) == {}


@pytest.mark.parametrize("engine", [{"worker": 2, "tiers": WriteThrough()}], indirect=True)
def test_it_tells_the_device_from_the_host_and_storage(engine: Engine) -> None:
    engine.register()
    tokens = engine.prompt(random.Random(6), 6)
    node = engine.insert(tokens)
    copy = engine.tree.begin_backup(node, {FULL: range(6)})
    engine.tree.end(copy.op)
    engine.publish()
    whole = 6 * _PAGE

    def by_medium() -> tuple[int, int, int]:
        said = engine.answer(tokens)
        return said.get("gpu", 0), said.get("cpu", 0), said.get("disk", 0)

    # Dynamo counts what is on a nearer medium for those behind it, too.
    assert settled(by_medium, (whole, whole, whole)) == (whole, whole, whole)
    engine.tree.evict(2)
    engine.publish()
    device = engine.tree.look(tokens).tokens
    assert 0 < device < whole
    assert settled(by_medium, (device, whole, whole)) == (device, whole, whole)
    engine.told.append(engine.tree.path_stored(node, Tier.STORAGE, 0, 6))
    engine.tree.evict(100)
    engine.tree.evict_host(3)
    engine.publish()
    assert settled(by_medium, (0, 3 * _PAGE, whole)) == (0, 3 * _PAGE, whole)


@pytest.mark.parametrize("engine", [{"worker": 3}], indirect=True)
def test_adapters_and_salts_share_nothing(engine: Engine) -> None:
    engine.register()
    adapted, salted = (engine.prompt(random.Random(seed), 4) for seed in (7, 8))
    engine.insert(adapted, PrefixNamespace(adapter="adapter"))
    engine.insert(salted, PrefixNamespace(salt="tenant"))
    engine.publish()
    whole = 4 * _PAGE
    assert settled(lambda: engine.answer(adapted, lora_name="adapter").get("gpu"), whole) == whole
    assert settled(lambda: engine.answer(salted, cache_salt="tenant").get("gpu"), whole) == whole
    for others in ({}, {"lora_name": "another"}, {"cache_salt": "another"}):
        assert not engine.answer(adapted, **others)
        assert not engine.answer(salted, **others)


@pytest.mark.parametrize("engine", [{"worker": 5}], indirect=True)
def test_pages_with_keys_of_an_image_are_heard(engine: Engine) -> None:
    """Dynamo 1.6.1 has no question with an image: it tells such pages for their tokens."""
    engine.register()
    pictured = engine.prompt(random.Random(18), 4)
    engine.insert(pictured, PrefixNamespace(model="draft", extra=("0f" * 32,)))
    engine.publish()
    assert settled(lambda: engine.answer(pictured).get("gpu"), 4 * _PAGE) == 4 * _PAGE


@pytest.mark.parametrize("engine", [{"worker": 4, "keep_batches": 4}], indirect=True)
def test_one_that_comes_late_knows_what_was_cached_before(engine: Engine) -> None:
    chance = random.Random(9)
    prompts = [engine.prompt(chance, 6) for _ in range(30)]
    for tokens in prompts:
        engine.insert(tokens)
        engine.publish()
    engine.register()
    assert engine.tree.sizes().evictable > 29 * 6
    for tokens in prompts:
        right = engine.tree.look(tokens).tokens
        assert settled(lambda tokens=tokens: engine.answer(tokens).get("gpu", 0), right) == right
