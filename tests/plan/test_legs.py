"""Between any two fleets every element of the destination is written exactly once, by a rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given

from kvmover.errors import LayoutError, PlanError
from kvmover.layout import Component, CpOrder, Fleet, Span, Stripe
from kvmover.plan import Plan, Replicas
from tests.plan.leg_cases import BOTH, PAGES, check, check_balance, check_relations, heads_of, plans
from tests.proofs import family, searched


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("heads", family(range(1, 17), few=(3, 8)))
def test_every_tensor_parallel_size_to_every_other_is_written_once(heads: int, replicas: Replicas) -> None:
    component = heads_of(heads)
    for src, dst in product(range(1, 17), repeat=2):
        start, stop = (15, 79) if dst % 2 else (1, 65)  # 1 and 15 tokens of the first and last page, and 3 whole ones
        plan = Plan(component, Fleet(tp=src, page_tokens=16), Fleet(tp=dst, page_tokens=24), start, stop, replicas)
        check_balance(plan, check(plan))


@pytest.mark.parametrize("replicas", BOTH)
def test_sources_and_destinations_are_one_relation_for_every_pair_of_sizes(replicas: Replicas) -> None:
    for heads, src, dst in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8)):
        plan = Plan(heads_of(heads), Fleet(tp=src, page_tokens=3), Fleet(tp=dst, page_tokens=4), 2, 16, replicas)
        check_relations(plan, list(plan.legs()))


CP_FLEETS = [
    Fleet(cp=cp, page_tokens=page, cp_order=order) for cp in range(1, 5) for order in CpOrder for page in PAGES
]


@pytest.mark.parametrize("src", CP_FLEETS, ids=lambda fleet: f"cp{fleet.cp}-{fleet.cp_order}-{fleet.page_tokens}")
def test_every_context_parallel_order_to_every_other_is_written_once(src: Fleet) -> None:
    ranges = [(0, 200), (37, 158), (64, 65)]
    for number, dst in enumerate(CP_FLEETS):
        start, stop = ranges[number % len(ranges)]
        check(Plan(heads_of(1), src, dst, start, stop))


def test_every_number_of_stages_to_every_other_is_written_once() -> None:
    for layers, src, dst in product(range(1, 12), range(1, 5), range(1, 5)):
        if max(src, dst) <= layers:
            check(Plan(heads_of(2, layers), Fleet(pp=src, tp=2), Fleet(pp=dst), 0, 7))


@searched(few=100, many=400)
@given(plans())
def test_any_fleet_to_any_other_is_written_once_with_balanced_replicas(plan: Plan) -> None:
    check_balance(plan, check(plan))


@searched(few=30, many=80)
@given(plans())
def test_any_two_fleets_agree_on_who_sends_to_whom(plan: Plan) -> None:
    check_relations(plan, list(plan.legs()))


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "fleet",
    [
        Fleet(tp=4),
        Fleet(tp=3, pp=2, page_tokens=16),
        Fleet(tp=2, cp=3, page_tokens=3),
        Fleet(tp=6, cp=2, cp_order=CpOrder.TOKEN),
    ],
    ids=["tp4", "tp3-pp2", "tp2-cp3", "tp6-cp2-token"],
)
def test_a_fleet_sends_to_its_own_kind_rank_by_rank(fleet: Fleet, heads: int, replicas: Replicas) -> None:
    legs = check(Plan(heads_of(heads, 2), fleet, fleet, 5, 300, replicas))
    assert sorted((leg.src_rank, leg.dst_rank) for leg in legs) == [(rank, rank) for rank in range(fleet.size)]


def test_a_latent_on_eight_ranks_is_sent_by_all_eight_and_no_page_by_two() -> None:
    plan = Plan(Component.mla(61, 576, "bfloat16"), Fleet(tp=8), Fleet(tp=2), 0, 64 * 80)
    legs = check(plan)
    check_balance(plan, legs)
    assert {leg.src_rank for leg in legs} == set(range(8))
    assert {leg.nbytes(plan.component) for leg in legs} == {20 * 64 * 61 * 1152}
    assert {len(leg.positions) for leg in legs} == {1}


def test_replicas_on_both_sides_each_serve_their_share_of_the_others() -> None:
    plan = Plan(heads_of(2), Fleet(tp=4), Fleet(tp=8), 0, 64)
    pairs = sorted((leg.src_rank, leg.dst_rank) for leg in check(plan))
    assert pairs == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]


def test_eight_heads_from_three_ranks_to_two_are_cut_where_the_shares_meet() -> None:
    legs = check(Plan(heads_of(6), Fleet(tp=3), Fleet(tp=2), 0, 64))
    shares = [(leg.src_rank, leg.dst_rank, leg.heads.triple()) for leg in legs]
    assert shares == [(0, 0, [0, 2, 1]), (1, 0, [2, 1, 1]), (1, 1, [3, 1, 1]), (2, 1, [4, 2, 1])]


def test_one_token_reaches_only_the_ranks_that_hold_its_position() -> None:
    plan = Plan(heads_of(2), Fleet(tp=2, cp=4, page_tokens=16), Fleet(cp=4, cp_order=CpOrder.TOKEN), 70, 71)
    assert [(leg.src_rank, leg.dst_rank) for leg in check(plan)] == [(0, 2), (1, 2)]


def test_bytes_of_a_leg_count_keys_and_values_at_the_dtype() -> None:
    plan = Plan(Component.attention(80, 8, 128, "bfloat16"), Fleet(tp=4, page_tokens=16), Fleet(tp=2, pp=2), 0, 8192)
    legs = check(plan)
    assert {leg.nbytes(plan.component) for leg in legs} == {40 * 2 * 2 * 8192 * 256}
    assert sum(leg.nbytes(plan.component) for leg in legs) == 8192 * plan.component.token_bytes


LONG = [
    Fleet(tp=tp, cp=cp, page_tokens=page, cp_order=order)
    for tp, cp, page in ((1, 1, 64), (8, 2, 16), (2, 4, 24), (3, 3, 16))
    for order in CpOrder
]


@pytest.mark.parametrize("replicas", BOTH)
def test_a_million_tokens_are_planned_without_a_look_at_a_single_one(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enumerated(_: object) -> Iterator[int]:
        raise AssertionError("enumerated")

    monkeypatch.setattr(Stripe, "__iter__", enumerated)
    monkeypatch.setattr(Span, "__iter__", enumerated)
    for src, dst in product(LONG, repeat=2):
        plan = Plan(heads_of(2), src, dst, 12_345, 1_000_003, replicas)
        for leg in plan.legs_into(dst.size - 1):
            assert len(leg.positions) <= 3 * (src.page_tokens + dst.page_tokens), leg


def test_pages_are_dealt_alike_wherever_in_a_request_they_lie() -> None:
    """Of two cut pages of equal size the first comes first: the order in a set of page numbers is nobody's to know."""
    src, dst = Fleet(tp=3, page_tokens=2), Fleet(tp=2, page_tokens=2)

    def dealt(shift: int) -> list[tuple[int, int, list[int]]]:
        legs = Plan(heads_of(1), src, dst, shift + 1, shift + 15).legs()
        return [(leg.src_rank, leg.dst_rank, sorted(p - shift for s in leg.positions for p in s)) for leg in legs]

    assert all(dealt(shift) == dealt(0) for shift in range(0, 64, 2))


