"""Windows, states and index keys: only what is wanted is written, once, whatever TP, PP and CP the two fleets have."""

from __future__ import annotations

from itertools import product

import pytest

from kvmover.errors import PlanError
from kvmover.layout import Component, CpOrder, Fleet
from kvmover.plan import Leg, Plan, Replicas
from tests.plan.leg_cases import BOTH, check, check_balance, check_relations, plan_of, positions_of
from tests.proofs import family

GRIDS = [
    Fleet(tp, pp, cp, 16, order)
    for (tp, pp, cp), order in zip(product((1, 2, 3, 4), (1, 2), (1, 2, 3)), list(CpOrder) * 8, strict=True)
]
ORDERS = [Fleet(tp, 1, cp, page, order) for tp, cp, page in ((1, 1, 16), (2, 3, 3), (3, 2, 24)) for order in CpOrder]


def states_of(heads: int, states: int, layers: int = 2) -> Component:
    return Component.state("states", layers, heads, 3, "float32", states)


def pairs(legs: list[Leg]) -> list[tuple[int, int]]:
    return sorted((leg.src_rank, leg.dst_rank) for leg in legs)


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("heads", family([1, 2, 3, 8], few=[3]))
def test_states_between_any_two_grids_are_written_once_with_balanced_replicas(heads: int, replicas: Replicas) -> None:
    for number, (src, dst) in enumerate(product(GRIDS, repeat=2)):
        plan = plan_of(states_of(heads, (1, 2, 5)[number % 3]), src, dst, range(40, 300), replicas)
        check_balance(plan, check(plan))


@pytest.mark.parametrize("replicas", BOTH)
def test_the_two_sides_agree_on_who_sends_states_to_whom(replicas: Replicas) -> None:
    for src, dst in product(GRIDS[::3], GRIDS[1::3]):
        for heads, states in ((2, 1), (4, 3)):
            plan = plan_of(states_of(heads, states), src, dst, range(7), replicas)
            check_relations(plan, list(plan.legs()))


def test_states_do_not_depend_on_the_request_nor_on_how_its_positions_are_dealt() -> None:
    shapes = [Fleet(2, 1, 3, page, order) for page in (1, 16, 64) for order in CpOrder]
    plans = [
        plan_of(states_of(4, 3), src, Fleet(4), tokens, Replicas.STRIPE)
        for src in shapes
        for tokens in (range(1), range(16), range(99, 4_000))
    ]
    first, *others = [check(plan) for plan in plans]
    assert all(legs == first for legs in others)


@pytest.mark.parametrize("replicas", BOTH)
def test_a_state_on_four_context_ranks_is_sent_by_all_four_to_as_many_boxes(replicas: Replicas) -> None:
    across_heads = check(plan_of(states_of(8, 1), Fleet(cp=4), Fleet(tp=4), range(99), replicas))
    assert {len(legs) for legs in (across_heads, {leg.src_rank for leg in across_heads})} == {4}
    across_stages = check(plan_of(states_of(8, 1), Fleet(cp=4), Fleet(tp=2, pp=2), range(99), replicas))
    assert {len(legs) for legs in (across_stages, {leg.src_rank for leg in across_stages})} == {4}


def test_many_states_on_four_context_ranks_are_dealt_in_turn() -> None:
    legs = check(plan_of(states_of(2, 8), Fleet(cp=4), Fleet(), range(99), Replicas.STRIPE))
    assert pairs(legs) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert {leg.tokens for leg in legs} == {2}


@pytest.mark.parametrize("replicas", BOTH)
def test_every_context_rank_of_the_destination_gets_the_state(replicas: Replicas) -> None:
    legs = check(plan_of(states_of(2, 1), Fleet(tp=2), Fleet(tp=2, cp=3), range(5), replicas))
    assert pairs(legs) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5)]


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_a_fleet_sends_states_to_its_own_kind_rank_by_rank(heads: int, replicas: Replicas) -> None:
    for fleet in GRIDS:
        legs = check(plan_of(states_of(heads, 4), fleet, fleet, range(99), replicas))
        assert pairs(legs) == [(rank, rank) for rank in range(fleet.size)]


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("window", [1, 20, 64, 1_000])
def test_only_the_last_positions_of_a_sliding_window_are_written(window: int, replicas: Replicas) -> None:
    component = Component("sliding", 1, 1, 2, 1, "int8", window)
    for (src, dst), tokens in product(product(ORDERS, repeat=2), (range(160), range(37, 159), range(64, 65))):
        plan = plan_of(component, src, dst, tokens, replicas)
        legs = check(plan)
        check_balance(plan, legs)
        written = {position for leg in legs for position in positions_of(leg.positions).tolist()}
        assert written == set(tokens) & set(range(tokens.stop)[-window:])


def test_context_ranks_before_the_window_send_nothing() -> None:
    component = Component.sliding(4, 2, 64, 32, "bfloat16")
    src = Fleet(cp=4, page_tokens=16, cp_order=CpOrder.BLOCK)
    legs = check(plan_of(component, src, Fleet(), range(256), Replicas.STRIPE))
    assert [(leg.src_rank, [stripe.quad() for stripe in leg.positions]) for leg in legs] == [(3, [[224, 1, 32, 32]])]


def test_index_keys_are_one_more_head_that_every_rank_holds_and_all_eight_send() -> None:
    keys = Component("index", 61, 1, 1, 132, "uint8")
    plan = plan_of(keys, Fleet(tp=8), Fleet(tp=2, pp=2), range(64 * 80), Replicas.STRIPE)
    legs = check(plan)
    check_balance(plan, legs)
    assert {leg.src_rank for leg in legs} == set(range(8))
    assert sum(leg.nbytes(keys) for leg in legs) == 2 * 64 * 80 * keys.token_bytes


def test_bytes_of_a_leg_of_states_count_each_state_once() -> None:
    temporal = Component.state("temporal", 24, 128, 64 * 128, "float32")
    plan = plan_of(temporal, Fleet(tp=4), Fleet(tp=2), range(8_192), Replicas.STRIPE)
    assert {leg.nbytes(temporal) for leg in check(plan)} == {24 * 32 * 64 * 128 * 4}


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (0, 64), (2, 4)])
def test_states_that_a_request_does_not_have_are_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match=rf"positions \[{start}, {stop}\) of states, which has 2 a request"):
        Plan(states_of(2, 2), Fleet(), Fleet(cp=2), start, stop)
