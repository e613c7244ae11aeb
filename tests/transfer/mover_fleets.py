"""Fleets of movers in one process, with pools whose every byte is known: what the tests of this folder move about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Gate, Transfer
from kvmover.transport import LoopbackNetwork, LoopbackTransport, Transport

POISON = 0xEE

#: Chunks of 4 KiB, so that small requests have many of them. The rates make neither route an obvious choice.
SMALL_CHUNKS = Costs(
    descriptor_us=1.0, wire_rate=1e3, gather_rate=1e3, scatter_rate=1e3, chunk_us=10.0, chunk_bytes=4096
)
#: Nothing is probed: what is counted and what is held in flight are the requests' own.
CONFIG = MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0, costs=SMALL_CHUNKS, route=Route.PACKED)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: One page table a component.
Tables = list[np.ndarray]
#: Every row of a request, [layer, kv, head, position, byte], one tensor a component.
Truth = list[torch.Tensor]


class HandClock:
    """A clock that stands still unless it is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Bench:
    """A model, a network in this process, and how to make fleets of it."""

    components: tuple[Component, ...]
    config: MoverConfig = CONFIG
    clock: Callable[[], float] = time.monotonic
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    movers: list[Mover] = field(default_factory=list[Mover])

    def transport(self, name: str) -> Transport:
        return LoopbackTransport(self.network, name, self.clock)

    def mover(
        self, place: Place, pools: Sequence[Pool], config: MoverConfig | None = None, model: str = "toy"
    ) -> Mover:
        wire = self.transport(f"{place.engine}{place.rank}")
        mover = Mover(wire, Model(model, self.components), place, pools, config or self.config, self.clock)
        self.movers.append(mover)
        return mover

    def engine(
        self,
        name: str,
        fleet: Fleet,
        order: str = "NHD",
        separate: tuple[str, ...] = (),
        pages: int = 64,
        config: MoverConfig | None = None,
    ) -> Engine:
        """A mover a rank, over pools full of poison."""
        ranks: list[Mover] = []
        pools: list[list[Pool]] = []
        for rank in range(fleet.size):
            specs = [
                PoolSpec.dense(c, fleet.shard(c, rank, 1), pages, fleet.page_rows(c), order, separate)
                for c in self.components
            ]
            shared = (config or self.config).route is Route.MAPPED
            pools.append([poisoned(spec, shared) for spec in specs])
            ranks.append(self.mover(Place(name, fleet, rank), pools[-1], config))
        return Engine(name, fleet, self.components, ranks, pools)

    def settle(self, until: Callable[[], bool], within_s: float = 20) -> None:
        """Poll everybody until something is so."""
        deadline = time.monotonic() + within_s
        while not until():
            assert time.monotonic() < deadline, "the movers are stuck"
            for mover in self.movers:
                mover.poll()

    def turn(self, rounds: int = 6) -> None:
        """Poll everybody, often enough for every message to be answered and the answer to be acted upon."""
        for _ in range(rounds):
            for mover in self.movers:
                mover.poll()

    def ended(self, transfers: Iterable[Transfer], within_s: float = 20) -> None:
        transfers = list(transfers)
        self.settle(lambda: all(transfer.ended for transfer in transfers), within_s)
        self.turn()

    def assert_nothing_is_left(self) -> None:
        """Every region is back, and no mover remembers a request."""
        for mover in self.movers:
            core = mover._core
            for staging in (core.incoming, core.outgoing):
                assert (staging.arena.reserved_bytes, staging.arena.quarantined_bytes) == (0, 0)
                staging.arena.check()
                assert len(staging.arena._free) == staging.arena.slabs
            assert not mover._destination._attempts
            assert not mover._destination._credits
            assert not mover._destination.quarantine
            assert not mover._reads.flights
            assert not mover._source._requests
            assert not mover._source._asked
            assert not mover._source.early
            assert not mover._writes._queue
            assert not mover._writes._staged
            assert not mover._writes.flights
            assert not core.later


