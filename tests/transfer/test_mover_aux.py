"""Payloads beside the cache: they reach every rank that waits for them, once, whatever becomes of messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import PlanError
from kvmover.layout import Fleet, Pool
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.protocol.wire import MAX_AUX_BYTES, Verb
from kvmover.transfer.result import Gate, Result, Transfer

TOKEN = b"first token"
verbs = pytest.mark.parametrize("verb", list(Verb))


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


def pair_of(verb: Verb, src: Fleet | None = None, dst: Fleet | None = None) -> tuple[Pair, FaultyNetwork]:
    network = FaultyNetwork()
    return Pair.of(src, dst, config=replace(CONFIG, verb=verb), clock=HandClock(), network=network), network


def receive(pair: Pair, *aux_from: int, start: int = 0) -> list[Transfer]:
    return pair.dst.receive("request", "prefill", range(start, pair.tokens), pair.dst_tables, aux_from)


@verbs
def test_every_destination_rank_gets_the_payload_of_the_rank_that_has_it(verb: Verb):
    """The last stage of the pipeline computes the first token, and no destination of layers of the first one has it."""
    pair, _ = pair_of(verb, Fleet(pp=2, page_tokens=4), Fleet(pp=2, tp=2, page_tokens=4))
    landed = receive(pair, 1)
    pair.bench.turn()
    sent = [
        mover.send("request", table, aux=TOKEN) for mover, table in zip(pair.src.movers, pair.src_tables, strict=True)
    ]
    pair.bench.ended([*sent, *landed])
    assert [ended(transfer).aux for transfer in landed] == [{1: TOKEN}] * 4
    assert [ended(transfer).reason for transfer in sent] == [None, None]
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@verbs
def test_payloads_of_several_ranks_are_told_apart(verb: Verb):
    pair, _ = pair_of(verb, Fleet(tp=2, page_tokens=4))
    landed = receive(pair, 0, 1)
    sent = [
        mover.send("request", table, aux=b"of %d" % rank)
        for rank, (mover, table) in enumerate(zip(pair.src.movers, pair.src_tables, strict=True))
    ]
    pair.bench.ended([*sent, *landed])
    assert ended(landed[0]).aux == {0: b"of 0", 1: b"of 1"}


@verbs
def test_a_payload_may_come_long_after_the_last_chunk_and_the_transfer_waits_for_it(verb: Verb):
    pair, _ = pair_of(verb)
    (sent,), (landed,) = pair.send(), receive(pair, 0)
    pair.bench.turn(60)
    pair.assert_landed()
    assert not landed.ended
    assert not sent.ended
    pair.src.movers[0].attach(sent, TOKEN)
    pair.bench.ended([sent, landed])
    assert ended(landed).aux == {0: TOKEN}
    pair.bench.assert_nothing_is_left()


@verbs
def test_a_payload_without_a_single_chunk_is_still_a_payload(verb: Verb):
    """Everything was in the destination's own cache, but for what comes next."""
    pair, _ = pair_of(verb)
    landed = receive(pair, 0, start=100)
    pair.bench.turn()
    assert not landed[0].ended
    sent = [pair.src.movers[0].send("request", pair.src_tables[0], aux=TOKEN)]
    pair.bench.ended([*sent, *landed])
    assert (ended(landed[0]).aux, ended(landed[0]).nbytes) == ({0: TOKEN}, 0)
    pair.bench.assert_nothing_is_left()


def test_a_payload_that_nobody_asked_for_stays_where_it_is():
    pair, _ = pair_of(Verb.PUSH)
    sent = [pair.src.movers[0].send("request", pair.src_tables[0], aux=TOKEN)]
    landed = receive(pair)
    pair.bench.ended([*sent, *landed])
    assert ended(landed[0]).aux == {}


