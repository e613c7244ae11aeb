"""A Fleet is the ranks of one engine as a grid, and gives the Shard of a component that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from kvmover.errors import LayoutError
from kvmover.fields import settle, settle_whole, whole
from kvmover.layout.component import Component
from kvmover.layout.positions import Stripe
from kvmover.layout.span import Span


class CpOrder(StrEnum):
    """A context-parallel order of positions: pages or single tokens dealt in turn, or one block a rank."""

    PAGE = "page"
    TOKEN = "token"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place in its fleet. Only this class takes a rank apart."""

    tp: int
    pp: int
    cp: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of a component that one rank holds of one request. `positions` is None if it holds no position.

    The rank stores its positions densely and in order: token `i` of its page table is the i-th position of the stripe,
    whose last run may reach past the end of the request, to the end of a page. Where a component has states, they are
    its positions, the same on every context-parallel rank.
    """

    layers: Span
    heads: Span
    positions: Stripe | None


@dataclass(frozen=True, slots=True)
class Replica:
    """Copy `index` of `count` equal copies of box `box`: boxes are numbered by layers, then heads."""

    box: int
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """One engine's grid of ranks, `rank = (pp * cp_size + cp) * tp_size + tp`, and its page size in tokens.

    `pages`: (component, rows of a page), or a mapping, for components with pages of another size than `page_tokens`
    tokens. Raises LayoutError for sizes below 1. A model with a window of 64-token pages beside pages of 256, and a row
    every 4 tokens in the rest:

    >>> fleet = Fleet(tp=2, page_tokens=256, pages={"sliding": 64})
    >>> sliding, c4 = Component.sliding(1, 1, 512, 128, "uint8"), Component("c4", 1, 1, 1, 584, "uint8", row_tokens=4)
    >>> fleet.page_rows(sliding), fleet.page_rows(c4), fleet.page_rows(Component.mla(1, 576, "uint8"))
    (64, 64, 256)
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    page_tokens: int = 64
    cp_order: CpOrder = CpOrder.PAGE
    pages: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", _component_pages(self.pages))
        settle_whole(self, "fleet", LayoutError, tp=1, pp=1, cp=1, page_tokens=1)
        settle(self, "fleet", LayoutError, cp_order=CpOrder)

    def __hash__(self) -> int:
        """Hash the sizes only, as a Component does."""
        return hash((self.tp, self.pp, self.cp, self.page_tokens))

    @property
    def size(self) -> int:
        """The number of ranks: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    def coordinate(self, rank: int) -> Coordinate:
        """Returns a rank's place: rank 5 of TP2 x PP4 is tp 1, pp 2, cp 0. Raises LayoutError outside the fleet."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside a fleet of {self.size} ranks, counted from 0")
        rest, tp = divmod(rank, self.tp)
        pp, cp = divmod(rest, self.cp)
        return Coordinate(tp, pp, cp)

    def rank(self, at: Coordinate) -> int:
        """Returns the rank at a coordinate: the inverse of `coordinate`."""
        return (at.pp * self.cp + at.cp) * self.tp + at.tp

    def page_rows(self, component: Component) -> int:
        """Returns the component's own positions in a page of its pools: a token each, or a row, or 1 state.

        Raises LayoutError if a page would end within a row, as 64 tokens with a row every 128.
        """
        named = dict(self.pages).get(component.name)
        if component.states:
            if named not in (None, 1):
                raise LayoutError(f"pages of {component.name} have {named} states; a page of states has 1")
            return 1
        if named is None and self.page_tokens % component.row_tokens:
            held = f"{component.name} has a row every {component.row_tokens} tokens, and pages of {self.page_tokens}"
            remedy = f"take pages of a multiple of {component.row_tokens}, or name its rows in `pages`"
            raise LayoutError(f"{held} tokens end within one; {remedy}")
        return named or self.page_tokens // component.row_tokens

    def shard(self, component: Component, rank: int, tokens: int) -> Shard:
        """Returns the shard of `component` at `rank` for a request of `tokens`. Raises LayoutError below 1 token."""
        if tokens < 1:
            raise LayoutError(f"tokens = {tokens}; a request has at least 1")
        return self.shard_of_rows(component, rank, component.extent(tokens))

    def shard_of_rows(self, component: Component, rank: int, extent: int) -> Shard:
        """Returns the same shard for a request of `extent` positions of the component's own."""
        layers, heads, cp = _layers_and_heads(self, component, rank)
        return Shard(layers, heads, self._positions(component, cp, extent))

    def replica(self, component: Component, rank: int) -> Replica:
        """Returns the copy and the box of `component` that a rank holds.

        Ranks with equal heads are neighbours; context-parallel ranks with equal positions multiply the copies. Of 2
        heads on TP4, rank 3 holds copy 1 of 2 of box 1.
        """
        return _replica(self, component, rank)

    def _positions(self, component: Component, cp: int, extent: int) -> Stripe | None:
        """Returns the part of `extent` positions of the context-parallel rank `cp`."""
        width, parts = self.page_rows(component), component.cp_parts(self.cp)
        part = cp % parts
        if self.cp_order is CpOrder.TOKEN:
            count = len(range(part, extent, parts))
            return Stripe(part, count, parts, 1) if count else None
        pages = -(-extent // width)
        if self.cp_order is CpOrder.PAGE:
            count = len(range(part, pages, parts))
            return Stripe(part * width, count, parts * width, width) if count else None
        first, stop = part * pages // parts, (part + 1) * pages // parts
        return Stripe(first * width, stop - first, width, width) if first < stop else None


def _component_pages(given: Any) -> tuple[tuple[str, int], ...]:
    """Returns the rows of a page by name, sorted, each once. Raises LayoutError."""
    wrong = f"fleet has pages = {given!r}; give the rows of a page by component, as {{'c4': 64}}"
    try:
        pairs: list[Any] = list(given.items() if hasattr(given, "items") else given)
    except TypeError:
        raise LayoutError(wrong) from None
    found: dict[str, int] = {}
    for pair in pairs:
        if type(pair) not in (tuple, list) or len(pair) != 2:
            raise LayoutError(wrong)
        name: Any = pair[0]
        if not isinstance(name, str):
            raise LayoutError(f"fleet has pages of {name!r}; components are named by text")
        if name in found:
            raise LayoutError(f"fleet has pages = {given!r}, where a component is named twice")
        found[name] = whole(pair[1], f"a page of {name} has rows", LayoutError, 1)
    return tuple(sorted(found.items()))


@lru_cache(maxsize=65536)
def _layers_and_heads(fleet: Fleet, component: Component, rank: int) -> tuple[Span, Span, int]:
    """Returns a rank's layers, heads and context-parallel index. Cached: every request needs them."""
    at = fleet.coordinate(rank)
    if fleet.pp > component.layers:
        raise LayoutError(
            f"{fleet.pp} pipeline stages for {component.layers} layers of {component.name}; each needs one"
        )
    return (
        Span.share(component.layers, fleet.pp, at.pp),
        Span.share(component.heads, fleet.tp, at.tp),
        at.cp,
    )


@lru_cache(maxsize=65536)
def _replica(fleet: Fleet, component: Component, rank: int) -> Replica:
    at, tp = fleet.coordinate(rank), fleet.tp
    shares, parts = min(component.heads, tp), component.cp_parts(fleet.cp)
    share = at.tp * shares // tp
    first, stop = -(-share * tp // shares), -(-(share + 1) * tp // shares)
    columns = stop - first
    return Replica(at.pp * shares + share, at.cp // parts * columns + at.tp - first, fleet.cp // parts * columns)
