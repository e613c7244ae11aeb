"""A PagePart is the box of a page that a rank holds or wants; `elected` says who of several holders writes it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.errors import LayoutError
from kvmover.layout import Component, Fleet, Shard, Span, Stripe
from kvmover.store.namespace import Namespace


@dataclass(frozen=True, slots=True)
class PageBox:
    """Heads, layers and tokens of a page, in whole-model numbers; tokens count from the page's first.

    Cells are what digests are taken of and what is read: one head of one layer, `kv token dim` in it. They follow each
    other head by head, so the cells of two layers of one head are neighbours.
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
        """Digests that an object of this box carries: heads x layers."""
        return self.heads.count * self.layers.count


@dataclass(frozen=True, slots=True)
class PagePart:
    """A box of a component's pages, packed `head layer kv token dim`: what one rank reads and writes of each page.

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
        """What a rank with `shard` holds of page number `page` of a request, or None.

        `shard` is `fleet.shard(component, rank, tokens)`. Raises LayoutError where the rank's tokens of the page are no
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
        """What `rank` holds of every page. Raises LayoutError where it holds nothing, or no stripe, of one."""
        part = cls.of(component, fleet.shard(component, rank, page_tokens), page_tokens)
        if part is None:
            raise LayoutError(
                f"rank {rank} of {fleet} holds nothing of a page of {page_tokens} tokens of {component.name}"
            )
        return part

    @classmethod
    def whole(cls, component: Component, page_tokens: int) -> PagePart:
        """All of every page."""
        tokens = len(page_rows(component, page_tokens))
        return cls(
            component, PageBox(Span(0, component.heads), Span(0, component.layers), Stripe(0, 1, tokens, tokens))
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: `dim` elements of one token, head, layer and kv."""
        return self.component.row_bytes

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: `kv token dim` of one head of one layer."""
        return self.component.kv * self.box.tokens.tokens * self.component.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the part of one page, packed."""
        return self.box.cells * self.cell_bytes

    def key(self, namespace: Namespace) -> PartKey:
        """How objects of `namespace` name this part. Raises LayoutError where its tokens leave the page."""
        tokens = len(page_rows(self.component, namespace.page_tokens))
        if self.box.tokens.stop > tokens:
            raise LayoutError(f"tokens {self.box.tokens.quad()} are outside a page of {tokens}")
        return part_key(namespace.digest_for(self.component), self.box)


def page_rows(component: Component, page_tokens: int, page: int = 0) -> range:
    """Positions of the component's own that page number `page` of a request is. Raises LayoutError where it ends in a
    row: 64 tokens, and a row every 128.
    """
    if page_tokens % component.row_tokens:
        held = f"{component.name} has a row every {component.row_tokens} tokens"
        raise LayoutError(f"{held}, and pages of {page_tokens} tokens end within one")
    return component.rows(range(page * page_tokens, (page + 1) * page_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class PartKey:
    """A part as objects name it. Made by `part_key` only, once each: two are equal if they are one object.

    There are few in a store, and every object is looked up by them: comparing the spans took most of a lookup.
    """

    component: bytes
    box: PageBox


_KEYS: dict[tuple[bytes, PageBox], PartKey] = {}


def part_key(component: bytes, box: PageBox) -> PartKey:
    """The key of `box` of the component whose digest is `component` (`Namespace.digest_for`)."""
    return _KEYS.setdefault((component, box), PartKey(component, box))


def replicas(component: Component, fleet: Fleet, rank: int) -> tuple[int, int]:
    """Which copy of its part `rank` holds, of how many. A component whose ranks all hold their own has one copy.

    Tensor parallel ranks beyond the heads repeat them; states are on every context parallel rank.
    """
    copy = fleet.replica(component, rank)
    return copy.index, copy.count


def elected(component: Component, fleet: Fleet, rank: int, page: bytes) -> bool:
    """Whether `rank` writes `page`, of all ranks that hold the same part of it (sglang#24376).

    By the page's hash: every rank agrees without a word, and all of them write their share of the pages.
    """
    index, count = replicas(component, fleet, rank)
    return int.from_bytes(page[:8], "little") % count == index
