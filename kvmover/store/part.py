"""A PagePart is the box of a page that a rank holds or wants; `elected` picks the writer among its holders."""

from __future__ import annotations

from dataclasses import dataclass

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
