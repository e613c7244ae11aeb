"""Units lie inside one page on both sides and are the leg's tokens, each once."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.layout import Component, CpOrder, Fleet, Stripe
from kvmover.plan import Plan, Units
from kvmover.plan.units import Paging, cut

PAGES = [1, 3, 16, 24, 64]
FLEETS = st.builds(
    Fleet, st.integers(1, 3), st.just(1), st.integers(1, 4), st.sampled_from(PAGES), st.sampled_from(CpOrder)
)


def check(positions: tuple[Stripe, ...], src: Paging, dst: Paging) -> tuple[Units, ...]:
    groups = cut(positions, src, dst)
    held = [np.array(list(side.held)) for side in (src, dst)]
    seen: list[np.ndarray] = []
    for units in groups:
        assert len(units) == len(units.src) == len(units.dst) > 0
        assert units.src.dtype == units.dst.dtype == np.int64
        for at, side in ((units.src, src), (units.dst, dst)):
            assert (at >= 0).all()
            assert (at // side.page_tokens == (at + units.tokens - 1) // side.page_tokens).all(), "across a page border"
        tokens = np.arange(units.tokens)
        there, here = (each[at[:, None] + tokens] for each, at in zip(held, (units.src, units.dst), strict=True))
        assert np.array_equal(there, here), "the two sides mean different positions"
        seen.append(here.reshape(-1))
    wanted = [position for stripe in positions for position in stripe]
    assert sorted(np.concatenate(seen).tolist()) == sorted(wanted)
    lengths = [units.tokens for units in groups]
    assert lengths == sorted(set(lengths), reverse=True)
    assert max(lengths) <= gcd(src.page_tokens, dst.page_tokens)
    return groups


@settings(max_examples=200)
@given(FLEETS, FLEETS, st.integers(0, 150), st.integers(1, 200), st.integers(1, 3))
def test_the_units_of_any_leg_respect_the_pages_of_both_sides(
    src: Fleet, dst: Fleet, start: int, tokens: int, heads: int
) -> None:
    plan = Plan(Component("rows", 1, 1, heads, 1, "int8"), src, dst, start, start + tokens)
    for leg in plan.legs():
        sides = []
        for fleet, shard in ((src, plan.src_shard(leg.src_rank)), (dst, plan.dst_shard(leg.dst_rank))):
            assert shard.positions is not None
            sides.append(Paging(shard.positions, fleet.page_tokens))
        check(leg.positions, *sides)


@pytest.mark.parametrize(("src", "dst"), [(16, 64), (24, 16), (3, 64), (64, 64)], ids=lambda page: str(page))
def test_whole_pages_in_step_are_cut_into_pieces_of_the_common_divisor(src: int, dst: int) -> None:
    tokens = 3 * 64 * 24
    request = Stripe(0, 1, tokens, tokens)
    (units,) = check((request,), Paging(request, src), Paging(request, dst))
    assert units.tokens == gcd(src, dst)
    assert len(units) == tokens // gcd(src, dst)


def test_a_range_from_the_middle_of_a_page_leaves_one_short_piece_at_each_end() -> None:
    request = Stripe(0, 1, 96, 96)
    groups = check((Stripe(5, 1, 64, 64),), Paging(request, 16), Paging(request, 48))
    assert [(units.tokens, len(units)) for units in groups] == [(16, 3), (11, 1), (5, 1)]


def test_pages_out_of_step_are_cut_where_they_meet() -> None:
    source, target = Stripe(0, 1, 64, 64), Stripe(6, 1, 58, 58)
    groups = check((target,), Paging(source, 16), Paging(target, 16))
    assert groups[0].tokens == 2


def test_token_interleave_makes_units_of_one_token() -> None:
    source, target = Stripe(1, 50, 4, 1), Stripe(0, 1, 200, 200)
    (units,) = check((source,), Paging(source, 16), Paging(target, 16))
    assert (units.tokens, len(units)) == (1, 50)


def test_the_same_interleave_on_both_sides_keeps_whole_pages() -> None:
    held = Stripe(1, 64, 4, 1)
    (units,) = check((held,), Paging(held, 16), Paging(held, 16))
    assert (units.tokens, len(units)) == (16, 4)


def test_a_slice_of_units_is_the_same_units_fewer() -> None:
    units = Units(4, np.arange(0, 40, 4), np.arange(100, 140, 4))
    part = units.slice(2, 5)
    assert (part.tokens, len(part)) == (4, 3)
    assert part.src.tolist() == [8, 12, 16]
    assert part.dst.tolist() == [108, 112, 116]
