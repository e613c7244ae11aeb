"""Both routes of every leg put every byte where a plain copy by logical coordinates puts it, and touch nothing else.

The oracle knows pools as numpy views by layer, kv, page, token, head and dim; it shares no address arithmetic with the
code under test. Memories hold a unique id for every byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.errors import PlanError
from kvmover.layout import AXES, PACKED_ORDER, Component, CpOrder, Fleet, Layout, PoolSpec, Shard, Span
from kvmover.plan import Box, Held, Leg, Place, Plan, Replicas, Runs, Strided
from kvmover.plan.lower import box, coalesced_runs, count_runs, packed_place, pool_place, strided, units_of

DIM_LAST = [" ".join(axes) for axes in permutations(AXES) if axes[-1] == "dim"]
SEPARATE = [(), ("layer",), ("layer", "kv"), ("kv",)]
POISON = -1


def positions_of(leg: Leg) -> np.ndarray:
    return np.array([position for stripe in leg.positions for position in stripe])


@dataclass
class Memory:
    """One rank's pool: an id a byte, and the page table of the request."""

    held: Held
    pages: np.ndarray
    memory: list[np.ndarray]

    @classmethod
    def of(cls, spec: PoolSpec, shard: Shard, first_id: int, random: np.random.Generator) -> Memory:
        """A pool of twice the pages that the request needs; its pages are never neighbours."""
        assert shard.positions is not None
        needed = -(-shard.positions.tokens // spec.page_tokens)
        ids = np.arange(first_id, first_id + spec.allocations * spec.allocation_bytes)
        pages = random.permutation(needed) * 2 + 1
        assert pages.max() < spec.pages
        return cls(Held(spec, shard), pages, list(ids.reshape(spec.allocations, spec.allocation_bytes)))

    def planes(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(layer, kv, [page, token, head, byte of a row]) by local index, as views of the memory."""
        spec = self.held.spec
        layout, size = spec.layout, spec.component.element_bytes
        extents = [layout.extent_of(axis) for axis in ("page", "token", "head")]
        strides = [layout.stride_of(axis) * size * 8 for axis in ("page", "token", "head")]
        for layer, kv in product(range(layout.extent_of("layer")), range(layout.extent_of("kv"))):
            at = {"layer": layer, "kv": kv}
            allocation, first = 0, 0
            for axis in ("layer", "kv"):
                if axis in spec.separate:
                    allocation = allocation * layout.extent_of(axis) + at[axis]
                else:
                    first += at[axis] * layout.stride_of(axis) * size
            yield (
                layer,
                kv,
                np.lib.stride_tricks.as_strided(
                    self.memory[allocation][first:], [*extents, spec.component.row_bytes], [*strides, 8]
                ),
            )

    def rows(self, leg: Leg) -> dict[tuple[int, int], tuple[np.ndarray, tuple[np.ndarray, ...]]]:
        """Whole-model (layer, kv) -> the plane and an index into it, [position of the leg, head of the leg]."""
        shard, page_tokens = self.held.shard, self.held.spec.page_tokens
        held = np.array(list(shard.positions or ()))
        place = np.searchsorted(held, positions_of(leg))
        assert (held[place] == positions_of(leg)).all()
        heads = np.array(list(leg.heads)) - shard.heads.start
        index = self.pages[place // page_tokens][:, None], (place % page_tokens)[:, None], heads[None, :]
        return {
            (layer + shard.layers.start, kv): (plane, index)
            for layer, kv, plane in self.planes()
            if layer + shard.layers.start in leg.layers
        }

    def poisoned(self) -> list[np.ndarray]:
        return [np.full_like(memory, POISON) for memory in self.memory]


@dataclass
class Scene:
    """One leg between two pools, with what the destination must hold afterwards."""

    leg: Leg
    src: Memory
    dst: Memory

    @property
    def component(self) -> Component:
        return self.src.held.spec.component

    def places(self) -> Iterator[tuple[Place, Place, Place, Box, int]]:
        """Per group of units: both pools' places, the staging place, the direct box, and the first staged byte."""
        first_byte = 0
        for units in units_of(self.leg, self.src.held, self.dst.held):
            source = pool_place(self.src.held, self.leg, units.src, self.src.pages)
            target = pool_place(self.dst.held, self.leg, units.dst, self.dst.pages)
            staged = packed_place(self.component, self.leg, units, first_byte)
            joined = box(self.component, self.leg, units, source, target)
            yield source, target, staged, joined, first_byte
            first_byte += joined.nbytes

    def boxes(self) -> list[Box]:
        return [direct for _, _, _, direct, _ in self.places()]

    def expected(self) -> list[np.ndarray]:
        """The destination after a plain copy, poison where the leg has no business."""
        after = Memory(self.dst.held, self.dst.pages, self.dst.poisoned())
        sources = self.src.rows(self.leg)
        for plane, (target, index) in after.rows(self.leg).items():
            source, at = sources[plane]
            target[index] = source[at]
        return after.memory


def move_box(b: Box, src: Sequence[np.ndarray], dst: Sequence[np.ndarray]) -> None:
    """The definition of a box, in broadcast sums."""
    tokens, heads, row = np.ogrid[: b.tokens, : b.heads, : b.row_bytes]
    for plane in range(len(b.src.offset)):
        at, to = (
            side.offset[plane]
            + side.units[:, None, None, None]
            + (heads * side.head_bytes + tokens * side.token_bytes + row)[None]
            for side in (b.src, b.dst)
        )
        write(dst[b.dst.allocation[plane]], to, src[b.src.allocation[plane]][at])


def write(memory: np.ndarray, at: np.ndarray, ids: np.ndarray) -> None:
    assert at.min(initial=0) >= 0
    assert (memory[at] == POISON).all(), "written twice"
    memory[at] = ids
    assert np.unique(at).size == at.size, "written twice"


def move_runs(runs: Runs, src: Sequence[np.ndarray], dst: Sequence[np.ndarray]) -> None:
    for (source, at), (target, to), nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
        assert min(at, to) >= 0
        assert (dst[target][to : to + nbytes] == POISON).all(), "written twice"
        dst[target][to : to + nbytes] = src[source][at : at + nbytes]


def move_strided(s: Strided, src: Sequence[np.ndarray], dst: Sequence[np.ndarray]) -> None:
    run, count = np.arange(s.run_bytes), np.arange(s.count)[:, None]
    for (source, at), (target, to) in zip(s.src, s.dst, strict=True):
        write(dst[target], to + count * s.dst_stride + run, src[source][at + count * s.src_stride + run])


def assert_equal(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert np.array_equal(ours, theirs)


def check_direct(scene: Scene) -> None:
    boxes, expected = scene.boxes(), scene.expected()
    nbytes = scene.leg.nbytes(scene.component)
    assert sum(each.nbytes for each in boxes) == nbytes == sum((memory != POISON).sum() for memory in expected)
    by_box, by_run, by_stride = (scene.dst.poisoned() for _ in range(3))
    for each in boxes:
        move_box(each, scene.src.memory, by_box)
        move_strided(strided(each), scene.src.memory, by_stride)
    runs = coalesced_runs(boxes)
    move_runs(runs, scene.src.memory, by_run)
    for got in (by_box, by_run, by_stride):
        assert_equal(got, expected)
    assert runs.nbytes.sum() == nbytes
    assert len(runs) <= sum(strided(each).runs for each in boxes)
    assert count_runs(scene.leg, scene.src.held, scene.dst.held) >= len(runs)


def check_packed(scene: Scene) -> None:
    nbytes = scene.leg.nbytes(scene.component)
    staging = [np.full(nbytes + 8, POISON)]
    landed = scene.dst.poisoned()
    for source, target, staged, direct, first_byte in scene.places():
        units = next(u for u in units_of(scene.leg, scene.src.held, scene.dst.held) if u.tokens == direct.tokens)
        move_box(box(scene.component, scene.leg, units, source, staged), scene.src.memory, staging)
        assert (staging[0][first_byte : first_byte + direct.nbytes] != POISON).all()
        move_box(box(scene.component, scene.leg, units, staged, target), staging, landed)
    assert (staging[0][nbytes:] == POISON).all()
    assert_equal(landed, scene.expected())


def scene_of(
    plan: Plan,
    leg: Leg,
    layouts: tuple[str, str],
    separate: tuple[tuple[str, ...], tuple[str, ...]],
    seed: int,
    gap: int = 0,
) -> Scene:
    random = np.random.default_rng(seed)
    sides: list[Memory] = []
    for fleet, rank, order, apart in zip(
        (plan.src, plan.dst), (leg.src_rank, leg.dst_rank), layouts, separate, strict=True
    ):
        shard = fleet.shard(plan.component, rank, plan.stop)
        assert shard.positions is not None
        pages = 2 * -(-shard.positions.tokens // fleet.page_tokens) + 1
        spec = PoolSpec.dense(plan.component, shard, pages, fleet.page_tokens, order, apart)
        if gap:
            spec = PoolSpec(plan.component, with_gaps(spec, gap), apart)
        sides.append(Memory.of(spec, shard, 1_000_000 * len(sides), random))
    return Scene(leg, *sides)


def with_gaps(spec: PoolSpec, gap: int) -> Layout:
    """The same axes in the same order, every one but dim a little further apart: an engine's padded pool."""
    layout = spec.layout
    strides: list[int] = []
    reach = 0
    for axis, extent in zip(reversed(layout.axes), reversed(layout.shape), strict=True):
        stride = 0 if axis in spec.separate else 1 if axis == "dim" else reach + gap
        reach = max(reach, stride * extent)
        strides.append(stride)
    return Layout(layout.axes, layout.shape, tuple(reversed(strides)))


@st.composite
def scenes(draw: st.DrawFn, orders: Sequence[str] = DIM_LAST) -> Scene:
    dim = draw(st.sampled_from([3, 1, 2]))
    dtype = draw(st.sampled_from(["int8", "bfloat16", "float32"]))
    component = Component("rows", draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 6)), dim, dtype)
    fleets = [
        Fleet(
            draw(st.integers(1, 4)),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 3, 4, 16, 24])),
            draw(st.sampled_from(CpOrder)),
        )
        for _ in range(2)
    ]
    start = draw(st.one_of(st.just(0), st.integers(0, 40)))
    plan = Plan(component, *fleets, start, start + draw(st.integers(1, 60)), draw(st.sampled_from(Replicas)))
    legs = list(plan.legs())
    leg = legs[draw(st.integers(0, len(legs) - 1))]
    layouts = draw(st.tuples(st.sampled_from(orders), st.sampled_from(orders)))
    separate = draw(st.tuples(st.sampled_from(SEPARATE), st.sampled_from(SEPARATE)))
    return scene_of(plan, leg, layouts, separate, draw(st.integers(0, 99)), draw(st.sampled_from([0, 0, 0, 5])))


