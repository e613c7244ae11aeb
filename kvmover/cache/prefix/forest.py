"""The Forest has the nodes of all namespaces, their sums and orders, and the steps that change all three together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmover.cache.prefix.config import DeviceOnly, EvictionGranularity, TreeConfig, WriteBack, WriteThrough
from kvmover.cache.prefix.errors import StaleHandle
from kvmover.cache.prefix.events import Journal
from kvmover.cache.prefix.hashes import PrefixNamespace
from kvmover.cache.prefix.node import ComponentPages, LockedPath, Node
from kvmover.cache.prefix.policy import LRU, Order, Recency
from kvmover.cache.prefix.results import ROOT, Tier

ID_BYTES = 4


@dataclass(slots=True)
class EvictableSet:
    """Pages of one component on one tier, and those of its nodes that may be given up, in order."""

    order: Order
    evictable: int = 0
    protected: int = 0


class PrefixEnd(NamedTuple):
    """An end inside a node, where a prompt left it half way: page `page` of the path, from the root."""

    node: Node
    page: int


#: Places that are known at a time, 200 B each. A match that ended inside a node is stale after so many others.
MOST_PLACES = 4096

#: Nodes of a path, or of a run in it, from which on joining is looked at.
SHORTEST_RUN = 8

#: Tokens of a shorter run that is joined all the same: copying 16 KiB takes less than the look-ups that it saves.
SMALL_RUN_BYTES = 16 << 10


class Forest:
    """State of a tree. It holds to the invariants between two calls, but for those about what only callers can do."""

    def __init__(self, config: TreeConfig) -> None:
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
        self.clock = 0
        self.next_id = ROOT + 1
        self.locked_paths: dict[int, LockedPath] = {}
        self.nodes: dict[int, Node] = {}
        self.clear()

    def __del__(self) -> None:
        self._unlink()

    def _unlink(self) -> None:
        """Nodes know their parents and children, and no collector takes such rings apart."""
        for node in self.nodes.values():
            node.children.clear()
            node.parent = None

    def clear(self) -> None:
        """Forget all nodes. Ids go on counting, so that none is used twice."""
        self._unlink()
        self.roots: dict[PrefixNamespace, Node] = {}
        self.nodes = {ROOT: self._root(None)}
        self._places: dict[int, PrefixEnd] = {}
        #: The leaf that was trimmed last: its tokens and pages may reach beyond its end. See `whole`.
        self.trimmed: Node | None = None
        self.device = EvictableSet(self.config.policy.order())
        self.host = EvictableSet(self.config.policy.order())
        #: Nodes with pages on both tiers, where the host's are made on eviction: those on the host are the first to go
        #: there.
        self.doubles = Recency()
        self.held_device = [EvictableSet(Recency()) for _ in self.config.components]
        self.held_host = [EvictableSet(Recency()) for _ in self.config.components]

    def _root(self, namespace: PrefixNamespace | None) -> Node:
        """A root: no pages, on every tier, and locked for ever, so that no walk upwards goes past it."""
        root = Node(ROOT, None, b"", 0, 0)
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
        self.whole()
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
        self.whole()
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
        node_id = self.next_id
        self.next_id += 1
        self._keep_place(node_id, PrefixEnd(node, page))
        return node_id

    def _keep_place(self, node_id: int, place: PrefixEnd) -> None:
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
        self.whole()
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def key(self, node: Node) -> bytes:
        """What its parent finds it by: its first page."""
        return node.tokens[: self.page_bytes]

    # Structure

    def attach(self, parent: Node, tokens: bytes) -> Node:
        """A new child. It has no pages yet: set them, then `weigh` and `settle`."""
        node = Node(self.next_id, parent, tokens, parent.end, parent.end + len(tokens) // self.page_bytes)
        self.next_id += 1
        node.used = node.created = self.clock
        if self.config.components:
            node.held = tuple(ComponentPages() for _ in self.config.components)
        self.nodes[node.id] = node
        parent.children[tokens[: self.page_bytes]] = node
        return node

    def front(self, node: Node, pages: int, node_id: int) -> Node:
        """What a split of `node` after its first `pages` pages would put above it, without tokens and a place in the
        tree. Nothing is changed.
        """
        front = Node(node_id, node.parent, b"", node.start, node.start + pages)
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
        if node.held:
            front.held = tuple(self._front_held(i, held, ids) for i, held in enumerate(node.held))
        return front

    def _front_held(self, index: int, held: ComponentPages, ids: int) -> ComponentPages:
        if not self.config.components[index].per_page:
            return ComponentPages()
        pages = held.pages[:ids] if held.pages is not None else None
        host = held.host[:ids] if held.host is not None else None
        return ComponentPages(pages, host, held.locks, held.host_locks, held.busy)

    def split(self, node: Node, pages: int, front_id: int = 0) -> Node:
        """Cut `node` after its first `pages` pages. The front becomes a new node, with a new id or the place's that it
        was, and is returned; the id stays with the end.

        Everything is copied, so that a part does not keep the memory of the whole. An unlocked front counts as used
        last of all: use its path, or put it in front.
        """
        assert node.parent is not None
        if node is self.trimmed:
            self.whole()
        cut, ids = pages * self.page_bytes, pages * ID_BYTES
        if not front_id:
            front_id = self.next_id
            self.next_id += 1
        front = self.front(node, pages, front_id)
        front.tokens, front.used = node.tokens[:cut], self.clock
        self.nodes[front.id] = front
        node.parent.children[self.key(node)] = front
        node.parent, node.tokens, node.start = front, node.tokens[cut:], front.end
        front.children = {self.key(node): node}
        if node.pages is not None:
            node.pages = node.pages[ids:]
            front.device_children = 1
        if node.host is not None:
            node.host = node.host[ids:]
        if node.hashes is not None:
            node.hashes = node.hashes[pages:]
        for i, held in enumerate(node.held):
            if self.config.components[i].per_page:
                held.pages = held.pages[ids:] if held.pages is not None else None
                held.host = held.host[ids:] if held.host is not None else None
        self.settle(front)
        return front

    def join(self, path: Sequence[Node]) -> list[Node]:
        """Nodes of a path that has just been used, root first, where long runs that nothing tells apart are one node.

        Splits outlive what they were for: where prompts left a hot prefix and their ends were evicted, nodes with a
        single child are left, each of which costs every match a look-up. A run of `SHORTEST_RUN` or more is joined at
        once, so that a node costs its bytes an eighth of a time; one of few bytes is joined whenever the path is long.
        Where nodes are given up whole by choice, none is joined. Where they are for the sake of further components, a
        node that was joined holds no more than `_most_pages`.
        """
        if len(path) < SHORTEST_RUN or self.config.grain is not EvictionGranularity.PAGE:
            return list(path)
        joined, run = list[Node](), [path[0]]
        for node in path[1:]:
            if not self._alike(run[-1], node) or (node.held and node.end - run[0].start > self._most_pages(node)):
                joined += self._joined(run)
                run = []
            run.append(node)
        return joined + self._joined(run)

    def _most_pages(self, node: Node) -> int:
        """Of a joined node in a tree with further components, like `node`: few bytes, and of what goes whole no more
        than an end needs. Else a lock would keep, and an eviction give up, windows far before the one that is meant.
        """
        reach = [
            component.reach_tokens
            for component, held in zip(self.config.components, node.held, strict=True)
            if component.per_page and (held.pages is not None or held.host is not None)
        ]
        return min([SMALL_RUN_BYTES // self.page_bytes, *(tokens // self.config.page_tokens for tokens in reach)])

    def _alike(self, above: Node, node: Node) -> bool:
        """Whether no lock, copy, tier, child or rank tells `above` from its child `node`."""
        return (
            len(above.children) == 1
            and above.locks == (node.locks > 0)
            and not (above.host_locks or node.host_locks)
            and not (above.backing or above.loading or node.backing or node.loading)
            and (above.pages is None) == (node.pages is None)
            and (above.host is None) == (node.host is None)
            and (above.hashes is None) == (node.hashes is None)
            and min(above.hits, self.hits_due) == min(node.hits, self.hits_due)
            and (self.by_recency or _ranked_by(above) == _ranked_by(node))
            and all(map(self._held_alike, range(len(node.held)), above.held, node.held))
        )

    def _held_alike(self, index: int, above: ComponentPages, held: ComponentPages) -> bool:
        """Whether ids of a component are one run. What stands at the end of `above` would stand inside it.

        No segment of a lock ends with `above`, which has no handle of its own, so where as many cover one as the other
        none begins behind it either.
        """
        if above.busy or held.busy or above.locks != held.locks or above.host_locks != held.host_locks:
            return False
        if not self.config.components[index].per_page:
            return above.pages is None and above.host is None
        return (above.pages is None) == (held.pages is None) and (above.host is None) == (held.host is None)

    def _joined(self, run: list[Node]) -> list[Node]:
        """The last node of a run takes what all of them have; ids of the others go on as places inside it."""
        first, last, above = run[0], run[-1], run[:-1]
        small = (last.end - first.start) * self.page_bytes <= SMALL_RUN_BYTES
        if not above or (len(run) < SHORTEST_RUN and not small):
            return run
        assert first.parent is not None
        del first.parent.children[self.key(first)]
        last.tokens = b"".join(node.tokens for node in run)
        if last.pages is not None:
            last.pages = b"".join(node.pages or b"" for node in run)
        if last.host is not None:
            last.host = b"".join(node.host or b"" for node in run)
        if last.hashes is not None:
            last.hashes = tuple(name for node in run for name in node.hashes or ())
        for i, held in enumerate(last.held):
            if self.config.components[i].per_page:
                if held.pages is not None:
                    held.pages = b"".join(node.held[i].pages or b"" for node in run)
                if held.host is not None:
                    held.host = b"".join(node.held[i].host or b"" for node in run)
        last.start, last.parent, last.created = first.start, first.parent, first.created
        first.parent.children[self.key(last)] = last
        for node in above:
            for order in (self.device.order, self.host.order, self.doubles):
                order.discard(node)
            for account in (*self.held_device, *self.held_host):
                account.order.discard(node)
            del self.nodes[node.id]
            self._keep_place(node.id, PrefixEnd(last, node.end))
            # Places inside it are found in the node that has its pages now.
            node.parent, node.start, node.tokens, node.children = last, node.end, b"", {}
        return [last]

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
                self.settle(parent)
        else:
            self.forget_root(parent)

    def forget_root(self, root: Node) -> None:
        """A namespace goes with the last of its nodes."""
        if not root.children and root.namespace is not None:
            del self.roots[root.namespace]

    # Accounts and orders

    def weigh(self, node: Node, sign: int) -> None:
        """Add or take off what `node` counts in the accounts: take it off, change the node, add it, settle it."""
        pages = sign * (node.end - node.start)
        if node.pages is not None:
            if node.locks:
                self.device.protected += pages
            else:
                self.device.evictable += pages
        if self.plain:
            return
        if node.host is not None:
            if node.pages is not None or node.locks or node.host_locks:
                self.host.protected += pages
            else:
                self.host.evictable += pages
        for i, held in enumerate(node.held):
            count = pages if self.config.components[i].per_page else sign
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
        if self.plain:
            return
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

    def give(self, node: Node, tier: Tier, index: int, ids: bytes) -> None:
        """The node now has `ids` of a component on `tier`."""
        if self.plain:
            node.pages = ids
            self.weigh(node, 1)
            if not node.locks:
                self.device.order.add(node)
        else:
            self.weigh(node, -1)
            _set(node, tier, index, ids)
            self.weigh(node, 1)
            self.settle(node)
        if index < 0:
            if tier is Tier.DEVICE and node.parent is not None:
                node.parent.device_children += 1
            if self.journal is not None:
                self.journal.stored(node, tier)

    def take(self, node: Node, tier: Tier, index: int) -> bytes:
        """The node has no ids of a component on `tier` any more; those it had are returned. The parent may go next."""
        if node is self.trimmed:
            self.whole()
        ids = self.ids(node, tier, index)
        assert ids is not None
        self.weigh(node, -1)
        _set(node, tier, index, None)
        if self.plain:
            self.device.order.discard(node)
        else:
            self.weigh(node, 1)
            self.settle(node)
        if index < 0:
            parent = node.parent
            assert parent is not None
            if tier is Tier.DEVICE:
                parent.device_children -= 1
                if not parent.locks and parent.pages is not None:
                    self.device.order.add(parent)
            if self.journal is not None:
                self.journal.removed(node.page_hashes(self.config.page_words), tier)
        return ids

    def trim(self, node: Node, pages: int) -> bytes:
        """Cut the last `pages` pages off an unlocked leaf that has nothing but device pages; their ids are returned.

        As a split and a removal of the end. What is left keeps its place in the order, and is another node: whoever
        knew the old one knew of more pages. Its bytes are cut when somebody looks at them, so that the next cut, which
        is of the same leaf, copies no more than what goes.
        """
        keep = node.end - node.start - pages
        assert node.pages is not None
        assert not node.locks
        if self.journal is not None:
            self.journal.removed(node.page_hashes(self.config.page_words)[keep:], Tier.DEVICE)
        if node.hashes is not None:
            node.hashes = node.hashes[:keep]
        del self.nodes[node.id]
        node.id = self.next_id
        self.next_id += 1
        self.nodes[node.id] = node
        if node is not self.trimmed:
            self.whole()
            self.trimmed = node
        ids = node.pages[keep * ID_BYTES : (keep + pages) * ID_BYTES]
        node.end -= pages
        self.device.evictable -= pages
        return ids

    def whole(self) -> None:
        """Cut the bytes of the leaf that was trimmed last to its pages. Every way to a node that reads them goes by."""
        node = self.trimmed
        if node is not None:
            self.trimmed, pages = None, node.end - node.start
            node.tokens = node.tokens[: pages * self.page_bytes]
            node.pages = node.pages[: pages * ID_BYTES] if node.pages is not None else None

    def ids(self, node: Node, tier: Tier, index: int) -> bytes | None:
        """Page ids of a component (-1: attention KV) at a node on a tier, int32 as bytes; None where it has none."""
        if index < 0:
            return node.pages if tier is Tier.DEVICE else node.host
        held = node.held[index]
        return held.pages if tier is Tier.DEVICE else held.host

    def touch(self, path: Sequence[Node]) -> None:
        """A use of `path`, deepest first. Of other components only what the end of the path needs is used."""
        self.clock += 1
        clock = self.clock
        for node in path:
            node.used = clock
        self.device.order.touch(path)
        if self.hosted:
            self.host.order.touch(path)
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


def _place(order: Order, node: Node, belongs: bool) -> None:
    if belongs:
        order.add(node)
    else:
        order.discard(node)


def _ranked_by(node: Node) -> tuple[int, ...]:
    return node.hits, node.priority, node.created


def _set(node: Node, tier: Tier, index: int, ids: bytes | None) -> None:
    at = node if index < 0 else node.held[index]
    if tier is Tier.DEVICE:
        at.pages = ids
    else:
        at.host = ids
