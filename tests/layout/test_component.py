"""What a component wants of a request: all of it, the end of it, or its states; and components that cannot exist."""

from __future__ import annotations

from dataclasses import replace
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
    for component in (FULL, sliding(7)):
        assert (component.extent(1_000), component.page_tokens(64), component.cp_parts(4)) == (1_000, 64, 4)
    assert (states(3).extent(1_000), states(3).page_tokens(64), states(3).cp_parts(4)) == (3, 1, 1)


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
        (lambda: states(1).wanted(range(0, 8, 2)), r"positions range\(0, 8, 2\) of temporal are not consecutive"),
        (lambda: FULL.wanted(range(8, 0, -1)), r"positions range\(8, 0, -1\) of attention are not consecutive"),
    ],
    ids=["no-window", "negative-window", "negative-states", "both", "stepped", "backwards"],
)
def test_an_impossible_component_or_range_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (np.dtype("float16"), "float16"), ("torch.int8", "int8")]
)
def test_a_dtype_is_taken_as_torch_and_numpy_have_it(dtype: Any, name: str):
    assert Component.attention(2, 2, 8, dtype) == Component.attention(2, 2, 8, name)


@pytest.mark.parametrize("dtype", ["bf16", torch.complex64, np.dtype("float128"), float, None, 2])
def test_another_dtype_is_refused_with_those_that_are_known(dtype: Any):
    with pytest.raises(LayoutError, match=r"unknown dtype .*; known are bfloat16, float16"):
        Component.attention(2, 2, 8, dtype)


@pytest.mark.parametrize("field", ["layers", "kv", "heads", "dim", "states", "window"])
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
