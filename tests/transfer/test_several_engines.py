"""Several decode engines ask one source for one request, or for its staging memory: what one does costs no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, Bench, HandClock, Pair, truth_of
from mover_network import FaultyNetwork

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.meter import Gauge
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Gate, Result, Transfer
from kvmover.transfer.tombstones import SERVED

TOKENS = 32
QUICK = replace(CONFIG, route=Route.PACKED)


class Passed:
    def query(self) -> bool:
        return True


class Scene:
    """A source of TP1 and decode engines A, B of `tp` ranks each, with a request that lies in the source's pools."""

    def __init__(self, *tp: int) -> None:
        self.clock, self.network = HandClock(), FaultyNetwork()
        self.bench = Bench((Component.attention(2, 2, 64, "bfloat16"),), QUICK, self.clock, self.network)
        self.source = self.bench.engine("prefill", Fleet(page_tokens=4))
        self.engines = [self.bench.engine(name, Fleet(tp=n, page_tokens=4)) for name, n in zip("AB", tp, strict=True)]
        for engine in self.engines:
            engine.connect(self.source)
        self.bench.turn()
        self.tables, self.truth = self.source.tables(TOKENS), truth_of(self.bench.components, TOKENS)
        self.source.fill(self.tables, self.truth)
        self.wanted = [engine.tables(TOKENS, 1) for engine in self.engines]
        self.before = [engine.snapshot() for engine in self.engines]

    def send(self, gates: list[Gate] | None = None) -> Transfer:
        return self.source.movers[0].send("request", self.tables[0], gates)

    def receive(self, engine: int, rank: int = 0) -> Transfer:
        mover, table = self.engines[engine].movers[rank], self.wanted[engine][rank]
        return mover.receive("request", "prefill", range(TOKENS), table)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            self.bench.turn(12)

    def cut(self, mover: Mover) -> None:
        self.network.cut(mover._transport.name)
        self.bench.movers.remove(mover)

    def holds(self, engine: int) -> None:
        target = self.engines[engine]
        target.assert_holds(target.landed(self.before[engine], self.wanted[engine], self.truth))


def result(transfer: Transfer) -> Result:
    assert transfer.result is not None, "it is open"
    return transfer.result


def reasons(*transfers: Transfer) -> list[str | None]:
    return [result(transfer).reason for transfer in transfers]


def test_ranks_of_two_engines_are_told_apart():
    """Rank 0 of one and rank 1 of another are not the two ranks of either."""
    scene = Scene(2, 2)
    sent = scene.send()
    first = [scene.receive(0, 0), scene.receive(1, 1)]
    scene.pass_time(1.0)
    assert reasons(*first) == [None, None]
    assert not sent.ended
    second = [scene.receive(0, 1), scene.receive(1, 0)]
    scene.pass_time(1.0)
    assert reasons(sent, *second) == [None] * 3
    scene.holds(0)
    scene.holds(1)
    scene.bench.assert_nothing_is_left()


def test_two_engines_that_ask_before_it_is_sent_are_both_served():
    scene = Scene(1, 2)
    asked = [scene.receive(0), scene.receive(1, 0), scene.receive(1, 1)]
    scene.pass_time(0.5)
    sent = scene.send()
    scene.pass_time(1.0)
    assert reasons(sent, *asked) == [None] * 4
    scene.holds(0)
    scene.holds(1)


