"""A request that is given repeatedly: whoever asks gets what is there by then, as often as they ask."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from mover_fleets import CONFIG, Bench, HandClock, truth_of
from mover_network import FaultyNetwork

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Gauge
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Gate, Service, Transfer

TOKENS, PAGE = 32, 4
DEADLINE_S = 5.0


class Passed:
    def query(self) -> bool:
        return True


class Growing:
    """Two ranks that compute a request, with engines A, of one rank, and B, of two, which may ask for parts of it."""

    def __init__(self, verb: Verb = Verb.PULL, route: Route = Route.PACKED, deadline_s: float = DEADLINE_S) -> None:
        self.clock, self.network = HandClock(), FaultyNetwork()
        config = replace(CONFIG, route=route, verb=verb, silence_s=3.0, ping_s=0.5, deadline_s=300.0)
        self.bench = Bench((Component.attention(2, 2, 64, "bfloat16"),), config, self.clock, self.network)
        self.source = self.bench.engine("running", Fleet(tp=2, page_tokens=PAGE))
        self.engines = {name: self.bench.engine(name, Fleet(tp=tp, page_tokens=8)) for name, tp in (("A", 1), ("B", 2))}
        for engine in self.engines.values():
            engine.connect(self.source)
        self.bench.turn()
        self.tables, truth = self.source.tables(TOKENS), truth_of(self.bench.components, TOKENS)
        self.source.fill(self.tables, truth)
        self.truth = truth
        self.wanted = {name: engine.tables(TOKENS, 1) for name, engine in self.engines.items()}
        self.before = {name: engine.snapshot() for name, engine in self.engines.items()}
        self.computed = 0
        self.sent = [
            mover.send("request", [[]], [], deadline_s=deadline_s, service=Service.REPEATED)
            for mover in self.source.movers
        ]

    def compute(self, tokens: int) -> None:
        """One token a step, each with a page where it begins one."""
        for token in range(self.computed, tokens):
            for mover, sent, (table,) in zip(self.source.movers, self.sent, self.tables, strict=True):
                page = [table[token // PAGE : token // PAGE + 1]] if token % PAGE == 0 else None
                mover.produced(sent, Gate(Passed(), tokens=token + 1), page)
        self.computed = tokens

    def ask(self, name: str, start: int, stop: int) -> list[Transfer]:
        engine = self.engines[name]
        tables = [[table[: -(-stop // 8)] for table in tables] for tables in self.wanted[name]]
        return [
            mover.receive("request", "running", range(start, stop), table)
            for mover, table in zip(engine.movers, tables, strict=True)
        ]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            self.bench.turn(12)

    def fetch(self, name: str, start: int, stop: int) -> None:
        asked = self.ask(name, start, stop)
        self.pass_time(0.5)
        assert [transfer.landed().reason for transfer in asked] == [None] * len(asked)

    def holds_all(self, name: str) -> None:
        engine = self.engines[name]
        engine.assert_holds(engine.landed(self.before[name], self.wanted[name], self.truth))

    @property
    def is_open(self) -> bool:
        return not any(sent.ended for sent in self.sent)


@pytest.mark.parametrize("verb", list(Verb))
@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
def test_an_engine_fetches_what_has_been_written_since_it_asked_last(verb: Verb, route: Route):
    scene = Growing(verb, route)
    for start, stop in ((0, 13), (13, 14), (14, 27), (27, TOKENS)):
        scene.compute(stop)
        scene.fetch("A", start, stop)
        assert scene.is_open
    scene.holds_all("A")
    scene.fetch("A", TOKENS, TOKENS)
    assert [sent.landed().reason for sent in scene.sent] == [None, None]
    assert sum(sent.landed().nbytes for sent in scene.sent) == TOKENS * 2 * 2 * 2 * 64 * 2
    scene.bench.assert_nothing_is_left()


def test_what_is_not_written_yet_comes_when_it_is():
    scene = Growing()
    scene.compute(8)
    asked = scene.ask("B", 0, 16)
    scene.pass_time(0.5)
    assert not any(transfer.ended for transfer in asked)
    scene.compute(16)
    scene.pass_time(0.5)
    assert [transfer.landed().reason for transfer in asked] == [None, None]
    assert scene.is_open


def test_an_engine_that_gives_up_or_dies_costs_no_other_and_may_itself_ask_again():
    scene = Growing()
    scene.compute(16)
    asked = scene.ask("B", 0, 20)
    scene.pass_time(0.5)
    for mover, transfer in zip(scene.engines["B"].movers, asked, strict=True):
        mover.abort(transfer, "the client left")
    scene.pass_time(0.5)
    assert scene.is_open
    scene.fetch("B", 0, 16)
    asked = scene.ask("B", 16, 20)
    scene.pass_time(0.25)
    for mover in list(scene.engines["B"].movers):
        scene.network.cut(mover._transport.name)
        scene.bench.movers.remove(mover)
    for _ in range(5):
        scene.pass_time(1.0)
        scene.compute(scene.computed + 1)
    assert scene.is_open
    scene.compute(TOKENS)
    scene.fetch("A", 0, TOKENS)
    scene.holds_all("A")
    scene.fetch("A", TOKENS, TOKENS)
    assert not scene.is_open


def test_one_that_wants_no_more_ends_it_when_nobody_is_being_served():
    scene = Growing()
    scene.compute(8)
    waiting = scene.ask("B", 0, 9)
    scene.pass_time(0.5)
    scene.fetch("A", 8, 8)
    assert scene.is_open
    scene.compute(9)
    scene.pass_time(0.5)
    assert [transfer.landed().reason for transfer in waiting] == [None, None]
    assert [sent.landed().reason for sent in scene.sent] == [None, None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verb", list(Verb))
def test_messages_that_are_lost_or_doubled_cost_time_and_no_byte(verb: Verb, seed: int):
    """Two engines ask by turns for what has come since they asked last, over a wire that loses every sixth message."""
    scene, rng = Growing(verb, deadline_s=300.0), random.Random(seed)
    scene.network.copies = lambda *message: rng.choice((0, 1, 1, 1, 1, 2))
    had = dict.fromkeys(scene.engines, 0)
    while scene.computed < TOKENS:
        scene.compute(min(TOKENS, scene.computed + rng.randrange(1, 7)))
        name = rng.choice("AB") if scene.computed < TOKENS else "A"
        for each in (name, "B") if scene.computed == TOKENS else name:
            asked = scene.ask(each, had[each], scene.computed)
            while not all(transfer.ended for transfer in asked):
                scene.pass_time(0.25)
            assert [transfer.landed().reason for transfer in asked] == [None] * len(asked)
            had[each] = scene.computed
    scene.holds_all("A")
    scene.holds_all("B")
    assert scene.is_open
    scene.network.copies = lambda *message: 1
    scene.fetch("A", TOKENS, TOKENS)
    scene.pass_time(3.0)
    assert [sent.landed().reason for sent in scene.sent] == [None, None]


def test_its_time_begins_anew_with_each_token_and_ends_it_though_it_was_served():
    scene = Growing()
    for tokens in range(1, 9):
        scene.compute(tokens)
        scene.pass_time(DEADLINE_S - 1)
    assert scene.is_open
    scene.fetch("A", 0, 8)
    scene.pass_time(DEADLINE_S + 1)
    assert [sent.result and sent.result.cause for sent in scene.sent] == [Cause.DEADLINE, Cause.DEADLINE]
    late = scene.ask("A", 0, 8)
    scene.pass_time(0.5)
    assert [transfer.result and transfer.result.cause for transfer in late] == [Cause.PEER_ABORTED]


def test_gates_of_what_nobody_asks_for_do_not_pile_up():
    scene = Growing()
    scene.compute(TOKENS)
    request = scene.source.movers[0]._source._requests["request"]
    assert request.gates is not None
    assert len(request.gates) <= 5
    assert len(request.passed) == 1
    assert scene.source.movers[0].snapshot().gauges[Gauge.OPEN_SENDS] == 1
