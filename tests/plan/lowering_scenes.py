"""Legs between two pools whose every byte has an id, and the plain copy that says where each of them belongs.

The oracle knows pools as numpy views by layer, kv, page, token, head and dim; it shares no address arithmetic with the
code under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from hypothesis import strategies as st

from kvmover.layout import AXES, Component, CpOrder, Fleet, Layout, PoolSpec, Shard
from kvmover.plan import Box, BoxSide, Held, Leg, Plan, Runs, Strided
from kvmover.plan.lower import box, coalesced_runs, count_runs, packed_place, pool_place, strided, units_of
from tests.plan.leg_cases import BOTH, KINDS, own_pages, plan_of

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
    def of(cls, spec: PoolSpec, shard: Shard, start: int, first_id: int, random: np.random.Generator) -> Memory:
        """A pool of twice the pages that the request needs; its pages are never neighbours.

        Pages that end before `start` have no place in the table: an id that no pool has stands there.
        """
        assert shard.positions is not None
        needed = -(-shard.positions.tokens // spec.page_tokens)
        ids = np.arange(first_id, first_id + spec.allocations * spec.allocation_bytes)
        pages = random.permutation(needed) * 2 + 1
        assert pages.max() < spec.pages
        last = np.array(list(shard.positions))[spec.page_tokens - 1 :: spec.page_tokens]
        pages[: np.searchsorted(last, start)] = random.choice([-1, 1 << 40])
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

    def places(self) -> Iterator[tuple[BoxSide, BoxSide, BoxSide, Box, int]]:
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
    groups = units_of(scene.leg, scene.src.held, scene.dst.held)
    assert count_runs(scene.leg, scene.src.held, scene.dst.held, groups) >= len(runs)


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
        shard = fleet.shard_of_rows(plan.component, rank, plan.stop)
        assert shard.positions is not None
        page_tokens = fleet.page_rows(plan.component)
        pages = 2 * -(-shard.positions.tokens // page_tokens) + 1
        spec = PoolSpec.dense(plan.component, shard, pages, page_tokens, order, apart)
        if gap:
            spec = PoolSpec(plan.component, with_gaps(spec, gap), apart)
        sides.append(Memory.of(spec, shard, plan.start, 1_000_000 * len(sides), random))
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
    layers, kv, heads = draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 6))
    component = Component("rows", layers, kv, heads, dim, dtype, **draw(KINDS))
    fleets = [
        Fleet(
            draw(st.integers(1, 4)),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 3, 4, 16, 24])),
            draw(st.sampled_from(CpOrder)),
            draw(own_pages()),
        )
        for _ in range(2)
    ]
    start = draw(st.one_of(st.just(0), st.integers(0, 40)))
    tokens = range(start, start + draw(st.integers(1, 60)))
    plan = plan_of(component, *fleets, tokens, draw(st.sampled_from(BOTH)))
    legs = list(plan.legs())
    leg = legs[draw(st.integers(0, len(legs) - 1))]
    layouts = draw(st.tuples(st.sampled_from(orders), st.sampled_from(orders)))
    separate = draw(st.tuples(st.sampled_from(SEPARATE), st.sampled_from(SEPARATE)))
    return scene_of(plan, leg, layouts, separate, draw(st.integers(0, 99)), draw(st.sampled_from([0, 0, 0, 5])))