@settings(max_examples=200)
@given(scenes())
def test_the_direct_route_puts_every_byte_where_a_plain_copy_does(scene: Scene) -> None:
    check_direct(scene)


@settings(max_examples=200)
@given(scenes())
def test_the_packed_route_puts_every_byte_where_a_plain_copy_does(scene: Scene) -> None:
    check_packed(scene)


def small_plan() -> Plan:
    """Two ranks to one, pages of 2 to pages of 3, from the middle of a page."""
    return Plan(Component("rows", 2, 2, 2, 3, "int8"), Fleet(tp=2, page_tokens=2), Fleet(page_tokens=3), 1, 7)


@pytest.mark.parametrize("order", DIM_LAST, ids=lambda order: order.replace(" ", "-"))
def test_a_pool_in_this_order_sends_to_and_receives_from_pools_in_all_orders(order: str) -> None:
    plan = small_plan()
    _, leg = plan.legs()
    for number, other in enumerate(DIM_LAST):
        scene = scene_of(plan, leg, (order, other), ((), ()), number)
        landed = scene.dst.poisoned()
        move_runs(coalesced_runs(scene.boxes()), scene.src.memory, landed)
        assert_equal(landed, scene.expected())


@pytest.mark.parametrize("order", ["NHD", "HND", PACKED_ORDER], ids=["NHD", "HND", "packed"])
@pytest.mark.parametrize("separate", SEPARATE, ids=lambda axes: "-".join(axes) or "one-allocation")
@pytest.mark.parametrize(
    "pages", [(1, 64), (3, 16), (16, 24), (24, 24), (64, 3)], ids=lambda pages: f"{pages[0]}to{pages[1]}"
)
def test_both_routes_agree_for_the_usual_orders_and_pages(
    order: str, separate: tuple[str, ...], pages: tuple[int, int]
) -> None:
    component = Component.attention(3, 4, 2, "bfloat16")
    plan = Plan(component, Fleet(tp=4, page_tokens=pages[0]), Fleet(tp=2, pp=2, page_tokens=pages[1]), 5, 70)
    leg = list(plan.legs())[1]
    scene = scene_of(plan, leg, (order, "HND"), (separate, ("layer", "kv")), 7)
    check_direct(scene)
    check_packed(scene)


