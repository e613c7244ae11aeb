"""An EvictionPolicy says which page goes first, by an ordered structure that answers without looking at all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol, TypeAlias

from kvmover.cache.prefix.node import Node

#: The smaller, the sooner it goes.
EvictionRank: TypeAlias = tuple[int, ...]

#: Of a node, and of how long ago the first in order was used: about how long a node stays, in uses of the tree.
EvictionRanking: TypeAlias = Callable[[Node, int], EvictionRank]


class Order(Protocol):
    """Nodes that may be given up, kept across calls. Ties go by node id or by time, never by a hash."""

    def add(self, node: Node) -> None:
        """Let it be given up. One that is there already keeps its place."""
        ...

    def discard(self, node: Node) -> None:
        """The node may not be given up any more, or is gone. One that is not in order is no error."""
        ...

    def touch(self, path: Iterable[Node]) -> None:
        """These were used now, deepest first. Those that are not in the order stay out."""
        ...

    def front(self, node: Node) -> None:
        """Let it go before all others: what is left of a victim."""
        ...

    def first(self) -> Node | None:
        """The node to give up next; None where there is none."""
        ...

    def __contains__(self, node: Node) -> bool: ...

    def __len__(self) -> int: ...


class Recency:
    """Least recently used first, in O(1).

    A path is touched deepest first, so that a node always stands before the nodes above it: the first one is a leaf,
    and nothing is searched. With a strict order nothing is left to break ties.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Behind all others: it was used last. O(1)."""
        self._nodes.setdefault(node)

    def discard(self, node: Node) -> None:
        """See Order. O(1)."""
        self._nodes.pop(node, None)

    def touch(self, path: Iterable[Node]) -> None:
        """Nodes of one path, deepest first, each behind all others."""
        nodes = self._nodes
        move = nodes.move_to_end
        for node in path:
            if node in nodes:
                move(node)

    def front(self, node: Node) -> None:
        """Before all others: it is given up next."""
        self._nodes[node] = None
        self._nodes.move_to_end(node, last=False)

    def first(self) -> Node | None:
        """The one used least recently."""
        return next(iter(self._nodes), None)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)


class HeapEntry(NamedTuple):
    """A node as it was ranked. It is good while it is the one noted for its node and that was not used since."""

    rank: EvictionRank
    node_id: int
    used: int
    node: Node


class Ranked:
    """Smallest rank first, in O(log n): a heap whose outdated entries are put right when they come up.

    A use does not lower a rank, so an outdated entry comes up too early and never too late.
    """

    def __init__(self, rank: EvictionRanking) -> None:
        self._rank = rank
        self._entries: dict[Node, HeapEntry] = {}
        self._heap: list[HeapEntry] = []
        #: The last use that was seen.
        self._now = 0

    def add(self, node: Node) -> None:
        """By its rank at this moment."""
        if node not in self._entries:
            self._push(node)

    def discard(self, node: Node) -> None:
        """O(1), but for a clearing now and then: its entry in the heap is passed over."""
        self._entries.pop(node, None)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def touch(self, path: Iterable[Node]) -> None:
        """Nothing to do: `first` looks again."""

    def front(self, node: Node) -> None:
        """Ranked as the first is now."""
        if self._heap:
            entry = self._entries[node] = HeapEntry(self._heap[0].rank, node.id, node.used, node)
            heappush(self._heap, entry)
        else:
            self._push(node)

    def first(self) -> Node | None:
        """The lowest rank by now."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            node = entry.node
            if entries.get(node) is not entry:
                heappop(heap)
            elif entry.used == node.used:
                return node
            else:
                heappop(heap)
                self._push(node)
        return None

    def _push(self, node: Node) -> None:
        self._now = max(self._now, node.used)
        age = self._now - self._heap[0].used if self._heap else 0
        entry = self._entries[node] = HeapEntry(self._rank(node, age), node.id, node.used, node)
        heappush(self._heap, entry)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """A name, and how to make the order that it keeps."""

    name: str
    order: Callable[[], Order]

    @classmethod
    def ranked(cls, name: str, rank: EvictionRanking) -> EvictionPolicy:
        """A policy that gives up the lowest rank first: O(log nodes) a use."""
        return cls(name, lambda: Ranked(rank))


LRU = EvictionPolicy("lru", Recency)
LFU = EvictionPolicy.ranked("lfu", lambda node, _age: (node.hits, node.used))
#: Two classes, of which what was hit twice goes last; in each the least recently used.
SLRU = EvictionPolicy.ranked("slru", lambda node, _age: (node.hits >= 2, node.used))
FIFO = EvictionPolicy.ranked("fifo", lambda node, _age: (node.created,))
PRIORITY = EvictionPolicy.ranked("priority", lambda node, _age: (node.priority, node.used))
#: Least recently used, but what was used twice stays about twice as long: it may go when it would have gone, had it
#: been used that much later. Unlike SLRU's second class it does go. On the Mooncake conversation trace at page 64 the
#: hit rate is 0.0573 instead of LRU's 0.0553 at 1M tokens, 0.1520 instead of 0.1421 at 3M, 0.3003 instead of 0.2940 at
#: 10M, and 0.3644 instead of 0.3660 at 30M, where nearly everything fits; SLRU's are 0.0606, 0.0994, 0.2118 and 0.3609.
EARNED = EvictionPolicy.ranked("earned", lambda node, age: (node.used + age * (node.hits >= 2),))

POLICIES = {policy.name: policy for policy in (LRU, LFU, SLRU, FIFO, PRIORITY, EARNED)}
