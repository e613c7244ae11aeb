"""Sending while the prefill computes: a chunk goes when its layers of its tokens are in the pages, and not before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mover_fleets import CONFIG, POISON, SMALL_CHUNKS, Bench, HandClock, Pair
from mover_growing import kept

from kvmover.errors import PlanError
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import ALL, Gate
from tests.proofs import searched

LAYERS, TOKENS = 4, 24

#: A chunk of 4 tokens of 2 layers, of either component: 4 x 2 x (2 x 2 x 16, or 64) bytes.
CHUNK_BYTES = 512


@dataclass(eq=False)
class Event:
    """Stands in for a CUDA event that passes when it is told to."""

    passed: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.passed


def layered(route: Route = Route.PACKED, verb: Verb = Verb.PUSH, tp: int = 1, chunk_layers: int = 2) -> Pair:
    """Four layers, two heads of 16 bytes, 24 tokens; nothing is in the source's pages."""
    costs = replace(SMALL_CHUNKS, chunk_bytes=CHUNK_BYTES)
    config = replace(CONFIG, route=route, verb=verb, chunk_layers=chunk_layers, costs=costs)
    bench = Bench(
        (Component("attention", LAYERS, 2, 2, 8, "bfloat16"), Component("keys", LAYERS, 1, 1, 64, "uint8")), config
    )
    src, dst = bench.engine("prefill", Fleet(tp=tp, page_tokens=4)), bench.engine("decode", Fleet(page_tokens=4), "HND")
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, TOKENS)
    for pools in src.pools:
        for pool in pools:
            for tensor in pool.tensors:
                tensor.fill_(POISON)
    return pair


def compute(pair: Pair, done: set[tuple[int, int]]) -> None:
    """Let the source's pages hold these (layer, token), and poison elsewhere."""
    truth = [torch.full_like(rows, POISON) for rows in pair.truth]
    for layer, token in done:
        for mine, rows in zip(truth, pair.truth, strict=True):
            mine[layer, :, :, token] = rows[layer, :, :, token]
    pair.src.fill(pair.src_tables, truth)


def before(layers: int, tokens: int) -> set[tuple[int, int]]:
    return {(layer, token) for layer in range(layers) for token in range(tokens)}


