"""Pages that are named as they are computed: each chunk goes when its own are, and the bytes are those of the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mover_fleets import CONFIG, HandClock, Pair
from mover_growing import FLEETS, LAYERS, MODEL, TOKENS, Event, before, compute, growing, kept, landed_rows, part

from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer.destination.destination_attempts import spliced
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import ALL, Cause, Gate
from kvmover.transfer.source.source_attempts import Needs

ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])


@ways
def test_a_prefill_in_chunks_names_the_pages_of_each_and_they_move_before_the_last_is_computed(
    verb: Verb, route: Route
):
    pair = growing(route, verb)
    mover = pair.src.movers[0]
    (asked,) = pair.receive()
    transfer = mover.send("request", [[], [], []], [])
    done: set[tuple[int, int]] = set()
    for first in range(0, TOKENS, 8):
        done |= before(LAYERS, first + 8)
        compute(pair, done)
        pages = part(pair.src_tables[0], [first // 4, first // 4, 0], [first // 4 + 2, first // 4 + 2, 0])
        if first + 8 == TOKENS:
            pages[2] = pair.src_tables[0][2]
        mover.produced(transfer, Gate(None, tokens=first + 8), pages)
        pair.bench.turn(12)
        assert landed_rows(pair) == first + 8
    pair.bench.ended([transfer, asked])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


corner = st.tuples(st.integers(0, LAYERS), st.integers(0, TOKENS))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_however_pages_and_gates_are_split_and_ordered_the_bytes_are_those_of_the_whole(data: st.DataObject):
    """A chunk that left before its pages were named or computed would bring poison."""
    src = data.draw(st.sampled_from(FLEETS))
    route, verb = data.draw(st.sampled_from(Route)), data.draw(st.sampled_from(Verb))
    pair = growing(route, verb, src, data.draw(st.integers(0, 3)))
    corners = kept([*data.draw(st.lists(corner, max_size=4)), (ALL, ALL)])
    events = [Event() for _ in corners]
    if data.draw(st.booleans()):
        asked = pair.receive()
    named = [[data.draw(st.integers(0, len(table))) for table in tables] for tables in pair.src_tables]
    sent = [
        mover.send("request", part(tables, [0] * len(MODEL), count), [])
        for mover, tables, count in zip(pair.src.movers, pair.src_tables, named, strict=True)
    ]
    if not pair.dst.movers[0]._destination._attempts:
        asked = pair.receive()
    done: set[tuple[int, int]] = set()
    for n, (event, (layers, tokens)) in enumerate(zip(events, corners, strict=True)):
        last = n + 1 == len(corners)
        passes_first = data.draw(st.booleans())
        if passes_first:
            done |= before(layers, tokens)
            compute(pair, done)
            event.passed = True
        for rank, (mover, transfer) in enumerate(zip(pair.src.movers, sent, strict=True)):
            tables = pair.src_tables[rank]
            stop = [
                len(table) if last else data.draw(st.integers(count, len(table)))
                for table, count in zip(tables, named[rank], strict=True)
            ]
            more = part(tables, named[rank], stop)
            named[rank] = stop
            mover.produced(transfer, Gate(event, layers, tokens), more if any(map(len, more)) else None)
            pair.bench.turn(data.draw(st.integers(0, 2)))
        if not passes_first:
            done |= before(layers, tokens)
            compute(pair, done)
            event.passed = True
        pair.bench.turn(data.draw(st.integers(0, 3)))
    pair.bench.ended([*sent, *asked])
    for transfer in (*sent, *asked):
        transfer.landed()
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_a_chunk_is_ready_when_a_passed_gate_covers_it_and_all_its_pages_are_named():
    """Every case of two gates, of layers, tokens and pages up to 2."""
    small = range(3)
    for layers, tokens, pages in product(small, small, product(small, small)):
        needs = Needs(layers, tokens, pages)
        for named in product(small, small):
            enough = pages[0] <= named[0] and pages[1] <= named[1]
            for corners in [(), *product(product(small, small), repeat=1), *product(product(small, small), repeat=2)]:
                covered = any(layers <= at_layer and tokens <= at_token for at_layer, at_token in corners)
                gates = [Gate(None, *at) for at in corners]
                assert needs.met(gates, named) == (covered and enough)


def test_page_ids_cross_the_wire_once_in_a_pull_from_pages(monkeypatch: pytest.MonkeyPatch):
    """Of 6 pages in three parts, and 4 of the window that are some, no offer says one again."""
    pair = growing(Route.DIRECT, Verb.PULL)
    staged: list[wire.Staged] = []
    decode = wire.decode

    def heard(payload: bytes) -> wire.AnyMessage:
        message = decode(payload)
        if isinstance(message, wire.Staged):
            staged.append(message)
        return message

    monkeypatch.setattr(wire, "decode", heard)
    (asked,) = pair.receive()
    mover, tables = pair.src.movers[0], pair.src_tables[0]
    transfer = mover.send("request", [[], [], []], [])
    compute(pair, before(LAYERS, TOKENS))
    for first in range(0, 6, 2):
        pages = part(tables, [first, first, 0], [first + 2, first + 2, 2 if first == 4 else 0])
        mover.produced(transfer, Gate(None, tokens=(first + 2) * 4), pages)
        pair.bench.turn(12)
    pair.bench.ended([transfer, asked])
    pair.assert_landed()
    fresh = [each for each in staged if any(each.pages)]
    assert [wire.lengths(each.pages) for each in fresh] == [(2, 2, 0), (2, 2, 0), (2, 2, 2)]
    assert [each.first_pages for each in fresh] == [(), (2, 2, 0), (4, 4, 0)]


def test_pages_that_are_none_of_the_pool_are_refused_and_nothing_is_added():
    pair = growing()
    mover = pair.src.movers[0]
    transfer = mover.send("request", [[], [], []], [])
    for pages, why in (
        ([[64], [], []], "page id 64 is outside a pool of 64 pages of attention"),
        ([[1, -1], [], []], "page id -1 is outside"),
        ([[1.5], [], []], "whole numbers"),
        ([[1]], "1 page tables for 3 components"),
    ):
        with pytest.raises(PlanError, match=why):
            mover.produced(transfer, Gate(None), pages)
    assert [len(table) for table in mover._source._requests["request"].pages] == [0, 0, 0]
    assert mover._source._requests["request"].gates == []
    mover.produced(transfer, Gate(None, tokens=0), [[3], [-1, 5], []])
    with pytest.raises(PlanError, match="page id -1 is outside a pool of 64 pages of sliding"):
        mover.produced(transfer, Gate(None), [[], [-1], []])


@ways
def test_pages_that_are_named_for_a_window_and_are_none_fail_the_request_on_both_sides(verb: Verb, route: Route):
    """-1 stands for what lies before a window: a chunk that reaches into it is not sent."""
    pair = growing(route, verb)
    mover, (asked,) = pair.src.movers[0], pair.receive()
    tables = [table.copy() for table in pair.src_tables[0]]
    tables[1][:] = -1
    transfer = mover.send("request", tables, [Gate(None)])
    pair.bench.ended([transfer, asked])
    for ended in (transfer, asked):
        assert ended.result is not None
        assert "page id -1 is outside" in str(ended.result.reason)
    assert transfer.result is not None
    assert transfer.result.cause is Cause.PROTOCOL
    pair.bench.assert_nothing_is_left()


def test_a_request_that_ends_without_all_its_pages_says_which_tokens_miss_some():
    pair = growing()
    mover, (asked,) = pair.src.movers[0], pair.receive()
    compute(pair, before(LAYERS, TOKENS))
    transfer = mover.send("request", part(pair.src_tables[0], [0, 0, 0], [3, 6, 2]), [Gate(None)])
    pair.bench.turn(12)
    assert landed_rows(pair) == 12
    mover.abort(transfer, "the prefill was preempted")
    pair.bench.ended([transfer, asked])
    reason = "the prefill was preempted: no pages were named for tokens of attention 12 to 24"
    for ended in (transfer, asked):
        assert ended.result is not None
        assert ended.result.reason == reason
    pair.bench.assert_nothing_is_left()


def test_a_request_whose_pages_stop_coming_ends_at_its_deadline_and_each_part_of_it_begins_that_anew():
    clock = HandClock()
    config = replace(CONFIG, deadline_s=10.0, silence_s=1000.0)
    pair = Pair.of(tokens=8, config=config, clock=clock)
    mover = pair.src.movers[0]
    transfer = mover.send("request", [[]], [])
    clock.now += 8
    mover.produced(transfer, Gate(None, tokens=4), [pair.src_tables[0][0][:1]])
    clock.now += 8
    pair.bench.turn()
    assert not transfer.ended
    (asked,) = pair.receive()
    pair.bench.turn()
    clock.now += 10
    for _ in range(4):
        pair.bench.turn()
        clock.now += 1
    pair.bench.ended([transfer, asked])
    assert transfer.result is not None
    assert transfer.result.cause is Cause.DEADLINE
    assert "no pages were named for tokens of attention 4 to 8" in str(transfer.result.reason)


def test_what_is_said_of_a_transfer_that_has_ended_changes_nothing():
    pair = growing()
    mover = pair.src.movers[0]
    transfer = mover.send("request", [[], [], []], [])
    mover.abort(transfer, "over")
    mover.produced(transfer, Gate(None), [[1], [1], []])
    pair.bench.turn()
    pair.bench.assert_nothing_is_left()


def test_pages_cannot_be_added_to_a_request_that_is_all_there():
    pair = growing()
    mover = pair.src.movers[0]
    transfer = mover.send("request", pair.src_tables[0])
    with pytest.raises(PlanError, match="as if all of it were in its pages"):
        mover.produced(transfer, Gate(None), [[1], [1], []])


def test_a_destination_that_asks_for_more_than_is_computed_waits_and_hears_how_it_ended():
    """A request that is still growing: 24 tokens are asked for, and the source ends with 16."""
    pair = growing()
    mover, (asked,) = pair.src.movers[0], pair.receive()
    compute(pair, before(LAYERS, 16))
    transfer = mover.send("request", [[], [], []], [])
    mover.produced(transfer, Gate(None, tokens=16), part(pair.src_tables[0], [0, 0, 0], [4, 4, 0]))
    pair.bench.turn(12)
    assert landed_rows(pair) == 16
    assert not asked.ended
    mover.abort(transfer, "generation stopped at 16 tokens")
    pair.bench.ended([transfer, asked])
    assert asked.result is not None
    assert str(asked.result.reason).startswith("generation stopped at 16 tokens: no pages were named for tokens of")
    assert asked.result.cause is Cause.PEER_ABORTED
    assert asked.result.incomplete[0] == (4, 5)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("known", "more", "first", "spliced_pages"),
    [
        ([], [1, 2], (), [1, 2]),
        ([1, 2], [3], (2,), [1, 2, 3]),
        ([1, 2], [2, 3], (1,), [1, 2, 3]),
        ([1, 2], [1], (), [1, 2]),
        ([1, 2], [4], (3,), None),
        ([1, 2], [], (2,), [1, 2]),
        ([1, 2], [3, 4, 5, 6], (2,), [1, 2, 3, 4]),
        ([1, 2], [3], (-1,), None),
    ],
    ids=str,
)
def test_page_ids_are_put_behind_those_known_and_a_gap_is_noticed(
    known: list[int], more: list[int], first: tuple[int, ...], spliced_pages: list[int] | None
):
    """Of a source of whose table 4 pages are wanted."""
    tables = (np.array(known, np.int64),) if known else ()
    got = spliced(tables, (np.array(more, np.int64),), first, (4,))
    assert (got and got[0].tolist()) == spliced_pages


def test_another_number_of_tables_than_there_are_components_is_refused():
    with pytest.raises(PlanError, match="2 page tables for 1 components"):
        spliced((), (np.zeros(1, np.int64),) * 2, (), (4,))


@pytest.mark.parametrize(
    "ready", [((0, 9),), ((1, 2), (0, 1)), ((-1, 1),), ((0, 1),) * 100_000], ids=["9", "2", "-1", "many"]
)
def test_an_offer_of_chunks_that_are_none_fails_the_attempt(
    ready: tuple[tuple[int, int], ...],
):
    pair = growing(Route.DIRECT, Verb.PULL, chunk_layers=0)
    (asked,) = pair.receive()
    pair.bench.turn()
    destination, source = pair.dst.movers[0]._destination, pair.src.movers[0]
    (attempt,) = destination._attempts
    (chunks,) = (each.chunks for each in attempt.state.sources.values())
    assert chunks < 9
    (peer,) = (destination.core.peers.get(name) for name in attempt.lanes)
    assert peer is not None
    destination.hear(peer, wire.Offered(*attempt.id, ready))
    assert "offers chunks" in str(attempt.state.reason)
    pair.bench.ended([asked])
    assert not source._source._requests
