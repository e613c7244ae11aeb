"""The Forest has the nodes of all namespaces, their sums and orders, and the steps that change all three together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import columns
from kvmover.cache.prefix.config import DeviceOnly, TreeConfig, WriteBack, WriteThrough
from kvmover.cache.prefix.events import Journal
from kvmover.cache.prefix.hashes import PrefixNamespace
from kvmover.cache.prefix.node import LockedPath, Node, page_hashes
from kvmover.cache.prefix.pages_in_use import PagesInUse
from kvmover.cache.prefix.policy import LRU, Order
from kvmover.cache.prefix.results import ROOT, Tier
from kvmover.errors import PrefixError, StaleHandle


class PrefixEnd(NamedTuple):
    """An end inside a node, where a prompt left it half way: page `page` of the path, from the root."""

    node: Node
    page: int


#: Places that are known at a time, 200 B each. A match that ended inside a node is stale after so many others.
MOST_PLACES = 4096


class Forest:
    """State of a tree. It holds to the invariants between two calls, but for those about what only callers can do.

    `core` has the columns: that of the process, unless a caller brings one.
    """

    def __init__(self, config: TreeConfig, core: TreeCore | None = None) -> None:
        self.config = config
        self.page_bytes = config.page_bytes
        self.hosted = not isinstance(config.tiers, DeviceOnly)
        #: One tier and nothing but attention KV: most of what follows has nothing to do then.
        self.plain = not self.hosted and not config.components
        self.writes_back = isinstance(config.tiers, WriteBack)
        #: LRU: nothing but the last use tells nodes apart.
        self.by_recency = config.policy is LRU
        #: Hits from which on a node is written through: more of them tell nothing.
        self.hits_due = config.tiers.after_hits if isinstance(config.tiers, WriteThrough) else 0
        self.journal: Journal | None = None
        self.locked_paths: dict[int, LockedPath] = {}
        core = core or chosen()
        #: By tier and component: ids of nodes, and of operations until their end.
        self.in_use = {
            (tier, index): core.PagesInUse()
            for tier in (Tier.DEVICE, Tier.HOST)
            for index in range(-1, len(config.components))
        }
        self.columns = columns = core.Columns()
        columns.page_bytes, columns.per_page = config.page_bytes, tuple(each.per_page for each in config.components)
        columns.hosted, columns.writes_back = self.hosted, self.writes_back
        columns.next_id = ROOT + 1
        #: Those of the columns.
        self.nodes, self.roots = columns.nodes, columns.roots
        self.clear()

    def __del__(self) -> None:
        self._unlink()

    def _unlink(self) -> None:
        """Nodes know their parents and children, and no collector takes such rings apart."""
        for node in self.nodes.values():
            node.unlink()

    def clear(self) -> None:
        """Forget all nodes. Ids go on counting, so that none is used twice."""
        self._unlink()
        self.nodes.clear()
        self.roots.clear()
        self.nodes[ROOT] = self._root(None)
        self._places: dict[int, PrefixEnd] = {}
        columns, components = self.columns, range(len(self.config.components))
        columns.trimmed = None
        columns.device = self.device = columns.set_of(self._order(), 0)
        columns.host = self.host = columns.set_of(self._order(), 1)
        columns.doubles = self.doubles = columns.recency(2)
        columns.held_device = self.held_device = [columns.set_of(None, 3 + 2 * i) for i in components]
        columns.held_host = self.held_host = [columns.set_of(None, 4 + 2 * i) for i in components]

    def _order(self) -> Order | None:
        return None if self.by_recency else self.config.policy.order()

    def _root(self, namespace: PrefixNamespace | None) -> Node:
        """A root: no pages, on every tier, and locked for ever, so that no walk upwards goes past it."""
        root = self.columns.node(ROOT, None, b"", 0, 0)
        root.held = ()
        root.pages, root.host, root.locks, root.host_locks, root.namespace = b"", b"", 1, 1, namespace
        return root

    def root(self, namespace: PrefixNamespace) -> Node:
        """The root of a namespace, made at its first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._root(namespace)
        return root

    def node(self, node_id: int) -> Node:
        """The node that ends where `node_id` says, cut there if it is a place inside one: its path is then used.

        Raises StaleHandle for an id that is gone or never was.
        """
        self.columns.whole()
        node = self.nodes.get(node_id)
        if node is None:
            node, page = self._place(node_id)
            if page < node.end:
                del self._places[node_id]
                node = self.split(node, page - node.start, node_id)
                self.touch(node.path())
        return node

    def view(self, node_id: int) -> Node:
        """As `node`, to be read only: of a place it is a copy of the front, and nothing is cut or used."""
        self.columns.whole()
        node = self.nodes.get(node_id)
        if node is None:
            node, page = self._place(node_id)
            if page < node.end:
                front = self.front(node, page - node.start, node_id)
                front.tokens = node.tokens[: (page - node.start) * self.page_bytes]
                return front
        return node

    def place(self, node: Node, page: int) -> int:
        """A new id for the end of `page` inside `node`. It holds whatever is split or merged, until the page goes."""
        node_id = self.columns.next_id
        self.columns.next_id += 1
        self.keep_place(node_id, PrefixEnd(node, page))
        return node_id

    def keep_place(self, node_id: int, place: PrefixEnd) -> None:
        """Let an id stand for an end inside a node, instead of the oldest where there are too many."""
        self._places[node_id] = place
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]

    def _place(self, node_id: int) -> PrefixEnd:
        """What covers the page of a place by now: a split leaves the end with the id, and puts fronts above."""
        place = self._places.get(node_id)
        if place is not None:
            at, page = place
            while at.start >= page and at.parent is not None:
                at = at.parent
            if self.nodes.get(at.id) is at and page <= at.end:
                return PrefixEnd(at, page)
        raise StaleHandle(f"node {node_id} is gone, or never was")

    def __iter__(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        self.columns.whole()
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def key(self, node: Node) -> bytes:
        """What its parent finds it by: its first page."""
        return node.tokens[: self.page_bytes]

    # Ids

    def claim(self, rows: Sequence[tuple[Tier, int, bytes]]) -> None:
        """Take the ids of components on tiers that a call brings: all of them, or none with a PrefixError."""
        for place, (tier, index, ids) in enumerate(rows):
            page = self.in_use[tier, index].claim(ids)
            if page >= 0:
                for earlier, other, had in rows[:place]:
                    self.in_use[earlier, other].release(had)
                raise PrefixError(
                    f"page {page} of {self.config.name(index)} on the {tier.name.lower()} is given twice, or is the"
                    " tree's already: who gives it back would free it twice"
                    if page >> 31 == 0
                    else f"page ids have 31 bits, got {page}"
                )

    # Structure

    def attach(self, parent: Node, tokens: bytes) -> Node:
        """A new child. It has no pages yet: set them, then `weigh` and `settle`."""
        columns, end = self.columns, parent.end + len(tokens) // self.page_bytes
        node = columns.node(columns.next_id, parent, tokens, parent.end, end)
        columns.next_id += 1
        node.used = node.created = columns.clock
        self.nodes[node.id] = node
        parent.children[tokens[: self.page_bytes]] = node
        return node

    def front(self, node: Node, pages: int, node_id: int) -> Node:
        """See Columns.front."""
        return self.columns.front(node, pages, node_id)

    def split(self, node: Node, pages: int, front_id: int = 0) -> Node:
        """See Columns.split."""
        return self.columns.split(node, pages, front_id)

    def remove(self, node: Node) -> None:
        """Take a childless node out. What it holds must have been taken off it before."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[self.key(node)]
        del self.nodes[node.id]
        # A place may know the node for a while yet.
        node.tokens, node.hashes = b"", None
        if parent.parent is not None:
            if self.hosted:
                self.columns.settle(parent)
        else:
            self.columns.forget_root(parent)

    # What a node holds

    def give(self, node: Node, tier: Tier, index: int, ids: bytes) -> None:
        """The node now has `ids` of a component on `tier`."""
        if self.plain:
            node.pages = ids
            self.columns.weigh(node, 1)
            if not node.locks:
                self.device.order.add(node)
        else:
            self.columns.weigh(node, -1)
            _set(node, tier, index, ids)
            self.columns.weigh(node, 1)
            self.columns.settle(node)
        if index < 0:
            if tier is Tier.DEVICE and node.parent is not None:
                node.parent.device_children += 1
            if self.journal is not None:
                self.journal.stored(node, tier)

    def take(self, node: Node, tier: Tier, index: int) -> bytes:
        """The node has no ids of a component on `tier` any more; those it had are returned. The parent may go next."""
        if node is self.columns.trimmed:
            self.columns.whole()
        ids = self.ids(node, tier, index)
        assert ids is not None
        self.columns.weigh(node, -1)
        _set(node, tier, index, None)
        if self.plain:
            self.device.order.discard(node)
        else:
            self.columns.weigh(node, 1)
            self.columns.settle(node)
        if index < 0:
            parent = node.parent
            assert parent is not None
            if tier is Tier.DEVICE:
                parent.device_children -= 1
                if not parent.locks and parent.pages is not None:
                    self.device.order.add(parent)
            if self.journal is not None:
                self.journal.removed(page_hashes(node, self.config.page_words), tier)
        return ids

    def trim(self, node: Node, pages: int) -> bytes:
        """See Columns.trim. The node is on the device alone, and unlocked."""
        keep = node.end - node.start - pages
        assert not node.locks
        if self.journal is not None:
            self.journal.removed(page_hashes(node, self.config.page_words)[keep:], Tier.DEVICE)
        return self.columns.trim(node, pages)

    def ids(self, node: Node, tier: Tier, index: int) -> bytes | None:
        """Page ids of a component (-1: attention KV) at a node on a tier, int32 as bytes; None where it has none."""
        if index < 0:
            return node.pages if tier is Tier.DEVICE else node.host
        held = node.held[index]
        return held.pages if tier is Tier.DEVICE else held.host

    def touch(self, path: list[Node], used_pages: int | None = None) -> None:
        """A use of `path`, deepest first. Of other components only what its end needs is used: the end of the path, or
        of its first `used_pages` pages.
        """
        self.columns.touch(path)
        if self.config.components and used_pages is not None:
            path = [node for node in path if node.end <= used_pages]
        for i, component in enumerate(self.config.components):
            reached = path[: self.reach(path, component.reach_tokens)]
            self.held_device[i].order.touch(reached)
            self.held_host[i].order.touch(reached)

    def reach(self, path: Sequence[Node], tokens: int) -> int:
        """How many nodes of `path`, from its deep end on, it takes to hold `tokens` tokens."""
        count = 0
        while count < len(path) and tokens > 0:
            tokens -= (path[count].end - path[count].start) * self.config.page_tokens
            count += 1
        return count


def _set(node: Node, tier: Tier, index: int, ids: bytes | None) -> None:
    at = node if index < 0 else node.held[index]
    if tier is Tier.DEVICE:
        at.pages = ids
    else:
        at.host = ids


class TreeCore(Protocol):
    """A module that has columns: `columns`, or the one in C, whose objects have the same attributes and methods."""

    Columns: type[columns.Columns]
    PagesInUse: type[PagesInUse]


PYTHON_CORE: TreeCore = columns
#: None where it was not built, or must not be used.
C_CORE: TreeCore | None = cast("TreeCore | None", NATIVE)


def chosen() -> TreeCore:
    """The core of trees that nobody brings one for."""
    return C_CORE or PYTHON_CORE
