"""A Rule says which pages of a component a prefix needs, hence which prefix lengths can be restored. Pure.

Attention KV and index keys need all pages, a sliding window those that its last tokens lie in, a state the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmover.cache.prefix.errors import PrefixError


@dataclass(frozen=True, slots=True)
class Rule:
    """`reach_tokens`: how far back from its end a prefix needs the component; None: to the beginning."""

    reach_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.reach_tokens is not None and self.reach_tokens < 1:
            raise PrefixError(f"a component that reaches {self.reach_tokens} tokens back: it is at least 1, or None")

    def needs(self, pages: int, page_tokens: int) -> range:
        """Pages that a prefix of `pages` needs.

        >>> Rule().needs(5, 16), Rule(reach_tokens=20).needs(5, 16), Rule(reach_tokens=1).needs(5, 16)
        (range(0, 5), range(3, 5), range(4, 5))
        """
        return range(max(0, pages - self.reach_pages(pages, page_tokens)), pages)

    def reach_pages(self, pages: int, page_tokens: int) -> int:
        """How many pages back from its end a prefix of `pages` or fewer needs."""
        return pages if self.reach_tokens is None else -(-self.reach_tokens // page_tokens)


ALL_PAGES = Rule()
LAST_PAGE = Rule(reach_tokens=1)


def restorable(
    rules: Mapping[str, Rule], present: Mapping[str, Sequence[bool]], page_tokens: int, first_page: int = 0
) -> npt.NDArray[np.bool_]:
    """[page count from 0]: whether a prefix of so many pages has all it needs. The empty one always has.

    `present` says of each component which pages of the prompt storage has; of those that need all pages, the first
    `first_page` are there already.

    >>> rules = {"full": ALL_PAGES, "state": LAST_PAGE}
    >>> restorable(rules, {"full": [1, 1, 1, 0], "state": [0, 1, 0, 1]}, 16).nonzero()[0].tolist()
    [0, 2]
    """
    pages = min(len(row) for row in present.values())
    counts, legal = np.arange(pages + 1), np.ones(pages + 1, bool)
    for name, rule in rules.items():
        row = np.array(present[name][:pages], bool)
        if rule.reach_tokens is None:
            row[:first_page] = True
        missing = np.concatenate([[0], np.cumsum(~row)])  # of the pages before each
        legal &= missing[counts] == missing[np.maximum(0, counts - rule.reach_pages(pages, page_tokens))]
    return legal
