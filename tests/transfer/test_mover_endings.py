"""Requests that end before they begin, and what is said about them afterwards: at once, once, and with the reason."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Transfer
from kvmover.transfer.tombstones import MEMORY_S

ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])
WANT = wire.Want("request", 1, 0, 100, Route.PACKED, Replicas.STRIPE, 4096)


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


def stands_still(pair: Pair) -> None:
    """No message is answered by another for ever."""
    counts = [mover.meter.counts for mover in pair.bench.movers]
    pair.bench.turn(12)
    before = [count[Count.MESSAGES] for count in counts]
    pair.bench.turn(12)
    assert [count[Count.MESSAGES] for count in counts] == before


def still_works(pair: Pair) -> None:
    transfers = [*pair.send("afterwards"), *pair.receive("afterwards")]
    pair.bench.ended(transfers)
    assert not any(ended(transfer).reason for transfer in transfers)
    pair.assert_landed()


# Refusals


@ways
@pytest.mark.parametrize("when", ["before it is asked for", "after"])
def test_a_request_that_a_source_refuses_ends_at_once_with_its_reason(verb: Verb, route: Route, when: str):
    """The engine's prefill failed, or it never had the request: nobody waits for a deadline."""
    clock = HandClock()  # stands still
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, verb=verb, route=route), clock=clock)
    if when == "after":
        (landed,) = pair.receive()
        pair.bench.turn()
    pair.src.movers[1].refuse("request", "prefill failed")
    if when != "after":
        (landed,) = pair.receive()
    pair.bench.turn(12)
    assert (ended(landed).reason, ended(landed).cause) == ("prefill failed", Cause.PEER_ABORTED)
    assert not landed.quarantined
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


def test_a_refused_request_can_be_sent_after_all():
    pair = Pair.of()
    pair.src.movers[0].refuse("request", "not yet")
    (landed,) = pair.receive()
    pair.bench.ended([landed])
    assert ended(landed).reason == "not yet"
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.ended(transfers)
    assert not any(ended(transfer).reason for transfer in transfers)
    pair.assert_landed()


@ways
def test_a_request_that_was_given_up_before_anybody_asked_tells_who_asks_later(verb: Verb, route: Route):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, verb=verb, route=route), clock=clock)
    for mover, transfer in zip(pair.src.movers, pair.send(), strict=True):
        mover.abort(transfer, "out of memory")
    pair.bench.turn()
    (landed,) = pair.receive()
    pair.bench.turn(12)
    assert ended(landed).reason == "out of memory"
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


@ways
def test_one_source_that_fails_ends_the_request_for_all_others(verb: Verb, route: Route):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, verb=verb, route=route), clock=clock)
    landed = pair.receive()
    pair.bench.turn()
    other = pair.src.movers[0].send("request", pair.src_tables[0])
    pair.src.movers[1].refuse("request", "prefill failed")
    pair.bench.turn(12)
    for transfer in (*landed, other):
        assert ended(transfer).reason == "prefill failed"
        assert not transfer.quarantined
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


# Requests that are over


def served(pair: Pair) -> None:
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.turn(60)
    assert not any(ended(transfer).reason for transfer in transfers)


@ways
def test_a_request_that_was_served_is_not_waited_for_when_it_is_asked_for_again(verb: Verb, route: Route):
    """The clock stands still: nobody waits for a deadline, nor for what is said again."""
    clock = HandClock()
    config = replace(CONFIG, verb=verb, route=route)
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config, clock=clock)
    served(pair)
    (again,) = pair.receive()
    pair.bench.turn(12)
    assert (ended(again).reason, ended(again).cause) == ("it was served already", Cause.PEER_ABORTED)
    assert not again.quarantined
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


def test_a_request_that_was_served_is_not_waited_for_by_another_engine_either():
    pair = Pair.of(clock=HandClock())
    served(pair)
    spare = pair.bench.engine("spare", Fleet(tp=2, page_tokens=4))
    spare.connect(pair.src)
    pair.bench.turn()
    late = spare.receive("request", "prefill", range(pair.tokens), spare.tables(pair.tokens))
    pair.bench.turn(12)
    assert {ended(transfer).reason for transfer in late} == {"it was served already"}
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


def test_a_request_whose_deadline_passed_before_it_was_asked_for_says_so_to_who_asks_then():
    clock = HandClock()
    pair = Pair.of(clock=clock)
    (sent,) = pair.send()
    clock.now += CONFIG.deadline_s
    pair.bench.turn()
    (late,) = pair.receive()
    pair.bench.turn(12)
    assert ended(late).reason == ended(sent).reason == "deadline passed before every destination asked"
    pair.bench.assert_nothing_is_left()


def test_a_request_that_not_every_destination_has_asked_for_is_not_over():
    pair = Pair.of(dst=Fleet(tp=2, page_tokens=4), clock=HandClock())
    (sent,) = pair.send()
    early = pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), pair.dst_tables[0])
    pair.bench.turn(60)
    assert ended(early).landed
    assert not sent.ended
    late = pair.dst.movers[1].receive("request", "prefill", range(pair.tokens), pair.dst_tables[1])
    pair.bench.turn(60)
    assert ended(late).landed
    assert ended(sent).landed
    pair.assert_landed()


