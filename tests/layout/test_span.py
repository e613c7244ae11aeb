"""Spans are sets of numbers, and `&` is their intersection."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import EMPTY, Span

SMALL = [Span(start, count, step) for start, count, step in product(range(7), range(6), range(1, 6))]
SPANS = st.builds(Span, st.integers(0, 500), st.integers(0, 120), st.integers(1, 60))
HUGE = st.builds(Span, st.integers(0, 1 << 50), st.integers(0, 1 << 40), st.integers(1, 1 << 20))


def test_a_small_span_is_the_set_it_says() -> None:
    for start, count, step in product(range(7), range(6), range(1, 6)):
        numbers = [start + i * step for i in range(count)]
        span = Span(start, count, step)
        assert list(span) == numbers
        assert len(span) == count
        assert bool(span) == bool(numbers)
        assert span.stop == (numbers[-1] + 1 if numbers else 0)
        assert [value for value in range(40) if value in span] == numbers
        assert [span.index(value) for value in numbers] == list(range(count))


def test_intersection_is_set_intersection_on_every_pair_of_small_spans() -> None:
    sets = [frozenset(span) for span in SMALL]
    for (left, a), (right, b) in product(zip(SMALL, sets, strict=True), repeat=2):
        assert set(left & right) == a & b, (left, right)


def test_equal_spans_are_equal_sets() -> None:
    by_set: dict[frozenset[int], Span] = {}
    for span in SMALL:
        assert by_set.setdefault(frozenset(span), span) == span
    assert len(set(SMALL)) == len(by_set)


@given(SPANS, SPANS)
def test_intersection_is_set_intersection(left: Span, right: Span) -> None:
    assert set(left & right) == set(left) & set(right)


@given(SPANS, SPANS, SPANS)
def test_intersection_does_not_depend_on_order_or_grouping(a: Span, b: Span, c: Span) -> None:
    assert a & b == b & a
    assert (a & b) & c == a & (b & c)
    assert a & a == a
    assert a & EMPTY == EMPTY


@given(HUGE, HUGE)
def test_intersection_of_huge_spans_has_the_right_ends_without_enumeration(left: Span, right: Span) -> None:
    both = left & right
    assert both == right & left
    for value in (both.start, both.stop - 1) if both else ():
        assert value in left
        assert value in right
    if both.count > 1:
        assert both.start - both.step not in left or both.start - both.step not in right
        assert both.stop - 1 + both.step not in left or both.stop - 1 + both.step not in right
        assert both.step % left.step == both.step % right.step == 0


def test_every_share_of_things_is_balanced_and_covers_them_in_order() -> None:
    for extent, parts in product(range(1, 41), repeat=2):
        shares = [Span.share(extent, parts, index) for index in range(parts)]
        counts = [share.count for share in shares]
        assert max(counts) - min(counts) <= 1, (extent, parts)
        assert min(counts) >= 1
        if extent >= parts:
            assert [thing for share in shares for thing in share] == list(range(extent))
        else:
            held = [share.start for share in shares]
            assert held == sorted(held)
            copies = [held.count(thing) for thing in range(extent)]
            assert min(copies) >= 1
            assert max(copies) - min(copies) <= 1


def test_legal_shares_follow_the_closed_forms_of_the_design() -> None:
    for heads, tp in product(range(1, 65), repeat=2):
        if heads % tp and tp % heads:
            continue
        each, replicas = max(1, heads // tp), max(1, tp // heads)
        for rank in range(tp):
            assert Span.share(heads, tp, rank) == Span((rank // replicas) * each, each)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Span(-1, 2), r"span needs .*\[-1, 2, 1\]"),
        (lambda: Span(0, -2), r"\[0, -2, 1\]"),
        (lambda: Span(0, 2, 0), r"\[0, 2, 0\]"),
        (lambda: Span(3, 3, 2).index(4), r"4 is not in span \[3, 3, 2\]"),
        (lambda: Span(3, 3, 2).index(9), r"9 is not in span \[3, 3, 2\]"),
        (lambda: EMPTY.index(0), r"0 is not in span \[0, 0, 1\]"),
        (lambda: Span.share(0, 2, 0), "part 0 of 0 in 2 parts"),
        (lambda: Span.share(4, 0, 0), "part 0 of 4 in 0 parts"),
        (lambda: Span.share(4, 2, 2), "part 2 of 4 in 2 parts"),
        (lambda: Span.share(4, 2, -1), "part -1 of 4 in 2 parts"),
    ],
    ids=[
        "negative-start",
        "negative-count",
        "zero-step",
        "index-between",
        "index-after",
        "index-empty",
        "share-of-nothing",
        "share-of-no-parts",
        "share-after-last",
        "share-before-first",
    ],
)
def test_an_impossible_span_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
