"""Two engines in one process, of which one has a running request that writes a row a step and is moved meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from kvmover.layout import Component, Fleet
from kvmover.migrate import (
    ArrivalPhase,
    ArrivingRank,
    Checkpoint,
    DepartingRank,
    DeparturePhase,
    Migration,
    MigrationConfig,
    Party,
)
from kvmover.transfer.arguments import table_lengths
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.content import DIGEST_BYTES, Content
from tests.transfer.mover_fleets import CONFIG, POISON, Bench, Engine, Tables, Truth, truth_of

ATTENTION = (Component("attention", 2, 2, 2, 16, "uint8"),)
#: With rows that only the last tokens need, and states that every step writes anew.
HYBRID = (
    Component("attention", 2, 2, 2, 8, "uint8"),
    Component("sliding", 2, 2, 2, 8, "uint8", window=3),
    Component("state", 2, 1, 2, 16, "uint8", states=2),
)
MOST_TOKENS = 64
#: What the request is of.
DIGEST = b"a" * DIGEST_BYTES


class Meeting:
    """Ranks of one thread agree one call late: each gets the least of the rows of the call before."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._rows: list[npt.NDArray[np.int64]] = []

    def minimum(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        self._rows.append(values)
        begins = (len(self._rows) - 1) // self._ranks * self._ranks
        before = self._rows[begins - self._ranks : begins] if begins else []
        return np.minimum.reduce(before) if before else None


@dataclass(slots=True, eq=False)
class Move:
    """One migration between two engines, both sides of all ranks, and the request that goes on meanwhile."""

    bench: Bench
    source: Engine
    target: Engine
    tokens: int
    truth: Truth
    source_tables: list[Tables]
    target_tables: list[Tables]
    departing: list[DepartingRank] = field(default_factory=list[DepartingRank])
    arriving: list[ArrivingRank] = field(default_factory=list[ArrivingRank])
    generation: int = 0

    @classmethod
    def between(
        cls,
        src: Fleet,
        dst: Fleet,
        components: Sequence[Component] = ATTENTION,
        config: MoverConfig = CONFIG,
        tokens: int = 20,
    ) -> Move:
        bench = Bench(tuple(components), config)
        source, target = bench.engine("a", src), bench.engine("b", dst, "HND")
        target.connect(source)
        bench.turn()
        tables = source.tables(MOST_TOKENS, 1), target.tables(MOST_TOKENS, 2)
        move = cls(bench, source, target, tokens, truth_of(components, MOST_TOKENS), *tables)
        move.write()
        return move

    def written(self, tokens: int) -> Truth:
        """What the request's rows are when it has so many tokens: states are others after every step."""
        states = truth_of(self.bench.components, 1, seed=tokens)
        return [
            again if c.states else rows[:, :, :, : c.extent(tokens)]
            for c, rows, again in zip(self.bench.components, self.truth, states, strict=True)
        ]

    def write(self) -> None:
        self.source.fill(
            [self.part(self.source, rank, self.tokens) for rank in range(self.source.fleet.size)],
            self.written(self.tokens),
        )

    def part(self, engine: Engine, rank: int, tokens: int) -> Tables:
        """The page tables of a rank, of so many tokens."""
        tables = (self.source_tables if engine is self.source else self.target_tables)[rank]
        lengths = table_lengths(self.bench.components, engine.fleet, rank, tokens)
        return [table[:length] for table, length in zip(tables, lengths, strict=True)]

    def payload(self) -> bytes:
        return f"{self.tokens} tokens".encode()

    def now(self, rank: int) -> Checkpoint:
        return Checkpoint(self.tokens, self.part(self.source, rank, self.tokens), self.payload())

    def begin(
        self,
        config: MigrationConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        digest: bytes = DIGEST,
        meant: bytes = DIGEST,
    ) -> None:
        """Both sides, all ranks. `digest`: what the request is of; `meant`: what the target takes it for."""
        self.generation += 1
        parties = (Party(engine.name, engine.fleet.size) for engine in (self.source, self.target))
        content = Content(self.tokens, digest)
        migration = Migration("r", self.generation, *parties, self.tokens, self.payload(), content)
        leave, come = Meeting(self.source.fleet.size), Meeting(self.target.fleet.size)
        self.departing = [
            DepartingRank(mover, migration, self.now(rank), config, leave, clock)
            for rank, mover in enumerate(self.source.movers)
        ]
        arriving = replace(Migration.decode(migration.encode()), content=Content(self.tokens, meant))
        self.arriving = [
            ArrivingRank(mover, arriving, self.part(self.target, rank, self.tokens), config, come, clock)
            for rank, mover in enumerate(self.target.movers)
        ]

    def step(self) -> None:
        """The request computes a token where it may, and everybody is polled."""
        if self.departing and self.departing[0].may_write and self._writes():
            self.tokens += 1
            self.write()
            for rank, departing in enumerate(self.departing):
                departing.wrote(self.now(rank))
        self.turn()

    def _writes(self) -> bool:
        """Near its end a request writes only what was announced."""
        return self.tokens < MOST_TOKENS - 8 or self.departing[0].phase is DeparturePhase.STOPPING

    def turn(self) -> None:
        """Everybody is polled, and named the pages that are missing."""
        for mover in self.bench.movers:
            mover.poll()
        for departing in self.departing:
            departing.poll()
        for rank, arriving in enumerate(self.arriving):
            arriving.poll()
            if arriving.pages_for:
                arriving.allocated(arriving.pages_for, self.part(self.target, rank, arriving.pages_for))
        self.check()

    def check(self) -> None:
        """Ranks of an engine are of one mind, but for those that are polled first; one engine has the request, and no
        transfer may write the pages of one that is here.
        """
        has = {
            each.phase in (DeparturePhase.COPYING, DeparturePhase.STOPPING, DeparturePhase.BACK)
            for each in self.departing
        }
        takes = {each.phase is ArrivalPhase.HERE for each in self.arriving}
        assert len(has) <= 1
        assert len(takes) <= 1
        assert not (True in has and True in takes)
        assert not any(each.phase is ArrivalPhase.HERE and each.holds_pages for each in self.arriving)

    def until_settled(self, turns: int = 3000) -> None:
        for _ in range(turns):
            if all(each.settled for each in (*self.departing, *self.arriving)):
                return
            self.step()
        phases = [each.phase for each in (*self.departing, *self.arriving)]
        raise AssertionError(f"not settled: {phases}, {[each.reason for each in (*self.departing, *self.arriving)]}")

    def assert_target_holds(self, tokens: int) -> None:
        """The rows that so many tokens need are in the target's pages, and no page that is nobody's was touched."""
        tables = [self.part(self.target, rank, tokens) for rank in range(self.target.fleet.size)]
        self.target.assert_holds(self.target.landed(self.target.snapshot(), tables, self.written(tokens)))
        for pools in self.target.pools:
            for pool in pools:
                for layer in range(pool.spec.layout.extent_of("layer")):
                    strange = pool.plane(layer, 0)[::2].view(torch.uint8)
                    assert strange.eq(POISON).all()
