"""A component says what a prefix needs of it: which pages a node has, when they are of use, what a lock must cover.

Attention KV is the tree itself: a page id for every page. Any further component keeps, at some nodes, page ids of its
own pool. A Rule says the same of pages in a row, so of storage, which has no nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmover.errors import PrefixError

#: The name of attention KV, which every tree has.
FULL = "full"


class MatchValidator(Protocol):
    """Says of each node in turn, root first, whether a match may end there. It has state: ask it of every node."""

    def __call__(self, tokens: int, present: bool, /) -> bool: ...


class TreeComponent(Protocol):
    """What the tree must know of a further component. SlidingWindow and State are two; an engine may bring its own."""

    @property
    def name(self) -> str:
        """Its name among the tree's components, and in page ids that are handed in."""
        ...

    @property
    def per_page(self) -> bool:
        """Whether a node keeps one id a page, to be cut with it, or one id at its end, which stays there."""
        ...

    @property
    def rank(self) -> int:
        """Giving this component up inside the tree takes those of the same and lower rank along."""
        ...

    @property
    def reach_tokens(self) -> int:
        """How far back from its end a prefix needs it: what a lock covers and a match refreshes."""
        ...

    @property
    def grid_tokens(self) -> int:
        """A branching point lies on a multiple of this many tokens."""
        ...

    def match_validator(self) -> MatchValidator:
        """A new one for each match."""
        ...


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """KV of layers that see `window_tokens` back. Further back it may be given up: the node is then a tombstone.

    A prefix is of use where its last `window_tokens` tokens, or all if it is shorter, have it.
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
        """The whole window."""
        return self.window_tokens

    def match_validator(self) -> MatchValidator:
        """Counts tokens since the last node without the window's pages."""
        return _Window(self.window_tokens)


@dataclass(slots=True)
class _Window:
    """Tokens since the last tombstone; from the root on as many as one likes."""

    window_tokens: int
    run_tokens: float = float("inf")

    def __call__(self, tokens: int, present: bool, /) -> bool:
        self.run_tokens = self.run_tokens + tokens if present else 0
        return self.run_tokens >= self.window_tokens


@dataclass(frozen=True, slots=True)
class State:
    """The state of recurrent layers: one id, at the end of a node, of use there only.

    It is shared, and a request writes to its own: copy it before the first step. `grid_tokens` is the recurrence's
    chunk: states exist at its multiples, and so do branching points.
    """

    name: str = "state"
    grid_tokens: int = 1
    per_page: bool = False
    rank: int = 0
    reach_tokens: int = 1

    def __post_init__(self) -> None:
        if self.grid_tokens < 1:
            raise PrefixError(f"states lie at multiples of at least one token, got {self.grid_tokens}")

    def match_validator(self) -> MatchValidator:
        """A match may end wherever a state stands."""
        return _present


def _present(_tokens: int, present: bool, /) -> bool:
    return present


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A pool that is indexed by another component's page ids: index keys, draft KV. It moves and goes with them.

    The tree keeps no ids for it, so it cannot free them a second time.
    """

    name: str
    of: str = FULL


@dataclass(frozen=True, slots=True)
class Rule:
    """Which pages of a component a prefix needs: all of attention KV, of a window its last tokens', of a state one.

    `reach_tokens` says how far back from its end; None: to the beginning.
    """

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
