"""Both routes of every leg put every byte where a plain copy by logical coordinates puts it, and touch nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from kvmover.errors import PlanError
from kvmover.layout import PACKED_ORDER, Component, Fleet, PoolSpec, Shard, Span
from kvmover.plan import Held, Leg, Plan, Replicas
from kvmover.plan.lower import box, coalesced_runs, count_runs, packed_place, pool_place, units_of
from tests.plan.leg_cases import plan_of
from tests.plan.lowering_scenes import (
    DIM_LAST,
    POISON,
    SEPARATE,
    Scene,
    assert_equal,
    check_direct,
    check_packed,
    move_box,
    move_runs,
    scene_of,
    scenes,
)
from tests.proofs import searched, tries


@searched(few=60, many=200)
@given(scenes())
def test_the_direct_route_puts_every_byte_where_a_plain_copy_does(scene: Scene) -> None:
    check_direct(scene)


@searched(few=60, many=200)
@given(scenes())
def test_the_packed_route_puts_every_byte_where_a_plain_copy_does(scene: Scene) -> None:
    check_packed(scene)


def small_plan() -> Plan:
    """Two ranks to one, pages of 2 to pages of 3, from the middle of a page."""
    return Plan(Component("rows", 2, 2, 2, 3, "int8"), Fleet(tp=2, page_tokens=2), Fleet(page_tokens=3), 1, 7)


@pytest.mark.searched
@pytest.mark.parametrize("order", DIM_LAST, ids=lambda order: order.replace(" ", "-"))
def test_a_pool_in_this_order_sends_to_and_receives_from_pools_in_all_orders(order: str) -> None:
    """A plain run takes each sixteenth of the orders, from another one on for each."""
    step = tries(plain=16, prove=1, night=1)
    plan = small_plan()
    _, leg = plan.legs()
    for number, other in [*enumerate(DIM_LAST)][DIM_LAST.index(order) % step :: step]:
        scene = scene_of(plan, leg, (order, other), ((), ()), number)
        landed = scene.dst.poisoned()
        move_runs(coalesced_runs(scene.boxes()), scene.src.memory, landed)
        assert_equal(landed, scene.expected())


@pytest.mark.parametrize("order", ["NHD", "HND", PACKED_ORDER], ids=["NHD", "HND", "packed"])
@pytest.mark.parametrize("separate", SEPARATE, ids=lambda axes: "-".join(axes) or "one-allocation")
@pytest.mark.parametrize(
    "pages", [(1, 64), (3, 16), (16, 24), (24, 24), (64, 3)], ids=lambda pages: f"{pages[0]}to{pages[1]}"
)
def test_both_routes_agree_for_the_usual_orders_and_pages(
    order: str, separate: tuple[str, ...], pages: tuple[int, int]
) -> None:
    component = Component.attention(3, 4, 2, "bfloat16")
    plan = Plan(component, Fleet(tp=4, page_tokens=pages[0]), Fleet(tp=2, pp=2, page_tokens=pages[1]), 5, 70)
    leg = list(plan.legs())[1]
    scene = scene_of(plan, leg, (order, "HND"), (separate, ("layer", "kv")), 7)
    check_direct(scene)
    check_packed(scene)


def test_the_packed_order_is_unit_head_layer_kv_token_dim() -> None:
    plan = Plan(Component.attention(2, 3, 2, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=6), 0, 12)
    (leg,) = plan.legs()
    scene = scene_of(plan, leg, ("NHD", "HND"), ((), ()), 3)
    (units,) = units_of(leg, scene.src.held, scene.dst.held)
    source, _, staged, _, _ = next(scene.places())
    staging = [np.full(leg.nbytes(plan.component), POISON)]
    move_box(box(plan.component, leg, units, source, staged), scene.src.memory, staging)
    rows = scene.src.rows(leg)
    logical = np.stack([plane[index] for plane, index in rows.values()]).reshape(2, 2, 6, 2, 3, 2)
    assert np.array_equal(staging[0], logical.transpose(2, 4, 0, 1, 3, 5).reshape(-1))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_units_add_up_to_the_whole_move(chunk: int) -> None:
    plan = Plan(Component.attention(2, 4, 3, "int8"), Fleet(tp=2, page_tokens=4), Fleet(page_tokens=6), 3, 47)
    leg = list(plan.legs())[1]
    scene = scene_of(plan, leg, ("NHD", PACKED_ORDER), ((), ()), 1)
    landed = scene.dst.poisoned()
    for units in units_of(leg, scene.src.held, scene.dst.held):
        for start in range(0, len(units), chunk):
            part = units.slice(start, start + chunk)
            source = pool_place(scene.src.held, leg, part.src, scene.src.pages)
            target = pool_place(scene.dst.held, leg, part.dst, scene.dst.pages)
            staging = [
                np.full(
                    min(chunk, len(units) - start) * box(plan.component, leg, part, source, target).unit_bytes, POISON
                )
            ]
            staged = packed_place(plan.component, leg, part, 0)
            move_box(box(plan.component, leg, part, source, staged), scene.src.memory, staging)
            assert (staging[0] != POISON).all()
            move_box(box(plan.component, leg, part, staged, target), staging, landed)
    assert_equal(landed, scene.expected())


def test_pages_that_follow_each_other_in_both_pools_cost_one_run() -> None:
    plan = Plan(Component.mla(1, 8, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=4), 0, 32)
    (leg,) = plan.legs()
    scene = scene_of(plan, leg, ("NHD", "NHD"), ((), ()), 0)
    up, down, apart = np.arange(8), np.arange(8)[::-1], np.array([0, 1, 2, 3, 8, 9, 5, 6])
    for src_pages, dst_pages, runs in (
        (up, up + 3, 1),
        (down, down, 1),
        (up, down, 8),
        (apart, up, 3),
        (apart, apart, 3),
    ):
        scene.src.pages, scene.dst.pages = src_pages, dst_pages
        assert len(coalesced_runs(scene.boxes())) == runs
        check_direct(scene)


@settings(max_examples=100)
@given(scenes(orders=["NHD", "HND"]))
def test_the_estimate_of_runs_is_exact_for_scattered_pages_in_the_engines_own_orders(scene: Scene) -> None:
    groups = units_of(scene.leg, scene.src.held, scene.dst.held)
    assert count_runs(scene.leg, scene.src.held, scene.dst.held, groups) == len(coalesced_runs(scene.boxes()))


@pytest.mark.parametrize(("order", "runs"), [("NHD", 1_048_576), ("HND", 16_384)], ids=["NHD", "HND"])
def test_the_estimate_of_runs_is_that_of_the_published_case(order: str, runs: int) -> None:
    component = Component.attention(64, 8, 128, "bfloat16")
    plan = Plan(component, Fleet(tp=4), Fleet(tp=2), 0, 8192)
    leg = next(plan.legs())
    held = [
        Held(PoolSpec.dense(component, shard, 128, 64, order), shard)
        for shard in (plan.src_shard(0), plan.dst_shard(0))
    ]
    assert count_runs(leg, *held, units_of(leg, *held)) == runs


def tables() -> tuple[Held, Leg, np.ndarray]:
    plan = Plan(Component.attention(1, 2, 4, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=4), 0, 12)
    (leg,) = plan.legs()
    shard = plan.src_shard(0)
    held = Held(PoolSpec.dense(plan.component, shard, 10, 4, "NHD"), shard)
    (units,) = units_of(leg, held, held)
    return held, leg, units.src


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 2], "page table of 2 pages is too short for page 2 of the request"),
        ([], "page table of 0 pages is too short"),
        ([1, 2, 10], "page id 10 is outside a pool of 10 pages"),
        ([1, -1, 3], "page id -1 is outside a pool of 10 pages"),
        ([1 << 40, 2, 3], f"page id {1 << 40} is outside a pool of 10 pages"),
    ],
    ids=["short", "empty", "past-the-end", "negative", "huge"],
)
def test_a_page_table_that_does_not_fit_is_refused_with_the_value(pages: list[int], message: str) -> None:
    held, leg, tokens = tables()
    with pytest.raises(PlanError, match=message):
        pool_place(held, leg, tokens, np.array(pages, np.int64))


def test_pages_past_the_requests_own_are_not_looked_at() -> None:
    held, leg, tokens = tables()
    short = pool_place(held, leg, tokens, np.array([4, 0, 9]))
    longer = pool_place(held, leg, tokens, np.array([4, 0, 9, -1, 77]))
    assert np.array_equal(short.units, longer.units)


def places_of(component: Component, stop: int, pages: list[int]) -> list[int]:
    """Unit offsets, in pages, of all that `component` wants of a request of `stop` tokens in pages of 4."""
    plan = plan_of(component, Fleet(page_tokens=4), Fleet(page_tokens=4), range(stop), Replicas.STRIPE)
    (leg,) = plan.legs()
    shard = plan.src_shard(0)
    held = Held(PoolSpec.dense(component, shard, 10, Fleet(page_tokens=4).page_rows(component), "NHD"), shard)
    table = np.array(pages, np.int64)
    return [
        offset // held.spec.stride_bytes("page")
        for units in units_of(leg, held, held)
        for offset in pool_place(held, leg, units.src, table).units.tolist()
    ]


def test_pages_before_the_window_may_have_any_number_and_those_in_it_may_not() -> None:
    window_of_6 = Component.sliding(1, 2, 4, 6, "int8")  # positions 12 to 17: pages 3 and 4
    assert places_of(window_of_6, 18, [-1, 1 << 40, -1, 7, 2]) == [7, 2]
    with pytest.raises(PlanError, match="page id -1 is outside a pool of 10 pages"):
        places_of(window_of_6, 18, [5, 5, 5, -1, 2])
    with pytest.raises(PlanError, match="page table of 4 pages is too short for page 4 of the request"):
        places_of(window_of_6, 18, [5, 5, 5, 7])


def test_a_page_table_of_states_has_an_entry_a_state_however_long_the_request() -> None:
    three_states = Component.state("states", 1, 2, 4, "int8", states=3)
    assert places_of(three_states, 1, [8, 0, 5]) == places_of(three_states, 4_000, [8, 0, 5]) == [8, 0, 5]
    with pytest.raises(PlanError, match="page table of 2 pages is too short for page 2 of the request"):
        places_of(three_states, 1, [8, 0])


def test_a_rank_that_holds_nothing_has_no_pages_to_cut() -> None:
    held, leg, _ = tables()
    nothing = Held(held.spec, Shard(Span(0, 1), Span(0, 2), None))
    with pytest.raises(PlanError, match="holds no position"):
        units_of(leg, held, nothing)


def test_page_offsets_past_32_bits_are_exact() -> None:
    component = Component.attention(80, 8, 128, "bfloat16")
    plan = Plan(component, Fleet(), Fleet(), 0, 128)
    (leg,) = plan.legs()
    shard = plan.src_shard(0)
    held = Held(PoolSpec.dense(component, shard, 1 << 20, 64, PACKED_ORDER), shard)
    pages = np.array([(1 << 20) - 1, 3])
    place = pool_place(held, leg, np.array([0, 64]), pages)
    page_bytes = 64 * component.token_bytes
    assert place.units.dtype == np.int64
    assert place.units.tolist() == [((1 << 20) - 1) * page_bytes, 3 * page_bytes]