def test_the_packed_order_is_unit_head_layer_kv_token_dim() -> None:
    plan = Plan(Component.attention(2, 3, 2, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=6), 0, 12)
    (leg,) = plan.legs()
    scene = scene_of(plan, leg, ("NHD", "HND"), ((), ()), 3)
    (units,) = units_of(leg, scene.src.held, scene.dst.held)
    source, _, staged, _, _ = next(scene.places())
    staging = [np.full(leg.nbytes(plan.component), POISON)]
    move_box(box(plan.component, leg, units, source, staged), scene.src.memory, staging)
    rows = scene.src.rows(leg)
    logical = np.stack([plane[index] for plane, index in rows.values()]).reshape(2, 2, 6, 2, 3, 2)
    assert np.array_equal(staging[0], logical.transpose(2, 4, 0, 1, 3, 5).reshape(-1))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_units_add_up_to_the_whole_move(chunk: int) -> None:
    plan = Plan(Component.attention(2, 4, 3, "int8"), Fleet(tp=2, page_tokens=4), Fleet(page_tokens=6), 3, 47)
    leg = list(plan.legs())[1]
    scene = scene_of(plan, leg, ("NHD", PACKED_ORDER), ((), ()), 1)
    landed = scene.dst.poisoned()
    for units in units_of(leg, scene.src.held, scene.dst.held):
        for start in range(0, len(units), chunk):
            part = units.slice(start, start + chunk)
            source = pool_place(scene.src.held, leg, part.src, scene.src.pages)
            target = pool_place(scene.dst.held, leg, part.dst, scene.dst.pages)
            staging = [
                np.full(
                    min(chunk, len(units) - start) * box(plan.component, leg, part, source, target).unit_bytes, POISON
                )
            ]
            staged = packed_place(plan.component, leg, part, 0)
            move_box(box(plan.component, leg, part, source, staged), scene.src.memory, staging)
            assert (staging[0] != POISON).all()
            move_box(box(plan.component, leg, part, staged, target), staging, landed)
    assert_equal(landed, scene.expected())


