"""Movers over the loopback: every byte lands where it belongs, and what goes wrong ends in time, with its reason."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mover_cases import Case, cases, messages
from mover_fleets import CONFIG, SMALL_CHUNKS, Bench, Engine, HandClock, Pair, truth_of

from kvmover.errors import LayoutError, PeerLost, PeerRefused, PeerUnknown, PlanError, RefusedFor, TransferFailed
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Model, Place, read_card, write_card
from kvmover.transfer.result import Result, Transfer
from kvmover.transport import LoopbackTransport
from kvmover.transport.base import Revocation
from tests.proofs import searched

ROUTES = [Route.DIRECT, Route.PACKED]
CHUNK_BYTES = SMALL_CHUNKS.chunk_bytes


def ended(transfer: Transfer) -> Result:
    """The result of a transfer that has one."""
    assert transfer.result is not None
    return transfer.result


def reasons(transfers: list[Transfer]) -> list[str | None]:
    assert all(transfer.result for transfer in transfers)
    return [transfer.result.reason for transfer in transfers if transfer.result]


# Every byte


@searched(few=15, many=60)
@given(cases(most_tokens=90), st.sampled_from([None, *ROUTES]), st.sampled_from([1 << 20, 3 << 20]))
def test_any_fleet_fills_any_other_and_touches_nothing_else(case: Case, route: Route | None, arena_bytes: int):
    costs = replace(SMALL_CHUNKS, chunk_bytes=max(case.chunk_bytes, 512))
    bench = Bench(
        case.components, replace(CONFIG, arena_bytes=arena_bytes, costs=costs, route=route, replicas=case.replicas)
    )
    src, dst = (
        bench.engine(name, s.fleet, s.order, s.separate, case.pages(s))
        for name, s in (("prefill", case.src), ("decode", case.dst))
    )
    dst.connect(src)
    bench.turn(2)
    pair = Pair.request(bench, src, dst, case.tokens)
    offered = src.snapshot()
    transfers = [*pair.send(), *pair.receive(start=case.start)]
    bench.ended(transfers)
    moved = sum(transfer.landed().nbytes for transfer in transfers[: src.fleet.size])
    assert moved == sum(transfer.landed().nbytes for transfer in transfers[src.fleet.size :])
    pair.assert_landed(case.start)
    src.assert_holds(offered)
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", ROUTES)
def test_a_result_says_what_was_moved_and_how(route: Route):
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, route=route))
    sent, landed = pair.send(), pair.receive()
    pair.bench.ended([*sent, *landed])
    result = landed[0].landed()
    assert (result.reason, result.landed, result.quarantined) == (None, True, False)
    assert result.nbytes == 100 * 1024
    assert result.peers == 2
    assert result.routes == (route, route)
    assert sum(transfer.landed().writes for transfer in sent) == result.writes == 2 * 13
    assert sum(transfer.landed().runs for transfer in sent) == result.runs > result.writes


def test_an_empty_range_ends_at_once_and_moves_nothing():
    pair = Pair.of(Fleet(tp=2, page_tokens=4), Fleet(pp=2, page_tokens=4))
    sent, landed = pair.send(), pair.receive(start=100)
    assert all(transfer.landed().nbytes == 0 for transfer in landed)
    pair.bench.ended(sent)
    assert all(transfer.landed().nbytes == 0 for transfer in sent)
    pair.assert_landed(100)
    pair.bench.assert_nothing_is_left()


# Asking and offering


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("start", [0, 37, 100])
@pytest.mark.parametrize("polls", [0, 1, 10])
def test_a_request_may_be_asked_for_before_it_is_offered(route: Route, start: int, polls: int):
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, route=route))
    landed = pair.receive(start=start)
    pair.bench.turn(polls)
    sent = pair.send()
    pair.bench.ended([*sent, *landed])
    assert reasons([*sent, *landed]) == [None] * 3
    pair.assert_landed(start)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_may_be_offered_before_it_is_asked_for(route: Route):
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, route=route))
    sent = pair.send()
    pair.bench.turn(10)
    assert not any(transfer.ended for transfer in sent)
    landed = pair.receive()
    pair.bench.ended([*sent, *landed])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_a_want_that_was_withdrawn_is_not_served_later():
    pair = Pair.of()
    (landed,) = pair.receive()
    pair.bench.turn()
    pair.dst.movers[0].abort(landed, "changed my mind")
    pair.bench.ended([landed])
    (sent,) = pair.send()
    pair.bench.turn()
    assert not sent.ended
    (again,) = pair.receive()
    pair.bench.ended([sent, again])
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


def test_many_requests_move_at_once():
    pair = Pair.of(
        Fleet(tp=2, page_tokens=4), Fleet(page_tokens=16), config=replace(CONFIG, arena_bytes=3 * CHUNK_BYTES)
    )
    bench, src, dst = pair.bench, pair.src, pair.dst
    pages = iter(np.arange(64))
    expected, transfers = dst.snapshot(), []
    for n in range(1, 8):
        truth, src_tables = truth_of(bench.components, n, n), [[np.array([2 * n, 2 * n + 1])]] * 2
        dst_tables = [[np.array([next(pages)])]]
        src.fill(src_tables, truth)
        transfers += src.send(f"request-{n}", src_tables)
        transfers += dst.receive(f"request-{n}", "prefill", range(n), dst_tables)
        expected = dst.landed(expected, dst_tables, truth)
    bench.ended(transfers)
    assert not any(reasons(transfers))
    dst.assert_holds(expected)
    bench.assert_nothing_is_left()


def test_two_fleets_of_different_shape_fetch_from_one_at_once():
    bench = Bench((Component("attention", 4, 2, 6, 16, "bfloat16"), Component("keys", 4, 1, 1, 24, "uint8")))
    src = bench.engine("prefill", Fleet(tp=3, page_tokens=16))
    wide = bench.engine("wide", Fleet(tp=4, cp=2, page_tokens=4), "HND")
    tall = bench.engine("tall", Fleet(pp=2, page_tokens=24), "page token layer kv head dim", ("layer",))
    wide.connect(src)
    tall.connect(src)
    bench.turn()
    one, two = Pair.request(bench, src, wide, 90, 1), Pair.request(bench, src, tall, 70, 2)
    first, second = [[np.arange(6)] * 2] * 3, [[np.arange(6, 11)] * 2] * 3
    src.fill(first, one.truth)
    src.fill(second, two.truth)
    transfers = [*src.send("one", first), *src.send("two", second)]
    transfers += [*one.receive("one"), *two.receive("two", start=11)]
    bench.ended(transfers)
    assert not any(reasons(transfers))
    one.assert_landed()
    two.assert_landed(11)
    bench.assert_nothing_is_left()


# Back-pressure


@pytest.mark.parametrize(
    ("src_arena", "dst_arena"),
    [
        (CHUNK_BYTES, CHUNK_BYTES),
        (CHUNK_BYTES, 1 << 20),
        (1 << 20, CHUNK_BYTES),
        (CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1),
    ],
)
def test_full_arenas_wait_instead_of_dropping(src_arena: int, dst_arena: int):
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),))
    src = bench.engine("prefill", Fleet(tp=2, page_tokens=4), config=replace(CONFIG, arena_bytes=src_arena))
    dst = bench.engine("decode", Fleet(page_tokens=4), config=replace(CONFIG, arena_bytes=dst_arena))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 100)
    transfers = [*pair.send(), *pair.receive()]
    bench.ended(transfers)
    assert not any(reasons(transfers))
    pair.assert_landed()
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("arena_bytes", [1000, 2047, 2048 + 255])
def test_an_arena_holds_one_layer_of_a_page_or_no_mover_is_made_with_it(arena_bytes: int):
    """Of 4 tokens with K and V of 2 heads of 64 bfloat16: 2,048 bytes, less than which no chunk can always be."""
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),), replace(CONFIG, arena_bytes=arena_bytes))
    if arena_bytes >= 2048:
        bench.engine("prefill", Fleet(page_tokens=4))
        return
    with pytest.raises(LayoutError) as refused:
        bench.engine("prefill", Fleet(page_tokens=4))
    wanted = f"arena_bytes = {arena_bytes}; one layer of a page of attention is a chunk of 2048 bytes"
    assert str(refused.value) == wanted


def test_an_arena_of_slabs_has_room_for_one_layer_of_a_page_in_each():
    """Chunks are to be of 256 bytes and cannot be."""
    costs = replace(SMALL_CHUNKS, chunk_bytes=1)
    config = replace(CONFIG, arena_bytes=4 * 2048, revocation=Revocation.PROVEN, costs=costs)
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),), config)
    src, dst = (bench.engine(name, Fleet(page_tokens=4)) for name in ("prefill", "decode"))
    assert dst.movers[0]._core.incoming.arena.slab_bytes == 2048
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 40)
    transfers = [*pair.send(), *pair.receive()]
    bench.ended(transfers)
    assert reasons(transfers) == [None, None]
    pair.assert_landed()
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("odd", [1, 100, 255])
def test_an_arena_of_an_odd_size_is_used_as_far_as_it_goes(odd: int):
    component = Component("attention", 1, 1, 1, 250, "uint8")  # chunks of 250 bytes, regions of 256
    costs = replace(SMALL_CHUNKS, chunk_bytes=1)
    bench = Bench((component,), replace(CONFIG, costs=costs, arena_bytes=256 + odd))
    src, dst = bench.engine("prefill", Fleet(page_tokens=1)), bench.engine("decode", Fleet(page_tokens=1))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 30)
    transfers = [*pair.send(), *pair.receive()]
    bench.ended(transfers)
    assert not any(reasons(transfers))
    pair.assert_landed()
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("smaller", ["source", "destination"])
def test_a_page_of_all_layers_that_fits_no_arena_goes_by_fewer_layers(smaller: str):
    """Of 2 layers a page is 4 KiB; each arena holds a page of one."""
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),))
    small = {smaller: replace(CONFIG, arena_bytes=2048 + 255)}
    src = bench.engine("prefill", Fleet(page_tokens=4), config=small.get("source"))
    dst = bench.engine("decode", Fleet(page_tokens=4), config=small.get("destination"))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 100)
    transfers = [*pair.send(), *pair.receive()]
    bench.ended(transfers)
    assert reasons(transfers) == [None, None]
    assert ended(transfers[1]).writes == 50
    pair.assert_landed()
    bench.assert_nothing_is_left()


def test_a_source_whose_arena_is_too_small_for_a_layer_is_not_asked():
    """No Mover is made with one, so it is a peer of another making, which says so on its card."""
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),))
    src, dst = (bench.engine(name, Fleet(page_tokens=4)) for name in ("prefill", "decode"))
    core = src.movers[0]._core
    core.card = msgspec.structs.replace(core.card, staging=replace(core.card.staging, nbytes=256))
    dst.connect(src)
    bench.turn()
    pair = Pair.request(bench, src, dst, 100)
    with pytest.raises(PlanError, match="of one layer, does not fit the arena of 256"):
        pair.receive()
    pair.dst.assert_holds(pair.before)


# Giving up


#: When the engine gives up: by route, since what goes direct is all in flight at once.
MOMENTS = [
    *((Route.PACKED, moment) for moment in ("asked", "flying", "half landed", "before it is offered")),
    *((Route.DIRECT, moment) for moment in ("flying", "before it is offered")),
]


@pytest.mark.parametrize(("route", "moment"), MOMENTS)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_an_abort_from_either_side_ends_both_and_the_name_is_free_again(route: Route, side: str, moment: str):
    config = replace(CONFIG, route=route, arena_bytes=2 * CHUNK_BYTES)
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config)
    bench, network = pair.bench, pair.bench.network
    landed = pair.receive()
    if moment == "before it is offered":
        bench.turn()
    sent = pair.send()
    if moment == "asked":
        bench.turn(1)
    if moment == "half landed":
        bench.settle(lambda: len(_arrived(pair.dst)) >= 3)
    if moment in ("flying", "half landed"):
        network.hold()
        bench.turn()
    given_up = sent if side == "src" else landed
    for mover, transfer in zip(getattr(pair, side).movers, given_up, strict=True):
        mover.abort(transfer, "enough of this")
    bench.turn()
    if moment == "flying":
        assert not sent[0].ended  # writes may still land: nobody has their pages back
        assert not landed[0].ended
    network.deliver()
    bench.ended([*sent, *landed])
    for transfer in [*sent, *landed]:
        with pytest.raises(TransferFailed, match="enough of this"):
            transfer.landed()
        assert transfer.result is not None
        assert not transfer.result.quarantined
    bench.assert_nothing_is_left()

    after = pair.dst.snapshot()
    bench.turn()
    pair.dst.assert_holds(after)  # and nothing lands late
    retry = Pair.request(bench, pair.src, pair.dst, 100)
    transfers = [*retry.send(), *retry.receive()]
    bench.ended(transfers)
    assert not any(reasons(transfers))
    retry.assert_landed()
    bench.assert_nothing_is_left()


def test_a_transfer_that_is_given_up_before_anybody_asks_ends_at_once():
    pair = Pair.of()
    (sent,) = pair.send()
    pair.src.movers[0].abort(sent, "enough of this")
    assert reasons([sent]) == ["enough of this"]
    pair.bench.turn()
    pair.bench.assert_nothing_is_left()


def test_aborting_what_has_ended_changes_nothing():
    pair = Pair.of()
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.ended(transfers)
    for mover, transfer in zip(pair.bench.movers, transfers, strict=True):
        mover.abort(transfer, "too late")
    pair.bench.turn()
    assert not any(reasons(transfers))
    pair.bench.assert_nothing_is_left()


def _arrived(dst: Engine) -> set[tuple[str, int]]:
    return {key for attempt in dst.movers[0]._destination._attempts for key in attempt.state.arrived}


def test_chunks_that_wait_for_staging_memory_are_not_written_after_an_abort():
    pair = Pair.of(config=replace(CONFIG, arena_bytes=1 << 20))
    pair.src.movers[0]._core.outgoing.arena.reserve((1 << 20) - CHUNK_BYTES)  # room for one chunk
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.network.hold()
    pair.bench.turn()
    pair.dst.movers[0].abort(landed, "enough of this")
    pair.bench.turn()
    assert len(pair.src.movers[0]._writes.flights) == 1
    assert not pair.src.movers[0]._writes._queue
    pair.bench.network.deliver()
    pair.bench.ended([sent, landed])
    assert reasons([sent, landed]) == ["enough of this"] * 2


def test_a_transfer_that_failed_for_one_destination_reads_its_pages_for_no_other():
    """The pages of an ended transfer are the engine's again: what is gathered from them is another request's."""
    pair = Pair.of(dst=Fleet(tp=2, page_tokens=4), config=replace(CONFIG, arena_bytes=2 * CHUNK_BYTES))
    network = pair.bench.network
    (sent,), landed = pair.send(), pair.receive()
    network.hold()
    pair.bench.turn()
    pair.dst.movers[0].abort(landed[0], "rank 0 gave up")
    pair.bench.turn(1)
    network.deliver()
    pair.bench.settle(lambda: sent.ended)
    for tensor in pair.src.pools[0][0].tensors:
        tensor.fill_(0)  # the engine reuses them
    pair.bench.ended([sent, *landed])
    assert reasons([sent, *landed]) == ["rank 0 gave up"] * 3
    pair.bench.assert_nothing_is_left()


def test_a_want_for_a_transfer_that_has_ended_is_not_served():
    clock = HandClock()
    pair = Pair.of(dst=Fleet(tp=2, page_tokens=4), clock=clock)
    (sent,) = pair.send()
    pair.bench.turn()
    clock.now += CONFIG.deadline_s / 2
    pair.bench.network.hold()
    first = pair.dst.movers[0].receive("request", "prefill", range(100), pair.dst_tables[0])
    pair.bench.turn()
    clock.now += CONFIG.deadline_s / 2
    pair.bench.turn()
    late = pair.dst.movers[1].receive("request", "prefill", range(100), pair.dst_tables[1])
    pair.bench.turn()
    pair.bench.network.deliver()
    pair.bench.ended([sent, first, late])
    assert reasons([sent, first, late]) == ["deadline passed before every destination asked"] * 3
    pair.bench.assert_nothing_is_left()


# Deadlines


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_that_nobody_offers_ends_at_its_deadline(route: Route):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, route=route), clock=clock)
    (landed,) = pair.receive()
    pair.bench.turn()
    clock.now += CONFIG.deadline_s - 1
    pair.bench.turn()
    assert not landed.ended
    clock.now += 1
    pair.bench.turn()
    assert landed.ended
    assert "deadline passed with 26 chunks missing, waiting for prefill0" in str(reasons([landed])[0])
    assert not ended(landed).quarantined
    pair.bench.assert_nothing_is_left()


def test_a_request_that_nobody_asks_for_ends_at_its_deadline():
    clock = HandClock()
    pair = Pair.of(clock=clock)
    (sent,) = pair.send()
    clock.now += CONFIG.deadline_s
    pair.bench.turn()
    assert reasons([sent]) == ["deadline passed before every destination asked"]
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", ROUTES)
def test_writes_that_never_end_are_given_up_and_what_they_may_touch_is_kept_out_of_use(route: Route):
    clock = HandClock()
    pair = Pair.of(config=replace(CONFIG, route=route, arena_bytes=4 * CHUNK_BYTES), clock=clock)
    (sent,), (landed,) = pair.send(), pair.receive()
    pair.bench.network.hold()
    pair.bench.turn()
    for _ in range(100):  # in steps, as time passes
        clock.now += (CONFIG.deadline_s + CONFIG.drain_s) / 99
        pair.bench.turn(1)
    assert sent.ended
    assert landed.ended
    assert "deadline" in str(reasons([sent])[0])
    assert ended(sent).quarantined
    incoming, outgoing = pair.dst.movers[0]._core.incoming.arena, pair.src.movers[0]._core.outgoing.arena
    if route is Route.PACKED:
        assert not ended(landed).quarantined
        assert incoming.quarantined_bytes == incoming.reserved_bytes == 2 * CHUNK_BYTES  # its share
        assert outgoing.reserved_bytes == 2 * CHUNK_BYTES  # the other half is for other destinations
    else:
        assert ended(landed).quarantined
    pair.bench.network.deliver()
    pair.bench.turn()
    assert outgoing.reserved_bytes == 0
    if route is Route.PACKED:
        pair.dst.assert_holds(pair.before)


# Peers that go away


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["asked", "flying"])
def test_a_lost_peer_ends_the_request_with_its_name_long_before_the_deadline(route: Route, victim: str, moment: str):
    clock = HandClock()
    config = replace(CONFIG, route=route, arena_bytes=4 * CHUNK_BYTES)
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config, clock=clock)
    bench = pair.bench
    (landed,) = pair.receive()
    sent = pair.send() if moment == "flying" else []
    if sent:
        bench.network.hold()
    bench.turn(2)
    gone = (pair.src if victim == "prefill" else pair.dst).movers[0]
    bench.network.cut(gone._transport.name)
    if victim == "decode":
        bench.network.deliver()
    for _ in range(12):
        clock.now += CONFIG.ping_s
        bench.turn(2)
    left = [landed] if victim == "prefill" else sent
    assert all(transfer.ended for transfer in left)
    if left:
        assert f"{victim}0" in str(reasons(left[:1])[0])
        assert "lost" in str(reasons(left[:1])[0])


@pytest.mark.parametrize("middle", [False, True], ids=["idle", "mid-request"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_restarted_rank_takes_the_place_of_its_predecessor(who: str, middle: bool):
    pair = Pair.of(Fleet(tp=2, page_tokens=4))
    bench, engine = pair.bench, pair.src if who == "prefill" else pair.dst
    transfers: list[Transfer] = []
    if middle:
        transfers = [*pair.send(), *pair.receive()]
        bench.network.hold()
        bench.turn()
    old = engine.movers[0]
    old_transfer = transfers[0 if who == "prefill" else 2] if middle else None
    bench.network.cut(old._transport.name)
    bench.movers.remove(old)
    engine.movers[0] = bench.mover(Place(who, engine.fleet, 0), engine.pools[0])
    if who == "prefill":
        pair.dst.movers[0].connect(engine.movers[0].card)
    else:
        engine.connect(pair.src)
    bench.turn()
    bench.network.deliver()
    left = [transfer for transfer in transfers if transfer is not old_transfer]
    bench.ended(left)
    if middle:
        assert any(f"rank 0 of {who} restarted as" in str(reason) for reason in reasons(left))
        assert all(reasons(left))
    retry = Pair.request(bench, pair.src, pair.dst, 100)
    transfers = [*retry.send("again"), *retry.receive("again")]
    bench.ended(transfers)
    assert not any(reasons(transfers))
    retry.assert_landed()


def test_closing_ends_what_is_open_as_failed():
    pair = Pair.of()
    served = [*pair.send(), *pair.receive()]
    pair.bench.network.hold()
    pair.bench.turn()
    unasked = pair.src.movers[0].send("unasked", pair.src_tables[0])
    unoffered = pair.dst.movers[0].receive("unoffered", "prefill", range(100), None)
    for mover in pair.bench.movers:
        mover.close()
    assert reasons([*served, unasked, unoffered]) == ["this side closed"] * 4
    for mover in pair.bench.movers:
        mover.close()


# Bad input from this side


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ([], "0 page tables for 1 components"),
        ([np.arange(25), np.arange(25)], "2 page tables for 1 components"),
        ([np.arange(24)], "24 pages is too short for page 24"),
        ([[]], "0 pages is too short"),
        ([np.arange(40, 65)], "page id 64 is outside a pool of 64"),
        ([np.arange(-1, 24)], "page id -1 is outside"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_receiving_into_wrong_pages_raises_before_anything_is_sent(route: Route, tables: list, reason: str):
    pair = Pair.of(config=replace(CONFIG, route=route))
    with pytest.raises(PlanError, match=reason):
        pair.dst.movers[0].receive("request", "prefill", range(100), tables)
    assert not pair.src.movers[0]._transport.inbox
    pair.bench.assert_nothing_is_left()
    transfers = [*pair.receive(), *pair.send()]
    pair.bench.ended(transfers)
    pair.assert_landed()


@pytest.mark.parametrize("positions", [range(0, 10, 2), range(-4, 10)])
def test_positions_that_are_no_range_of_tokens_are_refused(positions: range):
    pair = Pair.of()
    with pytest.raises(LayoutError, match="not a range of tokens"):
        pair.dst.movers[0].receive("request", "prefill", positions, pair.dst_tables[0])


def test_an_engine_that_is_not_connected_cannot_be_asked():
    pair = Pair.of(Fleet(tp=2, page_tokens=4))
    with pytest.raises(PeerUnknown, match="no rank of nobody is connected"):
        pair.dst.movers[0].receive("request", "nobody", range(100), pair.dst_tables[0])
    half = pair.bench.engine("half", Fleet(tp=2, page_tokens=4))
    pair.dst.movers[0].connect(half.movers[0].card)
    assert [pair.dst.movers[0].ranks(engine) for engine in ("nobody", "half", "prefill")] == [set(), {0}, {0, 1}]
    with pytest.raises(PeerUnknown, match="rank 1 of half is not connected"):
        pair.dst.movers[0].receive("request", "half", range(100), pair.dst_tables[0])
    pair.bench.assert_nothing_is_left()


def test_a_name_in_use_is_refused_on_either_side():
    pair = Pair.of()
    pair.send()
    pair.receive()
    with pytest.raises(PlanError, match="already being sent"):
        pair.send()
    with pytest.raises(PlanError, match="already being received"):
        pair.receive()


def test_offering_with_the_wrong_number_of_tables_raises():
    with pytest.raises(PlanError, match="2 page tables for 1 components"):
        Pair.of().src.movers[0].send("request", [[1], [2]])


@pytest.mark.parametrize("route", ROUTES)
def test_a_source_whose_pages_are_too_few_tells_the_destination_why(route: Route):
    pair = Pair.of(config=replace(CONFIG, route=route))
    pair.src.movers[0].send("request", [[1, 3]])
    landed = pair.receive()
    pair.bench.ended(landed)
    assert "page" in str(reasons(landed)[0])
    pair.dst.assert_holds(pair.before)


def test_pools_that_do_not_fit_the_fleet_make_no_mover():
    bench = Bench((Component("attention", 2, 2, 4, 64, "bfloat16"),))
    spec = PoolSpec.dense(bench.components[0], Fleet().shard(bench.components[0], 0, 1), 8, 4, "NHD")
    for fleet in (Fleet(tp=2, page_tokens=4), Fleet(page_tokens=8), Fleet(pp=3, page_tokens=4)):
        with pytest.raises((LayoutError, PeerRefused)):
            bench.mover(Place("prefill", fleet, 0), [Pool.zeros(spec)])


def test_a_transfer_that_has_not_ended_has_not_landed():
    (sent,) = Pair.of().send()
    with pytest.raises(TransferFailed, match="request has not ended"):
        sent.landed()


# Bad input from peers


def stranger(pair: Pair, model: str = "toy") -> tuple[Mover, LoopbackTransport]:
    """Another decode rank, whose transport is at hand."""
    bench = pair.bench
    spec = pair.dst.pools[0][0].spec
    mover = bench.mover(Place("stranger", pair.dst.fleet, 0), [Pool.zeros(spec)], model=model)
    bench.movers.remove(mover)
    return mover, mover._transport  # pyright: ignore[reportReturnType]


def still_works(pair: Pair) -> None:
    transfers = [*pair.send("afterwards"), *pair.receive("afterwards")]
    pair.bench.ended(transfers)
    assert not any(reasons(transfers))
    pair.assert_landed()


def test_another_model_is_refused_with_both_sides_values_and_nothing_is_loaded():
    pair = Pair.of()
    other, _ = stranger(pair, "tay")
    with pytest.raises(PeerRefused, match=r"peer holds tay \(attention 2x2x2x64 bfloat16\); this side holds toy"):
        pair.dst.movers[0].connect(other.card)
    assert other._transport.name not in pair.dst.movers[0]._transport._peers
    with pytest.raises(PeerRefused):
        other.connect(pair.dst.movers[0].card)


def test_a_hello_that_cannot_be_accepted_is_counted_and_the_loop_goes_on():
    pair = Pair.of()
    _, speaker = stranger(pair)
    source = pair.src.movers[0]
    speaker.connect(source._transport.metadata())
    rank = source._core.card
    model = Model("toy", pair.bench.components)
    too_deep = msgspec.structs.replace(rank, place=Place("stranger", Fleet(pp=3, page_tokens=4), 0))
    cards = [
        b"",
        b"garbage",
        stranger(pair, "tay")[0].card,  # another model
        source.card,  # our own
        pair.dst.movers[0].card,  # of somebody else
        write_card(model, too_deep),
        write_card(model, msgspec.structs.replace(rank, transport=b"garbage")),
    ]
    for card in cards:
        speaker.notify(source._transport.name, wire.encode(wire.Hello(card)))
    pair.bench.turn()
    assert source.meter.refused.total() == len(cards)
    still_works(pair)


def test_who_is_refused_again_and_again_is_counted_each_time_and_written_of_once_a_minute(
    caplog: pytest.LogCaptureFixture,
):
    clock = HandClock()
    pair = Pair.of(clock=clock)
    _, speaker = stranger(pair)
    source = pair.src.movers[0]
    speaker.connect(source._transport.metadata())
    for _ in range(121):
        speaker.notify(source._transport.name, wire.encode(wire.Hello(stranger(pair, "tay")[0].card)))
        pair.bench.turn()
        clock.now += 1.0
    assert source.meter.refused == {RefusedFor.HANDSHAKE: 121}
    first, *others = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert first.endswith("this side holds toy (attention 2x2x2x64 bfloat16); they differ in name")
    assert [line.rpartition(" (")[2] for line in others] == ["59 more like it since the last line)"] * 2


@pytest.mark.parametrize("reason", RefusedFor)
def test_what_is_turned_away_is_counted_by_its_reason(reason: RefusedFor):
    pair = Pair.of()
    pair.src.movers[0]._core.refused("p.1", reason, "it is another's")
    assert pair.src.movers[0].snapshot().meter.refused == {reason: 1}


def test_a_card_that_connect_refuses_is_counted_too():
    pair = Pair.of()
    with pytest.raises(PeerRefused):
        pair.dst.movers[0].connect(stranger(pair, "tay")[0].card)
    assert pair.dst.movers[0].meter.refused == {RefusedFor.HANDSHAKE: 1}


def test_a_hello_that_the_transport_cannot_follow_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch):
    pair = Pair.of()
    newcomer, _ = stranger(pair)
    source = pair.src.movers[0]

    def lost(metadata: bytes) -> str:
        raise PeerLost("stranger is lost: it closed just now")

    monkeypatch.setattr(source._transport, "connect", lost)
    newcomer.connect(source.card)
    newcomer.poll()
    pair.bench.turn()
    assert source.meter.refused.total() == 1
    still_works(pair)


@pytest.mark.parametrize("note", [b"", b"kvm", b"garbage", b"kvm\xff" + bytes(20), wire.encode(wire.Ping()) + b"\0"])
def test_a_note_that_is_no_message_is_counted_and_the_loop_goes_on(note: bytes):
    pair = Pair.of()
    for mover, other in zip(pair.bench.movers, reversed(pair.bench.movers), strict=True):
        mover._transport.notify(other._transport.name, note)
    pair.bench.turn()
    assert [mover.meter.counts[Count.MALFORMED_MESSAGES] for mover in pair.bench.movers] == [1, 1]
    still_works(pair)


def test_messages_of_strangers_are_dropped():
    pair = Pair.of()
    _, speaker = stranger(pair)
    for mover in pair.bench.movers:
        speaker.connect(mover._transport.metadata())
        for message in (wire.Done("request", 1), wire.Abort("request", 1, "no"), wire.Ping()):
            speaker.notify(mover._transport.name, wire.encode(message))
    pair.bench.turn()
    assert [mover.meter.counts[Count.MALFORMED_MESSAGES] for mover in pair.bench.movers] == [3, 3]
    still_works(pair)


WANT = wire.Want("request", 1, 0, 100, Route.DIRECT, Replicas.STRIPE, 4096, (np.arange(25, dtype="<i4").tobytes(),))


@pytest.mark.parametrize(
    "change",
    [
        {"start": -8, "stop": -8},
        {"start": -8},
        {"stop": 2**62},
        {"stop": 2**62, "route": Route.PACKED, "pages": ()},
        {"start": 2**61, "stop": 2**62, "route": Route.PACKED, "pages": ()},
        {"start": 2**62, "stop": 5},
        *(
            {"chunk_bytes": nbytes, "route": Route.PACKED, "pages": ()}  # served as far as it is granted: not at all
            for nbytes in (0, -(2**62), 2**62)
        ),
        {"pages": ()},
        {"pages": (b"abc",)},
        {"pages": (b"", b"")},
        {"pages": (np.arange(3, dtype="<i4").tobytes(),)},
        {"pages": (np.full(25, -1, dtype="<i4").tobytes(),)},
        {"pages": (np.full(25, 64, dtype="<i4").tobytes(),)},
    ],
    ids=str,
)
def test_a_want_that_makes_no_sense_is_answered_and_the_loop_goes_on(change: dict[str, object]):
    pair = Pair.of()
    pair.send()
    source, speaker = pair.src.movers[0], pair.dst.movers[0]._transport
    speaker.notify(source._transport.name, wire.encode(msgspec.structs.replace(WANT, **change)))
    pair.bench.turn()
    still_works(pair)


@pytest.mark.parametrize("offset", [1 << 20, wire.MOST, (1 << 20) - CHUNK_BYTES + 1])
def test_a_grant_outside_the_arena_fails_that_attempt_before_anything_is_packed(offset: int):
    clock = HandClock()
    pair = Pair.of(clock=clock)
    (sent,) = pair.send()
    source, target = pair.src.movers[0], pair.dst.movers[0]
    want = msgspec.structs.replace(WANT, route=Route.PACKED, pages=())
    for message in (want, wire.Granted("request", 1, (wire.Grant(0, offset),))):
        target._transport.notify(source._transport.name, wire.encode(message))
    pair.bench.turn()
    clock.now += CONFIG.drain_s
    pair.bench.ended([sent])
    assert f"grant at {offset} leaves the arena" in str(reasons([sent])[0])
    pair.dst.assert_holds(pair.before)


@searched(few=15, many=40)
@given(st.lists(st.tuples(messages(["request", "other"]), st.integers(0, 3)), max_size=12), st.sampled_from(ROUTES))
def test_no_sequence_of_messages_ends_the_loop_or_keeps_a_transfer_from_ending(
    said: list[tuple[wire.AnyMessage, int]], route: Route
):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=replace(CONFIG, route=route), clock=clock, tokens=20)
    transfers = [*pair.send(), *pair.receive()]
    generation = pair.dst.movers[0]._destination.generation
    source, target = pair.src.movers[0]._transport, pair.dst.movers[0]._transport
    for message, turns in said:
        if isinstance(message, wire.About):
            message = msgspec.structs.replace(message, generation=generation + message.generation % 3 - 1)
        for one, other in ((source, target), (target, source)):
            with suppress(PeerUnknown):  # who has NoSeat has parted, and is back in half a second
                one.notify(other.name, wire.encode(message))
        pair.bench.turn(turns)
    for _ in range(70):
        clock.now += (CONFIG.deadline_s + CONFIG.drain_s) / 64
        pair.bench.turn(2)
    assert all(transfer.ended for transfer in transfers)
    for transfer in transfers:
        assert ended(transfer).landed or ended(transfer).reason


def test_the_card_of_a_mover_can_be_read_by_others():
    pair = Pair.of()
    mover = pair.src.movers[0]
    assert read_card(Model("toy", pair.bench.components), mover.card) == mover._core.card


def test_a_mover_behaves_by_a_new_configuration_from_the_next_request_on():
    pair = Pair.of(config=replace(CONFIG, route=Route.PACKED))
    (mover,) = pair.dst.movers
    mover.configure(replace(CONFIG, route=Route.DIRECT))
    pair.bench.ended([*pair.send(), *(received := pair.receive())])
    assert ended(received[0]).routes == (Route.DIRECT,)
    with pytest.raises(LayoutError, match="cannot become"):
        mover.configure(replace(CONFIG, arena_bytes=CONFIG.arena_bytes * 2))


def test_a_request_that_waits_for_its_prefill_holds_no_region():
    """An arena of one chunk, and a request nobody offers before one that is: the second lands."""
    pair = Pair.of(config=replace(CONFIG, arena_bytes=4096))
    others = [np.arange(0, 50, 2)]
    waiting = pair.dst.movers[0].receive("waits for its prefill", "prefill", range(pair.tokens), others)
    pair.bench.turn()
    assert pair.dst.movers[0]._core.incoming.arena.reserved_bytes == 0
    pair.bench.ended([*pair.send("ready"), *pair.receive("ready")])
    pair.assert_landed()
    assert not waiting.ended
    pair.bench.ended([*pair.send("waits for its prefill"), waiting])