def test_a_source_rank_that_sends_last_serves_all_who_had_asked_it_though_one_has_all_it_wants():
    """Of one token the second context-parallel rank has nothing: the first engine is done with it before it sends."""
    bench = Bench((Component.attention(2, 2, 64, "bfloat16"),), QUICK, HandClock())
    source = bench.engine("prefill", Fleet(cp=2, page_tokens=4))
    engines = [bench.engine(name, Fleet(page_tokens=4)) for name in "AB"]
    for engine in engines:
        engine.connect(source)
    bench.turn()
    tables, truth = source.tables(1), truth_of(bench.components, 1)
    source.fill(tables, truth)
    wanted = [engine.tables(1, 1) for engine in engines]
    before = [engine.snapshot() for engine in engines]
    (first,) = engines[0].receive("request", "prefill", range(1), wanted[0])
    bench.turn()
    second = engines[1].movers[0].receive("request", "prefill", range(1), None)
    bench.turn()
    sent = [source.movers[0].send("request", tables[0])]
    bench.turn(20)
    assert first.landed()
    sent.append(source.movers[1].send("request", tables[1]))
    bench.turn(20)
    engines[1].movers[0].allocated(second, wanted[1][0])
    bench.ended([*sent, second])
    assert reasons(*sent, first, second) == [None] * 4
    for engine, held, at in zip(engines, before, wanted, strict=True):
        engine.assert_holds(engine.landed(held, at, truth))
    bench.assert_nothing_is_left()


def test_who_asks_after_the_request_was_served_hears_so_at_once():
    scene = Scene(1, 1)
    asked, sent = scene.receive(0), scene.send()
    scene.pass_time(0.5)
    assert reasons(asked, sent) == [None, None]
    late = scene.receive(1)
    scene.pass_time(0.5)
    assert reasons(late) == [SERVED]


@pytest.mark.parametrize("early", [True, False], ids=["before it is sent", "while it is computed"])
def test_an_engine_that_dies_fails_no_other_that_asks(early: bool):
    scene = Scene(1, 1)
    sent = None if early else scene.send(gates=[])
    scene.receive(0)
    asked = scene.receive(1)
    scene.pass_time(0.5)
    scene.cut(scene.engines[0].movers[0])
    scene.pass_time(1.0)
    if sent is None:
        sent = scene.send()
    else:
        assert not sent.ended
        scene.source.movers[0].produced(sent, Gate(Passed()))
    scene.pass_time(2.0)
    assert reasons(asked, sent) == [None, None]
    scene.holds(1)


def test_an_engine_that_gives_up_fails_its_own_ranks_and_no_other():
    scene = Scene(2, 1)
    sent = scene.send(gates=[])
    mine, sibling, other = scene.receive(0, 0), scene.receive(0, 1), scene.receive(1)
    scene.pass_time(0.5)
    scene.engines[0].movers[0].abort(mine, "the user left")
    scene.pass_time(1.0)
    assert reasons(mine, sibling) == ["the user left"] * 2
    assert not sent.ended
    assert not other.ended
    scene.source.movers[0].produced(sent, Gate(Passed()))
    scene.pass_time(1.0)
    assert reasons(other, sent) == [None] * 2
    scene.holds(1)


