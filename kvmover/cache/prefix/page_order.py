"""A PageOrder puts pages that are known by their hashes alone in the order of an EvictionPolicy.

A store, or the tier of an engine, keeps pages by hash and is told of the prompts that use them. Pages that came with
one prompt are a node, as in a PrefixTree, and so the tree's own orders rank them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from kvmover.cache.prefix.eviction_policy import EvictionPolicy
from kvmover.cache.prefix.forest import TreeCore, chosen, orders_of
from kvmover.cache.prefix.hashes import HASH_BYTES
from kvmover.cache.prefix.node import Node

#: Ticks of the clock that a prompt takes, as in a tree: it matches, inserts and unlocks.
_TICKS = 3

#: Unknown pages that are expected behind others.
_EXPECTED = 4096


class PageOrder:
    """The hashes of a cache's pages, the next to evict first. Belongs to one thread.

    A page goes after all pages that stand behind it in their prompts, as in a tree.
    """

    def __init__(self, policy: EvictionPolicy, core: TreeCore | None = None) -> None:
        """`core`: as of a Forest."""
        core = core or chosen()
        self._columns = core.Columns()
        self._orders = core.HazardOrder
        order, _ = orders_of(policy, core, HASH_BYTES)
        self._order = self._columns.recency(0) if order is None else order
        self._root = self._columns.node(0, None, b"", 0, 0)
        self._node_of = dict[bytes, Node]()
        #: The pages of each node, by its id.
        self._pages = dict[int, list[bytes]]()
        #: The pages before those that were asked for and are unknown.
        self._before = dict[bytes, bytes]()
        self._clock = self._last_id = 0

    def __contains__(self, page: bytes) -> bool:
        return page in self._node_of

    def __len__(self) -> int:
        return len(self._node_of)

    def use(self, prompt: Sequence[bytes]) -> None:
        """Record that a prompt used these pages, in its order. Unknown pages enter behind those before them.

        Pages that were expected belong to the prompt before.
        """
        if not prompt:
            return
        before = self._node_of.get(self._before.pop(prompt[0], b""), self._root)
        if before is self._root:
            self._clock += _TICKS
        asked = dict.fromkeys(prompt)
        fresh = [page for page in asked if page not in self._node_of]
        known = dict.fromkeys(self._node_of[page].id for page in asked if page in self._node_of)
        path = [self._used_part(self._node_of[self._pages[node_id][0]], asked) for node_id in known]
        for node in path:
            node.used = self._clock
            node.hits += 1
        path.reverse()
        self._order.touch(path)
        if fresh:
            self._order.add(self._new(path[0] if path else before, fresh))
            self._order.touch(path)

    def expect(self, prompt: Sequence[bytes]) -> None:
        """Remember that the first unknown page of a prompt stands behind the page before it, should it come alone."""
        at = next((at for at, page in enumerate(prompt) if page not in self._node_of), 0)
        if at:
            self._before[prompt[at]] = prompt[at - 1]
            if len(self._before) > _EXPECTED:
                del self._before[next(iter(self._before))]

    def discard(self, page: bytes) -> None:
        """Forget a page that is gone. An unknown page is ignored."""
        node = self._node_of.pop(page, None)
        if node is None:
            return
        self._pages[node.id].remove(page)
        node.end -= 1
        if not self._pages[node.id]:
            del self._pages[node.id]
            self._order.discard(node)
            if node.parent is not None:
                node.parent.device_children -= 1

    def victims(self, count: int, keeps: Callable[[bytes], bool]) -> list[bytes]:
        """Returns the next `count` pages to evict, or all there are, but for those that `keeps` holds back.

        They stay in the order until they are discarded.
        """
        if isinstance(self._order, self._orders):
            self._order.history.resident = len(self._node_of)
        found, aside, emptied = list[bytes](), dict[int, Node](), dict[int, int]()
        while len(found) < count and (node := self._order.first()) is not None:
            self._order.discard(node)
            aside[node.id] = node
            if node.device_children > emptied.get(node.id, 0):
                continue
            pages = [page for page in reversed(self._pages[node.id]) if not keeps(page)][: count - len(found)]
            found += pages
            above = node.parent
            if above is None or len(pages) < len(self._pages[node.id]):
                continue
            emptied[above.id] = emptied.get(above.id, 0) + 1
            if above.device_children == emptied[above.id] and aside.pop(above.id, None) is not None:
                self._order.add(above)
        for node in reversed(aside.values()):
            self._order.front(node)
        return found

    def _used_part(self, node: Node, asked: Container[bytes]) -> Node:
        """Returns the part of a node that a prompt used: its first pages, which become a node of their own."""
        pages = self._pages[node.id]
        cut = next((at for at, page in enumerate(pages) if page not in asked), len(pages))
        if not cut or cut == len(pages):
            return node
        front = self._enter(node.parent, pages[:cut], node.start)
        front.use, front.hits, front.created, front.device_children = node.use, node.hits, node.created, 1
        node.parent, node.start, self._pages[node.id] = front, front.end, pages[cut:]
        self._order.add(front)
        return front

    def _new(self, above: Node, pages: list[bytes]) -> Node:
        node = self._enter(above, pages, above.end)
        node.tokens = b"".join(page[-HASH_BYTES:].rjust(HASH_BYTES, b"\0") for page in pages)
        node.used = node.created = self._clock
        above.device_children += 1
        return node

    def _enter(self, above: Node | None, pages: list[bytes], start: int) -> Node:
        self._last_id += 1
        node = self._columns.node(self._last_id, above, b"", start, start + len(pages))
        self._pages[node.id] = pages
        self._node_of.update(dict.fromkeys(pages, node))
        return node
