"""The client that was written from docs/protocol.md fetches from real movers, each rank in a process of its own."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("nixl") is None:
    pytest.skip("no NIXL wheel is installed", allow_module_level=True)

from kvmover import Component, Fleet, Model, Mover, MoverConfig, Place, Pool, PoolSpec
from kvmover.layout import CpOrder
from kvmover.plan import Plan, Replicas
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport
from tests.independent.decode_client import ARENA_BYTES, CHUNK_BYTES, DEFAULTS, Client, Leg
from tests.proofs import family
from tests.transfer.fault_crowd import Crowd
from tests.transfer.fault_pages import POISON, rows
from tests.transfer.fault_rank import CONFIG, Job, Seat

pytestmark = pytest.mark.timeout(90)

PAGES = 24

#: Requests of each shape, sealed and not: 102 in `make test` and `make prove` together.
REQUESTS = 17

#: From and to which token a request asks: whole pages and parts of them at both ends, one page, one token.
WANTED = [(0, 150), (0, 7), (36, 100), (0, 64), (0, 1), (50, 150), (21, 64), (99, 100)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet of sources with its cache, and the page size of the client."""

    fleet: Fleet
    order: str
    components: tuple[Component, ...]
    page_tokens: int


SHAPES = {
    # Heads over two ranks; the keys are on both, which share their pages out. 7 of them are no multiple of 16 bytes.
    "gqa-tp2": Shape(
        Fleet(tp=2, page_tokens=16),
        "NHD",
        (
            Component("keys", 3, 1, 1, 24, "uint8"),
            Component.attention(layers=3, kv_heads=4, head_dim=32, dtype="bfloat16"),
        ),
        24,
    ),
    # Layers over two stages; a window, states, and rows of four tokens.
    "hybrid-pp2": Shape(
        Fleet(pp=2, page_tokens=32),
        "HND",
        (
            Component.attention(layers=3, kv_heads=2, head_dim=32, dtype="float16"),
            Component.sliding(layers=2, kv_heads=2, head_dim=16, window=50, dtype="float16"),
            Component.state("state", layers=2, heads=3, dim=20, dtype="float32", states=2),
            replace(Component("compressed", 2, 1, 1, 64, "bfloat16"), row_tokens=4),
        ),
        8,
    ),
    # A latent that all four ranks could give, of which two hold each half of the tokens.
    "mla-tp2-cp2": Shape(
        Fleet(tp=2, cp=2, page_tokens=8, cp_order=CpOrder.TOKEN),
        "NHD",
        (Component.mla(layers=3, latent_dim=288, dtype="bfloat16"),),
        16,
    ),
}


def described(component: Component) -> dict:
    """A component as the client is told of it: a field that says nothing is left out."""
    named = {key: getattr(component, key) for key in ("name", "layers", "kv", "heads", "dim", "dtype")}
    return named | {key: getattr(component, key) for key in DEFAULTS if getattr(component, key) != DEFAULTS[key]}


