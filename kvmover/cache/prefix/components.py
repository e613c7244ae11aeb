"""A component defines the pages that a prefix needs of it, when a match may use them, and which pages a lock covers.

Attention KV is the tree itself: one id for every page. A further component keeps ids of its own pool at some nodes. A
Rule states the needs for pages in a row, as in storage, which has no nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmover.errors import PrefixError

#: The name of attention KV, a component of every tree.
FULL = "full"


class TreeComponent(Protocol):
    """The properties of a further component, such as SlidingWindow or State; an engine may bring its own.

    A prefix is usable if the nodes that hold its last `reach_tokens` tokens, or all of a shorter one, have its ids.
    """

    @property
    def name(self) -> str:
        """Returns its name in the tree and in the caller's page ids."""
        ...

    @property
    def per_page(self) -> bool:
        """Returns True for one id a page, split with the node; False for one id at the node's end."""
        ...

    @property
    def rank(self) -> int:
        """Returns its rank: evicting it inside the tree also evicts lower ranks there."""
        ...

    @property
    def reach_tokens(self) -> int:
        """Returns the tokens before a prefix's end that it is needed for: matches and locks ask for them alone."""
        ...

    @property
    def grid_tokens(self) -> int:
        """Returns the tokens between possible branching points."""
        ...


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The KV of layers that attend `window_tokens` back. A node without its window pages is a tombstone.

    A prefix is usable if its last `window_tokens` tokens, or all of a shorter one, have window pages. Raises
    PrefixError if `window_tokens` is below 1.
    """

    window_tokens: int
    name: str = "swa"
    per_page: bool = True
    rank: int = 1
    grid_tokens: int = 1

    def __post_init__(self) -> None:
        if self.window_tokens < 1:
            raise PrefixError(f"a window has at least one token, got {self.window_tokens}")

    @property
    def reach_tokens(self) -> int:
        """Returns the whole window."""
        return self.window_tokens


@dataclass(frozen=True, slots=True)
class State:
    """The state of recurrent layers: one id at a node's end, usable there only.

    States are shared: a request copies one before its first step, and writes to the copy. `grid_tokens` is the
    recurrence's chunk: states and branching points lie at its multiples. Raises PrefixError if it is below 1.
    """

    name: str = "state"
    grid_tokens: int = 1
    per_page: bool = False
    rank: int = 0
    reach_tokens: int = 1

    def __post_init__(self) -> None:
        if self.grid_tokens < 1:
            raise PrefixError(f"states lie at multiples of at least one token, got {self.grid_tokens}")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A pool indexed by another component's page ids, such as index keys or draft KV, moved and freed with them.

    The tree keeps no ids for it, so it cannot free them twice.
    """

    name: str
    of: str = FULL


@dataclass(frozen=True, slots=True)
class Rule:
    """The pages of a component that a prefix needs: all of attention KV, a window's last tokens, or one state.

    `reach_tokens` counts back from the prefix's end; None: to the beginning. Raises PrefixError if it is below 1.
    """

    reach_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.reach_tokens is not None and self.reach_tokens < 1:
            raise PrefixError(f"a component that reaches {self.reach_tokens} tokens back: it is at least 1, or None")

    def needs(self, pages: int, page_tokens: int) -> range:
        """Returns the pages that a prefix of `pages` pages needs.

        >>> Rule().needs(5, 16), Rule(reach_tokens=20).needs(5, 16), Rule(reach_tokens=1).needs(5, 16)
        (range(0, 5), range(3, 5), range(4, 5))
        """
        return range(max(0, pages - self.reach_pages(pages, page_tokens)), pages)

    def reach_pages(self, pages: int, page_tokens: int) -> int:
        """Returns the pages before its end that a prefix of `pages` or fewer needs."""
        return pages if self.reach_tokens is None else -(-self.reach_tokens // page_tokens)


ALL_PAGES = Rule()
LAST_PAGE = Rule(reach_tokens=1)


def restorable(
    rules: Mapping[str, Rule], present: Mapping[str, Sequence[bool]], page_tokens: int, first_page: int = 0
) -> npt.NDArray[np.bool_]:
    """Returns bool [page count from 0]: True if a prefix of so many pages has all it needs. The empty one always has.

    `present[component][page]`: storage has the page. Of components that need all pages, the first `first_page` count as
    present.

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