def test_page_interleaved_ranks_exchange_a_handful_of_stripes_however_long_the_request() -> None:
    src, dst = Fleet(cp=4, page_tokens=16), Fleet(cp=3, page_tokens=64)
    for tokens in (100_000, 1_000_000, 100_000_000):
        plan = Plan(heads_of(1), src, dst, 7, tokens)
        assert max(len(leg.positions) for leg in plan.legs()) <= 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Plan(heads_of(1), Fleet(), Fleet(), 5, 5), PlanError, r"positions \[5, 5\)"),
        (lambda: Plan(heads_of(1), Fleet(), Fleet(), 0, 0), PlanError, r"positions \[0, 0\)"),
        (lambda: Plan(heads_of(1), Fleet(), Fleet(), -1, 4), PlanError, r"positions \[-1, 4\)"),
        (lambda: Plan(heads_of(1), Fleet(), Fleet(), 9, 4), PlanError, r"positions \[9, 4\)"),
        (lambda: Plan(heads_of(1, 3), Fleet(pp=4), Fleet(), 0, 4), LayoutError, "4 pipeline stages for 3 layers"),
        (lambda: Plan(heads_of(1, 3), Fleet(), Fleet(pp=5), 0, 4), LayoutError, "5 pipeline stages for 3 layers"),
    ],
    ids=["empty", "no-tokens", "negative", "backwards", "src-stages", "dst-stages"],
)
def test_an_impossible_plan_is_refused_with_its_values(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
