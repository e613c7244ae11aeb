"""Peers that are cut off, stopped, restarted and back again: what they may write is kept out of use until then.

The transport is taken to prove nothing of deregistered memory, as NIXL does not; see `test_registrations` for others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Backoff
from kvmover.transfer.memory.arena import Arena
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Transfer
from kvmover.transport import Revocation

#: What each of two source ranks has of a request, all of which is granted at once.
PART_BYTES = 100 * 512
PATIENT = replace(CONFIG, backoff=Backoff(jitter=0, attempts=5), linger_s=20.0, revocation=Revocation.UNPROVEN)
routes = pytest.mark.parametrize("route", list(Route))


def pair_of(route: Route = Route.PACKED, verb: Verb = Verb.PUSH) -> tuple[Pair, FaultyNetwork, HandClock]:
    """Two source ranks, the second of which gets into trouble."""
    network, clock = FaultyNetwork(), HandClock()
    config = replace(PATIENT, route=route, verb=verb)
    return Pair.of(Fleet(tp=2, page_tokens=4), config=config, clock=clock, network=network), network, clock


def pass_time(pair: Pair, seconds: float, step_s: float = 0.25) -> None:
    assert isinstance(pair.bench.clock, HandClock)
    for _ in range(round(seconds / step_s)):
        pair.bench.clock.now += step_s
        pair.bench.turn(2)


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


def incoming(pair: Pair) -> Arena:
    return pair.dst.movers[0]._core.incoming.arena


def name(mover: Mover) -> str:
    return mover._transport.name


def lands(pair: Pair, request: str) -> None:
    retry = Pair.request(pair.bench, pair.src, pair.dst, 100)
    transfers = [*retry.send(request), *retry.receive(request)]
    pass_time(pair, 2.0)
    pair.bench.ended(transfers)
    assert [ended(transfer).reason for transfer in transfers] == [None] * 3
    retry.assert_landed()


def in_flight(pair: Pair, network: FaultyNetwork) -> tuple[list[Transfer], Transfer]:
    sent, (landed,) = pair.send(), pair.receive()
    network.hold()
    pair.bench.turn(4)
    return sent, landed


@routes
def test_what_a_cut_off_peer_may_write_comes_back_when_it_is_reached_again_and_has_drained(route: Route):
    pair, network, _ = pair_of(route)
    sent, landed = in_flight(pair, network)
    trouble = pair.src.movers[1]
    network.cut(name(trouble))
    pass_time(pair, 4.0)
    assert ended(landed).cause is Cause.PEER_LOST
    if route is Route.PACKED:
        assert incoming(pair).quarantined_bytes == 2 * PART_BYTES  # the other rank's writes have not ended either
        assert not landed.quarantined
    else:
        assert (ended(landed).quarantined, landed.quarantined) == (True, True)
    network.deliver()  # what it had posted lands, late, where nobody else is
    pass_time(pair, 2.0)
    if route is Route.PACKED:
        assert incoming(pair).quarantined_bytes == incoming(pair).reserved_bytes == PART_BYTES
        pair.dst.assert_holds(pair.before)
    assert landed.quarantined == (route is not Route.PACKED)
    network.heal(name(trouble))
    pass_time(pair, 8.0)
    assert incoming(pair).reserved_bytes == 0
    assert not landed.quarantined
    assert all(transfer.ended for transfer in sent)
    assert pair.dst.movers[0].meter.counts[Count.RECONNECTS] == 1
    lands(pair, "again")
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
@pytest.mark.parametrize("successor", [True, False])
def test_what_a_dead_process_may_write_comes_back_whether_or_not_another_takes_its_place(route: Route, successor: bool):
    """Its lease ends on its own clock, and what it posted before has landed `linger_s` later. A process that maps our
    pages is waited for itself, and it would have to die: `test_mapped_processes.py` kills one.
    """
    pair, network, clock = pair_of(route)
    _, landed = in_flight(pair, network)
    heard = clock.now
    dead = pair.src.movers[1]
    network.cut(name(dead))
    pair.bench.movers.remove(dead)
    if successor:
        pair.src.movers[1] = pair.bench.mover(Place("prefill", pair.src.fleet, 1), pair.src.pools[1])
        pair.dst.movers[0].connect(pair.src.movers[1].card)  # it does not call back: this is all that is heard of it
    network.deliver()
    pass_time(pair, 4.0)
    assert ("restarted as" in str(ended(landed).reason)) == successor
    held = (incoming(pair).quarantined_bytes, landed.quarantined)
    assert held == ((PART_BYTES, False) if route is Route.PACKED else (0, True))
    pass_time(pair, heard + PATIENT.lease_s + PATIENT.linger_s - clock.now - 1)
    assert (incoming(pair).quarantined_bytes, landed.quarantined) == held
    pass_time(pair, 2.0)
    assert (incoming(pair).quarantined_bytes, landed.quarantined) == (0, False)
    if successor:
        lands(pair, "again")
    pair.bench.movers.append(dead)
    pair.bench.turn()


@routes
@pytest.mark.parametrize("verb", list(Verb))
def test_a_source_that_was_stopped_longer_than_anybody_waits_harms_nobody_when_it_goes_on(route: Route, verb: Verb):
    """SIGSTOP, then CONT: it goes on writing what it was told to, into memory that is kept for it."""
    pair, network, _ = pair_of(route, verb)
    sent, landed = in_flight(pair, network)
    stopped = pair.src.movers[1]
    pair.bench.movers.remove(stopped)
    pass_time(pair, PATIENT.silence_s + PATIENT.drain_s + 1)
    assert ended(landed).cause is Cause.PEER_LOST
    assert f"{name(stopped)} has answered nothing" in str(ended(landed).reason)
    pair.bench.movers.append(stopped)
    network.deliver()
    pass_time(pair, 20.0)
    for transfer in (*sent, landed):
        assert ended(transfer).reason
        assert not transfer.quarantined
    assert incoming(pair).reserved_bytes == 0
    lands(pair, "again")
    pair.bench.assert_nothing_is_left()


def test_a_destination_that_was_stopped_is_back_when_it_goes_on():
    pair, network, _ = pair_of()
    sent, landed = in_flight(pair, network)
    (stopped,) = pair.dst.movers
    pair.bench.movers.remove(stopped)
    network.deliver()
    pass_time(pair, PATIENT.silence_s + PATIENT.drain_s + 1)
    assert {ended(transfer).cause for transfer in sent} == {Cause.PEER_LOST}
    pair.bench.movers.append(stopped)
    pass_time(pair, 20.0)
    assert landed.ended
    assert not landed.quarantined
    lands(pair, "again")
    pair.bench.assert_nothing_is_left()


def test_a_peer_that_never_comes_back_costs_its_own_regions_for_a_while_and_nothing_else():
    pair, network, clock = pair_of()
    _, landed = in_flight(pair, network)
    trouble = pair.src.movers[1]
    network.cut(name(trouble))
    network.deliver()
    pass_time(pair, 20.0)
    assert ended(landed).cause is Cause.PEER_LOST
    assert incoming(pair).quarantined_bytes == incoming(pair).reserved_bytes == PART_BYTES
    pass_time(pair, 40.0)
    assert clock.now > 1000 + PATIENT.lease_s + PATIENT.linger_s
    assert incoming(pair).reserved_bytes == 0
    other = pair.bench.engine("other", Fleet(page_tokens=4), config=PATIENT)
    pair.dst.connect(other)
    pair.bench.turn()
    healthy = Pair.request(pair.bench, other, pair.dst, 100)
    transfers = [*healthy.send("healthy"), *healthy.receive("healthy")]
    pair.bench.ended(transfers)
    healthy.assert_landed()
    dials = pair.dst.movers[0]._reconnector.due(clock.now + 1e6)
    assert dials == ([], [])  # given up


@routes
@pytest.mark.parametrize("when", ["while it is awaited", "when it has been given up"])
def test_a_process_that_is_known_to_be_dead_is_forgotten_and_keeps_nothing(route: Route, when: str):
    pair, network, clock = pair_of(route)
    _, landed = in_flight(pair, network)
    dead, (waits,) = pair.src.movers[1], pair.dst.movers
    network.cut(name(dead))
    pair.bench.movers.remove(dead)
    network.deliver()
    if when == "when it has been given up":
        pass_time(pair, 4.0)
        assert ended(landed).quarantined == (route is not Route.PACKED)
        assert len(waits._destination.quarantine) == 1
    waits.forget("prefill", 1)
    waits.forget("prefill", 1)
    waits.forget("nobody", 7)
    pass_time(pair, 1.0)
    assert ended(landed).cause is Cause.PEER_LOST
    assert not landed.quarantined
    assert incoming(pair).reserved_bytes == 0
    assert waits.ranks("prefill") == {0}
    assert waits._reconnector.due(clock.now + 1e6) == ([], [])
    pair.bench.assert_nothing_is_left()


def test_a_peer_that_is_cut_off_while_nothing_is_under_way_is_missed_by_nobody_until_it_is_asked():
    pair, network, _ = pair_of()
    trouble = pair.src.movers[1]
    network.cut(name(trouble))
    pass_time(pair, 4.0)
    (landed,) = pair.receive()
    pass_time(pair, 4.0)
    assert ended(landed).cause is Cause.PEER_LOST
    network.heal(name(trouble))
    pass_time(pair, 8.0)
    lands(pair, "again")
    pair.bench.assert_nothing_is_left()


def test_a_request_lands_although_each_of_its_peers_is_cut_off_for_a_moment_when_it_is_not_needed():
    """Everything of rank 1 has landed when it is lost: its part is whole."""
    pair, network, _ = pair_of()
    landed = pair.receive()
    pair.bench.turn()
    late = pair.src.movers[1].send("request", pair.src_tables[1])
    pair.bench.turn(60)
    network.cut(name(pair.src.movers[1]))
    sent = pair.src.movers[0].send("request", pair.src_tables[0])
    pass_time(pair, 2.0)
    assert ended(landed[0]).reason is None
    pair.assert_landed()
    network.heal(name(pair.src.movers[1]))
    pass_time(pair, 8.0)
    assert ended(sent).reason is None
    assert ended(late).reason
    pair.bench.assert_nothing_is_left()


# Who has asked, and dies before there is anything to fetch


def asked_early(verb: Verb = Verb.PULL) -> tuple[Pair, FaultyNetwork, Transfer]:
    """Two destination ranks, the second of which has asked too and is then cut off."""
    network, clock = FaultyNetwork(), HandClock()
    config = replace(PATIENT, verb=verb, deadline_s=300.0)
    pair = Pair.of(dst=Fleet(tp=2, page_tokens=4), config=config, clock=clock, network=network)
    first, _ = pair.receive()
    pair.bench.turn()
    assert len(pair.src.movers[0]._source.early) == 2
    network.cut(name(pair.dst.movers[1]))
    return pair, network, first


@pytest.mark.parametrize("verb", list(Verb))
def test_a_destination_that_dies_after_asking_early_is_noticed_and_its_request_ends_when_it_is_sent(verb: Verb):
    """As it would have if it had been sent before: the pages come back at once, and the other rank is told."""
    pair, _, first = asked_early(verb)
    source = pair.src.movers[0]
    pass_time(pair, 2.0)
    assert source._source.early.peers == {name(pair.dst.movers[0])}
    (sent,) = pair.send()
    pair.bench.turn(12)
    assert ended(sent).cause is Cause.PEER_LOST
    assert name(pair.dst.movers[1]) in str(ended(sent).reason)
    assert not sent.quarantined
    assert ended(first).reason == ended(sent).reason


def test_a_destination_that_dies_after_asking_early_ends_a_request_that_is_sent_before_that_is_noticed():
    pair, _, first = asked_early()
    (sent,) = pair.send()
    pass_time(pair, 2.0)
    assert ended(sent).cause is Cause.PEER_LOST
    assert ended(first).reason == ended(sent).reason


def test_a_destination_that_is_back_and_asks_again_is_served():
    pair, network, first = asked_early()
    pass_time(pair, 2.0)
    network.heal(name(pair.dst.movers[1]))
    pass_time(pair, 10.0)
    assert not first.ended
    again = pair.dst.movers[1].receive("request", "prefill", range(pair.tokens), pair.dst_tables[1])
    pass_time(pair, 2.0)
    (sent,) = pair.send()
    pass_time(pair, 10.0)
    assert [ended(transfer).reason for transfer in (sent, first, again)] == [None] * 3
    pair.assert_landed()


def test_another_engine_that_asks_instead_of_a_dead_one_is_served():
    pair, _, _ = asked_early()
    pair.bench.movers.remove(pair.dst.movers[0])  # the whole engine
    pair.bench.network.cut(name(pair.dst.movers[0]))
    pass_time(pair, 2.0)
    spare = pair.bench.engine("spare", Fleet(page_tokens=4))
    spare.connect(pair.src)
    pair.bench.turn()
    tables = spare.tables(pair.tokens)
    (late,) = spare.receive("request", "prefill", range(pair.tokens), tables)
    pair.bench.turn()
    (sent,) = pair.send()
    pass_time(pair, 4.0)
    assert [ended(transfer).reason for transfer in (sent, late)] == [None] * 2


def test_a_request_that_a_dead_destination_never_asked_for_waits_for_another():
    pair, _, _ = asked_early()
    (sent,) = pair.src.send("another", pair.src_tables)
    pass_time(pair, 20.0)
    assert not sent.ended
