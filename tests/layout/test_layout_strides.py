"""A Layout's strides are numpy's, and its runs are what the addresses show."""

from __future__ import annotations

from functools import reduce
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import AXES, ORDERS, PACKED_ORDER, Component, Dim, Layout, PoolSpec, Shard, Span, axes_of, coalesce

EXTENTS = {"layer": 2, "kv": 2, "page": 3, "head": 4, "token": 5, "dim": 6}
ALL_ORDERS = [" ".join(axes) for axes in permutations(AXES)]
SOME_ORDERS = ["NHD", "HND", PACKED_ORDER, "page-layer-kv-token-head-dim", "dim token head page kv layer"]


def offsets(layout: Layout) -> np.ndarray:
    """Every element's offset, an array with the layout's axes."""
    parts = [np.arange(extent) * stride for extent, stride in zip(layout.shape, layout.stride, strict=True)]
    return reduce(np.add, np.ix_(*parts))


def lengths_of_runs(layout: Layout) -> list[int]:
    """Lengths of the contiguous runs, by looking at all addresses."""
    at = np.sort(offsets(layout), axis=None)
    breaks = np.flatnonzero(np.diff(at) != 1)
    return np.diff(np.concatenate(([-1], breaks, [at.size - 1]))).tolist()


def test_a_dense_layout_has_numpys_strides_in_all_720_orders() -> None:
    for order in ALL_ORDERS:
        layout = Layout.dense(order, **EXTENTS)
        array = np.empty([EXTENTS[axis] for axis in order.split()], np.int8)
        assert layout.axes == tuple(order.split())
        assert layout.shape == array.shape
        assert layout.stride == array.strides
        assert layout.elements == array.size
        assert layout.runs() == (array.size, 1)


def test_permuting_names_the_same_memory_in_another_order() -> None:
    for order in SOME_ORDERS:
        for other in ALL_ORDERS:
            moved = Layout.dense(order, **EXTENTS).permute(other)
            axes = axes_of(order)
            array = np.empty([EXTENTS[axis] for axis in axes], np.int8)
            assert moved.stride == array.transpose([axes.index(axis) for axis in other.split()]).strides
            assert {axis: moved.extent_of(axis) for axis in AXES} == EXTENTS
        assert Layout.dense(order, **EXTENTS).permute(order) == Layout.dense(order, **EXTENTS)


@given(st.data(), st.permutations(AXES))
def test_a_slice_has_the_strides_of_numpys_slice_and_the_runs_that_its_addresses_show(
    data: st.DataObject, axes: list[str]
) -> None:
    extents = {axis: data.draw(st.integers(1, 4), axis) for axis in AXES}
    layout, array = Layout.dense(" ".join(axes), **extents), np.empty([extents[axis] for axis in axes], np.int8)
    stepped = False
    for axis in data.draw(st.lists(st.sampled_from(AXES), unique=True), "sliced"):
        start = data.draw(st.integers(0, extents[axis] - 1), "start")
        step = data.draw(st.sampled_from([1, 1, 1, 2, 3]), "step")
        span = Span(start, data.draw(st.integers(1, len(range(start, extents[axis], step))), "count"), step)
        layout, stepped = layout.slice(axis, span), stepped or span.step > 1
        array = np.moveaxis(np.moveaxis(array, axes.index(axis), 0)[start : span.stop : span.step], 0, axes.index(axis))
    assert layout.shape == array.shape
    for extent, stride, expected in zip(layout.shape, layout.stride, array.strides, strict=True):
        assert extent == 1 or stride == expected
    assert layout.elements == offsets(layout).max() + 1
    length, count = layout.runs()
    lengths = lengths_of_runs(layout)
    assert length * count == sum(lengths)
    if stepped:  # the last piece of one index may touch the first of the next: longer runs, but not all of them
        assert all(each % length == 0 for each in lengths)
    else:
        assert lengths == [length] * count


