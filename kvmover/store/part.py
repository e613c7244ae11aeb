"""A PagePart is the box of a page that a rank holds or wants; `cover` picks cells of stored objects that form it.

`elected` picks the writing rank among those that hold the same part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvmover.errors import LayoutError
from kvmover.layout import Component, Fleet, Shard, Span, Stripe
from kvmover.store.namespace import Namespace


@dataclass(frozen=True, slots=True)
class PageBox:
    """A box of heads, layers and tokens of a page, in whole-model numbers; tokens count from the page's first.

    A cell is the unit of digests and reads: one head of one layer, packed `kv token dim`. Cells are ordered head by
    head, so the cells of two layers of one head are neighbours.
    """

    heads: Span
    layers: Span
    tokens: Stripe

    def __post_init__(self) -> None:
        for name, span in (("heads", self.heads), ("layers", self.layers)):
            if not span or span.step != 1:
                raise LayoutError(f"{name} {span.triple()} of a page are not a range")

    @property
    def cells(self) -> int:
        """Returns the number of cells and digests: heads x layers."""
        return self.heads.count * self.layers.count


@dataclass(frozen=True, slots=True)
class PagePart:
    """A box of a component's pages, packed `head layer kv token dim`, that one rank reads and writes.

    A TP8 rank of Llama-3-70B, pages of 64 tokens: 1 head x 80 layers x 2 x 64 x 128 x 2 bytes are 2,621,440.
    """

    component: Component
    box: PageBox

    def __post_init__(self) -> None:
        for name, span, extent in (
            ("heads", self.box.heads, self.component.heads),
            ("layers", self.box.layers, self.component.layers),
        ):
            if span.stop > extent:
                raise LayoutError(f"{name} {span.triple()} are outside the {extent} of {self.component.name}")

    @classmethod
    def of(cls, component: Component, shard: Shard, page_tokens: int, page: int = 0) -> PagePart | None:
        """Returns the part that a rank with `shard` holds of a request's page number `page`, or None.

        `shard` is `fleet.shard(component, rank, tokens)`. Raises LayoutError if the rank's tokens of the page are no
        stripe: its fleet's own pages must divide into the store's, or the other way round.
        """
        rows = page_rows(component, page_tokens, page)
        if shard.positions is None:
            return None
        held = [stripe.quad() for stripe in shard.positions.clip(rows.start, rows.stop)]
        if len(held) > 1:
            raise LayoutError(f"stripes {held} of page {page} of {page_tokens} tokens are not one stripe")
        if not held:
            return None
        start, count, step, width = held[0]
        return cls(component, PageBox(shard.heads, shard.layers, Stripe(start - rows.start, count, step, width)))

    @classmethod
    def held(cls, component: Component, fleet: Fleet, rank: int, page_tokens: int) -> PagePart:
        """Returns the part of `rank` of every page. Raises LayoutError if it holds no token or no stripe of one."""
        part = cls.of(component, fleet.shard(component, rank, page_tokens), page_tokens)
        if part is None:
            raise LayoutError(
                f"rank {rank} of {fleet} holds nothing of a page of {page_tokens} tokens of {component.name}"
            )
        return part

    @classmethod
    def whole(cls, component: Component, page_tokens: int) -> PagePart:
        """Returns the part that is the whole page."""
        tokens = len(page_rows(component, page_tokens))
        return cls(
            component, PageBox(Span(0, component.heads), Span(0, component.layers), Stripe(0, 1, tokens, tokens))
        )

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a row: `dim` elements of one token, head, layer and kv."""
        return self.component.row_bytes

    @property
    def cell_bytes(self) -> int:
        """Returns the bytes of a cell: `kv token dim` of one head of one layer."""
        return self.component.kv * self.box.tokens.tokens * self.component.row_bytes

    @property
    def nbytes(self) -> int:
        """Returns the packed bytes of the part of one page."""
        return self.box.cells * self.cell_bytes

    def key(self, namespace: Namespace) -> PartKey:
        """Returns the key of this part in `namespace`. Raises LayoutError if its tokens exceed the page."""
        tokens = len(page_rows(self.component, namespace.page_tokens))
        if self.box.tokens.stop > tokens:
            raise LayoutError(f"tokens {self.box.tokens.quad()} are outside a page of {tokens}")
        return part_key(namespace.digest_for(self.component), self.box)


def page_rows(component: Component, page_tokens: int, page: int = 0) -> range:
    """Returns the component's row positions of a request's page number `page`.

    Raises LayoutError if a page ends within a row, as 64 tokens with a row every 128.
    """
    if page_tokens % component.row_tokens:
        held = f"{component.name} has a row every {component.row_tokens} tokens"
        raise LayoutError(f"{held}, and pages of {page_tokens} tokens end within one")
    return component.rows(range(page * page_tokens, (page + 1) * page_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class PartKey:
    """A key of a part. Made only by `part_key`, once for each part: keys compare by identity.

    Look-ups compare keys often, and comparing the spans took most of a look-up.
    """

    component: bytes
    box: PageBox


_KEYS: dict[tuple[bytes, PageBox], PartKey] = {}


def part_key(component: bytes, box: PageBox) -> PartKey:
    """Returns the key of `box` of the component whose digest is `component` (`Namespace.digest_for`)."""
    return _KEYS.setdefault((component, box), PartKey(component, box))


def replicas(component: Component, fleet: Fleet, rank: int) -> tuple[int, int]:
    """Returns the index of the copy of its part that `rank` holds, and the number of copies (1 if unique).

    Tensor parallel ranks beyond the heads repeat them; states are on every context parallel rank.
    """
    copy = fleet.replica(component, rank)
    return copy.index, copy.count


def elected(component: Component, fleet: Fleet, rank: int, page: bytes) -> bool:
    """Returns True if `rank` writes `page`, among all ranks that hold the same part of it (sglang#24376).

    Chosen by the page's hash, so that ranks agree without communication and share the pages evenly.
    """
    index, count = replicas(component, fleet, rank)
    return int.from_bytes(page[:8], "little") % count == index


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