class Meeting:
    """A client and the ranks of one engine, all of which it has met; its memory is full of poison."""

    def __init__(self, shape: Shape, secret: bytes) -> None:
        config = replace(CONFIG, deadline_s=20.0, silence_s=10.0, keys=Keys(Key(secret)) if secret else None)
        self.shape = shape
        self.crowd = Crowd(
            Seat("prefill", shape.fleet, rank, shape.order, config=config, components=shape.components)
            for rank in range(shape.fleet.size)
        )
        components = [described(component) for component in shape.components]
        self.client = Client("decode", "toy", components, shape.page_tokens, PAGES, secret)
        ctypes.memset(self.client.base, POISON, len(self.client.memory))
        for rank in self.crowd.of("prefill"):
            self.client.connect(rank.ask("card"))

    def offer(self, job: Job) -> None:
        for rank in self.crowd.of("prefill"):
            rank.tell("send", job)

    def pools(self) -> list[np.ndarray]:
        """Views [page, layer, kv, head, token, byte] of the client's pools."""
        memory = np.frombuffer(self.client.memory, np.uint8)
        return [
            memory[start : start + int(np.prod(shape[:5])) * row].reshape(*shape[:5], row)
            for start, row, shape in self.client.pools
        ]

    def tables(self, chance: random.Random) -> list[list[int]]:
        return [chance.sample(range(PAGES), PAGES) for _ in self.shape.components]

    def put(self, pools: list[np.ndarray], job: Job, start: int, tables: list[list[int]]) -> None:
        """Write into `pools` what a request must bring, by what every rank of any engine holds there."""
        alone = Fleet(page_tokens=self.shape.page_tokens)
        for component, pool, table in zip(self.shape.components, pools, tables, strict=True):
            shard = alone.shard(component, 0, job.tokens)
            wanted = component.wanted(range(start, job.tokens))
            content = rows(job.seed, component, shard, wanted).transpose(2, 0, 1, 3, 4)
            for p, row in zip(wanted, content, strict=True):
                pool[table[p // pool.shape[4]], ..., p % pool.shape[4], :] = row


CASES = [(name, sealed) for name in SHAPES for sealed in ("open", "sealed")]
FEW = [("gqa-tp2", "sealed")]
SECRET = bytes(range(32))


@pytest.fixture
def meeting(name: str, sealed: str) -> Iterator[Meeting]:
    """A meeting after which nothing is leased, reserved or open at a source, and each region of the client is free."""
    here = Meeting(SHAPES[name], SECRET if sealed == "sealed" else b"")
    try:
        yield here
        here.crowd.assert_nothing_is_left()
        assert sorted(here.client.free) == list(range(0, ARENA_BYTES, CHUNK_BYTES))
    finally:
        here.crowd.kill()


@pytest.mark.parametrize(("name", "sealed"), family(CASES, FEW))
def test_every_page_has_the_sources_bytes_and_no_other_byte_is_touched(meeting: Meeting) -> None:
    chance, pools, chunks = random.Random(1), meeting.pools(), 0
    for number in range(REQUESTS):
        start, tokens = WANTED[number % len(WANTED)]
        job, tables = Job(f"request-{number}", number, tokens), meeting.tables(chance)
        expected = [pool.copy() for pool in pools]
        meeting.put(expected, job, start, tables)
        if number % 5:
            meeting.offer(job)
        else:  # the request is asked for before it is offered
            threading.Timer(0.05, meeting.offer, [job]).start()
        route = ("packed", "direct")[number // len(WANTED) % 2]
        meeting.client.fetch(job.name, "prefill", start, tokens, tables, route)
        chunks = max(chunks, *(len(source.rows) for source in meeting.client.sources.values()))
        assert all(np.array_equal(got, want) for got, want in zip(pools, expected, strict=True)), job
        ends = meeting.crowd.ended(job, "prefill")
        assert [end.cause for end in ends] == [None] * meeting.shape.fleet.size, ends
        for pool in pools:
            pool[...] = POISON
    assert chunks > 1, "a request of several chunks"
    assert set(meeting.client.memory[ARENA_BYTES : ARENA_BYTES + 256]) == {POISON}


@pytest.mark.parametrize(("name", "sealed"), [("gqa-tp2", "open")])
def test_a_request_that_fails_has_its_reason_and_the_next_one_lands(meeting: Meeting) -> None:
    """One that no rank gives, and one that ends at one rank after it was asked for."""
    chance, pools = random.Random(2), meeting.pools()
    for rank in meeting.crowd.of("prefill"):
        rank.ask("refuse", Job("refused", 0, 100), "no such prompt")
    with pytest.raises(ConnectionAbortedError, match="no such prompt"):
        meeting.client.fetch("refused", "prefill", 0, 100, meeting.tables(chance), "direct")
    giving, refusing = meeting.crowd.of("prefill")
    half = Job("half", 1, 100)
    giving.tell("send", half)
    refusing.ask("refuse", half, "evicted")
    with pytest.raises(ConnectionAbortedError, match="evicted"):
        meeting.client.fetch("half", "prefill", 0, 100, meeting.tables(chance), "packed")
    meeting.crowd.until(lambda: meeting.crowd.endings, 10, "the rank that gave hears of the end")
    assert [(end.job, end.reason) for end in meeting.crowd.endings] == [("half", "evicted")]
    job, tables = Job("whole", 2, 100), meeting.tables(chance)
    for pool in pools:
        pool[...] = POISON
    late = {"type": "Chunk", "request": "half", "generation": meeting.client.generation, "chunk": 0}
    for name in meeting.client.sources:
        meeting.client.hear(name, late)
    assert all((pool == POISON).all() for pool in pools), "a chunk of a request that is over"
    expected = [pool.copy() for pool in pools]
    meeting.put(expected, job, 0, tables)
    meeting.offer(job)
    meeting.client.fetch("whole", "prefill", 0, 100, tables, "packed")
    assert all(np.array_equal(got, want) for got, want in zip(pools, expected, strict=True))


STRANGERS = {"another key": ("toy", SECRET[::-1], SECRET), "no seal": ("toy", b"", SECRET), "model": ("it", b"", b"")}


@pytest.mark.parametrize(("model", "key", "secret"), STRANGERS.values(), ids=STRANGERS)
def test_a_card_of_another_key_or_model_is_refused(model: str, key: bytes, secret: bytes) -> None:
    latent = SHAPES["mla-tp2-cp2"].components[0]
    spec = PoolSpec.dense(latent, Fleet(page_tokens=16).shard(latent, 0, 1), 4, 16, "NHD")
    config = MoverConfig(arena_bytes=1 << 20, keys=Keys(Key(key)) if key else None)
    place, transport = Place("prefill", Fleet(page_tokens=16), 0), LoopbackTransport(LoopbackNetwork(), "prefill")
    mover = Mover(transport, Model("toy", (latent,)), place, [Pool.zeros(spec)], config)
    client = Client("decode", model, [described(latent)], 16, PAGES, secret)
    with pytest.raises(ConnectionRefusedError):
        client.connect(mover.card)
    mover.close()


FLEETS = [
    Fleet(tp, pp, cp, page_tokens=page, cp_order=CpOrder(order))
    for tp, pp, cp, page, order in [
        (1, 1, 1, 4, "page"),
        (3, 2, 1, 6, "page"),
        (6, 1, 2, 4, "page"),
        (2, 1, 3, 2, "token"),
        (4, 2, 2, 4, "block"),
    ]
]
CACHES = [
    Component.attention(layers=3, kv_heads=2, head_dim=4, dtype="float16"),
    Component.sliding(layers=2, kv_heads=2, head_dim=4, window=9, dtype="float16"),
    Component.mla(layers=2, latent_dim=4, dtype="float16"),
    Component.state("state", layers=2, heads=4, dim=4, dtype="float32"),
]


@pytest.mark.parametrize("component", CACHES, ids=[component.name for component in CACHES])
def test_the_clients_legs_are_those_of_the_plan(component: Component) -> None:
    for fleet in FLEETS:
        for tokens in (range(21), range(3, 17), range(8, 9)):
            own = component.wanted(tokens)
            plan = Plan(component, fleet, Fleet(page_tokens=4), own.start, own.stop, Replicas.STRIPE)
            for rank in range(fleet.size):
                leg = plan.leg(rank, 0)
                positions = [p for stripe in leg.positions for p in stripe if p < own.stop] if leg else []
                card = {"tp": fleet.tp, "pp": fleet.pp, "cp": fleet.cp, "page_tokens": fleet.page_tokens}
                card |= {"cp_order": fleet.cp_order.value, "pages": []}
                found = Leg(rank, card, DEFAULTS | described(component), tokens.start, tokens.stop)
                assert found.positions == sorted(positions), (fleet, rank)
