"""The Columns of a tree are its nodes, sums and orders, and the steps over them that requests take most.

This is the definition. The same class stands in C in `core/`, where it was built; every other part of the tree works
on either, and `forest.chosen` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvmover.cache.prefix.hashes import PrefixNamespace
from kvmover.cache.prefix.keys import common_bytes
from kvmover.cache.prefix.node import ComponentPages, Node
from kvmover.cache.prefix.pages_in_use import PagesInUse
from kvmover.cache.prefix.policy import Order, Recency

__all__ = ("ID_BYTES", "Columns", "Descent", "EvictableSet", "PagesInUse", "TierEviction")

ID_BYTES = 4

#: Nodes from the root down that spell a prompt, whole; one more that it leaves half way, and after how many pages.
Descent: TypeAlias = tuple[list[Node], Node | None, int]

#: What an eviction gives up: ids on the device, ids on the host, and copies to the host to carry out before, as (first
#: page, ids on the device, ids on the host).
TierEviction: TypeAlias = tuple[bytes, bytes, list[tuple[int, bytes, bytes]]]


class EvictableSet:
    """Pages of one component on one tier, and those of its nodes that may be given up, in order."""

    __slots__ = ("evictable", "order", "protected")

    def __init__(self, order: Order) -> None:
        self.order = order
        self.evictable = 0
        self.protected = 0


class Columns:
    """The Forest fills in what the tree is made for, and makes the sets anew when it forgets all nodes."""

    #: Of attention KV alone on two tiers, by recency and by pages: what `Eviction` defines, in C alone;
    #: without it that is the way. The first takes free host ids, the others how many pages are due.
    evict_device: Callable[[int, bytes], TierEviction] | None = None
    evict_host: Callable[[int], TierEviction] | None = None

    def __init__(self) -> None:
        self.page_bytes = 0
        #: Whether nodes can be on the host, and whether they come there when they are evicted.
        self.hosted = False
        self.writes_back = False
        #: Of each further component whether it has an id a page.
        self.per_page: tuple[bool, ...] = ()
        #: Uses so far, and the next node's id.
        self.clock = 0
        self.next_id = 0
        self.nodes: dict[int, Node] = {}
        self.roots: dict[PrefixNamespace, Node] = {}
        #: The leaf that was trimmed last: its tokens and pages may reach beyond its end. See `whole`.
        self.trimmed: Node | None = None
        self.device = EvictableSet(Recency())
        self.host = EvictableSet(Recency())
        #: Nodes with pages on both tiers, where the host's are made on eviction: those on the host are the first to go
        #: there.
        self.doubles: Order = Recency()
        self.held_device: list[EvictableSet] = []
        self.held_host: list[EvictableSet] = []

    def node(self, node_id: int, parent: Node | None, tokens: bytes, start: int, end: int) -> Node:
        """A node that nobody knows yet."""
        node = Node(node_id, parent, tokens, start, end)
        if self.per_page:
            node.held = tuple(ComponentPages() for _ in self.per_page)
        return node

    def set_of(self, order: Order | None, slot: int) -> EvictableSet:
        """An empty set, by recency where no other order is given. `slot`: which of a node's orders that is."""
        return EvictableSet(self.recency(slot) if order is None else order)

    def recency(self, slot: int) -> Recency:
        """An empty order, which no other of this tree has the number of."""
        return Recency(slot)

    # Paths

    def descend(self, root: Node, data: bytes, stop: int) -> Descent:
        """As far as the first `stop` bytes of `data` are known below `root`. Nothing is changed.

        O(bytes) + O(nodes): each node is one look-up of its first page and one comparison of memory.
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
        """Device page ids of the first `stop` pages of a path, root first, that has all of them."""
        rows = [node.pages or b"" for node in path]
        return (rows[0] if len(rows) == 1 else b"".join(rows))[: stop * ID_BYTES]

    def touch(self, path: Sequence[Node]) -> None:
        """A use of `path`, deepest first, in the orders of attention KV."""
        self.clock = clock = self.clock + 1
        for node in path:
            node.used = clock
        self.device.order.touch(path)
        if self.hosted:
            self.host.order.touch(path)

    def lock(self, node: Node) -> None:
        """One more handle on `node`: it and all above it stay where they are, on the device or else on the host."""
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
        """One handle less; what it kept was used until now."""
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

    # Cuts

    def front(self, node: Node, pages: int, node_id: int) -> Node:
        """What a split of `node` after its first `pages` pages would put above it, without tokens and a place in the
        tree. Nothing is changed.
        """
        front = self.node(node_id, node.parent, b"", node.start, node.start + pages)
        front.hits, front.used, front.created, front.priority = node.hits, node.used, node.created, node.priority
        front.locks, front.host_locks = int(node.locks > 0), int(node.host_locks > 0)
        front.backing, front.loading = node.backing, node.loading
        ids = pages * ID_BYTES
        if node.pages is not None:
            front.pages = node.pages[:ids]
        if node.host is not None:
            front.host = node.host[:ids]
        if node.hashes is not None:
            front.hashes = node.hashes[:pages]
        for per_page, mine, held in zip(self.per_page, front.held, node.held, strict=True):
            if per_page:
                mine.pages = held.pages[:ids] if held.pages is not None else None
                mine.host = held.host[:ids] if held.host is not None else None
                mine.locks, mine.host_locks, mine.busy = held.locks, held.host_locks, held.busy
        return front

    def split(self, node: Node, pages: int, front_id: int) -> Node:
        """Cut `node` after its first `pages` pages. The front becomes a new node, with a new id or the place's that it
        was, and is returned; the id stays with the end.

        Everything is copied, so that a part does not keep the memory of the whole. An unlocked front counts as used
        last of all: use its path, or put it in front.
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
            node.hashes = node.hashes[pages:]
        for per_page, held in zip(self.per_page, node.held, strict=True):
            if per_page:
                held.pages = held.pages[ids:] if held.pages is not None else None
                held.host = held.host[ids:] if held.host is not None else None
        self.settle(front)
        return front

    # Trees without components

    def grow(self, parent: Node, data: bytes, end: int, pages: bytes) -> Node:
        """A new leaf below `parent` for what `data` has up to page `end`, with `pages` on the device."""
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

    def evict(self, pages: int) -> bytes:
        """Give up `pages` pages, or all that may go, from the ends of leaves; their ids."""
        account, nodes, order, page_bytes = self.device, self.nodes, self.device.order, self.page_bytes
        left, freed = min(pages, account.evictable), list[bytes]()
        while left > 0:
            node = order.first()
            assert node is not None
            held, parent = node.end - node.start, node.parent
            if node.device_children:
                order.discard(node)  # it comes back with the end of its last child
                continue
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
        """Cut the last `pages` pages off an unlocked leaf that has nothing but device pages; their ids are returned.

        As a split and a removal of the end. What is left keeps its place in the order, and is another node: whoever
        knew the old one knew of more pages. Its bytes are cut when somebody looks at them, so that the next cut, which
        is of the same leaf, copies no more than what goes.
        """
        keep = node.end - node.start - pages
        assert node.pages is not None
        if node.hashes is not None:
            node.hashes = node.hashes[:keep]
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
        """Cut the bytes of the leaf that was trimmed last to its pages. Every way to a node that reads them goes by."""
        node = self.trimmed
        if node is not None:
            self.trimmed, pages = None, node.end - node.start
            node.tokens = node.tokens[: pages * self.page_bytes]
            node.pages = node.pages[: pages * ID_BYTES] if node.pages is not None else None

    def forget_root(self, root: Node) -> None:
        """A namespace goes with the last of its nodes."""
        if not root.children and root.namespace is not None:
            del self.roots[root.namespace]

    # Sums and orders

    def weigh(self, node: Node, sign: int) -> None:
        """Add or take off what `node` counts in the accounts: take it off, change the node, add it, settle it."""
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
        """Put `node` into the orders of what may be given up, or out of them. One that is there keeps its place."""
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