def test_pages_that_follow_each_other_in_both_pools_cost_one_run() -> None:
    plan = Plan(Component.mla(1, 8, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=4), 0, 32)
    (leg,) = plan.legs()
    scene = scene_of(plan, leg, ("NHD", "NHD"), ((), ()), 0)
    up, down, apart = np.arange(8), np.arange(8)[::-1], np.array([0, 1, 2, 3, 8, 9, 5, 6])
    for src_pages, dst_pages, runs in (
        (up, up + 3, 1),
        (down, down, 1),
        (up, down, 8),
        (apart, up, 3),
        (apart, apart, 3),
    ):
        scene.src.pages, scene.dst.pages = src_pages, dst_pages
        assert len(coalesced_runs(scene.boxes())) == runs
        check_direct(scene)


@settings(max_examples=100)
@given(scenes(orders=["NHD", "HND"]))
def test_the_estimate_of_runs_is_exact_for_scattered_pages_in_the_engines_own_orders(scene: Scene) -> None:
    assert count_runs(scene.leg, scene.src.held, scene.dst.held) == len(coalesced_runs(scene.boxes()))


@pytest.mark.parametrize(("order", "runs"), [("NHD", 1_048_576), ("HND", 16_384)], ids=["NHD", "HND"])
def test_the_estimate_of_runs_is_that_of_the_published_case(order: str, runs: int) -> None:
    component = Component.attention(64, 8, 128, "bfloat16")
    plan = Plan(component, Fleet(tp=4), Fleet(tp=2), 0, 8192)
    leg = next(plan.legs())
    held = [
        Held(PoolSpec.dense(component, shard, 128, 64, order), shard)
        for shard in (plan.src_shard(0), plan.dst_shard(0))
    ]
    assert count_runs(leg, *held) == runs


