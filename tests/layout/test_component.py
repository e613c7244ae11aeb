"""What a component wants of a request: all of it, the end of it, or its states; and components that cannot exist."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import Component, Fleet

FULL = Component.attention(2, 8, 64, "bfloat16")
RANGES = st.builds(lambda start, tokens: range(start, start + tokens), st.integers(0, 10_000), st.integers(0, 10_000))


def sliding(window: int) -> Component:
    return Component.sliding(2, 8, 64, window, "bfloat16")


def every(row_tokens: int) -> Component:
    return Component("compressed", 2, 1, 1, 584, "uint8", row_tokens=row_tokens)


def states(count: int) -> Component:
    return Component.state("temporal", 24, 128, 64 * 128, "float32", count)


@given(RANGES)
def test_a_component_without_window_or_states_wants_what_is_asked_for(positions: range) -> None:
    assert FULL.wanted(positions) == positions


@given(RANGES, st.integers(1, 10_000))
def test_a_window_wants_the_last_positions_that_were_asked_for_and_no_other(positions: range, window: int) -> None:
    assert sliding(window).wanted(positions) == positions[-window:]


@given(RANGES, st.integers(1, 99))
def test_states_are_all_wanted_whatever_the_positions_if_there_are_any(positions: range, count: int) -> None:
    assert states(count).wanted(positions) == (range(count) if positions else range(0))


@given(RANGES, st.sampled_from([FULL, sliding(3), sliding(700), states(1), states(7)]))
def test_what_is_wanted_of_the_wanted_is_all_of_it(positions: range, component: Component) -> None:
    once = component.wanted(positions)
    assert component.wanted(once) == once


def test_pages_and_context_parallel_parts_of_states_are_the_components_own() -> None:
    fleet = Fleet(page_tokens=64)
    for component in (FULL, sliding(7)):
        assert (component.extent(1_000), fleet.page_rows(component), component.cp_parts(4)) == (1_000, 64, 4)
    assert (states(3).extent(1_000), fleet.page_rows(states(3)), states(3).cp_parts(4)) == (3, 1, 1)
    assert (every(4).extent(1_003), fleet.page_rows(every(4)), every(4).cp_parts(4)) == (250, 16, 4)


@given(st.lists(st.integers(0, 2_000), min_size=2, max_size=9).map(sorted), st.integers(1, 130))
def test_a_request_that_moves_in_parts_moves_every_full_row_once(cuts: list[int], row_tokens: int) -> None:
    parts = [every(row_tokens).wanted(range(a, b)) for a, b in pairwise(cuts)]
    full = [row for row in range(2_001) if cuts[0] < (row + 1) * row_tokens <= cuts[-1]]
    assert [row for part in parts for row in part] == full


def test_pages_of_a_component_are_its_own_where_the_fleet_says_so() -> None:
    fleet = Fleet(page_tokens=256, pages={"sliding": 64, "compressed": 2})
    assert [fleet.page_rows(component) for component in (FULL, sliding(7), every(128))] == [256, 64, 2]
    assert fleet == Fleet(page_tokens=256, pages=(("compressed", 2), ("sliding", 64)))
    assert hash(fleet) == hash(Fleet(page_tokens=256, pages=[("sliding", 64), ("compressed", 2)]))  # pyright: ignore


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({"sliding": 0}, "a page of sliding has rows = 0; it must be at least 1"),
        ({"sliding": 2.0}, "a page of sliding has rows = 2.0; it must be a whole number"),
        ({3: 2}, "fleet has pages of 3; components are named by text"),
        ((("a", 1), ("a", 2)), "a component is named twice"),
        (7, "fleet has pages = 7; give the rows of a page by component"),
    ],
)
def test_pages_that_no_component_can_have_are_refused(pages: Any, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        Fleet(pages=pages)
    assert message in str(refused.value)


def test_pages_that_end_within_a_row_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(LayoutError, match="compressed has a row every 128 tokens, and pages of 64 tokens end within"):
        Fleet(page_tokens=64).page_rows(every(128))
    with pytest.raises(LayoutError, match="pages of temporal have 3 states; a page of states has 1"):
        Fleet(pages={"temporal": 3}).page_rows(states(1))


def test_a_state_has_the_bytes_of_its_heads() -> None:
    assert (states(1).kv, states(1).row_bytes, states(1).token_bytes) == (1, 32_768, 24 * 128 * 32_768)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding(0), "component sliding has window = 0; it must be at least 1"),
        (lambda: sliding(-4), "component sliding has window = -4"),
        (lambda: states(-1), "component temporal has states = -1; it must not be negative"),
        (
            lambda: Component("both", 1, 1, 1, 1, "int8", 4, 2),
            "component both has a window of 4 and 2 states; not both",
        ),
        (lambda: every(0), "component compressed has row_tokens = 0; it must be at least 1"),
        (
            lambda: replace(states(2), row_tokens=4),
            "component temporal has 2 states and a row every 4 tokens; not both",
        ),
        (lambda: states(1).wanted(range(0, 8, 2)), r"positions range\(0, 8, 2\) of temporal are not consecutive"),
        (lambda: FULL.wanted(range(8, 0, -1)), r"positions range\(8, 0, -1\) of attention are not consecutive"),
    ],
    ids=[
        "no-window",
        "negative-window",
        "negative-states",
        "both",
        "no-tokens",
        "states-and-rows",
        "stepped",
        "backwards",
    ],
)
def test_an_impossible_component_or_range_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bfloat16"), (np.dtype("float16"), "float16"), ("torch.int8", "int8"), (np.float32, "float32")],
)
def test_a_dtype_is_taken_as_torch_and_numpy_have_it(dtype: Any, name: str):
    assert Component.attention(2, 2, 8, dtype) == Component.attention(2, 2, 8, name)


@pytest.mark.parametrize("dtype", ["bf16", torch.complex64, np.dtype("float128"), float, None, 2])
def test_another_dtype_is_refused_with_those_that_are_known(dtype: Any):
    with pytest.raises(LayoutError, match=r"unknown dtype .*; known are bfloat16, float16"):
        Component.attention(2, 2, 8, dtype)


@pytest.mark.parametrize("field", ["layers", "kv", "heads", "dim", "states", "window", "row_tokens"])
@pytest.mark.parametrize("value", [2.0, "2", True])
def test_a_size_is_a_whole_number(field: str, value: object):
    with pytest.raises(LayoutError) as refused:
        replace(Component("c", 2, 2, 2, 8, "uint8"), **{field: value})
    assert str(refused.value) == f"component c has {field} = {value!r}; it must be a whole number"


def test_a_size_of_another_integer_type_is_taken_as_an_int():
    component = Component.attention(np.int64(2), np.int32(2), 8, "uint8")  # pyright: ignore[reportArgumentType]
    assert component == Component.attention(2, 2, 8, "uint8")
    assert type(component.layers) is int


@pytest.mark.parametrize("field", ["tp", "pp", "cp", "page_tokens"])
def test_a_fleet_has_whole_sizes(field: str):
    with pytest.raises(LayoutError, match=f"fleet has {field} = 2.0; it must be a whole number"):
        Fleet(**{field: 2.0})  # pyright: ignore[reportArgumentType]
