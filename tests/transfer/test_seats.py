"""Liveness before the clock: who is dead keeps nobody out, whatever its clock said, and who is refused hears why."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import PeerAhead, PeerRefused, PeerReplaced, RefusedFor
from kvmover.layout import Fleet, Pool
from kvmover.shared_memory import HostProcess
from kvmover.transfer.config import Backoff
from kvmover.transfer.meter import Gauge
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.connections import MAX_TOLD
from kvmover.transfer.peers.liveness import IDLE_S
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import MAX_AHEAD_S, Card, Place, Rank
from kvmover.transport import LoopbackTransport

FLEET = Fleet(page_tokens=4)
HOUR_NS = 3600 * 10**9
CALM = replace(CONFIG, backoff=Backoff(jitter=0), deadline_s=300.0)


def name(mover: Mover) -> str:
    return mover._transport.name


def loaded(mover: Mover) -> set[str]:
    assert isinstance(mover._transport, LoopbackTransport)
    return set(mover._transport._peers)


def pass_time(pair: Pair, seconds: float) -> None:
    assert isinstance(pair.bench.clock, HandClock)
    for _ in range(round(seconds / 0.25)):
        pair.bench.clock.now += 0.25
        pair.bench.turn(2)


class Ahead:
    """A decode rank, and a prefill rank `before` whose clock was an hour ahead, with the memory of `pair.src`."""

    def __init__(self) -> None:
        self.network, clock = FaultyNetwork(), HandClock()
        self.pair = Pair.of(config=CALM, clock=clock, network=self.network)
        self.target, (right,) = self.pair.dst.movers[0], self.pair.src.movers
        self.network.cut(name(right))
        self.pair.bench.movers.remove(right)
        pass_time(self.pair, 2 * IDLE_S + 20)
        self.target.forget("prefill", 0)
        self.before = self.prefill(HOUR_NS)
        self.target.connect(self.before.card)
        self.pair.bench.turn()
        assert self.target.ranks("prefill") == {0}

    def prefill(self, ahead_ns: int = 0) -> Mover:
        """A process of the prefill rank whose clock is so far ahead."""
        place = Place("prefill", FLEET, 0, time.time_ns() + ahead_ns)
        return self.pair.bench.mover(place, self.pair.src.pools[0])

    def kill(self, mover: Mover) -> None:
        self.network.cut(name(mover))
        self.pair.bench.movers.remove(mover)

    def successor(self) -> Mover:
        self.pair.src.movers[0] = self.prefill()
        return self.pair.src.movers[0]

    def lands(self) -> None:
        again = Pair.request(self.pair.bench, self.pair.src, self.pair.dst, 100)
        transfers = [*again.send("after"), *again.receive("after")]
        self.pair.bench.ended(transfers)
        assert [transfer.landed().reason for transfer in transfers] == [None] * 2
        again.assert_landed()


@pytest.mark.parametrize("how", ["forget", "disconnect", "disconnect rank"])
def test_who_is_forgotten_or_disconnected_keeps_its_successor_out_by_no_clock(how: str):
    there = Ahead()
    there.kill(there.before)
    match how:
        case "forget":
            there.target.forget("prefill", 0)
        case "disconnect":
            there.target.disconnect("prefill")
        case _:
            there.target.disconnect("prefill", 0)
    there.target.connect(there.successor().card)
    there.lands()


def test_a_rank_that_was_lost_before_is_forgotten_by_disconnect_too():
    there = Ahead()
    there.kill(there.before)
    pass_time(there.pair, 2 * IDLE_S + CALM.silence_s + 2)
    assert there.target.ranks("prefill") == frozenset()
    there.target.disconnect("prefill")
    there.target.connect(there.successor().card)
    there.lands()


def test_a_seat_that_was_empty_for_as_long_as_writes_linger_goes_to_whoever_answers():
    there = Ahead()
    there.kill(there.before)
    pass_time(there.pair, 2 * IDLE_S + CALM.silence_s + 2)
    successor = there.successor()
    with pytest.raises(PeerReplaced, match=f"generation .* {name(there.before)}; its seat is free in [23][0-9] s"):
        there.target.connect(successor.card)
    assert there.target.meter.refused == {RefusedFor.SEAT: 1}
    pass_time(there.pair, CALM.linger_s)
    there.target.connect(successor.card)
    there.lands()


def test_who_is_refused_hears_why_at_once_and_gets_the_seat_of_a_silent_process_by_asking():
    """Nobody awaited anything from the dead process, so its end is noticed only by asking it."""
    there = Ahead()
    there.kill(there.before)
    successor = there.successor()
    successor.connect(there.target.card)
    waits = successor.receive("early", "decode", range(100), there.pair.src_tables[0])
    there.pair.bench.turn()
    assert waits.result is not None
    assert waits.result.reason == (
        f"rank 0 of decode, generation {there.target._core.card.place.generation} refused this side: {name(successor)},"
        f" {successor._core.card.place.text()}, was replaced by generation"
        f" {there.before._core.card.place.generation} {name(there.before)}"
    )
    assert successor.ranks("decode") == frozenset()
    assert there.target._connections._told == {name(successor)}
    pass_time(there.pair, 120)
    assert there.target.ranks("prefill") == {0}
    assert name(successor) in loaded(there.target)
    assert not there.target._connections._told
    there.lands()


def test_who_is_refused_asks_again_ever_more_seldom_and_gives_up():
    there = Ahead()  # and the process that has the seat lives
    successor = there.successor()
    successor.connect(there.target.card)
    asked = list[float]()
    for _ in range(1600):
        before = there.target.meter.refused[RefusedFor.SEAT]
        pass_time(there.pair, 0.25)
        assert isinstance(there.pair.bench.clock, HandClock)
        asked += [there.pair.bench.clock.now] * (there.target.meter.refused[RefusedFor.SEAT] - before)
    waits = [after - before for before, after in pairwise(asked)]
    assert len(asked) == CALM.backoff.attempts
    assert waits == sorted(waits)
    assert not len(successor._reconnector)
    assert there.target.ranks("prefill") == {0}
    assert there.target._core.peers.seated(("prefill", 0)) == name(there.before), "who lives and answers keeps its seat"
    assert name(successor) not in loaded(there.target), "the connection by which it was told has ended"


def test_the_newer_of_two_that_live_has_the_seat_again_when_it_is_back():
    there = Ahead()
    there.network.cut(name(there.before))
    pass_time(there.pair, 2 * IDLE_S + CALM.silence_s + 2 + CALM.linger_s)
    successor = there.successor()
    there.target.connect(successor.card)
    there.network.heal(name(there.before))
    there.before.connect(there.target.card)
    pass_time(there.pair, 60)
    assert there.target._core.peers.seated(("prefill", 0)) == name(there.before)
    assert successor.ranks("decode") == frozenset()


def test_a_process_of_this_host_that_has_ended_makes_room_at_once():
    there = Ahead()
    ended = subprocess.Popen(["true"])
    process = HostProcess(ended.pid, 1)
    ended.wait()
    peers = there.target._core.peers
    peers._seen["prefill"].ranks[0].process = process
    there.kill(there.before)
    there.target.connect(there.successor().card)
    assert peers.get(name(there.before)) is None
    there.lands()


def test_an_engine_comes_back_in_another_fleet_however_far_ahead_its_clock_was():
    there = Ahead()
    there.kill(there.before)
    wide = Fleet(tp=2, page_tokens=4)
    engine = there.pair.bench.engine("other", wide)
    cards = []
    for rank in range(2):
        place = Place("prefill", wide, rank, 1 + rank)
        cards.append(there.pair.bench.mover(place, engine.pools[rank]).card)
    with pytest.raises(PeerReplaced, match=r"of Fleet.tp=2.*the engine came back as Fleet"):
        there.target.connect(cards[1])
    pass_time(there.pair, CALM.silence_s + 2 + CALM.linger_s)  # it was asked whether it is there
    for card in reversed(cards):
        there.target.connect(card)
    assert there.target.ranks("prefill") == {0, 1}
    there.target._core.peers.check()


def test_a_generation_of_a_time_to_come_is_refused_and_locks_nobody_out():
    """One Hello of anybody who knows the model would keep the name for ever."""
    pair = Pair.of(config=CALM, clock=HandClock())
    target, good = pair.dst.movers[0], pair.src.movers[0]
    evil = pair.bench.mover(Place("prefill", FLEET, 0, (1 << 63) - 1), [Pool.zeros(pair.src.pools[0][0].spec)])
    with pytest.raises(
        PeerAhead, match=r"began [0-9,.]+ days after now, by this side's clock; at most 1: set the clocks"
    ):
        target.connect(evil.card)
    evil.connect(target.card)
    asks = evil.receive("r", "decode", range(100), pair.src_tables[0])
    pair.bench.turn()
    assert asks.result is not None
    assert "days after now, by this side's clock" in str(asks.result.reason)
    assert target.meter.refused == {RefusedFor.SEAT: 2}
    pair.bench.movers.remove(evil)
    assert target.connect(good.card) == name(good)
    pair.bench.ended([*pair.send(), *pair.receive()])
    pair.assert_landed()


@pytest.mark.parametrize(("seconds", "is_welcome"), [(MAX_AHEAD_S, True), (MAX_AHEAD_S + 1, False)])
def test_a_day_is_what_clocks_may_differ_by(seconds: int, is_welcome: bool):
    pair = Pair.of()
    pair.dst.movers[0]._core.wall_ns = lambda: 10**18
    place = Place("other", FLEET, 0, 10**18 + seconds * 10**9)
    card = pair.bench.mover(place, [Pool.zeros(pair.src.pools[0][0].spec)]).card
    if is_welcome:
        pair.dst.movers[0].connect(card)
        return
    with pytest.raises(PeerAhead):
        pair.dst.movers[0].connect(card)


def test_a_card_is_refused_for_one_form_and_its_sender_hears_that_too():
    """Also where the card is whole and its seat is free: here this side tolerates no loss of its numbers."""
    pair = Pair.of(config=CALM, clock=HandClock())
    target, source = pair.dst.movers[0], pair.src.movers[0]
    target.disconnect("prefill")
    pair.bench.turn()
    source.disconnect("decode")

    def refuses(*_: object) -> None:
        raise PeerRefused("stored as e4m3 there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source._connections), "_admit", lambda self, rank, name: None)
        source.connect(target.card)
        patch.undo()
        patch.setattr("kvmover.transfer.peers.connections.check_forms", refuses)
        asks = source.receive("r", "decode", range(100), pair.src_tables[0])
        pair.bench.turn()
    assert str(asks.result and asks.result.reason).endswith("refused this side: stored as e4m3 there")


def test_so_many_are_told_at_a_time_and_each_connection_ends():
    clock = HandClock()
    pair = Pair.of(config=CALM, clock=clock)
    target, spec, known = pair.dst.movers[0], pair.src.pools[0][0].spec, loaded(pair.dst.movers[0])
    for _ in range(MAX_TOLD + 6):
        stranger = pair.bench.mover(Place("prefill", FLEET, 0, 1), [Pool.zeros(spec)])
        pair.bench.movers.remove(stranger)
        stranger.connect(target.card)
        stranger.poll()
        pair.bench.turn(1)
    assert target.meter.refused == {RefusedFor.SEAT: MAX_TOLD + 6}
    assert len(target._connections._told) == len(loaded(target) - known) == MAX_TOLD
    pass_time(pair, CALM.silence_s + 1)
    assert not target._connections._told
    assert loaded(target) == known


def test_who_has_a_seat_and_says_something_else_of_itself_keeps_it_and_is_told_nothing():
    pair = Pair.of()
    target, source = pair.dst.movers[0], pair.src.movers[0]
    envelope = msgspec.msgpack.decode(source._connections.card, type=Card)
    rank = msgspec.structs.replace(msgspec.msgpack.decode(envelope.body, type=Rank), host="elsewhere")
    card = msgspec.msgpack.encode(Card(envelope.speaks, envelope.fields, envelope.model, msgspec.msgpack.encode(rank)))
    source._core.say(name(target), wire.Hello(card))
    pair.bench.turn()
    assert target.meter.refused == {RefusedFor.HANDSHAKE: 1}
    assert source.ranks("decode") == target.ranks("prefill") == {0}
    pair.bench.ended([*pair.send(), *pair.receive()])
    pair.assert_landed()


def test_a_process_that_takes_the_place_of_a_forgotten_one_is_not_taken_for_dead():
    """Its generation is lower. Memory that it may still copy into would be free at once."""
    there = Ahead()
    (old,) = there.target.processes("prefill")
    there.kill(there.before)
    there.target.forget("prefill", 0)
    there.target.connect(there.successor().card)
    (new,) = there.target.processes("prefill")
    assert (old.has_ended(), new.has_ended()) == (True, False)
    there.target.disconnect("prefill")
    assert not new.has_ended(), "who was disconnected may live"
    there.target.forget("prefill", 0)
    assert new.has_ended()


def test_peers_that_nothing_is_awaited_from_are_counted_while_they_live():
    """A prefill that was killed nine times under one decode was nine peers."""
    network, clock = FaultyNetwork(), HandClock()
    pair = Pair.of(config=CALM, clock=clock, network=network)
    target, spec = pair.dst.movers[0], pair.src.pools[0][0].spec
    for number in range(9):
        mover = pair.bench.mover(Place(f"engine {number}", FLEET, 0), [Pool.zeros(spec)])
        target.connect(mover.card)
        pair.bench.turn()
        network.cut(name(mover))
        pair.bench.movers.remove(mover)
    assert target.snapshot().gauges[Gauge.PEERS] == 10
    pass_time(pair, 2 * IDLE_S + CALM.silence_s + 2)
    assert target.snapshot().gauges[Gauge.PEERS] == 1
    pass_time(pair, 300)
    assert target.snapshot().gauges[Gauge.DIALLED_PEERS] == 0
    assert target.ranks("prefill") == {0}, "who answers stays, however long nothing is asked of it"