def landed(pair: Pair) -> set[tuple[int, int]]:
    """(layer, token) that are in the destination's pages, of all heads, K and V, and of both components."""
    there: set[tuple[int, int]] | None = None
    for pool, table in zip(pair.dst.pools[0], pair.dst_tables[0], strict=True):
        component = pool.spec.component
        for kv in range(component.kv):
            here: set[tuple[int, int]] = set()
            for layer in range(LAYERS):
                plane = pool.plane(layer, kv).view(torch.uint8)
                rows = plane[[int(table[t // 4]) for t in range(TOKENS)], [t % 4 for t in range(TOKENS)]]
                here |= {(layer, t) for t in range(TOKENS) if not bool((rows[t] == POISON).all())}
            there = here if there is None else there & here
    assert there is not None
    return there


ways = pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])


@ways
def test_a_chunk_goes_exactly_when_its_layers_and_tokens_are_produced(verb: Verb, route: Route):
    """A gate after each group of layers and each half of the tokens, as a chunked prefill passes them."""
    pair = layered(route, verb)
    corners = [(2, 12), (4, 12), (2, 24), (4, 24)]
    events = [Event() for _ in corners]
    gates = [Gate(event, *corner) for event, corner in zip(events, corners, strict=True)]
    sent, asked = pair.src.send("request", pair.src_tables, gates), pair.receive()
    pair.bench.turn()
    assert landed(pair) == set()
    done: set[tuple[int, int]] = set()
    for event, (layers, tokens) in zip(events, corners, strict=True):
        done |= before(layers, tokens)
        compute(pair, done)
        event.passed = True
        pair.bench.turn(12)
        assert landed(pair) == done
    pair.bench.ended([*sent, *asked])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


corner = st.tuples(st.integers(0, LAYERS), st.integers(0, TOKENS))


@searched(few=10, many=30)
@given(
    corners=st.lists(corner, max_size=5),
    promised=st.integers(0, 5),
    verb=st.sampled_from(Verb),
    route=st.sampled_from(Route),
    tp=st.integers(1, 2),
    chunk_layers=st.integers(0, 3),
)
def test_gates_pass_in_any_order_and_nothing_is_read_before_it_is_there(
    corners: list[tuple[int, int]], promised: int, verb: Verb, route: Route, tp: int, chunk_layers: int
):
    """Some gates are known when the request is sent, others are produced later; the last one is for everything."""
    pair = layered(route, verb, tp, chunk_layers)
    corners = kept([*corners, (LAYERS, TOKENS)])
    events = [Event() for _ in corners]
    gates = [Gate(event, *corner) for event, corner in zip(events, corners, strict=True)]
    sent, asked = pair.src.send("request", pair.src_tables, gates[:promised]), pair.receive()
    pair.bench.turn(2)
    done: set[tuple[int, int]] = set()
    for n, (event, (layers, tokens)) in enumerate(zip(events, corners, strict=True)):
        if n >= promised:
            for mover, transfer in zip(pair.src.movers, sent, strict=True):
                mover.produced(transfer, gates[n])
        done |= before(layers, tokens)
        compute(pair, done)
        event.passed = True
        pair.bench.turn(2)
        assert landed(pair) <= done
    pair.bench.ended([*sent, *asked])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_an_event_that_has_passed_is_asked_no_more():
    pair = layered()
    event, never = Event(passed=True), Event()
    sent, asked = pair.src.send("request", pair.src_tables, [Gate(event, 2), Gate(never)]), pair.receive()
    pair.bench.turn(20)
    assert event.asked == 1
    assert never.asked > 10
    never.passed = True
    pair.bench.ended([*sent, *asked])


def test_a_gate_that_says_neither_layers_nor_tokens_is_for_everything():
    assert (Gate(Event()).layers, Gate(Event()).tokens) == (ALL, ALL)
    pair = layered(chunk_layers=0)
    sent, asked = pair.src.send("request", pair.src_tables, [Gate(Event(passed=True))]), pair.receive()
    pair.bench.ended([*sent, *asked])


def test_a_chunk_that_spans_two_gates_waits_for_one_that_covers_it():
    """Uncut by layers, half of the layers is nothing that can go."""
    pair = layered(chunk_layers=0)
    half, rest, whole = Event(passed=True), Event(passed=True), Event()
    gates = [Gate(half, 2, TOKENS), Gate(rest, LAYERS, 2), Gate(whole)]
    sent, asked = pair.src.send("request", pair.src_tables, gates), pair.receive()
    pair.bench.turn(12)
    assert landed(pair) == set()
    compute(pair, before(LAYERS, TOKENS))
    whole.passed = True
    pair.bench.ended([*sent, *asked])
    pair.assert_landed()


@pytest.mark.parametrize("verb", list(Verb))
def test_a_cold_request_holds_no_region_on_either_side(verb: Verb):
    """Arenas of one chunk: what waits for its prefill keeps nobody out, nor does what was produced half."""
    pair = layered(verb=verb)
    bench = pair.bench
    src = bench.engine("small", Fleet(page_tokens=4), config=replace(bench.config, arena_bytes=CHUNK_BYTES))
    dst = bench.engine("reader", Fleet(page_tokens=4), config=replace(bench.config, arena_bytes=CHUNK_BYTES))
    dst.connect(src)
    bench.turn()
    cold, warm = Pair.request(bench, src, dst, TOKENS), Pair.request(bench, src, dst, TOKENS)
    event, (held,) = Event(passed=True), cold.dst_tables
    others = [[np.setdiff1d(np.arange(64), table)[: len(table)] for table in held]]
    sent = src.send("cold", cold.src_tables, [Gate(event, 2, TOKENS)])
    asked = cold.receive("cold")
    bench.settle(lambda: landed(cold) == before(2, TOKENS))
    bench.turn()
    for mover in (*src.movers, *dst.movers):
        assert (mover._core.incoming.arena.reserved_bytes, mover._core.outgoing.arena.reserved_bytes) == (0, 0)
    bench.ended([*warm.send("warm"), *dst.receive("warm", src.name, range(TOKENS), others)])
    assert not asked[0].ended
    src.movers[0].produced(sent[0], Gate(event))
    bench.ended([*sent, *asked])
    bench.assert_nothing_is_left()


def test_a_request_whose_prefill_stops_ends_at_its_deadline_on_both_sides():
    clock = HandClock()
    pair = Pair.of(config=replace(CONFIG, chunk_layers=1), clock=clock)
    (sent,) = pair.src.send("request", pair.src_tables, [Gate(Event(passed=True), 1), Gate(Event())])
    (asked,) = pair.receive()
    pair.bench.turn()
    clock.now += CONFIG.deadline_s
    pair.bench.turn()
    clock.now += CONFIG.drain_s
    pair.bench.ended([sent, asked])
    for transfer in (sent, asked):
        assert transfer.result is not None
        assert "deadline" in str(transfer.result.reason)
        assert not transfer.quarantined
    pair.bench.assert_nothing_is_left()


def test_gates_cannot_be_added_to_a_request_that_is_all_there_or_that_is_over():
    pair = layered()
    (sent,) = pair.send()
    with pytest.raises(PlanError, match="as if all of it were in its pages"):
        pair.src.movers[0].produced(sent, Gate(Event()))
    (late,) = pair.src.send("late", pair.src_tables, gates=[])
    for transfer in (sent, late):
        pair.src.movers[0].abort(transfer, "over")
    pair.src.movers[0].produced(late, Gate(Event()))
    pair.bench.turn()
    pair.bench.assert_nothing_is_left()
