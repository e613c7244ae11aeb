"""Lemmas of places: packed and pooled layouts, and the tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvmover.kernels import table
from kvmover.layout.layout import Layout
from kvmover.plan.lower import PoolCut
from kvmover.vocabulary import AXES, PACKED_ORDER
from tests.theorems.given import lemma, stand_in, whole
from tests.theorems.symbols import claim, divides, is_symbolic, length, numbers, ordered


@lemma("places", bound=3)
def packed_elements_have_places_of_their_own() -> None:
    """An element's place in a dense layout says which element it is, and all places are inside."""
    sizes = {axis: whole(1) for axis in AXES}
    layout = Layout.dense(PACKED_ORDER, **sizes)
    at = {axis: whole(0, sizes[axis]) for axis in layout.axes}
    place: Any = 0
    for axis in reversed(layout.axes):
        stride = layout.stride_of(axis)
        ordered(at[axis], sizes[axis] - 1, stride)
        claim(place < stride)
        place = place + at[axis] * stride
    claim(place < layout.elements)
    for axis in layout.axes:
        found, place = divmod(place, layout.stride_of(axis))
        claim(found == at[axis])


@lemma("places", drawn=5000)
def lowered_places_are_those_of_the_layout() -> None:
    """A row of a unit is lowered to the layout's own address of its page, token and head, which is in the pool."""
    sizes = {axis: whole(1) for axis in AXES}
    strides = {axis: whole(0) for axis in AXES}
    at = {axis: whole(0, sizes[axis]) for axis in AXES}
    layout = Layout(tuple(AXES), tuple(sizes[axis] for axis in AXES), tuple(strides[axis] for axis in AXES))
    for axis in AXES:
        ordered(at[axis], 0, strides[axis])
        ordered(at[axis], sizes[axis] - 1, strides[axis])
    first = whole(0, at["head"] + 1)
    cut = PoolCut(
        None, None, first * strides["head"], strides["head"], strides["token"], strides["page"], sizes["token"]
    )  # pyright: ignore
    turn = whole(0)
    with stand_in("kvmover.plan.lower", "page_ids", lambda held, tokens, pages: at["page"]):
        unit = cut.units(None, turn * sizes["token"] + at["token"], None)  # pyright: ignore
    plane = at["layer"] * strides["layer"] + at["kv"] * strides["kv"]
    place = plane + unit + (at["head"] - first) * cut.head_bytes + at["dim"] * strides["dim"]
    by_layout: Any = 0
    for axis in AXES:
        by_layout = by_layout + at[axis] * strides[axis]
    claim(place == by_layout)
    claim(place >= 0)
    claim(place < layout.elements)


class Words:
    """The table of one region, as the functions of a kernel read it."""

    def __init__(self, **words: Any) -> None:
        self._words = {getattr(table, name).value: value for name, value in words.items()}

    def __add__(self, name: Any) -> Any:
        return self._words[name.value]


class Language:
    """The words of Triton that the tables' functions use. `lane`: the one row of a tile that is seen."""

    uint32 = int64 = torch.int64
    constexpr = None

    def __init__(self, lane: Any) -> None:
        self._lane = lane

    def load(self, value: Any) -> Any:
        return value if is_symbolic(value) else torch.tensor(value)

    def arange(self, first: int, stop: Any) -> Any:
        return self.load(self._lane)


@dataclass(frozen=True, slots=True)
class Grain:
    """A grain of a row of a region. `counts`: of each kind of place. `at`: its plane, head, unit, token and number."""

    counts: dict[str, Any]
    at: tuple[Any, ...]

    @classmethod
    def given(cls) -> Grain:
        """Returns any grain of a region of any size."""
        counts = {name: whole(1) for name in ("PLANES", "HEADS", "UNITS", "TOKENS", "GRAINS")}
        return cls(counts, tuple(whole(0, count) for count in counts.values()))

    def claim_found(self, piece: Any, lane: Any, pieces: Any, rows: Any, span: Any) -> None:
        """Claim that the kernels find it in lane `lane` of a piece of `rows`. `pieces`: of a unit, or of all."""
        plane, head, *_ = self.at
        tile = (piece * self.counts["HEADS"] + head) * self.counts["PLANES"] + plane
        words = Words(PIECES=pieces, **self.counts)
        with stand_in("kvmover.kernels.table", "tl", Language(lane)):
            *place, piece = table.plane_and_head.fn(words, tile)
            found = *place, *table.rows_of.fn(words, piece, rows, self.counts["GRAINS"], span)
        for one, other in zip(found, (*self.at, True), strict=True):
            claim(one == other)


@lemma("tiles", drawn=2000)
def rows_of_several_units_are_copied_once() -> None:
    """Where tiles take rows of several units, each grain of each row is in one tile, and the tile finds it there."""
    grain, rows = Grain.given(), whole(1)
    _, _, units, tokens, grains = grain.counts.values()
    _, _, unit, token, of_row = grain.at
    number = (unit * tokens + token) * grains + of_row
    piece, lane = divmod(number, rows)
    divides(number, grains, unit * tokens + token, of_row)
    grain.claim_found(piece, lane, -(-tokens * grains * units // rows), rows, table.SEVERAL_UNITS)


@lemma("tiles", drawn=2000)
def rows_of_one_unit_are_copied_once() -> None:
    """Where tiles take rows of one unit, each grain of each row is in one tile, and the tile finds it there."""
    grain, rows = Grain.given(), whole(1)
    _, _, _, tokens, grains = grain.counts.values()
    _, _, unit, token, of_row = grain.at
    place, lane = divmod(token * grains + of_row, rows)
    pieces = -(-tokens * grains // rows)
    ordered(place, pieces, rows)
    ordered(token, tokens - 1, grains)
    claim(place < pieces)
    grain.claim_found(unit * pieces + place, lane, pieces, rows, table.ONE_UNIT)


@lemma("tiles", bound=24)
def programs_share_the_tiles() -> None:
    """Under a budget of programs each tile is copied by one of them."""
    programs, tiles = whole(1), whole(1)
    tile, program = whole(0, tiles), whole(0, programs)
    turn, mine = divmod(tile, programs)
    count = length(numbers(program, tiles, programs))
    place, behind = divmod(tile - program, programs)
    for near in (0, -1):
        ordered(place, turn + near, programs)
    ordered(place, count, programs)
    ordered(place, 0, programs)
    takes = behind == 0 and place >= 0 and place < count
    claim(takes == (program == mine))