def test_a_request_that_was_served_can_be_sent_again():
    pair = Pair.of(clock=HandClock())
    served(pair)
    served(pair)
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_a_name_that_may_come_again_is_waited_for_once_it_is_opened():
    """Where somebody else makes names up, a destination may ask before the source knows of the second request."""
    pair = Pair.of(clock=HandClock())
    served(pair)
    pair.src.movers[0].reopen("request")
    (again,) = pair.receive()
    pair.bench.turn(12)
    assert not again.ended
    pair.send()
    pair.bench.turn(60)
    assert ended(again).landed
    pair.assert_landed()


def test_how_requests_ended_is_forgotten_after_an_hour():
    clock = HandClock()
    pair = Pair.of(clock=clock)
    others = [[np.arange(0, 50, 2)]]
    served(pair)
    pair.src.movers[0].refuse("other", "not now")
    clock.now += MEMORY_S - 1
    pair.bench.turn()
    late = [*pair.receive(), *pair.dst.receive("other", "prefill", range(100), others)]
    pair.bench.turn(12)
    assert [ended(transfer).reason for transfer in late] == ["it was served already", "not now"]
    clock.now += 1
    pair.bench.turn()
    late = [*pair.receive(), *pair.dst.receive("other", "prefill", range(100), others)]
    pair.bench.turn(12)
    assert not any(transfer.ended for transfer in late)


# Page tables


BAD_TABLES = {
    "too short": [np.arange(24)],
    "of nothing": [np.array([], np.int64)],
    "outside the pool": [np.arange(40, 65)],
    "before the pool": [np.arange(-1, 24)],
}


def offered_unchecked(mover: Mover, request: str, tables: list[np.ndarray]) -> Transfer:
    """As `send` of a process that checks nothing: what a destination has to live with."""
    transfer = Transfer(request, mover._core.clock())
    mover._source.send(transfer, tuple(tables), None, None, mover.config.deadline_s)
    return transfer