@pytest.mark.parametrize("first", [0, 1], ids=["the one that is wrong asks first", "the other asks first"])
@pytest.mark.parametrize("stop", [TOKENS + 1, TOKENS + 100], ids=["a page", "many pages"])
def test_an_engine_that_asks_for_more_than_there_is_fails_no_other_that_asks(first: int, stop: int):
    """The source knows what it has, and not who is wrong."""
    scene = Scene(1, 1)
    greedy = scene.engines[0].movers[0]
    transfers = dict[int, Transfer]()
    for engine in (first, 1 - first):
        if engine:
            transfers[1] = scene.receive(1)
        else:
            transfers[0] = greedy.receive("request", "prefill", range(stop), [range(-(-stop // 4))])
    scene.pass_time(0.5)
    sent = scene.send()
    scene.pass_time(1.0)
    assert "too short" in str(reasons(transfers[0])[0])
    assert reasons(transfers[1], sent) == [None, None]
    scene.holds(1)
    scene.bench.assert_nothing_is_left()


def test_an_engine_whose_want_cannot_be_met_is_not_waited_for():
    scene = Scene(1, 1)
    sent, odd = scene.send(), scene.engines[0].movers[0]
    impossible = wire.Want("request", 1, 0, TOKENS, Route.MAPPED, Replicas.STRIPE, 4096, (bytes(4 * TOKENS // 4),))
    odd._transport.notify(scene.source.movers[0]._transport.name, wire.encode(impossible))
    asked = scene.receive(1)
    scene.pass_time(1.0)
    assert reasons(asked, sent) == [None, None]


def test_a_second_engine_is_served_after_the_first_has_failed_once_the_request_is_sent_again():
    scene = Scene(1, 1)
    scene.receive(0)
    failed = scene.send(gates=[])
    scene.pass_time(0.5)
    scene.cut(scene.engines[0].movers[0])
    scene.pass_time(1.0)
    assert result(failed).cause is Cause.PEER_LOST
    again, asked = scene.send(), scene.receive(1)
    scene.pass_time(1.0)
    assert reasons(again, asked) == [None, None]
    scene.holds(1)


@pytest.mark.parametrize("early", [True, False], ids=["before it is sent", "while it is computed"])
def test_a_request_whose_every_engine_failed_has_failed_and_gives_its_pages_back(early: bool):
    scene = Scene(1, 1)
    scene.receive(0)
    sent = None if early else scene.send(gates=[])
    scene.pass_time(0.5)
    scene.cut(scene.engines[0].movers[0])
    scene.pass_time(1.0)
    sent = sent or scene.send()
    assert result(sent).cause is Cause.PEER_LOST
    late = scene.receive(1)
    scene.pass_time(1.0)
    assert "is lost" in str(reasons(late)[0])


@pytest.mark.parametrize("verb", list(Verb))
def test_a_destination_that_stops_leaves_staging_memory_to_the_others(verb: Verb):
    """It was granted twelve chunks of 4 KiB, more than the staging arena holds, and none of them leaves it."""
    network, config = FaultyNetwork(), replace(CONFIG, arena_bytes=8 * 4096, verb=verb)
    pair = Pair.of(config=config, clock=HandClock(), network=network, tokens=48)
    bench, source = pair.bench, pair.src.movers[0]
    stopped = bench.engine("stopped", Fleet(page_tokens=4), config=replace(config, arena_bytes=32 * 4096))
    stopped.connect(pair.src)
    bench.turn()
    source.send("its", pair.src_tables[0])
    stopped.movers[0].receive("its", "prefill", range(48), stopped.tables(48)[0])
    network.hold()
    for mover in (stopped.movers[0], source, stopped.movers[0]):
        mover.poll()
    bench.movers.remove(stopped.movers[0])
    for _ in range(20):
        source.poll()
    assert source.snapshot().gauges[Gauge.OUTGOING_RESERVED_BYTES] == 4 * 4096
    assert source.snapshot().gauges[Gauge.CHUNKS_WAITING_FOR_STAGING] == 8
    network.deliver()
    if verb is Verb.PULL:  # nothing of it went, and the others are served
        transfers = [*pair.send("theirs"), *pair.receive("theirs")]
        bench.ended(transfers)
        assert reasons(*transfers) == [None, None]
        pair.assert_landed()
        assert source.snapshot().gauges[Gauge.OUTGOING_RESERVED_BYTES] == 4 * 4096


def test_destinations_take_turns_for_staging_memory():
    """One that was granted twelve chunks before another was granted two does not send them all before it."""
    network, config = FaultyNetwork(), replace(CONFIG, arena_bytes=16 * 4096)
    pair = Pair.of(config=config, clock=HandClock(), network=network, tokens=48)
    bench, source = pair.bench, pair.src.movers[0]
    other = bench.engine("other", Fleet(page_tokens=4))
    other.connect(pair.src)
    bench.turn()
    source.send("long", pair.src_tables[0])
    source.send("short", [pair.src_tables[0][0][:2]])
    first, second = pair.dst.movers[0], other.movers[0]
    first.receive("long", "prefill", range(48), pair.dst_tables[0])
    second.receive("short", "prefill", range(8), [other.tables(8)[0][0]])
    for mover in (first, second, source, first, second):
        mover.poll()
    network.hold()
    for _ in range(2):
        source.poll()
    under_way = [part.job.peer.name for part in source._writes.flights.under_way()]
    assert sorted(under_way) == sorted([first._transport.name, second._transport.name])
