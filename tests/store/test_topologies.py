"""Whoever wrote a page, whoever reads it: TP x PP x CP on both sides, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_rank import PAGE, SPACE, Rank, pages_of

from kvmover.errors import LayoutError
from kvmover.layout import Component, CpOrder, Fleet, Span, Stripe
from kvmover.store import Got, PageBox, PagePart, PageStore, Put, elected, replicas
from kvmover.store.part import cell_runs, cover
from tests.store.segments import segments_of

COMPONENTS = (
    Component.attention(5, 8, 8, "bfloat16"),
    Component.attention(4, 2, 8, "float16"),
    Component.attention(4, 6, 8, "int8"),
    Component.mla(5, 24, "bfloat16"),
    Component.state("temporal", 4, 6, 64, "float32"),
)
REQUEST = 8 * PAGE

fleets = st.builds(
    Fleet,
    tp=st.sampled_from((1, 2, 3, 4, 8)),
    pp=st.sampled_from((1, 2, 3)),
    cp=st.sampled_from((1, 2, 3)),
    page_tokens=st.just(PAGE),
    cp_order=st.sampled_from(CpOrder),
)


def parts_of(component: Component, fleet: Fleet, page: int) -> Iterator[tuple[int, PagePart]]:
    for rank in range(fleet.size):
        part = PagePart.of(component, fleet.shard(component, rank, REQUEST), PAGE, page)
        if part:
            yield rank, part


@settings(max_examples=60)
@given(component=st.sampled_from(COMPONENTS), writer=fleets, reader=fleets, page=st.integers(0, 7))
def test_any_fleet_reads_what_any_fleet_wrote(component: Component, writer: Fleet, reader: Fleet, page: int) -> None:
    pages = pages_of(2)
    with TemporaryDirectory() as root, PageStore.open(Path(root), SPACE) as store:
        outcomes: list[list[Put]] = []
        for rank, part in parts_of(component, writer, page):
            door = Rank(store, part, 2, writes=partial(elected, component, writer, rank))
            outcomes.append([result.outcome for result in door.put(pages)])
        for number in range(len(pages)):
            written = [each[number] for each in outcomes].count(Put.WRITTEN)
            distinct = {part for _, part in parts_of(component, writer, page)}
            assert written == len(distinct), "a part was written twice, or not at all"
        for _, part in parts_of(component, reader, page):
            door = Rank(store, part, 2)
            assert door.exists(pages) == [True, True]
            assert [result.outcome for result in door.get(pages)] == [Got.READ] * 2


def test_a_rank_that_holds_every_other_token_is_not_served_a_damaged_page(tmp_path: Path) -> None:
    """It reads tokens out of whole cells that another fleet wrote: the cells are checked before a token is taken.

    The flipped byte is of token 0, so of rank 0's half; rank 1 is told as well, since a cell is good or bad as a whole.
    """
    component, pages = COMPONENTS[0], pages_of(3)
    whole = PagePart.whole(component, PAGE)
    for rank in range(2):
        root = tmp_path / str(rank)
        root.mkdir()
        with PageStore.open(root, SPACE) as store:
            Rank(store, whole, 3).put(pages)
            flip(next(segments_of(store).folder.glob("*.data")), whole.nbytes)
            reader = Fleet(cp=2, page_tokens=PAGE, cp_order=CpOrder.TOKEN)
            part = PagePart.of(component, reader.shard(component, rank, REQUEST), PAGE)
            assert part is not None
            door = Rank(store, part, 3)
            assert [result.outcome for result in door.get(pages)] == [Got.READ, Got.POISONED, Got.READ]
            assert dict(store.counters.poisoned) == {"digest": 1}
            assert door.exists(pages) == [True, False, True]


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@settings(max_examples=40)
@given(component=st.sampled_from(COMPONENTS), writer=fleets, reader=fleets, data=st.data())
def test_a_page_exists_only_when_every_object_that_the_reader_needs_is_there(
    component: Component, writer: Fleet, reader: Fleet, data: st.DataObject
) -> None:
    pages = pages_of(1)
    by_part = {part: rank for rank, part in parts_of(component, writer, 0)}
    missing = data.draw(st.sampled_from(sorted(by_part, key=lambda part: by_part[part])))
    with TemporaryDirectory() as root, PageStore.open(Path(root), SPACE) as store:
        for part in by_part:
            if part != missing:
                Rank(store, part, 1).put(pages)
        for _, part in parts_of(component, reader, 0):
            box, lost = part.box, missing.box
            needs = (
                bool(box.heads & lost.heads)
                and bool(box.layers & lost.layers)
                and bool(set(box.tokens) & set(lost.tokens))
            )
            door = Rank(store, part, 1)
            assert door.exists(pages) == [not needs]
            assert door.get(pages)[0].outcome is (Got.ABSENT if needs else Got.READ)


def test_fleets_that_both_wrote_are_no_special_case(tmp_path: Path) -> None:
    component, pages = COMPONENTS[0], pages_of(3)
    with PageStore.open(tmp_path, SPACE) as store:
        eight, two = Fleet(tp=8), Fleet(tp=2, pp=2)
        for rank in (0, 1, 2, 3, 6):
            Rank.of(store, component, eight, rank).put(pages)
        assert [r.outcome for r in Rank.of(store, component, two, 0).put(pages)] == [Put.PRESENT] * 3
        assert [r.outcome for r in Rank.of(store, component, two, 1).put(pages)] == [Put.WRITTEN] * 3
        assert [r.outcome for r in Rank.of(store, component, two, 3).put(pages)] == [Put.WRITTEN] * 3
        for fleet in (Fleet(), two, eight, Fleet(tp=3, pp=5)):
            for rank in range(fleet.size):
                assert all(r.ok for r in Rank.of(store, component, fleet, rank).get(pages))


spans = st.builds(Span, st.integers(0, 3), st.integers(1, 4))
boxes = st.builds(
    PageBox, spans, spans, st.builds(Stripe, st.integers(0, 3), st.integers(1, 3), st.integers(4, 5), st.integers(1, 4))
)


def cells(box: PageBox) -> set[tuple[int, int, int]]:
    return {(head, layer, token) for head in box.heads for layer in box.layers for token in box.tokens}


@given(wanted=boxes, held=st.lists(boxes, max_size=6).map(tuple))
@example(  # the last holds all tokens, and one of them was taken from the box before
    wanted=PageBox(Span(0, 4), Span(0, 1), Stripe(0, 1, 4, 4)),
    held=(
        PageBox(Span(0, 3), Span(0, 1), Stripe(0, 1, 4, 4)),
        PageBox(Span(0, 4), Span(0, 1), Stripe(0, 1, 4, 1)),
        PageBox(Span(3, 1), Span(0, 1), Stripe(0, 1, 4, 4)),
    ),
)
def test_pieces_cover_a_box_once_each_or_it_is_not_covered(wanted: PageBox, held: tuple[PageBox, ...]) -> None:
    pieces = cover(wanted, held)
    available = set().union(*map(cells, held))
    if pieces is None:
        assert cells(wanted) - available
        return
    got: list[tuple[int, int, int]] = []
    for piece in pieces:
        source, tokens = held[piece.source], list(wanted.tokens)
        if piece.tokens:
            pairs = [(list(source.tokens)[a], list(wanted.tokens)[b]) for a, b in piece.tokens]
            assert all(a == b for a, b in pairs)
            tokens = [token for token, _ in pairs]
        else:
            assert source.tokens == wanted.tokens
        got += [(h, layer, t) for h in piece.heads for layer in piece.layers for t in tokens]
        assert set(got[-len(tokens) :]) <= cells(source)
    assert sorted(got) == sorted(cells(wanted))


@given(wanted=boxes, held=boxes)
def test_runs_of_cells_name_the_same_cell_on_both_sides(wanted: PageBox, held: PageBox) -> None:
    for piece in cover(wanted, (held,)) or ():
        numbers = {side: np.arange(side.cells).reshape(side.heads.count, side.layers.count) for side in (held, wanted)}
        expected = [
            tuple(numbers[side][h - side.heads.start, layer - side.layers.start] for side in (held, wanted))
            for h in piece.heads
            for layer in piece.layers
        ]
        runs = cell_runs(piece, held, wanted)
        assert [(run.source_cell + i, run.part_cell + i) for run in runs for i in range(run.count)] == expected


def test_all_layers_of_neighbouring_heads_are_one_run() -> None:
    page = Stripe(0, 1, 64, 64)
    held, wanted = PageBox(Span(0, 8), Span(0, 80), page), PageBox(Span(2, 2), Span(0, 80), page)
    pieces = cover(wanted, (held,))
    assert pieces is not None
    (piece,) = pieces
    assert [(run.source_cell, run.part_cell, run.count) for run in cell_runs(piece, held, wanted)] == [(160, 0, 160)]


@given(component=st.sampled_from(COMPONENTS), fleet=fleets, page=st.binary(min_size=32, max_size=32))
def test_of_equal_parts_exactly_one_is_elected(component: Component, fleet: Fleet, page: bytes) -> None:
    groups: dict[object, list[int]] = {}
    for rank in range(fleet.size):
        shard = fleet.shard(component, rank, REQUEST)
        groups.setdefault((shard.heads, shard.layers, shard.positions), []).append(rank)
    for ranks in groups.values():
        if fleet.shard(component, ranks[0], REQUEST).positions is None:
            continue
        assert [elected(component, fleet, rank, page) for rank in ranks].count(True) == 1
        assert sorted(replicas(component, fleet, rank) for rank in ranks) == [
            (i, len(ranks)) for i in range(len(ranks))
        ]


def test_tokens_of_a_page_that_are_no_stripe_are_refused() -> None:
    component, fleet = COMPONENTS[0], Fleet(cp=2, page_tokens=3)
    with pytest.raises(LayoutError, match="not one stripe"):
        PagePart.of(component, fleet.shard(component, 0, 100), PAGE, 1)