@ways
@pytest.mark.parametrize("tables", BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_source_with_wrong_page_tables_fails_both_sides_before_a_byte_moves(
    verb: Verb, route: Route, tables: list[np.ndarray]
):
    clock = HandClock()
    network = FaultyNetwork()
    config = replace(CONFIG, verb=verb, route=route)
    pair = Pair.of(config=config, clock=clock, network=network)
    sent, (landed,) = offered_unchecked(pair.src.movers[0], "request", tables), pair.receive()[0:1]
    pair.bench.turn(12)
    assert "page" in str(ended(landed).reason)
    if "positions" not in str(ended(landed).reason):  # too many to even look is the destination's fault
        assert ended(sent).reason == ended(landed).reason
    assert network.operations == 0
    pair.dst.assert_holds(pair.before)
    if not sent.ended:
        pair.src.movers[0].abort(sent, "over")
    stands_still(pair)
    pair.bench.assert_nothing_is_left()
    still_works(pair)


@pytest.mark.parametrize("tables", [(), (b"abc",), (np.full(25, 64, "<i4").tobytes(),), (b"\xff" * 100,)], ids=len)
def test_page_tables_of_a_source_that_cannot_be_right_are_not_read_from(tables: tuple[bytes, ...]):
    pair = Pair.of(config=replace(CONFIG, verb=Verb.PULL, route=Route.DIRECT), clock=HandClock())
    (landed,) = pair.receive()
    target, liar = pair.dst.movers[0], pair.src.movers[0]._transport
    generation = target._destination.generation
    liar.notify(target._transport.name, wire.encode(wire.Staged("request", generation, 3, 0, pages=tables)))
    pair.bench.turn(12)
    assert ended(landed).reason
    pair.dst.assert_holds(pair.before)
    pair.bench.assert_nothing_is_left()
    still_works(pair)


# What is said too late, or makes no sense


def test_news_of_what_both_sides_have_forgotten_differently_are_not_answered_for_ever():
    """The destination has landed, the source has failed, and each tells the other so, once."""
    clock = HandClock()
    pair = Pair.of(clock=clock, network=FaultyNetwork())
    network = pair.bench.network
    assert isinstance(network, FaultyNetwork)
    network.copies = lambda source, target, message: int(not isinstance(message, wire.Done))
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.ended([landed])
    assert ended(landed).landed
    assert not sent.ended
    network.copies = lambda source, target, message: 2
    pair.src.movers[0].abort(sent, "the user left")
    clock.now += CONFIG.drain_s / 2
    pair.bench.turn(12)
    clock.now += CONFIG.drain_s
    pair.bench.turn(12)
    assert ended(sent).reason == "the user left"
    generation = pair.dst.movers[0]._destination.generation
    for message in (wire.Done("request", generation), wire.Granted("request", generation, ())):
        pair.dst.movers[0]._transport.notify(pair.src.movers[0]._transport.name, wire.encode(message))
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("known", ["landed", "failed", "unknown"])
@pytest.mark.parametrize("source_has", ["landed", "failed", "unknown"])
@pytest.mark.parametrize("verb", list(Verb))
def test_whatever_is_said_of_an_attempt_that_is_over_the_talk_comes_to_an_end(verb: Verb, source_has: str, known: str):
    pair = Pair.of(config=replace(CONFIG, verb=verb), clock=HandClock())
    source, target = pair.src.movers[0], pair.dst.movers[0]
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.turn(40)
    assert sent.ended
    assert landed.ended
    generation = target._destination.generation
    memory = source._source._closed
    if source_has == "failed":
        memory.close(("request", target._transport.name), generation, "the user left", 1e9)
    elif source_has == "unknown":
        memory._attempts.forget(("request", target._transport.name))
    if known == "failed":
        target._destination._ended.keep(("request", generation), "the user left", 1e9)
    elif known == "unknown":
        target._destination._ended.forget(("request", generation))
    about = ("request", generation)
    for message in (wire.Offered(*about, ()), wire.Chunk(*about, 0), wire.Staged(*about, 0, 0), wire.Aux(*about, b"")):
        source._transport.notify(target._transport.name, wire.encode(message))
    for message in (wire.Granted(*about, ()), wire.Taken(*about, 0), wire.Done(*about), wire.Abort(*about, "no")):
        target._transport.notify(source._transport.name, wire.encode(message))
    stands_still(pair)
    pair.bench.assert_nothing_is_left()


OFFERS = [((0, 2), (1, 3)), ((0, 26),), ((3, 1),), ((0, 2**62),), ((0, 1),) * 1000, ((2**62, 2**62),)]


@pytest.mark.parametrize("ready", OFFERS, ids=lambda ready: str(ready)[:24])
@pytest.mark.parametrize("route", list(Route))
def test_an_offer_that_makes_no_sense_fails_that_attempt_and_the_loop_goes_on(
    ready: tuple[tuple[int, int], ...], route: Route
):
    pair = Pair.of(config=replace(CONFIG, route=route), clock=HandClock())
    (landed,) = pair.receive()
    target, liar = pair.dst.movers[0], pair.src.movers[0]._transport
    liar.notify(target._transport.name, wire.encode(wire.Offered("request", target._destination.generation, ready)))
    pair.bench.turn(12)
    assert "offers chunks" in str(ended(landed).reason)
    assert ended(landed).cause is Cause.PROTOCOL
    pair.bench.assert_nothing_is_left()
    still_works(pair)


@pytest.mark.parametrize("offset", [(1 << 20) - 4095, 1 << 20, 2**62])
def test_a_chunk_that_is_staged_outside_of_the_staging_memory_is_not_read(offset: int):
    pair = Pair.of(config=replace(CONFIG, verb=Verb.PULL), clock=HandClock())
    (landed,) = pair.receive()
    target, liar = pair.dst.movers[0], pair.src.movers[0]._transport
    generation = target._destination.generation
    for message in (wire.Offered("request", generation, ((0, 25),)), wire.Staged("request", generation, 0, offset)):
        liar.notify(target._transport.name, wire.encode(message))
        pair.bench.turn(1)
    pair.bench.turn(12)
    assert "outside of its staging memory" in str(ended(landed).reason)
    pair.dst.assert_holds(pair.before)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    "change",
    [
        *({"chunk_layers": layers} for layers in (-1, -(2**62), 1, 2**62)),
        *({"aux": aux} for aux in ((-1,), (2**62,), tuple(range(1000)))),
        *({"verb": Verb.PULL, "route": route} for route in Route),
        {"verb": Verb.PULL, "stop": 2**62},
        {"digests": True},
        {"generation": -5},
        {"generation": 2**62},
    ],
    ids=str,
)
def test_a_want_of_odd_numbers_is_answered_and_the_loop_goes_on(change: dict[str, object]):
    pair = Pair.of(clock=HandClock())
    (sent,) = pair.send()
    source, speaker = pair.src.movers[0], pair.dst.movers[0]._transport
    speaker.notify(source._transport.name, wire.encode(msgspec.structs.replace(WANT, **change)))
    pair.bench.turn(12)
    source.abort(sent, "over")
    pair.bench.turn(12)
    assert pair.bench.clock() == 1000.0
    still_works(pair)


@pytest.mark.parametrize("how", ["close", "disconnect"])
def test_an_orderly_parting_is_no_warning(how: str, caplog: pytest.LogCaptureFixture):
    """Whoever stops an engine is not told that a peer was lost: it is what was asked for."""
    caplog.set_level(logging.INFO, "kvmover")
    pair = Pair.of()
    target = pair.dst.movers[0]
    asked = target.receive("request", "prefill", range(pair.tokens), pair.dst_tables[0])
    pair.bench.turn()
    target.close() if how == "close" else target.disconnect("prefill")
    assert not ended(asked).landed
    said = [record for record in caplog.records if record.getMessage().startswith("lost prefill")]
    assert said
    assert {record.levelname for record in said} == {"INFO"}
