"""Stripes are sets of tokens; `&` and `clip` are exact, and cost nothing per token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise, product
from math import gcd

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import Component, Fleet, Positions, Span, Stripe, common, normal, tokens_of

SMALL = [
    Stripe(start, count, width + gap, width)
    for start, count, width, gap in product(range(5), range(1, 4), range(1, 5), range(4))
]


@st.composite
def stripes(draw: st.DrawFn) -> Stripe:
    width = draw(st.integers(1, 40))
    gap = draw(st.integers(0, 200))
    return Stripe(draw(st.integers(0, 300)), draw(st.integers(1, 30)), width + gap, width)


def mask(stripe: Stripe) -> int:
    """The set as bits, without using the class's own iteration."""
    run = (1 << stripe.width) - 1
    return sum(run << (stripe.start + i * stripe.step) for i in range(stripe.count))


def disjoint_union(positions: Positions) -> int:
    masks = [mask(stripe) for stripe in positions]
    whole = reduce(int.__or__, masks, 0)
    assert whole.bit_count() == sum(m.bit_count() for m in masks), "a token twice"
    return whole


def test_a_stripe_keeps_the_tokens_it_was_made_of() -> None:
    for start, count, width, gap in product(range(3), range(1, 4), range(1, 5), range(4)):
        stripe = Stripe(start, count, width + gap, width)
        tokens = [start + run * (width + gap) + token for run in range(count) for token in range(width)]
        assert list(stripe) == tokens
        assert stripe.tokens == len(tokens)
        assert stripe.stop == tokens[-1] + 1
        assert [stripe.index(position) for position in tokens] == list(range(len(tokens)))
        for position in set(range(30)) - set(tokens):
            with pytest.raises(LayoutError, match=f"position {position} is not in stripe"):
                stripe.index(position)


def test_equal_stripes_are_equal_sets() -> None:
    by_set: dict[int, Stripe] = {}
    for stripe in SMALL:
        assert by_set.setdefault(mask(stripe), stripe) == stripe
    assert len(set(SMALL)) == len(by_set)


def test_intersection_is_set_intersection_on_every_pair_of_small_stripes() -> None:
    known = [(stripe, mask(stripe)) for stripe in dict.fromkeys(SMALL)]
    for (left, a), (right, b) in product(known, repeat=2):
        assert disjoint_union(left & right) == a & b, (left, right)


@given(stripes(), stripes())
def test_intersection_is_set_intersection(left: Stripe, right: Stripe) -> None:
    both = left & right
    assert disjoint_union(both) == mask(left) & mask(right)
    assert disjoint_union(right & left) == disjoint_union(both)
    assert both == normal(both)


@given(stripes(), stripes())
def test_an_intersection_has_as_many_stripes_as_amounts_of_overlap(left: Stripe, right: Stripe) -> None:
    assume(left.count > 1 and right.count > 1)
    amounts = -(-(left.width + right.width - 1) // gcd(left.step, right.step))
    assert len(left & right) <= amounts


def test_a_clip_keeps_what_lies_between_its_ends() -> None:
    for stripe in dict.fromkeys(SMALL):
        for low in range(-1, stripe.stop + 2):
            for high in range(low - 1, stripe.stop + 2):
                kept = stripe.clip(low, high)
                between = ((1 << max(high, low, 0)) - 1) & ~((1 << max(low, 0)) - 1)
                assert disjoint_union(kept) == mask(stripe) & between, (stripe, low, high)
                assert sum(piece.width == stripe.width for piece in kept) <= 1, "whole runs stay together"
                assert len(kept) <= 3


@given(st.lists(stripes(), max_size=3), stripes())
def test_common_tokens_of_several_stripes_are_in_order_and_counted(pieces: list[Stripe], right: Stripe) -> None:
    ahead = 0
    left: list[Stripe] = []
    for piece in pieces:
        left.append(Stripe(ahead + piece.start, piece.count, piece.step, piece.width))
        ahead = left[-1].stop
    both = common(tuple(left), right)
    assert disjoint_union(both) == disjoint_union(tuple(left)) & mask(right)
    assert tokens_of(both) == (disjoint_union(tuple(left)) & mask(right)).bit_count()
    assert all(a.start < b.start for a, b in pairwise(both))


PAGED = [
    Fleet(cp=cp, page_tokens=page, cp_order=order)
    for cp, page in ((1, 64), (2, 16), (4, 16), (3, 64), (4, 24))
    for order in ("page", "token", "block")
]


def test_a_million_tokens_intersect_without_a_look_at_a_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def enumerated(_: object) -> Iterator[int]:
        raise AssertionError("enumerated")

    component = Component.attention(1, 1, 8, "int8")
    tokens = 1_000_003
    shards = [[fleet.shard(component, rank, tokens).positions for rank in range(fleet.size)] for fleet in PAGED]
    monkeypatch.setattr(Stripe, "__iter__", enumerated)
    monkeypatch.setattr(Span, "__iter__", enumerated)
    for (left, held), (right, wanted) in product(zip(PAGED, shards, strict=True), repeat=2):
        total = 0
        for a, b in product(held, wanted):
            assert a is not None
            assert b is not None
            both = a & b
            total += sum(stripe.clip(0, tokens) != () and tokens_of(stripe.clip(0, tokens)) for stripe in both)
            assert len(both) <= 64 + 64, (left, right)
        assert total == tokens, (left, right)


def test_page_interleaved_ranks_of_two_page_sizes_share_a_handful_of_stripes() -> None:
    source = Stripe(16, 15_625, 64, 16)
    target = Stripe(64, 5_209, 192, 64)
    assert [stripe.quad() for stripe in source & target] == [[80, 5_208, 192, 16]]


@pytest.mark.parametrize(
    "quad",
    [(-1, 1, 1, 1), (0, 0, 1, 1), (0, 1, 1, 0), (0, 2, 3, 4)],
    ids=["negative-start", "no-runs", "no-width", "overlapping-runs"],
)
def test_an_impossible_stripe_is_refused_with_its_values(quad: tuple[int, int, int, int]) -> None:
    with pytest.raises(LayoutError, match=r"got \[" + ", ".join(map(str, quad))):
        Stripe(*quad)
