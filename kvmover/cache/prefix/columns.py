"""Columns holds a tree's nodes, page counts and orders, and the steps over them that requests take most.

This class is the definition; `core/` has the same class in C. The rest of the tree works with either (`forest.chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvmover.cache.prefix.eviction_policy import Order, Recency
from kvmover.cache.prefix.hashes import HASH_BYTES, PrefixNamespace
from kvmover.cache.prefix.hazard import HazardOrder, ReuseHistory
from kvmover.cache.prefix.keys import common_bytes
from kvmover.cache.prefix.node import ComponentPages, Node
from kvmover.cache.prefix.pages_in_use import PagesInUse

__all__ = (
    "ID_BYTES",
    "Columns",
    "Descent",
    "EvictableSet",
    "HazardOrder",
    "PagesInUse",
    "ReuseHistory",
    "TierEviction",
)

ID_BYTES = 4

#: Nodes, root first, that match a prompt whole; the node it leaves midway, or None; the pages matched in that node.
Descent: TypeAlias = tuple[list[Node], Node | None, int]

#: The result of an eviction: freed device ids, freed host ids, and copies to the host to carry out first, each (first
#: page, device ids, host ids).
TierEviction: TypeAlias = tuple[bytes, bytes, list[tuple[int, bytes, bytes]]]


class TierListener(Protocol):
    """A journal of pages that come and go. Tiers are numbers as in `results.Tier`."""

    def stored(self, node: Node, tier: int) -> None:
        """Record that all pages of a node have come to a tier."""
        ...

    def removed(self, node: Node, first: int, tier: int) -> None:
        """Record that a node's pages from its own `first` on leave a tier. The node still has its hashes."""
        ...


class EvictableSet:
    """The pages of one component on one tier: counts, and the evictable nodes in order."""

    __slots__ = ("evictable", "order", "protected")

    def __init__(self, order: Order) -> None:
        self.order = order
        self.evictable = 0
        self.protected = 0


