"""Integrity: what is damaged on its way is noticed where it landed, sent again once, and never taken for whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mover_cases import Case, cases
from mover_fleets import CONFIG, SMALL_CHUNKS, Bench, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import BY_WIRE, Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Transfer
from tests.proofs import searched

ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in sorted(BY_WIRE)])
DIGEST = replace(CONFIG, integrity=Integrity.DIGEST)


def pair_of(verb: Verb, route: Route, integrity: Integrity = Integrity.DIGEST) -> tuple[Pair, FaultyNetwork]:
    """25 chunks from one rank to one: operation number n is chunk n."""
    network = FaultyNetwork()
    config = replace(CONFIG, verb=verb, route=route, integrity=integrity)
    return Pair.of(config=config, network=network, clock=HandClock()), network


def run(pair: Pair) -> tuple[Transfer, Transfer]:
    (sent,), (landed,) = pair.send(), pair.receive()
    clock = pair.bench.clock
    assert isinstance(clock, HandClock)
    for _ in range(200):
        pair.bench.turn(1)
        clock.now += 0.1
        if sent.ended and landed.ended:
            break
    pair.bench.turn()
    return sent, landed


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


@ways
def test_what_is_not_compared_is_taken_as_it_comes(verb: Verb, route: Route):
    """The damage of the tests below is real."""
    pair, network = pair_of(verb, route, Integrity.NONE)
    network.spoils = lambda number: number == 7
    _, landed = run(pair)
    assert (ended(landed).landed, network.spoiled) == (True, 1)
    with pytest.raises(AssertionError, match="decode rank 0"):
        pair.assert_landed()


@ways
@pytest.mark.parametrize("spoilt", [{0}, {7, 8}, set(range(25))], ids=["first", "two", "all"])
def test_a_damaged_chunk_is_counted_and_sent_once_more(verb: Verb, route: Route, spoilt: set[int]):
    pair, network = pair_of(verb, route)
    network.spoils = lambda number: number in spoilt
    sent, landed = run(pair)
    assert (ended(landed).reason, ended(sent).reason) == (None, None)
    assert network.spoiled == ended(landed).resent == len(spoilt)
    assert network.operations == 25 + len(spoilt)
    assert pair.dst.movers[0].meter.counts[Count.MISMATCHED_CHUNKS] == len(spoilt)
    assert ended(landed).nbytes == pair.dst.movers[0].meter.counts[Count.RECEIVED_BYTES] == 100 * 1024
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@ways
def test_a_chunk_that_is_damaged_twice_fails_the_request_on_both_sides(verb: Verb, route: Route):
    pair, network = pair_of(verb, route)
    network.spoils = lambda number: number in (7, 25)  # the 26th is the 8th once more
    sent, landed = run(pair)
    for transfer in (sent, landed):
        assert (
            ended(transfer).reason
            == f"chunk 7 of {pair.src.movers[0]._transport.name} did not match its digest 2 times"
        )
        assert not transfer.quarantined
    assert ended(landed).cause is Cause.INTEGRITY
    assert ended(sent).cause is Cause.PEER_ABORTED
    assert ended(landed).resent == 2
    assert 7 in ended(landed).incomplete[0]  # a chunk is a page here
    whole = set(range(25)) - set(ended(landed).incomplete[0])
    # What was read may be of others until the source confirms, so a failed pull has nothing that is whole.
    assert len(whole) == (24 if verb is Verb.PUSH else 0)
    assert_pages(pair, whole)
    pair.bench.assert_nothing_is_left()


def assert_pages(pair: Pair, whole: set[int]) -> None:
    """Pages of a request (by index) are as they should be, and those of others as they were."""
    table = pair.dst_tables[0][0]
    good = [int(table[index]) for index in whole]
    strange = sorted(set(range(64)) - set(table.tolist()))
    expected = pair.dst.landed(pair.before, pair.dst_tables, pair.truth)
    for layer in range(2):
        for kv in range(2):
            got, want = (pools[0][0].plane(layer, kv).view(torch.uint8) for pools in (pair.dst.pools, expected))
            assert got[good].equal(want[good])
            assert got[strange].equal(want[strange])


@ways
def test_a_digest_survives_the_loss_of_the_message_that_carries_it(verb: Verb, route: Route):
    """A chunk whose news are lost is told of again; damaged as well, it must not pass for one without a digest."""
    pair, network = pair_of(verb, route)
    network.spoils = lambda number: number == 7
    lost = iter([0])

    def copies(source: str, target: str, message: wire.AnyMessage) -> int:
        return next(lost, 1) if isinstance(message, wire.Chunk | wire.Staged) and message.chunk == 7 else 1

    network.copies = copies
    _, landed = run(pair)
    assert next(lost, None) is None
    assert (ended(landed).reason, ended(landed).resent) == (None, 1)
    pair.assert_landed()


@searched(few=10, many=25)
@given(cases(most_tokens=40), st.sampled_from(Route), st.sampled_from([0, 1, 2]), st.data())
def test_any_damage_is_found_between_any_fleets_and_nothing_whole_is_called_damaged(
    case: Case, route: Route, chunk_layers: int, data: st.DataObject
):
    """Digests are of logical rows: other orders, page sizes and shares of the heads give the same."""
    costs = replace(SMALL_CHUNKS, chunk_bytes=max(case.chunk_bytes, 512))
    verb = data.draw(st.sampled_from(Verb), label="verb")
    config = replace(DIGEST, costs=costs, route=route, verb=verb, replicas=case.replicas, chunk_layers=chunk_layers)
    network = FaultyNetwork()
    bench = Bench(case.components, config, network=network)
    src, dst = (
        bench.engine(name, s.fleet, s.order, s.separate, case.pages(s))
        for name, s in (("prefill", case.src), ("decode", case.dst))
    )
    dst.connect(src)
    bench.turn(2)
    pair = Pair.request(bench, src, dst, case.tokens)
    spoilt = data.draw(st.sets(st.integers(0, 3), max_size=1), label="spoilt")
    network.spoils = lambda number: number in spoilt
    transfers = [*pair.send(), *pair.receive(start=case.start)]
    bench.ended(transfers)
    assert not any(ended(transfer).reason for transfer in transfers)
    assert sum(ended(transfer).resent for transfer in transfers) == network.spoiled
    pair.assert_landed(case.start)
    bench.assert_nothing_is_left()


def test_a_damaged_state_or_window_is_found_too():
    components = (
        Component.attention(2, 2, 8, "bfloat16"),
        Component.sliding(2, 2, 8, 8, "bfloat16"),
        Component.state("temporal", 2, 4, 64, "float32"),
    )
    network = FaultyNetwork()
    bench = Bench(components, replace(DIGEST, costs=replace(SMALL_CHUNKS, chunk_bytes=256)), network=network)
    src, dst = bench.engine("prefill", Fleet(tp=2, page_tokens=4)), bench.engine("decode", Fleet(page_tokens=4), "HND")
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 40)
    network.spoils = lambda number: number < 12  # all that is sent in the first round
    transfers = [*pair.send(), *(landed := pair.receive())]
    bench.ended(transfers)
    assert (ended(landed[0]).reason, ended(landed[0]).resent, network.spoiled) == (None, 12, 12)
    pair.assert_landed()
