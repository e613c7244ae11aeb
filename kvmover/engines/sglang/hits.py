"""`hits` says which prefixes of a request can be restored, from what each pool has of its pages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvmover.cache.prefix import Rule, restorable

#: A pool of which every page of a prefix is needed.
ALL_PAGES = 0


@dataclass(frozen=True, slots=True)
class Hits:
    """`lengths`: every restorable prefix in pages, rising. `reach`: per pool, the longest prefix that it can serve."""

    lengths: tuple[int, ...]
    reach: dict[str, int]

    @property
    def pages(self) -> int:
        return self.lengths[-1] if self.lengths else 0


def hits(found: Mapping[str, Sequence[bool]], trailing: Mapping[str, int]) -> Hits:
    """`found`: per pool, whether each page is stored. `trailing`: how many last pages of a prefix a pool needs of it,
    or ALL_PAGES. Ranks must intersect the lengths: the least of their longest may be one that a rank cannot restore.

    A state that was stored behind page 3 alone, and attention for five pages, serve a prefix of 3:

    >>> hits({"kv": [True] * 5, "mamba": [False, False, True, False, False]}, {"kv": ALL_PAGES, "mamba": 1})
    Hits(lengths=(3,), reach={'kv': 5, 'mamba': 3})
    """
    rules = {name: Rule(trailing[name] or None) for name in found}
    reach = {name: _lengths({name: rule}, found)[-1] for name, rule in rules.items()}
    return Hits(tuple(_lengths(rules, found)[1:]) if rules else (), reach)


def _lengths(rules: Mapping[str, Rule], found: Mapping[str, Sequence[bool]]) -> list[int]:
    """In pages, rising, from the empty prefix on. A page is the unit: pools say their reach in pages too."""
    legal = restorable(rules, {name: found[name] for name in rules}, page_tokens=1)
    return np.flatnonzero(legal).tolist()
