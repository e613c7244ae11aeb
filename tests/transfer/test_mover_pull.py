"""Pull: the destination reads what a push would have written, and never takes other bytes for its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mover_cases import Case, cases
from mover_fleets import CONFIG, SMALL_CHUNKS, Bench, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import BY_WIRE, Route
from kvmover.transfer.config import Integrity, MoverConfig
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause, Result, Transfer
from tests.proofs import searched

PULL = replace(CONFIG, verb=Verb.PULL)
CHUNK_BYTES = SMALL_CHUNKS.chunk_bytes
routes = pytest.mark.parametrize("route", list(Route))

#: Of which the wire carries the bytes, so that a test can hold them up.
wires = pytest.mark.parametrize("route", sorted(BY_WIRE))


def ended(transfer: Transfer) -> Result:
    assert transfer.result is not None
    return transfer.result


@pytest.mark.parametrize(
    ("route", "notes", "messages"),
    [
        (Route.DIRECT, 3, {wire.Want: 1, wire.Staged: 1, wire.Done: 1, wire.Kept: 1}),
        (Route.PACKED, 4, {wire.Want: 1, wire.Staged: 1, wire.Taken: 1, wire.Done: 1, wire.Kept: 1}),
    ],
)
def test_a_pull_of_one_chunk_takes_few_notes(
    route: Route, notes: int, messages: dict[type, int], monkeypatch: pytest.MonkeyPatch
):
    """Done, or Taken of staging memory, comes with the read."""
    config = MoverConfig(sandbox_bytes=0, arena_bytes=1 << 20, route=route, verb=Verb.PULL)
    bench = Bench((Component.attention(2, 2, 16, "bfloat16"),), config, HandClock())
    target, source = (bench.engine(name, Fleet(page_tokens=16)).movers[0] for name in ("decode", "prefill"))
    target.connect(source.card)
    bench.turn()
    heard, decode = Counter[type](), wire.decode

    def counted(payload: bytes) -> wire.AnyMessage:
        message = decode(payload)
        heard[type(message)] += 1
        return message

    monkeypatch.setattr(wire, "decode", counted)
    said = list[int]()
    for request in ("one", "two"):  # peers that meet for the first time ping each other
        heard.clear()
        sent = source.send(request, [[0, 1, 2, 3]])
        bench.ended([sent, target.receive(request, "prefill", range(64), [[4, 5, 6, 7]])])
        said.append(sum(mover.meter.counts[Count.NOTES] for mover in bench.movers))
    assert heard == messages
    assert said[1] - said[0] == notes


@searched(few=10, many=30)
@given(cases(most_tokens=60), st.sampled_from([None, *Route]), st.sampled_from(Integrity), st.sampled_from([0, 1, 3]))
def test_any_fleet_reads_from_any_other_what_that_would_have_written(
    case: Case, route: Route | None, integrity: Integrity, chunk_layers: int
):
    costs = replace(SMALL_CHUNKS, chunk_bytes=max(case.chunk_bytes, 512))
    config = replace(CONFIG, costs=costs, route=route, replicas=case.replicas, chunk_layers=chunk_layers)
    bench = Bench(case.components, config)
    src, dst = (
        bench.engine(name, s.fleet, s.order, s.separate, case.pages(s))
        for name, s in (("prefill", case.src), ("decode", case.dst))
    )
    dst.connect(src)
    bench.turn(2)
    pair = Pair.request(bench, src, dst, case.tokens)
    offered = src.snapshot()
    moved: list[int] = []
    for verb in Verb:
        for mover in dst.movers:
            mover.configure(replace(config, verb=verb, integrity=integrity))
        transfers = [*pair.send(verb), *pair.receive(verb, start=case.start)]
        bench.ended(transfers)
        moved.append(sum(transfer.landed().nbytes for transfer in transfers[src.fleet.size :]))
        assert sum(ended(transfer).resent for transfer in transfers) == 0
        pair.assert_landed(case.start)
        for pools in dst.pools:
            for pool, before in zip(pools, pair.before[dst.pools.index(pools)], strict=True):
                for tensor, was in zip(pool.tensors, before.tensors, strict=True):
                    tensor.copy_(was)
    src.assert_holds(offered)
    assert moved[0] == moved[1]
    bench.assert_nothing_is_left()


@wires
def test_a_pull_says_what_was_moved_and_how(route: Route):
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(PULL, route=route))
    sent, landed = pair.send(), pair.receive()
    pair.bench.ended([*sent, *landed])
    result = landed[0].landed()
    assert (result.nbytes, result.peers, result.routes, result.incomplete) == (100 * 1024, 2, (route, route), ())
    assert sum(transfer.landed().nbytes for transfer in sent) == result.nbytes
    (reader,) = pair.dst.movers
    assert reader.meter.counts[Count.RECEIVED_BYTES] == result.nbytes
    assert reader.meter.counts[Count.DESCRIPTORS] == (26 if route is Route.PACKED else result.runs)
    for source in pair.src.movers:
        assert source.meter.counts[Count.DESCRIPTORS] == 0  # it posted nothing


@routes
def test_a_request_may_be_asked_for_before_it_is_sent(route: Route):
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(PULL, route=route))
    landed = pair.receive()
    pair.bench.turn()
    sent = pair.send()
    pair.bench.ended([*sent, *landed])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("src_arena", "dst_arena"), [(CHUNK_BYTES, CHUNK_BYTES), (CHUNK_BYTES, 1 << 20), (1 << 20, CHUNK_BYTES)]
)
def test_full_staging_memory_waits_instead_of_failing(src_arena: int, dst_arena: int):
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),))
    src = bench.engine("prefill", Fleet(tp=2, page_tokens=4), config=replace(PULL, arena_bytes=src_arena))
    dst = bench.engine("decode", Fleet(page_tokens=4), config=replace(PULL, arena_bytes=dst_arena))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 100)
    bench.ended([*pair.send(), *pair.receive()])
    pair.assert_landed()
    bench.assert_nothing_is_left()


@wires
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_reader_in_flight_is_waited_for_by_its_own_side_only(route: Route, side: str):
    """The source's pages come back at once, and what the reader gets then is not taken for the request."""
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(PULL, route=route))
    bench, network = pair.bench, pair.bench.network
    sent, landed = pair.send(), pair.receive()
    network.hold()
    bench.turn()
    given_up = sent if side == "src" else landed
    for mover, transfer in zip(getattr(pair, side).movers, given_up, strict=True):
        mover.abort(transfer, "enough of this")
    bench.turn()
    assert all(transfer.ended for transfer in sent)
    assert not any(transfer.quarantined for transfer in sent)
    assert not landed[0].ended
    for pools in pair.src.pools:
        for tensor in pools[0].tensors:
            tensor.fill_(0)  # the engine reuses them
    network.deliver()
    bench.ended(landed)
    assert (ended(landed[0]).reason, ended(landed[0]).quarantined) == ("enough of this", False)
    bench.assert_nothing_is_left()
    if route is Route.PACKED:
        pair.dst.assert_holds(pair.before)


