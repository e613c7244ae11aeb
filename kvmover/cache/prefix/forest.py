"""A Forest holds the nodes of all namespaces, their page counts and eviction orders, and the steps that change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import columns
from kvmover.cache.prefix.eviction_policy import HAZARD, LRU, EvictionPolicy, Order
from kvmover.cache.prefix.hashes import PrefixNamespace
from kvmover.cache.prefix.hazard import HazardOrder, ReuseHistory
from kvmover.cache.prefix.kv_events import Journal
from kvmover.cache.prefix.node import LockedPath, Node
from kvmover.cache.prefix.pages_in_use import PagesInUse
from kvmover.cache.prefix.results import ROOT, Tier
from kvmover.cache.prefix.tree_config import DeviceOnly, TreeConfig, WriteBack, WriteThrough
from kvmover.errors import PrefixError, StaleHandle


class PrefixEnd(NamedTuple):
    """An end inside a node that a prompt left midway, after `page` pages from the root."""

    node: Node
    page: int


#: Most ids kept for ends inside nodes, 200 B each; older ones go stale.
MOST_PLACES = 4096


class Forest:
    """The state of a tree. Between calls it satisfies the invariants, except those that depend on the caller.

    `core` provides the columns; by default `chosen` does.
    """

    def __init__(self, config: TreeConfig, core: TreeCore | None = None, journal: Journal | None = None) -> None:
        self.config = config
        self.page_bytes = config.page_bytes
        self.hosted = not isinstance(config.tiers, DeviceOnly)
        #: One tier and attention KV alone: most steps below are then skipped.
        self.plain = not self.hosted and not config.components
        self.writes_back = isinstance(config.tiers, WriteBack)
        #: Nodes are ranked by their uses alone, in an order that both cores have.
        self.by_use = config.policy in (LRU, HAZARD)
        #: Hits at which a node is due for write-through; a higher count has no effect.
        self.hits_due = config.tiers.after_hits if isinstance(config.tiers, WriteThrough) else 0
        self.locked_paths: dict[int, LockedPath] = {}
        self._core = core = core or chosen()
        #: By tier and component index (-1: attention KV): ids of nodes, and of operations until their end.
        self.in_use = {
            (tier, index): core.PagesInUse()
            for tier in (Tier.DEVICE, Tier.HOST)
            for index in range(-1, len(config.components))
        }
        self.columns = columns = core.Columns()
        columns.page_bytes, columns.per_page = config.page_bytes, tuple(each.per_page for each in config.components)
        columns.reach_pages = tuple(-(-each.reach_tokens // config.page_tokens) for each in config.components)
        columns.ranks = tuple(each.rank for each in config.components)
        columns.hosted, columns.writes_back = self.hosted, self.writes_back
        columns.next_id = ROOT + 1
        self.journal = columns.journal = journal
        #: The columns' own dicts.
        self.nodes, self.roots = columns.nodes, columns.roots
        self.clear()

    def __del__(self) -> None:
        self._unlink()

    def _unlink(self) -> None:
        """Break the parent-child cycles, which no collector takes apart."""
        for node in self.nodes.values():
            node.unlink()

    def clear(self) -> None:
        """Forget all nodes. Ids go on counting, so that each is used once."""
        self._unlink()
        self.nodes.clear()
        self.roots.clear()
        self.nodes[ROOT] = self._root(None)
        self._places: dict[int, PrefixEnd] = {}
        columns, components = self.columns, range(len(self.config.components))
        columns.trimmed = None
        device, host = orders_of(self.config.policy, self._core, self.page_bytes)
        self._history = device.history if isinstance(device, self._core.HazardOrder) else None
        columns.device = self.device = columns.set_of(device, 0)
        columns.host = self.host = columns.set_of(host, 1)
        columns.doubles = self.doubles = columns.recency(2)
        columns.held_device = self.held_device = [columns.set_of(None, 3 + 2 * i) for i in components]
        columns.held_host = self.held_host = [columns.set_of(None, 4 + 2 * i) for i in components]

    def tell_room(self) -> None:
        """Tell what the tree learns from how many pages it holds, before it evicts."""
        if self._history is not None:
            tiers = [each.evictable + each.protected for each in (self.device, self.host)]
            self._history.resident = sum(tiers) if self.writes_back else max(tiers)

    def _root(self, namespace: PrefixNamespace | None) -> Node:
        """Returns a root: without pages, on every tier, locked for ever, so that upward walks stop there."""
        root = self.columns.node(ROOT, None, b"", 0, 0)
        root.held = ()
        root.pages, root.host, root.locks, root.host_locks, root.namespace = b"", b"", 1, 1, namespace
        root.hashes = b"" if namespace is None else namespace.digest
        return root

    def root(self, namespace: PrefixNamespace) -> Node:
        """Returns the root of a namespace, created at its first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._root(namespace)
        return root

    def node(self, node_id: int) -> Node:
        """Returns the node that ends at `node_id`. An end inside a node is split off, and its path marked as used.

        Raises StaleHandle for an unknown id.
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

    def covering(self, node_id: int) -> PrefixEnd:
        """Returns the node that has the last page of `node_id`, and how many pages from the root end there.

        Raises StaleHandle for an unknown id.
        """
        self.columns.whole()
        node = self.nodes.get(node_id)
        return self._place(node_id) if node is None else PrefixEnd(node, node.end)

    def view(self, node_id: int) -> Node:
        """Returns the node as `node` does, for reading: an end inside a node gives an unsplit copy of its front.

        Raises StaleHandle for an unknown id.
        """
        node, page = self.covering(node_id)
        if page < node.end:
            front = self.front(node, page - node.start, node_id)
            front.tokens = node.tokens[: (page - node.start) * self.page_bytes]
            return front
        return node

    def place(self, node: Node, page: int) -> int:
        """Returns a new id for the end of `page` inside `node`, valid across splits and joins."""
        node_id = self.columns.next_id
        self.columns.next_id += 1
        self.keep_place(node_id, PrefixEnd(node, page))
        return node_id

    def keep_place(self, node_id: int, place: PrefixEnd) -> None:
        """Register an id for an end inside a node, dropping the oldest beyond `MOST_PLACES`."""
        self._places[node_id] = place
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]

    def _place(self, node_id: int) -> PrefixEnd:
        """Returns the node that covers a place's page now: a split keeps ids at the end, and puts fronts above.

        Raises StaleHandle if the page is gone.
        """
        place = self._places.get(node_id)
        if place is not None:
            at, page = place
            while at.start >= page and at.parent is not None:
                at = at.parent
            if self.nodes.get(at.id) is at and page <= at.end:
                return PrefixEnd(at, page)
        raise StaleHandle(f"node {node_id} is gone, or never was")

    def __iter__(self) -> Iterator[Node]:
        """Iterate over every node except roots, parents first."""
        self.columns.whole()
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def key(self, node: Node) -> bytes:
        """Returns the bytes of the node's first page, its key among its parent's children."""
        return node.tokens[: self.page_bytes]

    # Ids

    def claim(self, rows: Sequence[tuple[Tier, int, bytes]]) -> None:
        """Claim the ids of all `rows`, (tier, component index, ids). Raises PrefixError if one is in use.

        It then claims no id.
        """
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
        """Returns a new child of `parent` without pages; `give` adds them."""
        columns, end = self.columns, parent.end + len(tokens) // self.page_bytes
        node = columns.node(columns.next_id, parent, tokens, parent.end, end)
        columns.next_id += 1
        node.used = node.created = columns.clock
        self.nodes[node.id] = node
        parent.children[tokens[: self.page_bytes]] = node
        return node

    def front(self, node: Node, pages: int, node_id: int) -> Node:
        """Returns a copy of a node's front. See Columns.front."""
        return self.columns.front(node, pages, node_id)

    def split(self, node: Node, pages: int, front_id: int = 0) -> Node:
        """Split a node. Returns the front. See Columns.split."""
        return self.columns.split(node, pages, front_id)

    def remove(self, node: Node) -> None:
        """Remove a childless node whose ids were taken."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[self.key(node)]
        del self.nodes[node.id]
        # A place may still refer to the node.
        node.tokens, node.hashes = b"", None
        if parent.parent is not None:
            if self.hosted:
                self.columns.settle(parent)
        else:
            self.columns.forget_root(parent)

    # Ids of a node

    def give(self, node: Node, tier: Tier, index: int, ids: bytes) -> None:
        """Set a component's `ids` at a node on `tier`, in counts, orders and journal too."""
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
        """Take a node's ids of a component off `tier`. Returns them. The parent may become evictable."""
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
                self.journal.removed(node, 0, tier)
        return ids

    def trim(self, node: Node, pages: int) -> bytes:
        """Cut the last pages off an unlocked device-only node. Returns their ids. See Columns.trim."""
        assert not node.locks
        if self.journal is not None:
            self.journal.removed(node, node.end - node.start - pages, Tier.DEVICE)
        return self.columns.trim(node, pages)

    def ids(self, node: Node, tier: Tier, index: int) -> bytes | None:
        """Returns a node's page ids of a component (-1: attention KV) on a tier, int32 as bytes, or None."""
        if index < 0:
            return node.pages if tier is Tier.DEVICE else node.host
        held = node.held[index]
        return held.pages if tier is Tier.DEVICE else held.host

    def touch(self, path: list[Node], used_pages: int | None = None) -> None:
        """Mark `path`, deepest first, as used; of further components the part that its end needs.

        With `used_pages`, the end for further components is that of the first `used_pages` pages.
        """
        self.columns.touch(path)
        if self.config.components and used_pages is not None:
            path = [node for node in path if node.end <= used_pages]
        for i, component in enumerate(self.config.components):
            reached = path[: self.reach(path, component.reach_tokens)]
            self.held_device[i].order.touch(reached)
            if self.hosted:
                self.held_host[i].order.touch(reached)

    def reach(self, path: Sequence[Node], tokens: int) -> int:
        """Returns the number of nodes, from the start of `path`, deepest first, that hold `tokens` tokens."""
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
    """A module with the columns: `columns`, or its C counterpart with the same attributes and methods."""

    Columns: type[columns.Columns]
    PagesInUse: type[PagesInUse]
    ReuseHistory: type[ReuseHistory]
    HazardOrder: type[HazardOrder]


PYTHON_CORE: TreeCore = columns
#: The C core; None if it was not built or is disabled.
C_CORE: TreeCore | None = cast("TreeCore | None", NATIVE)


def chosen() -> TreeCore:
    """Returns the default core: C if available."""
    return C_CORE or PYTHON_CORE


def orders_of(policy: EvictionPolicy, core: TreeCore, page_bytes: int) -> tuple[Order | None, Order | None]:
    """Returns a policy's orders of device and host, which share what they learn; None: the core's own, by recency."""
    if policy is HAZARD:
        history = core.ReuseHistory(page_bytes)
        return core.HazardOrder(history, 0), core.HazardOrder(history, 1)
    return (None, None) if policy is LRU else (policy.order(), policy.order())