@pytest.mark.parametrize(
    ("order", "heads", "runs"),
    [("NHD", 2, (256, 4096)), ("HND", 2, (2 * 64 * 128, 64)), (PACKED_ORDER, 2, (2 * 32 * 2 * 64 * 128, 1))],
    ids=["NHD", "HND", "packed"],
)
def test_two_of_eight_heads_of_a_page_lie_in_the_runs_that_the_order_allows(
    order: str, heads: int, runs: tuple[int, int]
) -> None:
    layout = Layout.dense(order, layer=32, kv=2, page=1, token=64, head=8, dim=128)
    assert layout.slice("head", Span(4, heads)).runs() == runs


@pytest.mark.parametrize("separate", [(), ("layer",), ("layer", "kv")], ids=["one", "layer", "layer-kv"])
@pytest.mark.parametrize("order", SOME_ORDERS[:4], ids=["NHD", "HND", "packed", "page-first"])
def test_separate_allocations_count_as_runs_of_their_own(order: str, separate: tuple[str, ...]) -> None:
    component = Component("a", 3, 2, 4, 8, "int8")
    spec = PoolSpec.dense(component, Shard(Span(0, 3), Span(0, 4), None), 5, 4, order, separate)
    length, count = spec.layout.runs()
    assert length * count == 3 * 2 * 5 * 4 * 4 * 8
    assert count == spec.allocations


def test_named_orders_are_arrangements_of_the_six_axes() -> None:
    for order in (*ORDERS, PACKED_ORDER):
        assert sorted(axes_of(order)) == sorted(AXES)
    assert axes_of("NHD") == axes_of("layer-kv-page-token-head-dim")
    assert axes_of("HND") == axes_of("layer kv page head token dim")


LOOPS = st.lists(
    st.builds(Dim, st.integers(1, 4), st.tuples(st.integers(1, 40), st.integers(1, 40))), min_size=1, max_size=4
)


def walk(loops: list[Dim]) -> list[tuple[int, ...]]:
    """Every stop of the nest, innermost loop fastest."""
    stops: list[tuple[int, ...]] = []
    for index in product(*(range(dim.extent) for dim in reversed(loops))):
        steps = zip(reversed(index), loops, strict=True)
        stops.append(tuple(np.sum([np.multiply(i, dim.strides) for i, dim in steps], axis=0).tolist()))
    return stops


@given(LOOPS, st.integers(1, 3))
def test_coalesced_loops_visit_the_same_addresses_in_the_same_order(loops: list[Dim], factor: int) -> None:
    inner = loops[0]
    continued = [*loops, Dim(factor, (inner.strides[0] * inner.extent, inner.strides[1] * inner.extent))]
    for nest in (loops, continued, [inner, continued[-1], *loops[1:]]):
        merged = coalesce(nest)
        assert walk(merged) == walk(nest)
        assert len(merged) <= len(nest)
        assert all(dim.extent > 1 for dim in merged[1:])


def test_a_loop_that_continues_its_neighbour_on_both_sides_is_merged_and_on_one_side_is_not() -> None:
    assert coalesce([Dim(4, (1, 1)), Dim(3, (4, 4))]) == [Dim(12, (1, 1))]
    assert coalesce([Dim(4, (1, 1)), Dim(3, (4, 8))]) == [Dim(4, (1, 1)), Dim(3, (4, 8))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: axes_of("NDH"), "unknown order 'NDH': use NHD, HND or"),
        (lambda: axes_of("layer kv page token head"), "unknown order 'layer kv page token head'"),
        (lambda: axes_of("layer layer kv page token head dim"), "unknown order"),
        (lambda: axes_of(""), "unknown order ''"),
        (lambda: Layout(("a", "b"), (1,), (1, 1)), "2 axes, 1 extents and 2 strides"),
        (lambda: Layout.dense("NHD", **{**EXTENTS, "head": 0}), "axis head has extent 0"),
        (lambda: Layout.dense("NHD", **EXTENTS).slice("head", Span(3, 2)), r"head span \[3, 2, 1\] is outside 0..4"),
        (lambda: Layout.dense("NHD", **EXTENTS).slice("head", Span(0, 0)), r"head span \[0, 0, 1\] is outside 0..4"),
    ],
    ids=["typo", "missing", "twice", "empty", "unequal", "no-extent", "slice-past-end", "slice-of-nothing"],
)
def test_an_impossible_layout_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
