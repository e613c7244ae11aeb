"""Pages that a destination names as it allocates them: a chunk lands once its own are, and nothing lands elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mover_fleets import CONFIG, SMALL_CHUNKS, Bench, HandClock, Pair, Tables
from mover_growing import FLEETS, LAYERS, MODEL, TOKENS, before, compute, growing, landed_rows, part

from kvmover.errors import PlanError
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import ALL, Cause, Gate, Transfer

ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])


def receive(pair: Pair) -> list[Transfer]:
    """Ask on every rank, with no page."""
    return [mover.receive("request", pair.src.name, range(pair.tokens), None) for mover in pair.dst.movers]


def whole(tables: Tables) -> list[int]:
    return [len(table) for table in tables]


@ways
@pytest.mark.parametrize("asked_first", [True, False], ids=["asked first", "sent first"])
def test_a_destination_that_allocates_pages_in_parts_gets_each_part_before_it_allocates_the_next(
    verb: Verb, route: Route, asked_first: bool
):
    pair = growing(route, verb)
    compute(pair, before(LAYERS, TOKENS))
    mover = pair.dst.movers[0]
    sent = [] if asked_first else pair.send()
    (asked,) = receive(pair)
    pair.bench.turn(12)
    sent = sent or pair.send()
    pair.bench.turn(12)
    assert landed_rows(pair) == 0
    for first in range(0, 6, 2):
        stop = [first + 2, first + 2, 2 if first == 4 else 0]
        mover.allocated(asked, part(pair.dst_tables[0], [first, first, 0], stop))
        pair.bench.turn(12)
        assert landed_rows(pair) == (first + 2) * 4
    pair.bench.ended([*sent, asked])
    asked.landed()
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_however_both_sides_name_their_pages_the_bytes_are_those_of_the_whole(data: st.DataObject):
    """A chunk that left, was written or was scattered before its pages were named would leave poison in them."""
    src, dst = data.draw(st.sampled_from(FLEETS)), data.draw(st.sampled_from(FLEETS))
    route, verb = data.draw(st.sampled_from(Route)), data.draw(st.sampled_from(Verb))
    pair = growing(route, verb, src, data.draw(st.integers(0, 3)), dst)
    asked = receive(pair) if data.draw(st.booleans()) else []
    sent = [mover.send("request", [[]] * len(MODEL), []) for mover in pair.src.movers]
    asked = asked or receive(pair)
    ends = [(pair.src, sent, pair.src_tables), (pair.dst, asked, pair.dst_tables)]
    named = [[[0] * len(MODEL) for _ in tables] for _, _, tables in ends]
    steps, done, tokens = data.draw(st.integers(0, 3)), set[tuple[int, int]](), 0
    for step in range(steps + 1):
        tokens = TOKENS if step == steps else data.draw(st.integers(tokens, TOKENS))
        done |= before(LAYERS, tokens)
        compute(pair, done)
        for side in data.draw(st.permutations([0, 1])):
            engine, transfers, every = ends[side]
            for rank, tables in enumerate(every):
                known = named[side][rank]
                stop = [
                    most if step == steps else data.draw(st.integers(count, most))
                    for most, count in zip(whole(tables), known, strict=True)
                ]
                pages = part(tables, known, stop)
                named[side][rank] = stop
                if side == 0:
                    tokens_there = ALL if step == steps else tokens
                    engine.movers[rank].produced(transfers[rank], Gate(None, tokens=tokens_there), pages)
                else:
                    engine.movers[rank].allocated(transfers[rank], pages)
                pair.bench.turn(data.draw(st.integers(0, 3)))
    pair.bench.ended([*sent, *asked])
    for transfer in (*sent, *asked):
        transfer.landed()
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("verb", Verb)
def test_digests_are_compared_in_pages_that_were_named_late(verb: Verb, route: Route):
    pair = growing(route, verb, integrity=Integrity.DIGEST)
    compute(pair, before(LAYERS, TOKENS))
    (asked,), sent, tables = receive(pair), pair.send(), pair.dst_tables[0]
    for first, stop in (([0, 0, 0], [3, 1, 2]), ([3, 1, 2], whole(tables))):
        pair.bench.turn(12)
        pair.dst.movers[0].allocated(asked, part(tables, first, stop))
    pair.bench.ended([*sent, asked])
    assert asked.landed().resent == 0
    pair.assert_landed()


def test_a_waiting_request_keeps_no_region_and_no_other_request_waits_for_it():
    """Arenas of one chunk: what has no pages yet is not granted."""
    pair = growing(arena_bytes=512)
    compute(pair, before(LAYERS, TOKENS))
    first = receive(pair) + pair.send()
    pair.bench.turn(12)
    assert pair.dst.movers[0]._core.incoming.arena.reserved_bytes == 0
    second = pair.dst.receive("second", pair.src.name, range(TOKENS), pair.dst_tables)
    second += pair.src.send("second", pair.src_tables)
    pair.bench.ended(second)
    assert all(transfer.result is not None and transfer.result.landed for transfer in second)
    assert not any(transfer.ended for transfer in first)
    pair.dst.movers[0].abort(first[0], "over")
    pair.bench.ended(first)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ([[64], [], []], "page id 64 is outside a pool of 64 pages"),
        ([[-1], [], []], "page id -1 is outside a pool of 64 pages"),
        ([[1], []], "2 page tables for 3 components"),
        ([[1.5], [], []], "page ids are whole numbers"),
        ([[5], [], []], "page id 5 is twice in the page table of attention"),
        ([[1, 3, 7, 9, 11, 13], [], []], "7 pages are named of attention, of which the request needs 6 here"),
        ([[], [], [1, 3, 5]], "3 pages are named of state, of which the request needs 2 here"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_pages_that_cannot_be_those_of_the_request_are_refused_and_nothing_is_added(pages: list[list[int]], why: str):
    pair = growing()
    (asked,) = receive(pair)
    mover = pair.dst.movers[0]
    mover.allocated(asked, [[5], [], []])
    with pytest.raises(PlanError, match=why):
        mover.allocated(asked, pages)
    (attempt,) = mover._destination._attempts
    assert [table.tolist() for table in attempt.pages] == [[5], [], []]


def test_pages_before_a_window_may_be_any_and_those_in_it_may_not():
    pair = growing()
    (asked,) = receive(pair)
    mover = pair.dst.movers[0]
    mover.allocated(asked, [[], [-1, -1, -1, -1], []])
    with pytest.raises(PlanError, match="page id -1 is outside a pool of 64 pages"):
        mover.allocated(asked, [[], [-1], []])
    mover.allocated(asked, [[], [7], []])


def test_pages_cannot_be_added_to_a_request_that_was_received_with_all_of_them():
    pair = growing()
    (asked,) = pair.receive()
    with pytest.raises(PlanError, match="request request was received with all of its pages"):
        pair.dst.movers[0].allocated(asked, [[], [], []])


@ways
def test_a_request_whose_pages_stop_coming_ends_at_its_deadline_and_says_so(verb: Verb, route: Route):
    clock = HandClock()
    pair = Pair.of(tokens=16, config=replace(CONFIG, route=route, verb=verb, deadline_s=10.0), clock=clock)
    mover, (asked,) = pair.dst.movers[0], receive(pair)
    sent = [pair.src.movers[0].send("request", pair.src_tables[0], deadline_s=100.0)]
    for _ in range(3):
        clock.now += 0.4
        pair.bench.turn(12)
    mover.allocated(asked, [pair.dst_tables[0][0][:2]])
    for _ in range(3):
        clock.now += 0.4
        pair.bench.turn(12)
    for _ in range(24):
        clock.now += 0.4
        pair.bench.turn()
    pair.bench.ended([*sent, asked])
    assert asked.result is not None
    assert asked.result.cause is Cause.DEADLINE
    assert "deadline passed with 2 chunks missing, 2 of them without pages here" in str(asked.result.reason)
    whole = verb is Verb.PUSH  # nobody has confirmed that what was read was kept
    assert asked.result.incomplete == ((2, 3) if whole else (0, 1, 2, 3),)
    pair.bench.assert_nothing_is_left()


@ways
@pytest.mark.parametrize("who", ["source", "destination"])
def test_either_side_gives_up_a_request_that_waits_for_pages(verb: Verb, route: Route, who: str):
    pair = growing(route, verb)
    compute(pair, before(LAYERS, TOKENS))
    (asked,), (sent,) = receive(pair), pair.send()
    pair.bench.turn(12)
    pair.dst.movers[0].allocated(asked, part(pair.dst_tables[0], [0, 0, 0], [2, 0, 1]))
    pair.bench.turn(12)
    if who == "source":
        pair.src.movers[0].abort(sent, "preempted")
    else:
        pair.dst.movers[0].abort(asked, "preempted")
    pair.bench.ended([sent, asked])
    for transfer in (sent, asked):
        assert transfer.result is not None
        assert transfer.result.reason == "preempted"
    pages = part(pair.dst_tables[0], [2, 0, 1], [6, 6, 2])
    pair.dst.movers[0].allocated(asked, pages)  # too late: they stay the engine's
    pair.bench.turn(12)
    assert landed_rows(pair) == 8
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", [Route.DIRECT, Route.MAPPED])
def test_a_source_that_writes_pages_is_told_of_more_again_where_that_was_lost(route: Route):
    """The second part of the tables is lost once, after the source has noted the first."""
    clock = HandClock()
    pair = Pair.of(tokens=16, config=replace(CONFIG, route=route), clock=clock)
    mover, (asked,) = pair.dst.movers[0], receive(pair)
    mover.allocated(asked, [pair.dst_tables[0][0][:2]])
    pair.bench.turn(12)
    noted = dict(next(iter(mover._destination._attempts)).state.noted)
    assert noted
    mover.allocated(asked, [pair.dst_tables[0][0][2:]])
    assert any(mover._core.outbox.values())
    mover._core.outbox.clear()
    sent = pair.send()
    for _ in range(8):
        clock.now += 0.4
        pair.bench.turn(12)
    pair.bench.ended([*sent, asked])
    asked.landed()
    pair.assert_landed()


def test_a_source_that_noted_fewer_pages_than_it_was_told_of_is_told_again():
    pair = Pair.of(tokens=16, config=replace(CONFIG, route=Route.DIRECT))
    mover, (asked,) = pair.dst.movers[0], receive(pair)
    mover.allocated(asked, [pair.dst_tables[0][0][:2]])
    (attempt,) = mover._destination._attempts
    peer = pair.src.movers[0]._core.transport.name
    for named, counts in (((1,), False), ((3,), False), ((), False), ((2,), True)):
        mover._told(peer, wire.Noted(*attempt.id, 9000, named))
        assert bool(attempt.state.noted) is counts


@pytest.mark.parametrize("pages", [([64],), ([0, 1], [1])], ids=["no page", "two tables"])
def test_a_source_refuses_more_pages_that_cannot_be(pages: tuple[list[int], ...]):
    """Of a destination that goes astray: nothing is written, and both sides hear why."""
    pair = Pair.of(tokens=16, config=replace(CONFIG, route=Route.DIRECT))
    (asked,), (sent,) = receive(pair), pair.send()
    pair.bench.turn(12)
    (attempt,) = pair.dst.movers[0]._destination._attempts
    (peer,) = attempt.wants
    want = wire.decode(attempt.wants[peer])
    assert isinstance(want, wire.Want)
    told = tuple(np.array(table, "<i4").tobytes() for table in pages)
    pair.src.movers[0]._told(pair.dst.movers[0]._core.transport.name, _with(want, told))
    pair.bench.ended([sent, asked])
    assert asked.result is not None
    assert "page tables of decode0" in str(asked.result.reason)
    pair.dst.assert_holds(pair.before)
    pair.bench.assert_nothing_is_left()


def _with(want: wire.Want, pages: tuple[bytes, ...]) -> wire.Want:
    from msgspec.structs import replace

    return replace(want, pages=pages)


def test_a_want_that_is_noted_early_grows_while_nobody_has_sent_the_request():
    """And one that comes late with fewer pages changes nothing."""
    pair = Pair.of(tokens=16, config=replace(CONFIG, route=Route.DIRECT))
    mover, source, (asked,) = pair.dst.movers[0], pair.src.movers[0], receive(pair)
    pair.bench.turn()
    (attempt,) = mover._destination._attempts
    (peer,) = attempt.wants
    short = attempt.wants[peer]
    mover.allocated(asked, [pair.dst_tables[0][0]])
    pair.bench.turn()
    mover._core.post(peer, short)
    pair.bench.turn()
    (early,) = source._source.early._early["request"].values()
    assert early.version[1] == 4
    assert attempt.state.noted
    sent = pair.send()
    pair.bench.ended([*sent, asked])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_tables_that_no_message_will_hold_are_refused_before_anything_is_asked():
    """300,000 pages of one token take 1.2 MB; the packed route sends none."""
    tokens, fleet = 300_000, Fleet(page_tokens=1)
    config = replace(CONFIG, route=Route.DIRECT, costs=replace(SMALL_CHUNKS, chunk_bytes=1 << 20))
    bench = Bench((Component("bytes", 1, 1, 1, 1, "uint8"),), config)
    source, target = bench.engine("prefill", fleet), bench.engine("decode", fleet, pages=tokens)
    target.connect(source)
    with pytest.raises(PlanError, match="1200000 bytes are over the limit .*; the packed route sends no page tables"):
        target.movers[0].receive("r", "prefill", range(tokens), None)
