"""Units and descriptors that C makes of page tables and boxes are those that Python makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.c_core import NATIVE
from kvmover.errors import PlanError
from kvmover.layout import Component, Fleet, PoolSpec
from kvmover.plan import Held, Plan
from kvmover.plan.lower import PoolCut, pool_cut
from kvmover.transfer.memory.descriptors import DescribedSide, Numbers, describe_in_python
from kvmover.transfer.protocol import chunks
from tests.proofs import searched

numbers = st.integers(-(1 << 40), 1 << 40)
strides = st.integers(0, 1 << 30)

needs_c = pytest.mark.skipif(NATIVE is None, reason="the C core was not built")


@st.composite
def described(draw: st.DrawFn) -> tuple[int, int, int, list[DescribedSide]]:
    """Arguments of `describe`, its rows poisoned."""
    planes, units, places, allocations = (draw(st.integers(*of)) for of in ((1, 5), (0, 6), (1, 4), (1, 3)))

    def table(count: int, values: st.SearchStrategy[int] = numbers) -> Numbers:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), np.int64)

    def side() -> DescribedSide:
        rows = np.full((planes * units * places, 5), -1, np.int64)
        tables = table(allocations), table(planes, st.integers(0, allocations - 1)), table(planes), table(units)
        return rows, *tables, draw(st.integers(0, 7)), draw(strides), draw(strides)

    return draw(strides), draw(st.integers(1, 9)), places, [side() for _ in range(draw(st.integers(0, 2)))]


def copied(side: DescribedSide) -> DescribedSide:
    return side[0].copy(), *side[1:]


@needs_c
@searched(few=40, many=2000)
@given(described())
def test_c_describes_the_sides_of_a_box_as_python_does(given_: tuple[int, int, int, list[DescribedSide]]) -> None:
    assert NATIVE is not None
    *shape, sides = given_
    ours, theirs = ([copied(side) for side in sides] for _ in range(2))
    NATIVE.descriptors(*shape, *ours)
    describe_in_python(*shape, *theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(mine[0], other[0])


def units_by(core: object, held: Held, cut: PoolCut, at: Numbers, pages: Numbers) -> object:
    """The offsets, or the words of the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "NATIVE", core)
        try:
            return chunks.unit_offsets(cut, held, at, pages).tolist()
        except PlanError as error:
            return str(error)


@needs_c
@searched(few=60, many=2000)
@given(
    page_tokens=st.sampled_from([1, 3, 16]),
    order=st.sampled_from(["NHD", "HND"]),
    at=st.lists(st.integers(0, 120), min_size=1, max_size=8),
    pages=st.lists(st.integers(-2, 9), max_size=8),
)
def test_c_finds_units_where_python_does_and_refuses_the_same_pages(
    page_tokens: int, order: str, at: list[int], pages: list[int]
) -> None:
    component = Component("rows", 2, 2, 4, 3, "int8")
    plan = Plan(component, Fleet(tp=2, page_tokens=page_tokens), Fleet(page_tokens=page_tokens), 0, 121)
    leg = plan.leg(1, 0)
    held = Held(PoolSpec.dense(component, plan.src_shard(1), 8, page_tokens, order), plan.src_shard(1))
    tables = np.array(at, np.int64), np.array(pages, np.int64)
    found = [units_by(core, held, pool_cut(held, leg), *tables) for core in (NATIVE, None)]
    assert found[0] == found[1]


ROW, ONE = np.zeros((1, 5), np.int64), np.zeros(1, np.int64)
SIDE = (ROW, ONE, ONE, ONE, ONE, 0, 0, 0)


@needs_c
@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ([()], "five tables and three numbers"),
        ([[*SIDE]], "five tables and three numbers"),
        ([(ROW, ONE, ONE + 1, *SIDE[3:])], "do not fit"),
        ([(ROW, ONE, ONE - 1, *SIDE[3:])], "do not fit"),
        ([(np.zeros((2, 5), np.int64), *SIDE[1:])], "do not fit"),
        ([(np.zeros(3, np.int8), *SIDE[1:])], "3 bytes are no numbers"),
        ([(*SIDE[:7], "0")], "int"),
    ],
)
def test_c_refuses_sides_that_do_not_fit(sides: list[object], words: str) -> None:
    assert NATIVE is not None
    with pytest.raises((ValueError, TypeError), match=words):
        NATIVE.descriptors(1, 1, 1, *sides)


@needs_c
def test_c_refuses_units_that_do_not_fit() -> None:
    assert NATIVE is not None
    with pytest.raises(ValueError, match="2 units of 1 tokens"):
        NATIVE.unit_offsets(np.zeros(2, np.int64), ONE, ONE, 1, 1, 1, 1, 0)
    with pytest.raises(ValueError, match="in pages of 0"):
        NATIVE.unit_offsets(ONE.copy(), ONE, ONE, 0, 1, 1, 1, 0)
    with pytest.raises(TypeError, match="takes 8 arguments, got 1"):
        NATIVE.unit_offsets(ONE)
    with pytest.raises(TypeError, match="3 numbers and sides"):
        NATIVE.descriptors(1)
