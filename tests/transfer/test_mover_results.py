"""What a failed request tells the engine: exactly the pages that are not whole, and are to be computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mover_cases import Case, cases
from mover_fleets import CONFIG, SMALL_CHUNKS, Bench, Engine, HandClock, Pair, Tables
from mover_network import FaultyNetwork

from kvmover.layout import Fleet, Pool
from kvmover.plan.cost import BY_WIRE, Route
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Transfer
from tests.proofs import searched


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


def not_whole(engine: Engine, rank: int, expected: list[Pool], tables: Tables) -> list[set[int]]:
    """Indices into the page tables of a rank, a component, of pages that hold another byte than they should."""
    found: list[set[int]] = []
    for pool, wanted, table in zip(engine.pools[rank], expected, tables, strict=True):
        layout = pool.spec.layout
        planes = [(layer, kv) for layer in range(layout.extent_of("layer")) for kv in range(layout.extent_of("kv"))]
        differ = torch.zeros(pool.spec.pages, dtype=torch.bool)
        for plane in planes:
            got, want = (p.plane(*plane).view(torch.uint8).flatten(1) for p in (pool, wanted))
            differ |= (got != want).any(1)
        found.append({index for index, page in enumerate(table) if differ[int(page)]})
    return found


def stop_after(pair: Pair, most: int, side: str, start: int = 0) -> list[Transfer]:
    """After so many writes or reads nothing lands any more, until somebody gives up. What the destination is told."""
    network = pair.bench.network
    assert isinstance(network, FaultyNetwork)
    network.most = most
    sent, landed = pair.send(), pair.receive(start=start)
    pair.bench.turn(12)
    giving_up = zip(pair.src.movers, sent, strict=True) if side == "src" else zip(pair.dst.movers, landed, strict=True)
    for mover, transfer in giving_up:
        mover.abort(transfer, "enough")
    pair.bench.turn()
    network.deliver()
    pair.bench.ended(landed)
    return landed


def assert_told(pair: Pair, landed: list[Transfer], way: tuple[Verb, Route], start: int = 0) -> None:
    expected = pair.dst.landed(pair.before, pair.dst_tables, pair.truth, start)
    for rank, transfer in enumerate(landed):
        missing = not_whole(pair.dst, rank, expected[rank], pair.dst_tables[rank])
        if ended(transfer).landed:
            assert ended(transfer).incomplete == ()
            assert not any(missing)
            continue
        told = [set(pages) for pages in ended(transfer).incomplete]
        assert [sorted(pages) for pages in told] == [list(pages) for pages in ended(transfer).incomplete]
        assert all(fewer <= more for fewer, more in zip(missing, told, strict=True))
        if way == (Verb.PUSH, Route.PACKED):  # elsewhere bytes may be there of which nobody has told
            assert missing == told


@searched(few=10, many=30)
@given(
    cases(most_tokens=50),
    st.sampled_from(Verb),
    st.sampled_from(Route),
    st.integers(0, 6),
    st.sampled_from(["src", "dst"]),
)
def test_the_pages_that_are_called_incomplete_are_those_that_are(
    case: Case, verb: Verb, route: Route, most: int, side: str
):
    config = replace(CONFIG, costs=replace(SMALL_CHUNKS, chunk_bytes=256), route=route, verb=verb)
    bench = Bench(case.components, replace(config, replicas=case.replicas), network=FaultyNetwork())
    src, dst = (
        bench.engine(name, s.fleet, s.order, s.separate, case.pages(s))
        for name, s in (("prefill", case.src), ("decode", case.dst))
    )
    dst.connect(src)
    bench.turn(2)
    pair = Pair.request(bench, src, dst, case.tokens)
    assert_told(pair, stop_after(pair, most, side, case.start), (verb, route), case.start)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("most", [0, 9, 25])
@pytest.mark.parametrize("way", [(verb, route) for verb in Verb for route in sorted(BY_WIRE)], ids="-".join)
def test_of_26_chunks_that_make_25_pages_in_two_halves_some_have_landed(way: tuple[Verb, Route], most: int, side: str):
    """TP2 to TP1: a chunk is 8 tokens of one of two heads, so two pages of 4."""
    verb, route = way
    config = replace(CONFIG, verb=verb, route=route)
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config, network=FaultyNetwork())
    (landed,) = stop_after(pair, most, side)
    assert_told(pair, [landed], way)
    assert not ended(landed).landed
    pages = len(ended(landed).incomplete[0])
    if verb is Verb.PULL or most < 2:
        assert pages == 25
    else:
        assert (0 if most == 25 else 15) < pages <= (8 if most == 25 else 25)


def test_a_destination_says_as_much_however_many_chunks_find_room_at_once():
    pair = Pair.of(clock=HandClock())
    counts = pair.dst.movers[0].meter.counts
    before = counts[Count.MESSAGES]
    sent, landed = pair.send(), pair.receive()
    pair.bench.ended([*sent, *landed])
    assert counts[Count.RECEIVED_CHUNKS] > 10
    assert counts[Count.MESSAGES] - before <= 5, "Want, Ping, Granted, Done, and what a Ping of the other is answered"


def test_a_page_that_two_sources_write_is_whole_when_both_have():
    """TP2 to TP1: each page has heads of either."""
    pair = Pair.of(Fleet(tp=2, page_tokens=4), network=FaultyNetwork(), clock=HandClock())
    network = pair.bench.network
    assert isinstance(network, FaultyNetwork)
    sent, (landed,) = pair.send(), pair.receive()
    network.cut(pair.src.movers[1]._transport.name)
    for _ in range(8):
        pair.bench.turn(2)
        assert isinstance(pair.bench.clock, HandClock)
        pair.bench.clock.now += CONFIG.ping_s
    assert ended(landed).cause is Cause.PEER_LOST
    assert ended(landed).incomplete == (tuple(range(25)),)
    pair.src.movers[0].abort(sent[0], "over")


def test_pages_that_were_not_asked_for_are_not_incomplete():
    pair = Pair.of(Fleet(tp=2, page_tokens=4))
    (landed,) = pair.receive(start=42)
    pair.bench.turn()
    pair.dst.movers[0].abort(landed, "enough")
    pair.bench.ended([landed])
    assert ended(landed).incomplete == (tuple(range(10, 25)),)
    assert ended(landed).cause is Cause.ABORTED


def test_a_request_that_landed_has_no_cause_and_nothing_incomplete():
    pair = Pair.of()
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.ended(transfers)
    for transfer in transfers:
        assert (ended(transfer).cause, ended(transfer).incomplete, ended(transfer).resent) == (None, (), 0)


def test_a_result_says_whether_it_landed_and_prints_as_a_sentence():
    landed = Result(None, 0.0081, nbytes=1_835_008)
    failed = Result("the peer said nothing for 5.0 s", 5.0, nbytes=40960, cause=Cause.PEER_LOST)
    assert (landed.landed, failed.landed) == (True, False)
    assert str(landed) == "landed: 1,835,008 bytes in 8.1 ms"
    assert str(failed) == "failed (peer_lost) after 5000.0 ms: the peer said nothing for 5.0 s"
