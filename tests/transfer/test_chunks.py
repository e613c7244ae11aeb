"""Lanes: both sides cut the same chunks, each unit into exactly one, and packing them changes no byte."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mover_cases import Case, Shape, cases
from mover_fleets import poisoned

from kvmover.errors import PlanError
from kvmover.kernels import reference
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.plan.legs import Replicas
from kvmover.plan.lower import BoxSide
from kvmover.regions import BoundMemory, bound
from kvmover.transfer.protocol.chunks import PIECE_ALIGN_BYTES, Cut, End, Lane, plans_between
from tests.proofs import searched


def end_of(case: Case, shape: Shape, rank: int, pages: int) -> End:
    specs = tuple(
        PoolSpec.dense(c, shape.fleet.shard(c, rank, 1), pages, tokens, shape.order, shape.separate)
        for c in case.components
        for tokens in [shape.fleet.page_rows(c)]
    )
    return End(shape.fleet, rank, specs)


def lanes_of(case: Case, pages: int = 150, layers: int = 0) -> Iterator[tuple[End, End, Lane]]:
    """Every pair of ranks, as the destination sees it, cut by so many layers."""
    if case.start == case.tokens:
        return
    for target in range(case.dst.fleet.size):
        for source in range(case.src.fleet.size):
            src, dst = end_of(case, case.src, source, pages), end_of(case, case.dst, target, pages)
            span = range(case.start, case.tokens)
            plans = plans_between(case.components, src.fleet, dst.fleet, span, case.replicas)
            yield src, dst, Lane.between(plans, src, dst, Cut(case.chunk_bytes, layers))


def table(end: End, seed: int) -> list[np.ndarray]:
    """Page tables long enough for anything, each page once."""
    random = np.random.default_rng(seed)
    return [random.permutation(spec.pages) for spec in end.pools]


def rows_of(place: BoxSide, heads: int, tokens: int) -> list[tuple[int, int]]:
    """(allocation, byte offset) of every row of one side of a box."""
    offset = place.offset[:, None, None, None] + place.units[None, :, None, None]
    offset = offset + np.arange(heads)[:, None] * place.head_bytes + np.arange(tokens) * place.token_bytes
    allocation = np.broadcast_to(place.allocation[:, None, None, None], offset.shape)
    return list(zip(allocation.ravel().tolist(), offset.ravel().tolist(), strict=True))


@searched(few=15, many=60)
@given(cases())
def test_both_sides_cut_the_same_chunks(case: Case):
    for src, dst, lane in lanes_of(case):
        span = range(case.start, case.tokens)
        plans = plans_between(case.components, src.fleet, dst.fleet, span, case.replicas)
        other = Lane.between(plans, src, dst, Cut(case.chunk_bytes))
        assert [chunk.span_bytes for chunk in other.chunks] == [chunk.span_bytes for chunk in lane.chunks]
        for mine, theirs in zip(lane.chunks, other.chunks, strict=True):
            assert len(mine.pieces) == len(theirs.pieces)
            for piece, same in zip(mine.pieces, theirs.pieces, strict=True):
                assert (piece.component, piece.first_byte) == (same.component, same.first_byte)
                assert piece.units.tokens == same.units.tokens
                np.testing.assert_array_equal(piece.units.src, same.units.src)
                np.testing.assert_array_equal(piece.units.dst, same.units.dst)


@searched(few=15, many=60)
@given(cases())
def test_every_row_of_a_lane_is_in_exactly_one_chunk(case: Case):
    for src, dst, lane in lanes_of(case):
        pages = table(src, 1), table(dst, 2)
        read: dict[int, list[tuple[int, int]]] = {}
        written: dict[int, list[tuple[int, int]]] = {}
        moved = 0
        for number in range(len(lane.chunks)):
            for component, box in lane.direct_boxes(number, *pages):
                read.setdefault(component, []).extend(rows_of(box.src, box.heads, box.tokens))
                written.setdefault(component, []).extend(rows_of(box.dst, box.heads, box.tokens))
                moved += box.nbytes
        for rows in (*read.values(), *written.values()):
            assert len(rows) == len(set(rows))
        expected = sum(leg.nbytes(c) for leg, c in zip(lane.legs, case.components, strict=True) if leg)
        assert moved == lane.nbytes == expected


@searched(few=15, many=60)
@given(cases())
def test_chunks_keep_to_their_size_and_pieces_to_their_alignment(case: Case):
    limit = -(-case.chunk_bytes // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES
    for _, _, lane in lanes_of(case):
        for number, chunk in enumerate(lane.chunks):
            assert chunk.pieces
            assert 0 < chunk.nbytes <= chunk.span_bytes
            single = len(chunk.pieces) == 1 and len(chunk.pieces[0].units) == 1
            assert single or (chunk.nbytes <= case.chunk_bytes and chunk.span_bytes <= limit)
            end = 0
            for piece, (component, box) in zip(
                chunk.pieces, lane.gather_boxes(number, [np.arange(150)] * len(case.components)), strict=True
            ):
                assert component == piece.component
                assert piece.first_byte % PIECE_ALIGN_BYTES == 0
                assert end <= piece.first_byte < end + PIECE_ALIGN_BYTES
                end = piece.first_byte + box.nbytes
            assert end <= chunk.span_bytes < end + PIECE_ALIGN_BYTES


def memory(pool: Pool) -> BoundMemory:
    return BoundMemory(pool.tensors)


@searched(few=10, many=30)
@given(cases(most_tokens=40))
def test_gathering_and_scattering_writes_what_going_direct_writes(case: Case):
    some = (ends for ends in lanes_of(case, pages=40) if ends[2].chunks)
    for src, dst, lane in islice(some, 4):
        pages = table(src, 1), table(dst, 2)
        source = [Pool(s, noise(s, n)) for n, s in enumerate(src.pools)]
        packed, direct = ([poisoned(spec) for spec in dst.pools] for _ in range(2))
        for number, chunk in enumerate(lane.chunks):
            arena = BoundMemory((torch.full((chunk.span_bytes,), 0xAB, dtype=torch.uint8),))
            gather = [bound(b, memory(source[c]), arena) for c, b in lane.gather_boxes(number, pages[0])]
            reference.move(gather)
            scatter = [bound(b, arena, memory(packed[c])) for c, b in lane.scatter_boxes(number, pages[1])]
            reference.move(scatter)
            straight = [bound(b, memory(source[c]), memory(direct[c])) for c, b in lane.direct_boxes(number, *pages)]
            reference.move(straight)
        for mine, theirs in zip(packed, direct, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.tensors, theirs.tensors, strict=True))


some_layers = st.integers(1, 5)


@searched(few=15, many=50)
@given(cases(most_tokens=60), some_layers)
def test_no_chunk_holds_layers_of_two_groups_and_groups_come_in_order(case: Case, layers: int):
    for _, _, lane in lanes_of(case, layers=layers):
        groups = [{layer // layers for piece in chunk.pieces for layer in piece.leg.layers} for chunk in lane.chunks]
        assert all(len(group) == 1 for group in groups)
        order = [group.pop() for group in groups]
        assert order == sorted(order)


@searched(few=15, many=50)
@given(cases(most_tokens=60), some_layers)
def test_a_lane_cut_by_layers_moves_the_same_rows_to_the_same_places(case: Case, layers: int):
    whole = [lane for _, _, lane in lanes_of(case)]
    for (src, dst, lane), uncut in zip(lanes_of(case, layers=layers), whole, strict=True):
        pages = table(src, 1), table(dst, 2)
        assert rows_moved(lane, *pages) == rows_moved(uncut, *pages)
        assert lane.nbytes == uncut.nbytes


def rows_moved(
    lane: Lane, src: list[np.ndarray], dst: list[np.ndarray]
) -> set[tuple[int, tuple[int, int], tuple[int, int]]]:
    """(component, row of the source, row of the destination), each once."""
    moved = [
        (component, *ends)
        for chunk in range(len(lane.chunks))
        for component, b in lane.direct_boxes(chunk, src, dst)
        for ends in zip(rows_of(b.src, b.heads, b.tokens), rows_of(b.dst, b.heads, b.tokens), strict=True)
    ]
    assert len(moved) == len(set(moved))
    return set(moved)


@searched(few=15, many=50)
@given(cases(most_tokens=60), st.integers(0, 5))
def test_the_reach_of_a_chunk_is_the_last_layer_and_position_of_its_rows(case: Case, layers: int):
    """Counted out, row by row, from what the source and the destination hold."""
    for src, dst, lane in lanes_of(case, layers=layers):
        for number, chunk in enumerate(lane.chunks):
            layer_stop = stop = 0
            for piece in chunk.pieces:
                component = case.components[piece.component]
                layer_stop = max(layer_stop, *(layer + 1 for layer in piece.leg.layers))
                ours, theirs = (
                    list(end.fleet.shard(component, end.rank, case.tokens).positions or ()) for end in (src, dst)
                )
                for first_src, first_dst in zip(piece.units.src.tolist(), piece.units.dst.tolist(), strict=True):
                    here = ours[first_src : first_src + piece.units.tokens]
                    assert here == theirs[first_dst : first_dst + piece.units.tokens]
                    stop = max(stop, case.tokens if component.states else (here[-1] + 1) * component.row_tokens)
            assert lane.reach(number, case.tokens) == (layer_stop, stop)


def test_a_chunk_of_two_components_reaches_as_far_as_either():
    """Two layers of attention over 40 tokens and three layers of windows of the last 8, in one chunk."""
    components = (Component.attention(2, 1, 8, "uint8"), Component.sliding(3, 1, 8, 8, "uint8"))
    ends = [
        End(fleet, 0, tuple(PoolSpec.dense(c, fleet.shard(c, 0, 1), 8, fleet.page_tokens, "NHD") for c in components))
        for fleet in (Fleet(page_tokens=8), Fleet(page_tokens=8))
    ]
    plans = plans_between(components, ends[0].fleet, ends[1].fleet, range(36), Replicas.STRIPE)
    (chunk,) = Lane.between(plans, *ends, Cut(1 << 20)).chunks
    assert {piece.component for piece in chunk.pieces} == {0, 1}
    assert Lane.between(plans, *ends, Cut(1 << 20)).reach(0, 36) == (3, 36)


@searched(few=10, many=30)
@given(cases(most_tokens=60), st.integers(0, 3))
def test_the_pages_of_a_chunk_are_those_that_its_boxes_touch(case: Case, layers: int):
    for src, dst, lane in islice(lanes_of(case, layers=layers), 4):
        pages = table(src, 1), [np.arange(spec.pages) for spec in dst.pools]
        for number in range(len(lane.chunks)):
            touched: dict[int, set[int]] = {}
            for component, b in lane.direct_boxes(number, *pages):
                spec = dst.pools[component]
                for _, offset in rows_of(b.dst, b.heads, b.tokens):
                    touched.setdefault(component, set()).add(page_at(spec, offset))
            named: dict[int, set[int]] = {}
            for component, indices in lane.target_pages(number):
                named.setdefault(component, set()).update(indices.tolist())
            assert named == touched


def page_at(spec: PoolSpec, offset: int) -> int:
    """Which page of a pool a byte of an allocation is of, whatever the order of its axes."""
    axes, strides = spec.layout.axes, spec.layout.stride
    for axis, stride in sorted(zip(axes, strides, strict=True), key=lambda pair: -pair[1]):
        index, offset = divmod(offset, stride * spec.component.element_bytes)
        if axis == "page":
            return index
    raise AssertionError(f"{spec} has no pages")


def noise(spec: PoolSpec, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, 256, (spec.allocation_bytes,), generator=random, dtype=torch.uint8)
        for _ in range(spec.allocations)
    )


def one_to_one(page_tokens: tuple[int, int], tokens: int, chunk_bytes: int) -> Lane:
    """64 bytes a head and token, 2 heads, 1 layer, kv 1."""
    component = Component("attention", 1, 1, 2, 64, "uint8")
    ends = [
        End(fleet, 0, (PoolSpec.dense(component, fleet.shard(component, 0, 1), 8, fleet.page_tokens, "NHD"),))
        for fleet in (Fleet(page_tokens=p) for p in page_tokens)
    ]
    plans = plans_between(
        tuple(pool.component for pool in ends[0].pools), ends[0].fleet, ends[1].fleet, range(tokens), Replicas.STRIPE
    )
    return Lane.between(plans, *ends, Cut(chunk_bytes))


def test_a_unit_larger_than_a_chunk_has_one_of_its_own():
    lane = one_to_one((16, 16), 64, chunk_bytes=1000)  # a unit of 16 tokens has 2,048 bytes
    assert [(chunk.nbytes, len(chunk.pieces)) for chunk in lane.chunks] == [(2048, 1)] * 4


def test_units_fill_a_chunk_as_far_as_they_fit():
    lane = one_to_one((4, 6), 36, chunk_bytes=1000)  # units of 2 tokens, 256 bytes: three a chunk
    assert [chunk.nbytes for chunk in lane.chunks] == [768] * 6


def test_a_page_table_that_is_too_short_or_names_no_page_is_refused():
    lane = one_to_one((16, 16), 64, 1 << 20)
    with pytest.raises(PlanError, match="too short"):
        lane.gather_boxes(0, [np.arange(3)])
    with pytest.raises(PlanError, match="page id 8 is outside a pool of 8"):
        lane.scatter_boxes(0, [np.array([0, 1, 2, 8])])
    with pytest.raises(PlanError, match="page id -1 is outside"):
        lane.scatter_boxes(0, [np.array([0, 1, 2, -1])])
