"""An EvictionPolicy says which page goes first, by an ordered structure that answers without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from kvmover.cache.prefix.node import Node

#: The smaller, the sooner it goes.
EvictionRank: TypeAlias = tuple[int, ...]

#: Of a node, and of how long ago what went last was used: about how long a node stays, in uses of the tree.
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

    def __init__(self, slot: int = 0) -> None:
        """`slot`: which of a node's orders this is. Only orders that keep their links in the nodes need to know."""
        self.slot = slot
        #: First what goes first.
        self.nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Behind all others: it was used last. O(1)."""
        self.nodes.setdefault(node)

    def discard(self, node: Node) -> None:
        """See Order. O(1)."""
        self.nodes.pop(node, None)

    def touch(self, path: Iterable[Node]) -> None:
        """Nodes of one path, deepest first, each behind all others."""
        nodes = self.nodes
        move = nodes.move_to_end
        for node in path:
            if node in nodes:
                move(node)

    def front(self, node: Node) -> None:
        """Before all others: it is given up next."""
        self.nodes[node] = None
        self.nodes.move_to_end(node, last=False)

    def first(self) -> Node | None:
        """The one used least recently."""
        return next(iter(self.nodes), None)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self.nodes

    def __len__(self) -> int:
        return len(self.nodes)


class RankedEntry(NamedTuple):
    """A node as it was ranked at its last use. Equal ranks go by `tie`: the node's id at that time, or a
    number below all for one put in front, so that no two are equal.
    """

    rank: EvictionRank
    tie: int
    used: int
    node: Node


#: Entries of a block of Ranked that has just been cut in two.
_BLOCK = 256


class Ranked:
    """Smallest rank first. A use ranks the nodes it touches anew, and nothing is put off to the next eviction.

    Entries lie in order in blocks of at most 512, so that a use costs two searches by halves and two moves within a
    block: 3 us, whatever was used before. A heap whose outdated entries are put right when they come up takes the 0.3 s
    of 50,000 uses in one call.
    """

    def __init__(self, rank: EvictionRanking) -> None:
        self._rank = rank
        self._entries: dict[Node, RankedEntry] = {}
        self._blocks: list[list[RankedEntry]] = []
        #: The last entry of each block.
        self._lasts: list[RankedEntry] = []
        #: The last use that was seen, and the use of the node that was first when somebody asked: what went last.
        self._now = 0
        self._fronts = 0
        self._first_used = 0

    def add(self, node: Node) -> None:
        """By its rank at this moment."""
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
        """Each that is in order is ranked anew. O(log n) a node."""
        for node in path:
            if node in self._entries:
                self.discard(node)
                self._put(self._ranked(node))

    def front(self, node: Node) -> None:
        """Ranked as the first is now, and before it."""
        self.discard(node)
        if self._blocks:
            self._fronts += 1
            self._put(RankedEntry(self._blocks[0][0].rank, -self._fronts, node.used, node))
        else:
            self._put(self._ranked(node))

    def first(self) -> Node | None:
        """The lowest rank."""
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
#: hit rate is 0.0573 instead of LRU's 0.0553 at 1M tokens, 0.1525 instead of 0.1421 at 3M, 0.2990 instead of 0.2940 at
#: 10M, and 0.3641 instead of 0.3660 at 30M, where nearly everything fits; SLRU's are 0.0606, 0.0994, 0.2118 and 0.3609.
EARNED = EvictionPolicy.ranked("earned", lambda node, age: (node.used + age * (node.hits >= 2),))

POLICIES = {policy.name: policy for policy in (LRU, LFU, SLRU, FIFO, PRIORITY, EARNED)}