@verbs
def test_messages_that_arrive_twice_bring_one_payload(verb: Verb):
    pair, network = pair_of(verb, Fleet(tp=2, page_tokens=4), Fleet(tp=2, page_tokens=4))
    network.copies = lambda source, target, message: 2
    landed = receive(pair, 0)
    sent = [
        mover.send("request", table, aux=TOKEN) for mover, table in zip(pair.src.movers, pair.src_tables, strict=True)
    ]
    pair.bench.ended([*sent, *landed])
    assert [ended(transfer).aux for transfer in landed] == [{0: TOKEN}] * 2
    pair.assert_landed()
    pair.bench.turn(20)
    pair.bench.assert_nothing_is_left()


@verbs
def test_a_payload_that_is_lost_is_asked_for_again(verb: Verb):
    pair, network = pair_of(verb)
    lost = iter([0, 0])
    network.copies = lambda source, target, message: next(lost, 1) if isinstance(message, wire.Aux) else 1
    sent = [pair.src.movers[0].send("request", pair.src_tables[0], aux=TOKEN)]
    landed = receive(pair, 0)
    clock = pair.bench.clock
    assert isinstance(clock, HandClock)
    for _ in range(40):
        pair.bench.turn(2)
        clock.now += CONFIG.resend_s / 8
    assert next(lost, None) is None
    pair.bench.ended([*sent, *landed])
    assert ended(landed[0]).aux == {0: TOKEN}
    assert clock.now - 1000 < CONFIG.deadline_s


def test_a_payload_of_a_rank_that_was_not_asked_is_not_taken_for_that_of_another():
    """An engine of the same shape has a rank 0 too, and knows, say from a log, what we call the request."""
    pair, _ = pair_of(Verb.PUSH)
    (landed,) = receive(pair, 0)
    spec = pair.src.pools[0][0].spec
    liar = pair.bench.mover(Place("twin", pair.src.fleet, 0), [Pool.zeros(spec)])
    target = pair.dst.movers[0]
    liar.connect(target.card)
    pair.bench.turn()
    liar._transport.notify(
        target._transport.name, wire.encode(wire.Aux("request", target._destination.generation, b"of somebody else"))
    )
    pair.bench.turn()
    sent = [pair.src.movers[0].send("request", pair.src_tables[0], aux=TOKEN)]
    pair.bench.ended([*sent, landed])
    assert ended(landed).aux == {0: TOKEN}


def test_a_payload_is_given_once_and_has_to_fit():
    pair, _ = pair_of(Verb.PUSH)
    (mover,) = pair.src.movers
    with pytest.raises(PlanError, match=f"{MAX_AUX_BYTES + 1} bytes is over the limit of {MAX_AUX_BYTES}"):
        mover.send("large", pair.src_tables[0], aux=bytes(MAX_AUX_BYTES + 1))
    sent = mover.send("request", pair.src_tables[0])
    with pytest.raises(PlanError, match="over the limit"):
        mover.attach(sent, bytes(MAX_AUX_BYTES + 1))
    mover.attach(sent, bytes(MAX_AUX_BYTES))
    with pytest.raises(PlanError, match=f"has a payload of {MAX_AUX_BYTES} bytes already"):
        mover.attach(sent, TOKEN)
    landed = receive(pair, 0)
    pair.bench.ended([sent, *landed])
    assert ended(landed[0]).aux == {0: bytes(MAX_AUX_BYTES)}
    mover.attach(sent, TOKEN)  # of a request that is over: nobody waits
    pair.bench.assert_nothing_is_left()


def test_a_rank_of_another_engine_says_nothing_beside_the_cache():
    """Its number is that of the rank that is awaited."""
    pair, _ = pair_of(Verb.PUSH)
    target = pair.dst.movers[0]
    other = pair.bench.mover(Place("other", Fleet(page_tokens=4), 0), [Pool.zeros(pair.src.pools[0][0].spec)])
    other.connect(target.card)
    (landed,) = receive(pair, 0)
    pair.bench.turn()
    generation = target._destination.generation
    forged = wire.Aux("request", generation, b"another token")
    sent = pair.src.movers[0].send("request", pair.src_tables[0], [], TOKEN)
    pair.bench.turn()
    assert not landed.ended
    other._core.say(target._transport.name, forged)
    pair.bench.turn()
    pair.src.movers[0].produced(sent, Gate(None))
    pair.bench.ended([landed])
    assert ended(landed).aux == {0: TOKEN}
