"""Engines find each other by their addresses, lose each other, meet again, and read each other's host memory."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest
import torch

from kvmover.cache.peers import Lent, PeerAnswer, PeerMiss, PeerPrefix, PeerRead, PeerTier
from kvmover.cache.prefix import DEFAULT_NAMESPACE, KeyUnits, RadixKey
from kvmover.config import ConfigError, Settings
from kvmover.config.settings import ExchangeSettings, PeerSettings
from kvmover.engines.common import Cards, Neighbours, ServedWeights, open_peer_tier
from kvmover.errors import TransportError
from kvmover.layout import PACKED_ORDER, Component, Fleet, Pool, PoolSpec
from kvmover.transfer import MoverConfig
from kvmover.transport import NixlTransport

KV = Component.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32")
MOVER = MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0, ping_s=0.1, resend_s=0.2)
PROMPT = np.arange(16, dtype=np.int32)
KEY = RadixKey.of(PROMPT, DEFAULT_NAMESPACE, KeyUnits.PLAIN)


def addresses(count: int) -> list[str]:
    """Of ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


class SmallEngine:
    """The ranks of an engine in this process. A row says which position, layer, kv and head it is of."""

    def __init__(
        self,
        fleet: Fleet,
        address: str,
        engines: list[str],
        model: str = "tiny",
        allow: Sequence[str] = (),
        directory: str | None = None,
    ) -> None:
        peers = PeerSettings(address, tuple(engines), directory, ask_s=2.0, silence_s=0.3, meet_s=0.05)
        exchange = ExchangeSettings(allow=tuple(allow))
        self.fleet, self.settings = fleet, Settings(mover=MOVER, peers=peers, exchange=exchange)
        self.tiers: list[PeerTier] = []
        self.pools: list[Pool] = []
        for rank in range(fleet.size):
            shard = fleet.shard(KV, rank, fleet.page_tokens)
            spec = PoolSpec.dense(KV, shard, 12, fleet.page_tokens, PACKED_ORDER)
            self.pools.append(Pool.zeros(spec))
            tier = open_peer_tier(self.settings, ServedWeights("tiny", model), fleet, rank, self.pools[-1:])
            assert tier is not None
            self.tiers.append(tier)
        self.neighbours = Neighbours(self.tiers, self.settings)
        self.neighbours.lay_out([tier.card for tier in self.tiers])

    def fill(self) -> None:
        """Pages 1 and on hold PROMPT, and may be lent."""
        page = self.fleet.page_tokens
        ids = list(range(1, 1 + len(PROMPT) // page))
        for rank, (tier, pool) in enumerate(zip(self.tiers, self.pools, strict=True)):
            heads = self.fleet.shard(KV, rank, page).heads
            for layer in range(2):
                for kv in range(2):
                    rows = torch.as_tensor(PROMPT).view(-1, page, 1, 1) * 100.0 + layer * 10 + kv
                    pool.plane(layer, kv)[ids] = rows + torch.tensor(list(heads)).view(1, 1, -1, 1) * 0.5
            tier.came(KEY.page_hashes(page), ids)

    def close(self) -> None:
        self.neighbours.close()
        for tier in self.tiers:
            tier.close()


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    stop = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < stop
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[..., SmallEngine]]:
    with ExitStack() as stack:

        def begun(*given: object, **more: object) -> SmallEngine:
            engine = SmallEngine(*given, **more)  # type: ignore[arg-type]
            stack.callback(engine.close)
            return engine

        yield begun


def read(engine: SmallEngine, rank: int, source: str | None = None) -> int:
    """Tokens that come to pages 0 and on of a rank of `engine` from the first that it asks."""
    tier, page, told = engine.tiers[rank], engine.fleet.page_tokens, list[object]()
    (answer,) = asked(engine, rank, "r", source)
    tokens = answer.tokens
    if tokens:
        read = PeerRead(lambda: False, told.append)
        tier.read(tier.question("r", b"", source), 0, range(tokens), [list(range(tokens // page))], read)
        until(lambda: tier.poll() or told)
        assert isinstance(told[0], int), told
    return tokens


def held(engine: SmallEngine, rank: int, name: str) -> list[int]:
    """Tokens of PROMPT that each engine says it has."""
    return [each.tokens for each in asked(engine, rank, name)]


def asked(engine: SmallEngine, rank: int, name: str, source: str | None = None) -> list[PeerAnswer]:
    tier, told = engine.tiers[rank], list[list[PeerAnswer]]()
    tier.look(tier.question(name, b"", source), PeerPrefix(KEY, 0, len(PROMPT)), lambda said: told.append(list(said)))
    until(lambda: tier.poll() or told)
    return told[0]


def test_engines_of_unlike_shape_that_list_each_other_find_and_read_each_other(start) -> None:
    both = addresses(2)
    first, second = start(Fleet(tp=2, page_tokens=4), both[0], both), start(Fleet(page_tokens=8), both[1], both)
    for engine, other in ((first, both[1]), (second, both[0])):
        until(lambda engine=engine, other=other: engine.neighbours.connected() == {other})
    first.fill()
    assert read(second, 0) == len(PROMPT)
    for layer in range(2):
        for kv in range(2):
            rows = second.pools[0].plane(layer, kv)[:2].reshape(16, 2, 8)
            expected = torch.as_tensor(PROMPT).view(16, 1, 1) * 100.0 + layer * 10 + kv
            assert torch.equal(rows, (expected + torch.tensor([0.0, 0.5]).view(1, 2, 1)).expand(16, 2, 8))


def test_an_engine_that_starts_again_at_its_address_is_met_again_and_read(start) -> None:
    both = addresses(2)
    first, second = start(Fleet(page_tokens=4), both[0], []), start(Fleet(page_tokens=8), both[1], both)
    until(lambda: second.neighbours.connected())
    first.close()
    assert held(second, 0, "nobody") == [0]  # and who is asked and says nothing is lost
    until(lambda: not second.neighbours.connected())
    again = start(Fleet(tp=2, page_tokens=2), both[0], [])
    until(lambda: second.neighbours.connected() == {both[0]})
    again.fill()
    assert read(second, 0) == len(PROMPT)


def update(engine: SmallEngine) -> None:
    (tier,) = engine.tiers
    tier.rejoin(partial(NixlTransport, "again"), "tiny, version 2", "the weights were updated")
    assert tier.counts() == Lent(0, 0)
    engine.neighbours.lay_out([tier.card])


def test_an_engine_whose_weights_are_updated_shares_nothing_of_before_and_meets_who_has_them_too(start) -> None:
    both = addresses(2)
    first, second = start(Fleet(page_tokens=4), both[0], both), start(Fleet(page_tokens=8), both[1], both)
    until(lambda: first.neighbours.connected() and second.neighbours.connected())
    first.fill()
    assert held(second, 0, "before") == [len(PROMPT)]
    update(first)
    until(lambda: not first.neighbours.connected() and not second.neighbours.connected())
    update(second)
    until(lambda: first.neighbours.connected() and second.neighbours.connected())
    assert held(second, 0, "none of it") == [0]
    first.fill()
    assert read(second, 0) == len(PROMPT)


def test_an_engine_of_another_model_is_refused_in_a_sentence_and_the_next_one_is_met(start, caplog) -> None:
    caplog.set_level(logging.INFO, "kvmover")
    three = addresses(3)
    start(Fleet(page_tokens=4), three[0], [], model="another")
    start(Fleet(page_tokens=4), three[1], [])
    asking = start(Fleet(page_tokens=8), three[2], three)
    until(lambda: asking.neighbours.connected())
    time.sleep(0.3)  # it is tried again meanwhile, and that is said once
    assert asking.neighbours.connected() == {three[1]}
    refusals = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    refusals = [line for line in refusals if line.startswith("nothing is shared")]
    assert len(refusals) == 1
    assert f"with the engine at {three[0]}: " in refusals[0]
    assert "another" in refusals[0]


def test_who_calls_itself_otherwise_than_it_is_listed_is_refused(caplog) -> None:
    caplog.set_level(logging.DEBUG, "kvmover")
    answers: list[Cards | TransportError] = [TransportError("no cards"), Cards("b:2", (b"card",))]

    def fetch(host: str, port: int, timeout_s: float, allow: Sequence[str]) -> Cards:
        assert (host, port) == ("a", 1)
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, TransportError):
            raise found
        return found

    neighbours = Neighbours((), Settings(peers=PeerSettings("c:3", ("a:1", "c:3"), meet_s=0.01)), fetch)
    with closing(neighbours):
        until(lambda: any("calls itself b:2" in record.getMessage() for record in caplog.records))
        assert not neighbours.connected()
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_a_stranger_s_name_is_logged_in_short_and_on_one_line_that_prints(caplog) -> None:
    caplog.set_level(logging.DEBUG, "kvmover")
    name = "b:2\n2026-01-01 ERROR all is lost\x1b[2J" + "x" * 5000

    def fetch(*_: object) -> Cards:
        return Cards(name, (b"card",))

    with closing(Neighbours((), Settings(peers=PeerSettings("c:3", ("a:1", "c:3"), meet_s=0.01)), fetch)):
        until(lambda: any("calls itself" in record.getMessage() for record in caplog.records))
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() and len(line) < 400 for line in lines)


def test_an_engine_of_another_shape_that_only_a_request_names_is_met_and_read_by_every_rank(start) -> None:
    both = addresses(2)
    first = start(Fleet(page_tokens=8), both[0], [])
    second = start(Fleet(tp=2, page_tokens=4), both[1], [], allow=["127.0.0.0/8"])
    first.fill()
    assert asked(second, 0, "nobody is asked without a name") == []
    assert [read(second, rank, both[0]) for rank in range(2)] == [len(PROMPT)] * 2
    assert second.neighbours.connected() == {both[0]}
    for rank, pool in enumerate(second.pools):
        rows = pool.plane(1, 1)[:4].reshape(16, 8)
        assert torch.equal(rows, (torch.as_tensor(PROMPT).view(16, 1) * 100.0 + 11 + rank * 0.5).expand(16, 8))
    first.close()
    asked(second, 0, "it says nothing, and is lost", both[0])
    asked(second, 1, "it says nothing, and is lost", both[0])  # it is in no list: nobody goes on dialling it
    until(lambda: not second.neighbours._ranks)


@pytest.mark.parametrize(
    ("allow", "model", "lent", "miss"),
    [
        ((), "tiny", True, PeerMiss.NOT_ALLOWED),
        (("10.0.0.0/8",), "tiny", True, PeerMiss.NOT_ALLOWED),
        (("127.0.0.1",), "another", True, PeerMiss.NOT_A_PEER),
        (("127.0.0.1",), "tiny", False, PeerMiss.ABSENT),
    ],
    ids=["nobody is allowed", "another network is", "other weights", "it has nothing"],
)
def test_a_named_source_that_brings_nothing_is_told_why_and_is_no_neighbour(start, allow, model, lent, miss) -> None:
    both = addresses(2)
    first, second = (
        start(Fleet(page_tokens=4), both[0], [], model),
        start(Fleet(page_tokens=4), both[1], [], "tiny", allow),
    )
    if lent:
        first.fill()
    assert asked(second, 0, "r", both[0]) == [PeerAnswer(0, miss)]
    assert second.neighbours.connected() == ({both[0]} if miss is PeerMiss.ABSENT else frozenset())


def test_a_dead_source_is_dialled_once_however_many_requests_name_it_and_others_are_read_meanwhile(start) -> None:
    three = addresses(3)
    first = start(Fleet(page_tokens=4), three[0], [])
    second = start(Fleet(page_tokens=8), three[1], three[:2], allow=["127.0.0.1"])
    until(lambda: second.neighbours.connected())
    first.fill()
    dialled, fetch = list[int](), second.neighbours._fetch

    def counted(host: str, port: int, timeout_s: float, allow: Sequence[str]) -> Cards:
        dialled.append(port)
        return fetch(host, port, timeout_s, allow)

    second.neighbours._fetch = counted
    for number in range(5):
        assert asked(second, 0, f"dead {number}", three[2]) == [PeerAnswer(0, PeerMiss.UNREACHABLE)]
    assert dialled.count(int(three[2].rpartition(":")[2])) == 1
    assert read(second, 0) == len(PROMPT)
    assert asked(second, 0, "itself", three[1]) == [PeerAnswer(0, PeerMiss.NEEDLESS)]


def test_engines_of_a_directory_are_met_as_they_come_and_named_without_being_in_allow(start, tmp_path) -> None:
    three, listed = addresses(3), tmp_path / "engines"
    listed.write_text(f"{three[2]}\n")
    first = start(Fleet(page_tokens=4), three[0], [])
    second = start(Fleet(page_tokens=8), three[2], [], directory=str(listed))
    first.fill()
    assert asked(second, 0, "r0", three[0]) == [PeerAnswer(0, PeerMiss.NOT_ALLOWED)]
    listed.write_text(f"{three[2]}\n{three[0]} # it came\n")
    until(lambda: second.neighbours.connected() == {three[0]})
    assert read(second, 0) == len(PROMPT)
    assert asked(second, 0, "r1", three[0]) == [PeerAnswer(len(PROMPT))]
    listed.write_text(f"{three[2]}\n")
    until(lambda: second.tiers[0].engines == ())
    assert second.neighbours.connected() == {three[0]}  # it may be reading still
    first.close()
    asked(second, 0, "it says nothing, and is lost", three[0])
    until(lambda: not second.neighbours._ranks)


def test_without_an_address_there_are_no_peers() -> None:
    assert open_peer_tier(Settings(), ServedWeights("tiny", "1"), Fleet(), 0, ()) is None


def test_an_address_that_cannot_be_listened_at_is_refused_by_its_setting() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            closing(Neighbours((), Settings(peers=PeerSettings(address)))) as neighbours,
            pytest.raises(ConfigError, match=rf"peers\.address = '{address}' cannot be listened at: .*in use"),
        ):
            neighbours.lay_out([b"card"])
