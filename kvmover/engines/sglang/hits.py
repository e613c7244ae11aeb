"""Which prefixes of a request can be restored, from what each pool has of its pages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: A pool of which every page of a prefix is needed.
ALL_PAGES = 0


@dataclass(frozen=True, slots=True)
class Hits:
    """`lengths`: every restorable prefix in pages, rising. `reach`: per pool, the longest prefix that it can serve."""

    lengths: tuple[int, ...]
    reach: dict[str, int]

    @property
    def pages(self) -> int:
        """The longest restorable prefix, in pages."""
        return self.lengths[-1] if self.lengths else 0


def hits(found: Mapping[str, Sequence[bool]], trailing: Mapping[str, int]) -> Hits:
    """`found`: per pool, whether each page is stored. `trailing`: how many last pages of a prefix a pool needs of it,
    or ALL_PAGES. Ranks must intersect the lengths: the least of their longest may be one that a rank cannot restore.

    A state that was stored behind page 3 alone, and attention for five pages, serve a prefix of 3:

    >>> hits({"kv": [True] * 5, "mamba": [False, False, True, False, False]}, {"kv": ALL_PAGES, "mamba": 1})
    Hits(lengths=(3,), reach={'kv': 5, 'mamba': 3})
    """
    lengths: set[int] | None = None
    reach: dict[str, int] = {}
    for name, pages in found.items():
        served = _served(pages, trailing[name])
        reach[name] = max(served, default=0)
        lengths = served if lengths is None else lengths & served
    return Hits(tuple(sorted(lengths or ())), reach)


def _served(pages: Sequence[bool], trailing: int) -> set[int]:
    """Lengths of the prefixes that a pool can serve: by how many pages in a row end there."""
    rows = accumulate(pages, lambda row, here: row + 1 if here else 0, initial=0)
    return {length for length, row in enumerate(rows) if length and row >= min(length, trailing or length)}
