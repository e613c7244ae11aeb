"""The prefix tree: which pages already hold the KV of a prompt's first tokens, and which page to give up next.

Pure bookkeeping over page ids: the caller owns the pages, and frees exactly those that `insert` and `evict` return.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmover.errors import LayoutError


@dataclass(slots=True, eq=False)
class Node:
    """One page: the tokens in it, where it lies, and what may follow it. Only the tree changes it."""

    key: tuple[int, ...]
    page_id: int
    parent: Node | None = field(repr=False)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict[tuple[int, ...], "Node"], repr=False)
    locks: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `tokens` of it, in `page_ids` in order of position. Lock it before relying on it."""

    tokens: int
    page_ids: tuple[int, ...]
    node: Node = field(repr=False, compare=False)


class PrefixTree:
    """Pages by the tokens they hold, after the pages before them. Only whole pages are kept.

    >>> tree = PrefixTree(page_tokens=2)
    >>> tree.insert([1, 2, 3, 4], [10, 11])
    ()
    >>> tree.match([1, 2, 3, 4, 5])
    Match(tokens=4, page_ids=(10, 11))
    >>> tree.insert([1, 2, 9, 9], [20, 21])  # page 20 holds what page 10 does
    (20,)
    >>> tree.match([1, 2, 3, 0]).page_ids
    (10,)
    >>> tree.evict(1)  # of the leaves, [3, 4] was used least recently
    (11,)
    """

    def __init__(self, page_tokens: int) -> None:
        if page_tokens < 1:
            raise LayoutError(f"a page holds at least one token, got {page_tokens}")
        self.page_tokens = page_tokens
        self.pages = 0
        self._root = Node((), -1, None)
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> Match:
        """The cached pages that begin `tokens`; the whole path becomes the most recently used.

        A caller that must compute at least one token asks with `tokens[:-1]`.
        """
        self._clock += 1
        node, page_ids = self._root, list[int]()
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            child.used = self._clock
            page_ids.append(child.page_id)
            node = child
        return Match(len(page_ids) * self.page_tokens, tuple(page_ids), node)

    def insert(self, tokens: Sequence[int], page_ids: Sequence[int]) -> tuple[int, ...]:
        """Keep the whole pages of `tokens`. Returned are the pages not taken, as the tree has others with their tokens.

        A page that the tree already has in this very place (the caller computed on top of a match) is no duplicate.
        """
        if len(page_ids) != len(tokens) // self.page_tokens:
            whole = len(tokens) // self.page_tokens
            raise LayoutError(f"{len(tokens)} tokens fill {whole} pages of {self.page_tokens}, got {len(page_ids)} ids")
        self._clock += 1
        node, duplicates = self._root, list[int]()
        for key, page_id in zip(self._keys(tokens), page_ids, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page_id, node)
                self.pages += 1
            elif child.page_id != page_id:
                duplicates.append(page_id)
            child.used = self._clock
            node = child
        return tuple(duplicates)

    def lock(self, match: Match) -> None:
        """Keep the pages of `match` from eviction. Locks count: as many unlocks end it."""
        # The last page is enough: the pages before it are no leaves while it is there.
        match.node.locks += 1

    def unlock(self, match: Match) -> None:
        if not match.node.locks:
            raise LayoutError(f"pages {match.page_ids} are not locked")
        match.node.locks -= 1

    def evict(self, pages: int) -> tuple[int, ...]:
        """Drop up to `pages` pages, least recently used first, always one that nothing follows and nobody locked."""
        leaves = [(node.used, node.page_id, node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed: list[int] = []
        while leaves and len(freed) < pages:
            _, page_id, node = heapq.heappop(leaves)
            freed.append(page_id)
            parent = node.parent
            assert parent is not None, "the root holds no page"
            del parent.children[node.key]
            if parent is not self._root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, parent.page_id, parent))
        self.pages -= len(freed)
        return tuple(freed)

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        whole = len(tokens) - len(tokens) % self.page_tokens
        return (tuple(tokens[at : at + self.page_tokens]) for at in range(0, whole, self.page_tokens))

    def _nodes(self) -> Iterator[Node]:
        """Every page's node, in no useful order."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