@dataclass(slots=True)
class Engine:
    """The movers of one fleet, by rank, with their pools [rank][component]."""

    name: str
    fleet: Fleet
    components: tuple[Component, ...]
    movers: list[Mover]
    pools: list[list[Pool]]

    def connect(self, other: Engine) -> None:
        for mover in self.movers:
            for peer in other.movers:
                mover.connect(peer.card)

    def tables(self, tokens: int, seed: int = 0) -> list[Tables]:
        """Page tables of a request, by rank: odd pages in random order, so that every page has a stranger beside it."""
        random = np.random.default_rng(seed)
        return [[self._table(c, rank, tokens, random) for c in self.components] for rank in range(self.fleet.size)]

    def _table(self, component: Component, rank: int, tokens: int, random: np.random.Generator) -> np.ndarray:
        held = self.fleet.shard(component, rank, tokens).positions
        pages = -(-held.tokens // self.fleet.page_rows(component)) if held else 0
        pool = self.pools[rank][self.components.index(component)].spec.pages
        return random.permutation(np.arange(1, pool, 2))[:pages]

    def fill(self, tables: list[Tables], truth: Truth) -> None:
        """Put a request into the pools, but for what no destination would ask for: rows before a window."""
        for rank in range(self.fleet.size):
            self._put(self.pools[rank], rank, tables[rank], truth, 0)

    def send(
        self, request: str, tables: list[Tables], gates: Sequence[Gate] | None = None, aux: bytes | None = None
    ) -> list[Transfer]:
        return [mover.send(request, table, gates, aux) for mover, table in zip(self.movers, tables, strict=True)]

    def receive(
        self, request: str, source: str, positions: range, tables: list[Tables], aux_from: Sequence[int] = ()
    ) -> list[Transfer]:
        return [
            mover.receive(request, source, positions, table, aux_from)
            for mover, table in zip(self.movers, tables, strict=True)
        ]

    def snapshot(self) -> list[list[Pool]]:
        return [[Pool(p.spec, tuple(t.clone() for t in p.tensors)) for p in pools] for pools in self.pools]

    def landed(self, before: list[list[Pool]], tables: list[Tables], truth: Truth, start: int = 0) -> list[list[Pool]]:
        """What the pools must be after positions from `start` on landed in what they were `before`."""
        after = [[Pool(p.spec, tuple(t.clone() for t in p.tensors)) for p in pools] for pools in before]
        for rank in range(self.fleet.size):
            self._put(after[rank], rank, tables[rank], truth, start)
        return after

    def assert_holds(self, expected: list[list[Pool]]) -> None:
        """Every byte of every pool, those that nobody should have touched too."""
        for rank, (mine, theirs) in enumerate(zip(self.pools, expected, strict=True)):
            for pool, wanted in zip(mine, theirs, strict=True):
                for got, want in zip(pool.tensors, wanted.tensors, strict=True):
                    assert torch.equal(got, want), f"{self.name} rank {rank} {pool.spec.component.name} {self.fleet}"

    def _put(self, pools: Sequence[Pool], rank: int, tables: Tables, truth: Truth, start: int) -> None:
        """Write what a request needs from token `start` on, component by component."""
        for pool, table, rows in zip(pools, tables, truth, strict=True):
            component = pool.spec.component
            shard = self.fleet.shard_of_rows(component, rank, rows.shape[3])
            held, wanted = shard.positions, component.wanted(range(start, start + self._tokens(truth, start)))
            chosen = [p for p in held if p in wanted] if held else []
            if held is None or not chosen:
                continue
            page, token = np.divmod([held.index(p) for p in chosen], self.fleet.page_rows(component))
            whole = rows.numpy()[:, :, list(shard.heads)][:, :, :, chosen].swapaxes(2, 3)
            for local, layer in enumerate(shard.layers):
                for kv in range(component.kv):
                    plane = pool.plane(local, kv)
                    words = plane.view(_WORDS[component.element_bytes]).numpy()
                    words[table[page], token] = np.ascontiguousarray(whole[layer, kv]).view(words.dtype)

    def _tokens(self, truth: Truth, start: int) -> int:
        """How many tokens from `start` on a request has, by the components that have a row a token."""
        lengths = [
            rows.shape[3] for c, rows in zip(self.components, truth, strict=True) if c.extent(1) == 1 and not c.states
        ]
        return max(lengths, default=start + 1) - start


def poisoned(spec: PoolSpec, shared: bool = False) -> Pool:
    pool = Pool.shared(spec) if shared else Pool.zeros(spec)
    for tensor in pool.tensors:
        tensor.fill_(POISON)
    return pool


def truth_of(components: Sequence[Component], tokens: int, seed: int = 0) -> Truth:
    """Random bytes, none of which is poison."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            0, POISON, (c.layers, c.kv, c.heads, c.extent(tokens), c.row_bytes), generator=random, dtype=torch.uint8
        )
        for c in components
    ]


@dataclass(slots=True)
class Pair:
    """A prefill rank and a decode rank, one component, one request of `tokens` tokens: the smallest move there is."""

    bench: Bench
    src: Engine
    dst: Engine
    tokens: int
    src_tables: list[Tables]
    dst_tables: list[Tables]
    truth: Truth
    before: list[list[Pool]]

    @classmethod
    def of(
        cls,
        src: Fleet | None = None,
        dst: Fleet | None = None,
        tokens: int = 100,
        config: MoverConfig = CONFIG,
        clock: Callable[[], float] = time.monotonic,
        network: LoopbackNetwork | None = None,
        pages: int = 64,
    ) -> Pair:
        """128 bytes a head and token, two heads, two layers, K and V: 1 KiB a token, so 4 tokens a chunk."""
        attention = Component("attention", 2, 2, 2, 64, "bfloat16")
        bench = Bench((attention,), config, clock, network or LoopbackNetwork())
        source = bench.engine("prefill", src or Fleet(page_tokens=4), pages=pages)
        target = bench.engine("decode", dst or Fleet(page_tokens=4), "HND", pages=pages)
        target.connect(source)
        bench.turn()
        return cls.request(bench, source, target, tokens)

    @classmethod
    def request(cls, bench: Bench, src: Engine, dst: Engine, tokens: int, seed: int = 0) -> Pair:
        src_tables, dst_tables = src.tables(tokens, seed), dst.tables(tokens, seed + 1)
        truth = truth_of(bench.components, tokens, seed)
        src.fill(src_tables, truth)
        return cls(bench, src, dst, tokens, src_tables, dst_tables, truth, dst.snapshot())

    def send(self, request: str = "request") -> list[Transfer]:
        return self.src.send(request, self.src_tables)

    def receive(self, request: str = "request", start: int = 0) -> list[Transfer]:
        return self.dst.receive(request, self.src.name, range(start, self.tokens), self.dst_tables)

    def assert_landed(self, start: int = 0) -> None:
        self.dst.assert_holds(self.dst.landed(self.before, self.dst_tables, self.truth, start))
