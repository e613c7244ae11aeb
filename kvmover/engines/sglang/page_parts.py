"""A rank's part of every page becomes components, page parts and restorable prefixes here, by pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvmover.cache.prefix import Rule, restorable
from kvmover.engines.common import ParallelRank, exchanged
from kvmover.engines.sglang.sglang_options import ModelFacts
from kvmover.errors import LayoutError
from kvmover.layout import Component, Span
from kvmover.store import PageBox, PagePart

#: The pool to which the model's numbers of heads and layers apply.
MAIN = "kv"

#: Marks a pool that needs every page of a prefix.
ALL_PAGES = 0


class TpPlacement(Enum):
    """The placement of a pool on a stage's tensor-parallel ranks: a share of the heads each, or all of its rows."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class PoolRows:
    """The rows of a pool on one rank: `layers` of them from `first_layer`, `drafts` of which are a draft model's.

    `kv`: 2 for attention, 1 if a row holds both. `states`: 0 for a row per token, 1 for a row per page.
    """

    name: str
    layers: int
    kv: int
    heads: int
    dim: int
    dtype: str
    first_layer: int = 0
    drafts: int = 0
    states: int = 0
    placement: TpPlacement = TpPlacement.SHARDED


def part_of_rows(rows: PoolRows, place: ParallelRank, model: ModelFacts, page_tokens: int) -> PagePart:
    """Returns the part of a page that `rows` are: the whole-model component, and the box of the page.

    `page_tokens`: of all ranks that share its positions. Without the whole model's numbers (1 head on each of 8 ranks
    may be 8 heads, or 4 held twice) pages are stored by rank: correct, but shared by fleets of the same shape only.
    Raises LayoutError if a rank's heads do not fit the model's.

    >>> rows = PoolRows("kv", layers=80, kv=2, heads=1, dim=128, dtype="bfloat16")
    >>> part = part_of_rows(rows, ParallelRank(tp=5, tp_size=8), ModelFacts(kv_heads=4), page_tokens=64)
    >>> part.component.heads, part.box.heads.triple(), part.nbytes
    (4, [2, 1, 1], 2621440)
    """
    total, heads = _heads(rows, place, model)
    name = rows.name + (f", {rows.drafts} of a draft model" if rows.drafts else "")
    if rows.dtype == "uint8" and model.kv_dtype:
        name += f", {model.kv_dtype}"
    layers, held = rows.layers, Span(0, rows.layers)
    if place.pp_size > 1:
        if model.layers is not None and not rows.drafts:
            layers, held = model.layers, Span(rows.first_layer, rows.layers)
        else:
            name += f", stage {place.pp} of {place.pp_size} from layer {rows.first_layer}"
    component = Component(name, layers, rows.kv, total, rows.dim, rows.dtype, states=rows.states)
    if model.exchange and name == MAIN:
        component = exchanged(component, rows.kv) or component
    own = place.in_stage
    positions = own.fleet(page_tokens // own.cp_size).shard(component, own.rank, page_tokens).positions
    assert positions is not None, "every rank holds some of every page"
    return PagePart(component, PageBox(heads, held, positions))


def _heads(rows: PoolRows, place: ParallelRank, model: ModelFacts) -> tuple[int, Span]:
    if rows.placement is TpPlacement.REPLICATED or place.tp_size == 1:
        return rows.heads, Span(0, rows.heads)
    total = model.kv_heads if rows.heads == 1 and model.kv_heads else rows.heads * place.tp_size
    heads = place.heads(total)
    if heads.count != rows.heads:
        raise LayoutError(
            f"{rows.name} has {rows.heads} heads on rank {place.tp} of {place.tp_size}; of {total} heads that is"
            f" {heads.count}"
        )
    return total, heads


def native_part(name: str, nbytes: int, place: ParallelRank, placement: TpPlacement) -> PagePart:
    """Returns a run of a page as an opaque row for ranks of the same shape; the component names the rank and stage."""
    whose = [f"rank {place.tp} of {place.tp_size}"] * (placement is TpPlacement.SHARDED and place.tp_size > 1)
    whose += [f"stage {place.pp} of {place.pp_size}"] * (place.pp_size > 1)
    component = Component.state(", ".join([name, *whose]), 1, 1, nbytes, "uint8")
    return PagePart.whole(component, 1)


@dataclass(frozen=True, slots=True)
class Hits:
    """The restorable prefixes. `lengths`: of each, rising; `reach`: per pool, of the longest it can serve; in pages."""

    lengths: tuple[int, ...]
    reach: dict[str, int]

    @property
    def pages(self) -> int:
        """Length of the longest restorable prefix, pages."""
        return self.lengths[-1] if self.lengths else 0


def hits(found: Mapping[str, Sequence[bool]], trailing: Mapping[str, int]) -> Hits:
    """Returns the prefixes that all pools can restore.

    `found`: per pool, True for each stored page. `trailing`: per pool, the number of last pages of a prefix it needs,
    or ALL_PAGES. Ranks must intersect the lengths: the least of their longest may be one that a rank cannot restore.

    A state stored behind page 3 alone, and attention for five pages, serve a prefix of 3:

    >>> hits({"kv": [True] * 5, "mamba": [False, False, True, False, False]}, {"kv": ALL_PAGES, "mamba": 1})
    Hits(lengths=(3,), reach={'kv': 5, 'mamba': 3})
    """
    rules = {name: Rule(trailing[name] or None) for name in found}
    reach = {name: _lengths({name: rule}, found)[-1] for name, rule in rules.items()}
    return Hits(tuple(_lengths(rules, found)[1:]) if rules else (), reach)


def _lengths(rules: Mapping[str, Rule], found: Mapping[str, Sequence[bool]]) -> list[int]:
    """Returns the restorable lengths, pages, rising, from the empty prefix on."""
    legal = restorable(rules, {name: found[name] for name in rules}, page_tokens=1)
    return np.flatnonzero(legal).tolist()
