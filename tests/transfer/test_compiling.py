"""A request waits for kernels of a peer that are being compiled, and no poll does, by whichever route it goes."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import pytest
import torch
from mover_fleets import CONFIG, Bench, Pair

from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.launch import Program
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.memory.chunk_tables import ChunkCopy
from kvmover.transfer.memory.copier import Copier, Done
from kvmover.transfer.memory.programs import Compiler, Programs, Way
from kvmover.transfer.memory.work import Work, launches
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.wire import Verb

pytestmark = pytest.mark.timeout(60)

ATTENTION = Component("attention", 2, 2, 2, 64, "bfloat16")


@dataclass
class Compiled:
    """What was compiled by anybody, and what copies were run, some as `parts` of tables that their requests share.
    `late`: kernels that a copy would have compiled."""

    programs: set[Program] = field(default_factory=set[Program])
    works: list[Work] = field(default_factory=list[Work])
    parts: list[ChunkCopy] = field(default_factory=list[ChunkCopy])
    late: list[Program] = field(default_factory=list[Program])

    def runs(self, work: Work, sms: int | None) -> None:
        """Launch on a CPU what a GPU would be told to do."""
        self.works.append(work)
        total = None if work.logicals is None else torch.zeros(1, dtype=torch.int64)
        self.late += [each.program for each in launches(work, sms, total) if each.program not in self.programs]

    def takes(self, chunk: ChunkCopy, sms: int | None, engine: CopyEngine) -> None:
        """The same for a chunk's part of its request's tables."""
        stretch = chunk.stretch()
        if stretch is None:
            return
        self.parts.append(chunk)
        total = torch.zeros(1, dtype=torch.int64) if chunk.digests else None
        for launch, _ in chunk.tables.launches(chunk, stretch, sms, engine, total):
            self.late += [launch.program] if launch.program not in self.programs else []


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Movers on the CPU have their kernels compiled as those on a GPU do, and then copy without."""
    found = Compiled()
    run = Copier.run

    def copy(self: Copier, work: Work, done: Done) -> None:
        found.runs(work, self.sms)
        run(self, work, done)

    def copy_part(self: Copier, chunk: ChunkCopy, done: Done) -> None:
        found.takes(chunk, self.sms, self.engine)
        self.run(chunk.here(), done)

    monkeypatch.setattr(Compiler, "compiles", True)
    monkeypatch.setattr(Program, "function", lambda self, *_: found.programs.add(self))
    monkeypatch.setattr(Program, "kept_function", lambda self, _: None)
    monkeypatch.setattr(Copier, "run", copy)
    monkeypatch.setattr(Copier, "copy", copy_part)
    return found


ROUTES = [(route, verb) for route in Route for verb in Verb]


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize(("route", "verb"), ROUTES)
def test_whatever_is_launched_was_compiled_before(
    route: Route, verb: Verb, integrity: Integrity, compiled: Compiled
) -> None:
    pair = Pair.of(
        Fleet(page_tokens=4), Fleet(page_tokens=8), config=replace(CONFIG, route=route, verb=verb, integrity=integrity)
    )
    transfers = [*pair.receive(), *pair.send()]
    pair.bench.ended(transfers)
    assert [transfer.result.reason for transfer in transfers if transfer.result] == [None, None]
    assert len(compiled.works) > 5 or (route, integrity) == (Route.DIRECT, Integrity.NONE)
    assert compiled.late == []
    if route is Route.PACKED:  # of the other routes, measured costs decide how large chunks are
        tables = {chunk.tables for chunk in compiled.parts}
        assert 0 < 2 * sum(len(each._kept) for each in tables) <= len(compiled.parts), "most chunks bring no table"
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def held_back(pair: Pair, mover: Mover, way: Way) -> Future[Programs | None]:
    """Everything is compiled but what the one peer of a mover needs of a way."""
    wait([begun for each in pair.bench.movers for begun in each._core.compiler._begun.values()], 20)
    compiler = mover._core.compiler
    ((peer, _),) = [key for key in compiler._begun if key[1] is way]
    future = compiler._begun[peer, way] = Future()
    return future


WAITS = [
    (Route.PACKED, Verb.PUSH, Way.GATHER),
    (Route.PACKED, Verb.PULL, Way.GATHER),
    (Route.PACKED, Verb.PUSH, Way.SCATTER),
    (Route.PACKED, Verb.PULL, Way.SCATTER),
    (Route.MAPPED, Verb.PUSH, Way.WRITE),
    (Route.MAPPED, Verb.PULL, Way.READ),
]


@pytest.mark.parametrize(("route", "verb", "way"), WAITS)
def test_a_request_waits_for_its_kernels_and_polls_do_not(
    route: Route, verb: Verb, way: Way, compiled: Compiled
) -> None:
    pair = Pair.of(config=replace(CONFIG, route=route, verb=verb))
    here = pair.src if way in (Way.GATHER, Way.WRITE) else pair.dst
    future = held_back(pair, here.movers[0], way)
    (wanted,) = pair.receive()
    pair.bench.turn()
    asked = pair.src.movers[0].waiting("request")
    assert bool(asked) == (here is pair.src), "nobody is asked for what could not be copied yet"
    (offered,) = pair.send()
    pair.bench.turn(20)
    assert compiled.works == []
    assert not wanted.ended
    future.set_result(None)
    pair.bench.ended([wanted, offered])
    assert len(compiled.works) > 5
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_a_request_that_is_given_up_before_its_kernels_are_compiled_leaves_nothing(compiled: Compiled) -> None:
    pair = Pair.of(config=CONFIG)
    future = held_back(pair, pair.dst.movers[0], Way.SCATTER)
    (wanted,) = pair.receive()
    pair.bench.turn()
    pair.dst.movers[0].abort(wanted, "not wanted any more")
    pair.bench.ended([wanted])
    future.set_result(None)
    pair.bench.turn()
    assert pair.src.movers[0].waiting("request") == []
    assert compiled.works == []
    assert not pair.dst.movers[0]._destination._unasked
    pair.bench.assert_nothing_is_left()


def test_a_compiler_that_fails_fails_the_requests_that_need_it(compiled: Compiled) -> None:
    pair = Pair.of(config=CONFIG)
    future = held_back(pair, pair.dst.movers[0], Way.SCATTER)
    transfers = [*pair.receive(), *pair.send()]
    pair.bench.turn()
    future.set_exception(RuntimeError("ptxas was killed"))
    pair.bench.ended(transfers)
    reasons = [transfer.result.reason for transfer in transfers if transfer.result]
    assert all(reason and "ptxas was killed" in reason for reason in reasons)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("compiles", [True, False])
def test_pools_are_mapped_when_a_peer_is_seated_that_copies_go_to_or_come_from(
    compiles: bool, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head for head, rank 0 has nothing for rank 1. Where nothing is compiled, they are mapped when first needed."""
    monkeypatch.setattr(Compiler, "compiles", compiles)
    bench = Bench((ATTENTION,), replace(CONFIG, route=Route.MAPPED))
    src, dst = (bench.engine(name, Fleet(tp=2, page_tokens=4)) for name in ("prefill", "decode"))
    dst.connect(src)
    bench.turn()
    for engine, others in ((src, dst), (dst, src)):
        for mover, partner in zip(engine.movers, others.movers, strict=True):
            mapped = {name for name, _ in mover._core.mappings._mapped}
            assert mapped == ({partner._core.transport.name} if compiles else set())
