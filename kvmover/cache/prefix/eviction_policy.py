"""An EvictionPolicy chooses the next victim, from an order that finds it without a scan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from kvmover.cache.prefix.hazard import HazardOrder, ReuseHistory
from kvmover.cache.prefix.node import Node

#: The smallest rank is evicted first.
EvictionRank: TypeAlias = tuple[int, ...]

#: Ranks a node, given the age of the last victim in uses of the tree: about how long a node stays.
EvictionRanking: TypeAlias = Callable[[Node, int], EvictionRank]


class Order(Protocol):
    """The evictable nodes in order, kept across calls. Ties are broken by node id or time, never by a hash."""

    def add(self, node: Node) -> None:
        """Add an evictable node. A node already in the order keeps its place."""
        ...

    def discard(self, node: Node) -> None:
        """Remove a node that is no longer evictable. A node outside the order is ignored."""
        ...

    def touch(self, path: Iterable[Node]) -> None:
        """Mark these nodes, deepest first, as used now. Nodes outside the order stay out."""
        ...

    def front(self, node: Node) -> None:
        """Put a node, the rest of a victim, first."""
        ...

    def first(self) -> Node | None:
        """Returns the next victim; None if empty."""
        ...

    def __contains__(self, node: Node) -> bool: ...

    def __len__(self) -> int: ...


class Recency:
    """An order by least recent use, O(1) a step.

    A path is touched deepest first, so a node always stands before its ancestors: the first is a leaf, found without a
    search. The order is strict, without ties.
    """

    def __init__(self, slot: int = 0) -> None:
        """Create an empty order. `slot` numbers it among a node's orders, for orders linked through nodes."""
        self.slot = slot
        #: The next victim first.
        self.nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Add a node last, as used last. O(1)."""
        self.nodes.setdefault(node)

    def discard(self, node: Node) -> None:
        """See Order. O(1)."""
        self.nodes.pop(node, None)

    def touch(self, path: Iterable[Node]) -> None:
        """Move nodes of a path, deepest first, each to the end."""
        nodes = self.nodes
        move = nodes.move_to_end
        for node in path:
            if node in nodes:
                move(node)

    def front(self, node: Node) -> None:
        """Put a node first, as the next victim."""
        self.nodes[node] = None
        self.nodes.move_to_end(node, last=False)

    def first(self) -> Node | None:
        """Returns the least recently used node; None if empty."""
        return next(iter(self.nodes), None)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self.nodes

    def __len__(self) -> int:
        return len(self.nodes)


class RankedEntry(NamedTuple):
    """A node as ranked at its last use. Equal ranks are ordered by `tie`, which is unique.

    `tie` is the node's id at that time, or a negative number for a node put in front.
    """

    rank: EvictionRank
    tie: int
    used: int
    node: Node


#: The entries of a block of Ranked just split in two.
_BLOCK = 256


class Ranked:
    """An order by smallest rank. A use ranks the touched nodes anew, leaving no work to the next eviction.

    Entries lie in order in blocks of at most 512, so a use costs two binary searches and two moves in a block: 3 us,
    regardless of earlier uses. A heap that corrects outdated entries as they come up spends the 0.3 s of 50,000 uses in
    one call.
    """

    def __init__(self, rank: EvictionRanking) -> None:
        self._rank = rank
        self._entries: dict[Node, RankedEntry] = {}
        self._blocks: list[list[RankedEntry]] = []
        #: The last entry of each block.
        self._lasts: list[RankedEntry] = []
        #: The last use seen, the count of nodes put first, and the last use of the node last returned by `first`: of
        #: the last victim.
        self._now = 0
        self._fronts = 0
        self._first_used = 0

    def add(self, node: Node) -> None:
        """Add a node by its present rank."""
        if node not in self._entries:
            self._put(self._ranked(node))

    def discard(self, node: Node) -> None:
        """See Order. O(log n)."""
        entry = self._entries.pop(node, None)
        if entry is None:
            return
        at = bisect_left(self._lasts, entry)
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def touch(self, path: Iterable[Node]) -> None:
        """Rank anew each node in the order. O(log n) a node."""
        for node in path:
            if node in self._entries:
                self.discard(node)
                self._put(self._ranked(node))

    def front(self, node: Node) -> None:
        """Put a node first, with the rank of the first."""
        self.discard(node)
        if self._blocks:
            self._fronts += 1
            self._put(RankedEntry(self._blocks[0][0].rank, -self._fronts, node.used, node))
        else:
            self._put(self._ranked(node))

    def first(self) -> Node | None:
        """Returns the node of the smallest rank; None if empty."""
        if not self._blocks:
            return None
        self._first_used = self._blocks[0][0].used
        return self._blocks[0][0].node

    def _ranked(self, node: Node) -> RankedEntry:
        self._now = max(self._now, node.used)
        age = self._now - self._first_used if self._first_used else 0
        return RankedEntry(self._rank(node, age), node.id, node.used, node)

    def _put(self, entry: RankedEntry) -> None:
        self._entries[entry.node] = entry
        if not self._blocks:
            self._blocks, self._lasts = [[entry]], [entry]
            return
        at = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, entry)
        if len(block) > 2 * _BLOCK:
            self._blocks[at : at + 1] = [block[:_BLOCK], block[_BLOCK:]]
            self._lasts[at : at + 1] = [block[_BLOCK - 1], block[-1]]
        else:
            self._lasts[at] = block[-1]

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """A name, and a factory of the order."""

    name: str
    order: Callable[[], Order]

    @classmethod
    def ranked(cls, name: str, rank: EvictionRanking) -> EvictionPolicy:
        """Returns a policy that evicts the smallest rank first: O(log nodes) a use."""
        return cls(name, lambda: Ranked(rank))


LRU = EvictionPolicy("lru", Recency)
#: Least likely to be used again first, as learnt from uses: see `hazard`. A tree's orders share one history.
HAZARD = EvictionPolicy("hazard", lambda: HazardOrder(ReuseHistory(4)))
LFU = EvictionPolicy.ranked("lfu", lambda node, _age: (node.hits, node.used))
#: Two classes, LRU within each: nodes hit twice or more are evicted last.
SLRU = EvictionPolicy.ranked("slru", lambda node, _age: (node.hits >= 2, node.used))
FIFO = EvictionPolicy.ranked("fifo", lambda node, _age: (node.created,))
PRIORITY = EvictionPolicy.ranked("priority", lambda node, _age: (node.priority, node.used))
POLICIES = {policy.name: policy for policy in (LRU, HAZARD, LFU, SLRU, FIFO, PRIORITY)}