def tables() -> tuple[Held, Leg, np.ndarray]:
    plan = Plan(Component.attention(1, 2, 4, "int8"), Fleet(page_tokens=4), Fleet(page_tokens=4), 0, 12)
    (leg,) = plan.legs()
    shard = plan.src_shard(0)
    held = Held(PoolSpec.dense(plan.component, shard, 10, 4, "NHD"), shard)
    (units,) = units_of(leg, held, held)
    return held, leg, units.src


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 2], "page table of 2 pages is too short for page 2 of the request"),
        ([], "page table of 0 pages is too short"),
        ([1, 2, 10], "page id 10 is outside a pool of 10 pages"),
        ([1, -1, 3], "page id -1 is outside a pool of 10 pages"),
        ([1 << 40, 2, 3], f"page id {1 << 40} is outside a pool of 10 pages"),
    ],
    ids=["short", "empty", "past-the-end", "negative", "huge"],
)
def test_a_page_table_that_does_not_fit_is_refused_with_the_value(pages: list[int], message: str) -> None:
    held, leg, tokens = tables()
    with pytest.raises(PlanError, match=message):
        pool_place(held, leg, tokens, np.array(pages, np.int64))


def test_pages_past_the_requests_own_are_not_looked_at() -> None:
    held, leg, tokens = tables()
    short = pool_place(held, leg, tokens, np.array([4, 0, 9]))
    longer = pool_place(held, leg, tokens, np.array([4, 0, 9, -1, 77]))
    assert np.array_equal(short.units, longer.units)


def test_a_rank_that_holds_nothing_has_no_pages_to_cut() -> None:
    held, leg, _ = tables()
    nothing = Held(held.spec, Shard(Span(0, 1), Span(0, 2), None))
    with pytest.raises(PlanError, match="holds no position"):
        units_of(leg, held, nothing)


def test_page_offsets_past_32_bits_are_exact() -> None:
    component = Component.attention(80, 8, 128, "bfloat16")
    plan = Plan(component, Fleet(), Fleet(), 0, 128)
    (leg,) = plan.legs()
    shard = plan.src_shard(0)
    held = Held(PoolSpec.dense(component, shard, 1 << 20, 64, PACKED_ORDER), shard)
    pages = np.array([(1 << 20) - 1, 3])
    place = pool_place(held, leg, np.array([0, 64]), pages)
    page_bytes = 64 * component.token_bytes
    assert place.units.dtype == np.int64
    assert place.units.tolist() == [((1 << 20) - 1) * page_bytes, 3 * page_bytes]