class Columns:
    """The nodes, counts and orders of a tree. The Forest sets the parameters, and renews the sets with the nodes."""

    #: Evictions of attention KV alone on two tiers, by LRU and by pages; in C only, else `Eviction`, the definition, is
    #: used. Both take the pages due, `evict_device` also free host ids.
    evict_device: Callable[[int, bytes], TierEviction] | None = None
    evict_host: Callable[[int], TierEviction] | None = None
    #: An eviction by whole nodes on one tier: so many pages of attention KV and of each further component, from so many
    #: nodes at most. Returns their freed ids. In C only, where `find` and `insert` serve trees with further components
    #: too; `Eviction`, `matched` and `Insertion` are the definitions.
    evict_nodes: Callable[[tuple[int, ...], int], tuple[bytes, ...]] | None = None

    def __init__(self) -> None:
        self.page_bytes = 0
        #: True if nodes can be on the host, and if they are copied there on eviction.
        self.hosted = False
        self.writes_back = False
        #: For each further component: True if it has one id a page; the last pages that an end needs; its rank.
        self.per_page: tuple[bool, ...] = ()
        self.reach_pages: tuple[int, ...] = ()
        self.ranks: tuple[int, ...] = ()
        #: The number of uses so far, and the next node's id.
        self.clock = 0
        self.next_id = 0
        self.nodes: dict[int, Node] = {}
        self.roots: dict[PrefixNamespace, Node] = {}
        #: The leaf trimmed last: its tokens and pages may extend beyond its end. See `whole`.
        self.trimmed: Node | None = None
        self.device = EvictableSet(Recency())
        self.host = EvictableSet(Recency())
        #: Under write-back, nodes with pages on both tiers: their host copies are evicted first.
        self.doubles: Order = Recency()
        #: Told of what comes to a tier and leaves it in these steps; None without events.
        self.journal: TierListener | None = None
        self.held_device: list[EvictableSet] = []
        self.held_host: list[EvictableSet] = []

    def node(self, node_id: int, parent: Node | None, tokens: bytes, start: int, end: int) -> Node:
        """Returns a new node, not yet linked into the tree."""
        node = Node(node_id, parent, tokens, start, end)
        if self.per_page:
            node.held = tuple(ComponentPages() for _ in self.per_page)
        return node

    def set_of(self, order: Order | None, slot: int) -> EvictableSet:
        """Returns an empty set, by recency unless `order` is given. `slot`: see `recency`."""
        return EvictableSet(self.recency(slot) if order is None else order)

    def recency(self, slot: int) -> Recency:
        """Returns an empty LRU order. `slot`, unique in the tree, numbers it among a node's orders."""
        return Recency(slot)

    # Paths

    def descend(self, root: Node, data: bytes, stop: int) -> Descent:
        """Returns the nodes below `root` that match the first `stop` bytes of `data`. The tree is unchanged.

        O(bytes) + O(nodes): a node costs one look-up of its first page and one memory comparison.
        """
        path, at = list[Node](), root
        page_bytes, offset, trimmed = self.page_bytes, 0, self.trimmed
        compare = data.startswith
        while offset < stop:
            child = at.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            if child is trimmed:
                self.whole()
            tokens = child.tokens
            if not compare(tokens, offset, stop):
                return path, child, common_bytes(data, offset, stop, tokens, page_bytes) // page_bytes
            path.append(child)
            offset += len(tokens)
            at = child
        return path, None, 0

    def gather(self, path: Sequence[Node], stop: int) -> bytes:
        """Returns device page ids of the first `stop` pages of a path, root first, wholly on the device."""
        rows = [node.pages or b"" for node in path]
        return (rows[0] if len(rows) == 1 else b"".join(rows))[: stop * ID_BYTES]

    def touch(self, path: Sequence[Node]) -> None:
        """Mark `path`, deepest first, as used in the orders of attention KV."""
        self.clock = clock = self.clock + 1
        for node in path:
            node.used = clock
        self.device.order.touch(path)
        if self.hosted:
            self.host.order.touch(path)

    def lock(self, node: Node) -> None:
        """Add a handle to `node`, protecting it and its ancestors on the device, or else on the host."""
        at = node
        while True:
            at.locks += 1
            if at.locks > 1:
                return
            if at.pages is not None or not at.host_locks:
                account, pages = self.device if at.pages is not None else self.host, at.end - at.start
                account.evictable -= pages
                account.protected += pages
                account.order.discard(at)
            assert at.parent is not None
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Remove a handle from `node`. Nodes that it alone protected count as used now."""
        self.clock = clock = self.clock + 1
        at = node
        at.locks -= 1
        while not at.locks:
            at.used = clock
            if at.pages is not None or not at.host_locks:
                account, pages = self.device if at.pages is not None else self.host, at.end - at.start
                account.evictable += pages
                account.protected -= pages
                account.order.add(at)
            assert at.parent is not None
            at = at.parent
            at.locks -= 1

    # Further components

    def first_held(self, node: Node, index: int) -> int:
        """Returns the first page of the nodes that hold what the end of `node`, below a root, needs of a component."""
        if not self.per_page[index]:
            return node.end - 1
        left, at = self.reach_pages[index], node
        while True:
            left -= at.end - at.start
            assert at.parent is not None
            if left <= 0 or at.parent.parent is None:
                return at.start
            at = at.parent

    def shift(self, node: Node, index: int, first: int, stop: int, device: int, host: int) -> None:
        """Add `device` and `host` to a component's lock counts, in pages [first, stop) of the path to `node`."""
        at = node
        while at.end > first:
            if at.end <= stop:
                held = at.held[index]
                self.weigh(at, -1)
                held.locks += device
                held.host_locks += host
                self.weigh(at, 1)
                self.settle(at)
            assert at.parent is not None
            at = at.parent

    # Splits

    def front(self, node: Node, pages: int, node_id: int) -> Node:
        """Returns the node that a split of `node` after `pages` pages would put above it, without tokens.

        It is not linked into the tree.
        """
        front = self.node(node_id, node.parent, b"", node.start, node.start + pages)
        front.hits, front.used, front.created, front.priority = node.hits, node.used, node.created, node.priority
        front.locks, front.host_locks = int(node.locks > 0), int(node.host_locks > 0)
        front.backing, front.loading, front.use = node.backing, node.loading, node.use
        ids = pages * ID_BYTES
        if node.pages is not None:
            front.pages = node.pages[:ids]
        if node.host is not None:
            front.host = node.host[:ids]
        if node.hashes is not None:
            front.hashes = node.hashes[: pages * HASH_BYTES]
        for per_page, mine, held in zip(self.per_page, front.held, node.held, strict=True):
            if per_page:
                mine.pages = held.pages[:ids] if held.pages is not None else None
                mine.host = held.host[:ids] if held.host is not None else None
                mine.locks, mine.host_locks, mine.busy = held.locks, held.host_locks, held.busy
        return front

    def split(self, node: Node, pages: int, front_id: int) -> Node:
        """Split `node` after its first `pages` pages. Returns the front, a new node; `node` keeps its id and the end.

        `front_id` is a place's id for the front, or 0 for a new one. Bytes are copied, so that a part does not retain
        the whole's memory. An unlocked front enters the order as used last: mark its path as used, or call the order's
        `front`.
        """
        assert node.parent is not None
        if node is self.trimmed:
            self.whole()
        cut, ids, page_bytes = pages * self.page_bytes, pages * ID_BYTES, self.page_bytes
        if not front_id:
            front_id = self.next_id
            self.next_id += 1
        front = self.front(node, pages, front_id)
        front.tokens, front.used = node.tokens[:cut], self.clock
        self.nodes[front.id] = front
        node.parent.children[node.tokens[:page_bytes]] = front
        node.parent, node.tokens, node.start = front, node.tokens[cut:], front.end
        front.children = {node.tokens[:page_bytes]: node}
        if node.pages is not None:
            node.pages = node.pages[ids:]
            front.device_children = 1
        if node.host is not None:
            node.host = node.host[ids:]
        if node.hashes is not None:
            node.hashes = node.hashes[pages * HASH_BYTES :]
        for per_page, held in zip(self.per_page, node.held, strict=True):
            if per_page:
                held.pages = held.pages[ids:] if held.pages is not None else None
                held.host = held.host[ids:] if held.host is not None else None
        self.settle(front)
        return front

    # Trees without components

    def grow(self, parent: Node, data: bytes, end: int, pages: bytes) -> Node:
        """Returns a new leaf below `parent` for `data`'s pages up to page `end`, with device ids `pages`."""
        first = parent.end * self.page_bytes
        node = self.node(self.next_id, parent, data[first : end * self.page_bytes], parent.end, end)
        self.next_id += 1
        node.pages, node.created, node.used, node.hits = pages, self.clock, self.clock, 1
        self.nodes[node.id] = parent.children[data[first : first + self.page_bytes]] = node
        parent.device_children += 1
        self.device.evictable += end - parent.end
        self.device.order.add(node)
        return node

    # Plain trees: attention KV alone, on one tier, by LRU

    def find(
        self, root: Node, data: bytes, stop: int
    ) -> tuple[Node | None, int, int, Node | None, int, bytes, tuple[bytes, ...]]:
        """Mark the path of `descend` as used. Returns the node that it ends in, its pages, its whole nodes.

        Then, for the last end that is usable: its node, its pages, their ids, and of each component the ids it needs. A
        path that ends midway has one node more than its whole nodes; an empty one ends in None.
        """
        path, inside, inner = self.descend(root, data, stop)
        whole = len(path)
        if whole:
            self.touch(path[::-1])
        if inside is not None:
            path.append(inside)
        if not path:
            return None, 0, 0, None, 0, b"", ()
        end = path[-1].end if inside is None else inside.start + inner
        return path[-1], end, whole, path[-1], end, self.gather(path, end), ()

    def insert(
        self,
        root: Node,
        data: bytes,
        ids: bytes,
        first_page: int,
        in_use: PagesInUse,
        brought: tuple[tuple[int, bytes, PagesInUse], ...],
    ) -> tuple[Node, int, tuple[bytes, ...]] | None:
        """Insert `data`'s pages, of which the tree has just the first `first_page`. Returns the path's end.

        Behind it the number of pages that the tree had, and the ids, no longer in use, of pages for which it had
        others: of attention KV, then of each row of `brought`, ids of further components, by index, for the last pages;
        none here. Returns None, before any change, if the tree has fewer pages, or ids do not fit or are in use; in
        Python also if it has more.
        """
        pages = len(data) // self.page_bytes
        if brought or not pages or not 0 <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
            return None
        path, inside, inner = self.descend(root, data, pages * self.page_bytes)
        known = inside.start + inner if inside is not None else path[-1].end if path else 0
        if known != first_page or in_use.claim(ids) >= 0:
            return None
        if inside is not None:
            path.append(self.split(inside, inner, 0))
        if known < pages:
            path.append(self.grow(path[-1] if path else root, data, pages, ids))
        self.touch(path[::-1])
        return path[-1], known, ()

    def evict(self, pages: int, leaves: int) -> bytes:
        """Evict `pages` pages, or all evictable, from the ends of at most `leaves` leaves. Returns their ids."""
        account, nodes, order, page_bytes = self.device, self.nodes, self.device.order, self.page_bytes
        left, freed = min(pages, account.evictable), list[bytes]()
        while left > 0 and len(freed) < leaves:
            node = order.first()
            assert node is not None
            held, parent = node.end - node.start, node.parent
            if node.device_children:
                order.discard(node)  # re-added when its last child goes
                continue
            if self.journal is not None:
                self.journal.removed(node, max(0, held - left), 0)
            if held > left:
                freed.append(self.trim(node, left))
                break
            assert node.pages is not None
            assert parent is not None
            freed.append(node.pages[: held * ID_BYTES])
            if node is self.trimmed:
                self.trimmed = None
            left -= held
            account.evictable -= held
            order.discard(node)
            del nodes[node.id], parent.children[node.tokens[:page_bytes]]
            node.pages, node.hashes, node.tokens = None, None, b""
            parent.device_children -= 1
            if parent.parent is None:
                self.forget_root(parent)
            elif not parent.locks:
                order.add(parent)
        return freed[0] if len(freed) == 1 else b"".join(freed)

    def trim(self, node: Node, pages: int) -> bytes:
        """Cut the last `pages` pages off an unlocked leaf that has device pages alone. Returns their ids.

        The rest keeps its place in the order but gets a new id, since the old one stood for more pages. Its bytes are
        cut only when read, so that the next trim, usually of the same leaf, copies only the ids it frees.
        """
        keep = node.end - node.start - pages
        assert node.pages is not None
        if node.hashes is not None:
            node.hashes = node.hashes[: keep * HASH_BYTES]
        del self.nodes[node.id]
        node.id = self.next_id
        self.next_id += 1
        self.nodes[node.id] = node
        if node is not self.trimmed:
            self.whole()
            self.trimmed = node
        node.end -= pages
        self.device.evictable -= pages
        return node.pages[keep * ID_BYTES : (keep + pages) * ID_BYTES]

    def whole(self) -> None:
        """Cut the bytes of the leaf trimmed last to its pages. Call it before they are read."""
        node = self.trimmed
        if node is not None:
            self.trimmed, pages = None, node.end - node.start
            node.tokens = node.tokens[: pages * self.page_bytes]
            node.pages = node.pages[: pages * ID_BYTES] if node.pages is not None else None

    def forget_root(self, root: Node) -> None:
        """Remove the namespace of `root` if its last node is gone."""
        if not root.children and root.namespace is not None:
            del self.roots[root.namespace]

    # Sums and orders

    def weigh(self, node: Node, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) a node's pages in the counts.

        To change a node, subtract it, change it, add it, and `settle` it.
        """
        pages = sign * (node.end - node.start)
        if node.pages is not None:
            if node.locks:
                self.device.protected += pages
            else:
                self.device.evictable += pages
        if node.host is not None:
            if node.pages is not None or node.locks or node.host_locks:
                self.host.protected += pages
            else:
                self.host.evictable += pages
        for i, held in enumerate(node.held):
            count = pages if self.per_page[i] else sign
            if held.pages is not None:
                account = self.held_device[i]
                if held.locks:
                    account.protected += count
                else:
                    account.evictable += count
            if held.host is not None:
                account = self.held_host[i]
                if held.pages is not None or held.host_locks:
                    account.protected += count
                else:
                    account.evictable += count

    def settle(self, node: Node) -> None:
        """Add `node` to the orders of evictable nodes, or remove it. A node already there keeps its place."""
        _place(self.device.order, node, node.pages is not None and not node.locks)
        if self.hosted:
            alone = node.pages is None and node.host is not None
            _place(self.host.order, node, alone and not node.locks and not node.host_locks)
            if self.writes_back:
                both = node.pages is not None and node.host is not None
                _place(self.doubles, node, both and not node.host_locks)
        for i, held in enumerate(node.held):
            _place(self.held_device[i].order, node, held.pages is not None and not held.locks)
            if self.hosted:
                alone = held.pages is None and held.host is not None
                _place(self.held_host[i].order, node, alone and not held.host_locks)


def _place(order: Order, node: Node, belongs: bool) -> None:
    if belongs:
        order.add(node)
    else:
        order.discard(node)
