"""`cover` picks cells of stored objects that together form a page part, written under any parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvmover.layout import Span
from kvmover.store.part import PageBox


@dataclass(frozen=True, slots=True)
class CoverPiece:
    """The cells to read of candidate object `source`: whole cells only.

    `heads` and `layers` are the model's. `tokens`: pairs (place in the object's cell, place in the part's cell); empty
    if both cells hold the same tokens, so that a cell is copied in one run.
    """

    source: int
    heads: Span
    layers: Span
    tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CellRun:
    """A run of `count` contiguous cells, with the first cell's number in the object and in the part."""

    source_cell: int
    part_cell: int
    count: int


@dataclass(frozen=True, slots=True)
class ObjectShare:
    """The share read from a page's object `number`: whole cells in place, or tokens of cells through a copy."""

    number: int
    piece: CoverPiece
    runs: tuple[CellRun, ...]


@dataclass(frozen=True, slots=True)
class _Rest:
    """A box still to be covered: ranges of heads and of layers, and a set of tokens as an integer's bits."""

    heads: range
    layers: range
    tokens: int


def _bits(box: PageBox) -> int:
    return sum(1 << token for token in box.tokens)


def _range(span: Span) -> range:
    return range(span.start, span.stop)


def _both(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))


@lru_cache(maxsize=4096)
def cover(wanted: PageBox, held: tuple[PageBox, ...]) -> tuple[CoverPiece, ...] | None:
    """Returns pieces of the `held` boxes that cover each token of each `wanted` cell once; None if any is missing.

    The largest share comes first, so that an object that holds all of `wanted` gives one piece.

    >>> from kvmover.layout import Stripe
    >>> page = Stripe(0, 1, 64, 64)
    >>> quarters = tuple(PageBox(Span(first, 2), Span(0, 80), page) for first in (0, 2, 4, 6))
    >>> half = PageBox(Span(0, 4), Span(40, 40), page)
    >>> [(piece.source, piece.heads.triple(), piece.layers.triple()) for piece in cover(half, quarters)]
    [(0, [0, 2, 1], [40, 40, 1]), (1, [2, 2, 1], [40, 40, 1])]
    >>> cover(PageBox(Span(0, 8), Span(0, 80), page), quarters[:3]) is None
    True
    """
    whole = _Rest(_range(wanted.heads), _range(wanted.layers), _bits(wanted))
    offers = [_Rest(_range(box.heads), _range(box.layers), _bits(box)) for box in held]
    rest, pieces = [whole], list[CoverPiece]()
    for source in sorted(range(len(held)), key=lambda number: (-_size(_common(whole, offers[number])), number)):
        left: list[_Rest] = []
        for part in rest:
            taken = _common(part, offers[source])
            if not _size(taken):
                left.append(part)
                continue
            pieces.append(_piece(source, taken, held[source], wanted))
            left += _without(part, taken)
        rest = left
    return None if rest else tuple(pieces)


def _common(left: _Rest, right: _Rest) -> _Rest:
    return _Rest(_both(left.heads, right.heads), _both(left.layers, right.layers), left.tokens & right.tokens)


def _size(part: _Rest) -> int:
    return len(part.heads) * len(part.layers) * part.tokens.bit_count()


def _without(part: _Rest, taken: _Rest) -> list[_Rest]:
    """Returns `part` minus `taken`, which lies in it, as up to five boxes."""
    heads, layers = part.heads, part.layers
    rests = [
        _Rest(range(heads.start, taken.heads.start), layers, part.tokens),
        _Rest(range(taken.heads.stop, heads.stop), layers, part.tokens),
        _Rest(taken.heads, range(layers.start, taken.layers.start), part.tokens),
        _Rest(taken.heads, range(taken.layers.stop, layers.stop), part.tokens),
        _Rest(taken.heads, taken.layers, part.tokens & ~taken.tokens),
    ]
    return [rest for rest in rests if _size(rest)]


def _piece(source: int, taken: _Rest, held: PageBox, wanted: PageBox) -> CoverPiece:
    heads = Span(taken.heads.start, len(taken.heads))
    layers = Span(taken.layers.start, len(taken.layers))
    if held.tokens == wanted.tokens and taken.tokens == _bits(wanted):
        return CoverPiece(source, heads, layers)
    tokens = [token for token in wanted.tokens if taken.tokens >> token & 1]
    return CoverPiece(source, heads, layers, tuple((held.tokens.index(t), wanted.tokens.index(t)) for t in tokens))


@lru_cache(maxsize=4096)
def cell_runs(piece: CoverPiece, held: PageBox, wanted: PageBox) -> tuple[CellRun, ...]:
    """Returns `piece` as runs contiguous on both sides: a single run if all layers are held and wanted."""
    runs: list[CellRun] = []
    for head in piece.heads:
        source = (head - held.heads.start) * held.layers.count + piece.layers.start - held.layers.start
        target = (head - wanted.heads.start) * wanted.layers.count + piece.layers.start - wanted.layers.start
        last = runs[-1] if runs else None
        if last and (last.source_cell + last.count, last.part_cell + last.count) == (source, target):
            runs[-1] = CellRun(last.source_cell, last.part_cell, last.count + piece.layers.count)
        else:
            runs.append(CellRun(source, target, piece.layers.count))
    return tuple(runs)


def shares(wanted: PageBox, held: Mapping[int, PageBox]) -> tuple[ObjectShare, ...] | None:
    """Returns the shares of the numbered objects `held` that cover `wanted` once; None if any cell is missing."""
    numbers, boxes = list(held), tuple(held.values())
    pieces = cover(wanted, boxes) or ()
    found = tuple(
        ObjectShare(numbers[piece.source], piece, cell_runs(piece, boxes[piece.source], wanted)) for piece in pieces
    )
    return found or None
