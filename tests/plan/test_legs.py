"""Between any two fleets every element of the destination is written exactly once, by a rank that holds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.errors import LayoutError, PlanError
from kvmover.layout import Component, CpOrder, Fleet, Shard, Span, Stripe
from kvmover.plan import Leg, Plan, Replicas

PAGES = (1, 3, 16, 24, 64)
BOTH = list(Replicas)


def heads_of(heads: int, layers: int = 1) -> Component:
    return Component("rows", layers, 1, heads, 1, "int8")


@lru_cache(4096)
def tokens_in(stripe: Stripe) -> np.ndarray:
    runs = stripe.start + np.arange(stripe.count) * stripe.step
    return (runs[:, None] + np.arange(stripe.width)).reshape(-1)


def positions_of(stripes: Iterable[Stripe]) -> np.ndarray:
    parts = [tokens_in(stripe) for stripe in stripes]
    return np.concatenate(parts) if parts else np.zeros(0, int)


@dataclass
class Box:
    """A shard or a leg as arrays: `mask` [position] over the whole request."""

    layers: slice
    heads: slice
    mask: np.ndarray

    @classmethod
    def of(cls, shard: Shard | Leg, positions: Iterable[Stripe], start: int, stop: int) -> Box:
        assert shard.layers.step == shard.heads.step == 1
        held = positions_of(positions)
        mask = np.zeros(stop, bool)
        mask[held[(held >= start) & (held < stop)]] = True
        layers, heads = shard.layers, shard.heads
        return cls(slice(layers.start, layers.stop), slice(heads.start, heads.stop), mask)


def boxes(plan: Plan, fleet: Fleet) -> list[Box]:
    shards = (fleet.shard(plan.component, rank, plan.stop) for rank in range(fleet.size))
    return [Box.of(shard, (shard.positions,) if shard.positions else (), plan.start, plan.stop) for shard in shards]


def within(inner: slice, outer: slice) -> bool:
    return outer.start <= inner.start < inner.stop <= outer.stop


def check(plan: Plan) -> list[Leg]:
    """All legs, after proving that they write everything once, send only what is owned, and agree with each other."""
    legs = list(plan.legs())
    sources, targets = boxes(plan, plan.src), boxes(plan, plan.dst)
    extents = (plan.component.layers, plan.component.heads, plan.stop)
    written = [np.zeros(extents, np.uint8) for _ in targets]
    for leg in legs:
        source = sources[leg.src_rank]
        box = Box.of(leg, leg.positions, plan.start, plan.stop)
        sent = positions_of(leg.positions)
        assert leg.tokens == len(sent) == box.mask.sum() > 0, f"{leg}: a position twice, or outside the range"
        assert within(box.layers, source.layers), f"{leg}: layers that the source does not hold"
        assert within(box.heads, source.heads), f"{leg}: heads that the source does not hold"
        assert source.mask[sent].all(), f"{leg}: positions that the source does not hold"
        written[leg.dst_rank][box.layers, box.heads] += box.mask
    for rank, (box, copies) in enumerate(zip(targets, written, strict=True)):
        wanted = np.zeros(extents, np.uint8)
        wanted[box.layers, box.heads] = box.mask
        assert np.array_equal(copies, wanted), f"{plan}: rank {rank} is written {copies.max()} times or not at all"
    assert len({(leg.src_rank, leg.dst_rank) for leg in legs}) == len(legs)
    return legs


def replica_groups(plan: Plan) -> Iterator[list[int]]:
    """Source ranks that hold the same box."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in range(plan.src.size):
        shard = plan.src_shard(rank)
        groups[shard.layers, shard.heads, shard.positions].append(rank)
    return (ranks for ranks in groups.values() if len(ranks) > 1)


def check_balance(plan: Plan, legs: list[Leg]) -> None:
    """STRIPE: replicas send the same within one page. ELECT: none is idle while another serves two."""
    sent, served = np.zeros(plan.src.size, int), np.zeros(plan.src.size, int)
    for leg in legs:
        sent[leg.src_rank] += leg.nbytes(plan.component)
        served[leg.src_rank] += 1
    for ranks in replica_groups(plan):
        if plan.replicas is Replicas.STRIPE:
            shard = plan.src_shard(ranks[0])
            page = plan.src.page_tokens * shard.layers.count * plan.component.kv * plan.component.row_bytes
            assert np.ptp(sent[ranks]) <= page, f"{plan}: replicas {ranks} send {sent[ranks]} bytes, a page is {page}"
        else:
            assert np.ptp(served[ranks]) <= 1, f"{plan}: replicas {ranks} serve {served[ranks]} ranks"


def check_relations(plan: Plan, legs: list[Leg]) -> None:
    """sources_of, destinations_of, legs_into and leg say the same, pair by pair."""
    by_pair = {(leg.src_rank, leg.dst_rank): leg for leg in legs}
    sources = [plan.sources_of(rank) for rank in range(plan.dst.size)]
    destinations = [plan.destinations_of(rank) for rank in range(plan.src.size)]
    for src, dst in product(range(plan.src.size), range(plan.dst.size)):
        assert (src in sources[dst]) == (dst in destinations[src]), (plan, src, dst)
        leg = plan.leg(src, dst)
        assert leg == by_pair.get((src, dst)), (plan, src, dst)
        assert leg is None or src in sources[dst], (plan, src, dst)
    for ranks in (*sources, *destinations):
        assert ranks == sorted(set(ranks))


@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("heads", range(1, 17))
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


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    tp = draw(st.integers(1, 16))
    pp, cp = draw(st.sampled_from([at for at in product(range(1, 5), repeat=2) if tp * at[0] * at[1] <= 32]))
    return Fleet(tp, pp, cp, draw(st.sampled_from(PAGES)), draw(st.sampled_from(CpOrder)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    component = Component(
        "rows", draw(st.integers(4, 7)), draw(st.integers(1, 2)), draw(st.integers(1, 16)), 3, "bfloat16"
    )
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    stop = start + draw(st.integers(1, 250))
    return Plan(component, draw(fleets()), draw(fleets()), start, stop, draw(st.sampled_from(BOTH)))


@settings(max_examples=250)
@given(plans())
def test_any_fleet_to_any_other_is_written_once_with_balanced_replicas(plan: Plan) -> None:
    check_balance(plan, check(plan))


@settings(max_examples=40)
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
