"""Eviction gives up what is used least, by component and tier, with all that is of no use without it."""

from __future__ import annotations

from collections.abc import Mapping

from kvmover.cache.prefix.columns import ID_BYTES, EvictableSet
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.config import EvictionGranularity, WriteBack
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.keys import PageIds, page_array, words
from kvmover.cache.prefix.match import positions
from kvmover.cache.prefix.node import Node
from kvmover.cache.prefix.results import ActionList, CopyLeg, CopyOut, FreePages, Tier
from kvmover.errors import PrefixError


class Eviction:
    """One call's victims. What they held is gathered, so that a caller frees each component and tier once.

    `room` are free host pages that a tree that writes back may copy victims into; what is not used stays the caller's.
    """

    def __init__(self, forest: Forest, room: PageIds = ()) -> None:
        self._forest = forest
        self._room = words(room) if len(room) else b""
        if self._room and not isinstance(forest.config.tiers, WriteBack):
            raise PrefixError("only a tree that writes back evicts into host pages")
        forest.claim([(Tier.HOST, -1, self._room)])
        # Of a tree with further components a leaf goes whole: without its window or state, what is left is of no use.
        self._trims = forest.config.grain is EvictionGranularity.PAGE and not forest.config.components
        self._copies = list[CopyOut]()
        self._freed: dict[tuple[int, Tier], list[bytes]] = {}

    def pools(self, pages: Mapping[int, int]) -> ActionList:
        """Give up as many device pages of each component, by its index, or all that can be.

        Attention KV goes first, leaves from their ends; what goes with them counts.
        """
        for index, count in sorted(pages.items()):
            count -= sum(map(len, self._freed.get((index, Tier.DEVICE), ()))) // ID_BYTES
            if index < 0:
                self._device(count)
            else:
                self._held(index, count)
        return self._outcome()

    def path(self, end: Node) -> ActionList:
        """Give up the device pages of a path from its end on, up to where others have their own below it, or it is
        locked. What has no copy on the host, and finds no room for one, stays, and so does all above it.
        """
        at = end
        while at.parent is not None and at.pages is not None and not (at.locks or at.device_children):
            if at.host is None and not self._room_for(at.end - at.start):
                break
            self._give_up(at)
            at = at.parent
        return self._outcome()

    def _device(self, pages: int) -> None:
        forest, account, spared = self._forest, self._forest.device, list[Node]()
        aim = account.evictable - pages
        while account.evictable > aim and (node := account.order.first()) is not None:
            if node.device_children:
                # It comes back with the end of its last child; where that is spared, it keeps its place.
                account.order.discard(node)
                if spared:
                    spared.append(node)
            elif not self._may_go(node, account.evictable - aim):
                account.order.discard(node)
                spared.append(node)
            elif self._only_here(node) and node.end - node.start > account.evictable - aim:
                self._note(-1, Tier.DEVICE, forest.trim(node, account.evictable - aim))
            else:
                self._give_up(self._trimmed(node, account.evictable - aim, account))
        for node in reversed(spared):
            # One above others may have gone in this very call, after its last child.
            if node.pages is not None:
                account.order.front(node)

    def _only_here(self, node: Node) -> bool:
        """Whether a leaf would be deleted, and may be so page by page."""
        return self._trims and node.host is None and not self._room

    def _may_go(self, node: Node, need: int) -> bool:
        """Whether a leaf, or `need` pages of its tail, can go. One to be deleted takes what hangs below it on the host,
        if nobody needs that.
        """
        pages = node.end - node.start
        if node.host is not None or self._room_for(min(need, pages) if self._trims else pages):
            return True
        return not node.host_locks and (not node.children or self._drop_below(node))

    def _held(self, index: int, pages: int) -> None:
        """Give up ids of a further component on the device alone: a leaf that is backed goes to the host whole."""
        account = self._forest.held_device[index]
        aim = account.evictable - pages
        while account.evictable > aim:
            node = account.order.first()
            if node is None:
                break
            if node.host is None or node.device_children or node.locks or node.children:
                self._bury(node, index)
            else:
                self._give_up(node)

    def host(self, pages: int) -> ActionList:
        """Give up host pages of attention KV: second copies first where they are made on eviction, then childless
        nodes.
        """
        forest = self._forest
        while pages > 0 and (node := forest.doubles.first()) is not None:
            pages -= node.end - node.start
            self._take(node, Tier.HOST, -1)
            for index, held in enumerate(node.held):
                if held.host is not None:
                    self._take(node, Tier.HOST, index)
        account = forest.host
        aim = account.evictable - pages
        while account.evictable > aim:
            node = account.order.first()
            if node is None:
                break
            if node.children:
                account.order.discard(node)
            else:
                self._uproot(self._trimmed(node, account.evictable - aim, account))
        return self._outcome()

    def held_host(self, index: int, pages: int) -> ActionList:
        """Give up ids of a further component that stand on the host alone."""
        account = self._forest.held_host[index]
        aim = account.evictable - pages
        while account.evictable > aim and (node := account.order.first()) is not None:
            self._take(node, Tier.HOST, index)
        return self._outcome()

    def _trimmed(self, node: Node, need: int, account: EvictableSet) -> Node:
        """The part of `node` that has to go: its tail. The front takes its place in the order, and is a new node."""
        pages = node.end - node.start
        if self._trims and need < pages:
            front = self._forest.split(node, pages - need)
            front.used = node.used
            account.order.front(front)
        return node

    def _give_up(self, node: Node) -> None:
        """A leaf on the device: it stays as a node of the host if it is backed, or can be now; else it is deleted."""
        if node.host is None and self._room_for(node.end - node.start):
            self._copy_out(node)
        if node.host is None:
            self._uproot(node)
            return
        self._take(node, Tier.DEVICE, -1)
        for index, held in enumerate(node.held):
            if held.pages is not None:
                self._take(node, Tier.DEVICE, index)

    def _room_for(self, pages: int) -> bool:
        return bool(self._room) and len(self._room) >= pages * ID_BYTES

    def _copy_out(self, node: Node) -> None:
        if node is self._forest.columns.trimmed:
            self._forest.columns.whole()
        assert node.pages is not None
        size = len(node.pages)
        ids, self._room = self._room[:size], self._room[size:]
        where = positions(self._forest, [node], -1)
        names = [FULL, *(sidecar.name for sidecar in self._forest.config.sidecars if sidecar.of == FULL)]
        legs = tuple(CopyLeg(name, where, page_array(node.pages), page_array(ids)) for name in names)
        self._copies.append(CopyOut(legs))
        self._forest.give(node, Tier.HOST, -1, ids)

    def _bury(self, node: Node, index: int) -> None:
        """Make `node` a tombstone of one component, and of those that are of no use without it."""
        components = self._forest.config.components
        for other, held in enumerate(node.held):
            lower = components[other].rank < components[index].rank
            if other == index or (lower and held.pages is not None and not held.locks):
                self._take(node, Tier.DEVICE, other)

    def _drop_below(self, node: Node) -> bool:
        """Delete the children of a node that cannot be copied out, all on the host alone. False if one is in use."""
        below, waiting = list[Node](), list(node.children.values())
        while waiting:
            below.append(waiting.pop())
            waiting.extend(below[-1].children.values())
        if any(each.locks or each.host_locks for each in below):
            return False
        for each in reversed(below):
            self._uproot(each)
        return True

    def _uproot(self, node: Node) -> None:
        """Take out a childless node with all it holds. Nodes above it stay: each has attention KV of its own."""
        if node.pages is not None:
            self._take(node, Tier.DEVICE, -1)
        if node.host is not None:
            self._take(node, Tier.HOST, -1)
        for index, held in enumerate(node.held):
            if held.pages is not None:
                self._take(node, Tier.DEVICE, index)
            if held.host is not None:
                self._take(node, Tier.HOST, index)
        self._forest.remove(node)

    def _take(self, node: Node, tier: Tier, index: int) -> None:
        self._note(index, tier, self._forest.take(node, tier, index))

    def _note(self, index: int, tier: Tier, ids: bytes) -> None:
        self._freed.setdefault((index, tier), []).append(ids)

    def _outcome(self) -> ActionList:
        """Copies first, then one FreePages a component and tier, in their order. Room that is left is the caller's."""
        self._forest.in_use[Tier.HOST, -1].release(self._room)
        name, freed = self._forest.config.name, list[FreePages]()
        for index, tier in sorted(self._freed):
            freed.append(FreePages(name(index), tier, page_array(b"".join(self._freed[index, tier]))))
        return ActionList((*self._copies, *freed))