@wires
def test_reads_that_never_end_are_given_up_and_what_they_touch_comes_back_when_they_do(route: Route):
    clock = HandClock()
    pair = Pair.of(config=replace(PULL, route=route, arena_bytes=4 * CHUNK_BYTES), clock=clock)
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.network.hold()
    pair.bench.turn()
    for _ in range(100):
        clock.now += (CONFIG.deadline_s + CONFIG.drain_s) / 99
        pair.bench.turn(1)
    assert ended(sent).reason
    assert ended(landed).reason
    assert not ended(sent).quarantined
    incoming = pair.dst.movers[0]._core.incoming.arena
    if route is Route.PACKED:
        assert not ended(landed).quarantined
        assert incoming.quarantined_bytes == incoming.reserved_bytes == 2 * CHUNK_BYTES  # its share
    else:
        assert landed.quarantined
    pair.bench.network.deliver()
    pair.bench.turn()
    assert incoming.reserved_bytes == 0
    assert not landed.quarantined
    if route is Route.PACKED:
        pair.dst.assert_holds(pair.before)
    pair.bench.assert_nothing_is_left()


@routes
def test_a_source_that_reused_its_pages_before_all_was_read_fails_the_request(route: Route):
    """Nothing but the missing confirmation tells the reader that what it has is of somebody else."""
    network = FaultyNetwork()
    pair = Pair.of(config=replace(PULL, route=route), network=network)
    network.copies = lambda source, target, message: int(not isinstance(message, wire.Done | wire.Abort))
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.turn()
    assert not landed.ended
    pair.src.movers[0].abort(sent, "out of pages")
    network.copies = lambda source, target, message: 1
    pair.bench.ended([sent, landed])
    assert ended(landed).reason == "out of pages"
    assert ended(landed).cause is Cause.PEER_ABORTED


@routes
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_lost_peer_ends_a_pull_with_its_name(route: Route, victim: str):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(PULL, route=route), clock=clock)
    sent, (landed,) = pair.send(), pair.receive()
    pair.bench.network.hold()
    pair.bench.turn()
    pair.bench.network.cut((pair.src if victim == "prefill" else pair.dst).movers[0]._transport.name)
    pair.bench.network.deliver()
    for _ in range(12):
        clock.now += CONFIG.ping_s
        pair.bench.turn(2)
    left = [landed] if victim == "prefill" else sent
    for transfer in left:
        assert f"{victim}0" in str(ended(transfer).reason)


def test_a_source_whose_page_tables_no_message_holds_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    pair = Pair.of(config=replace(PULL, route=Route.DIRECT), tokens=8)
    (sent,) = (pair.src.movers[0].send("request", [np.arange(60)]),)
    landed = pair.receive()
    monkeypatch.setattr(wire, "MAX_TABLE_BYTES", 4)
    pair.bench.ended(landed)
    assert "over the limit" in str(ended(landed[0]).reason)
    pair.src.movers[0].abort(sent, "over")
    pair.bench.turn()
    pair.bench.assert_nothing_is_left()
