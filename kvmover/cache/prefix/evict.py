"""Eviction frees the first pages in eviction order, by component and tier, with the ids useless without them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import inf

from kvmover.cache.prefix.columns import ID_BYTES, EvictableSet
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.keys import PageIds, page_array, words
from kvmover.cache.prefix.match import positions
from kvmover.cache.prefix.node import Node
from kvmover.cache.prefix.results import ActionList, CopyLeg, CopyOut, FreePages, Tier
from kvmover.cache.prefix.tree_config import EvictionGranularity, WriteBack
from kvmover.errors import PrefixError
from kvmover.fields import whole

#: More than the pages of any pool.
MOST_PAGES = 1 << 31


def due_pages(pages: int) -> int:
    """Returns the pages to evict, clamped to 0 and `MOST_PAGES`. Raises PrefixError unless it is a whole number."""
    if pages.__class__ is not int:
        pages = whole(pages, "pages to give up", PrefixError, -inf)
    return 0 if pages < 0 else pages if pages < MOST_PAGES else MOST_PAGES


class Eviction:
    """The victims of one call. Ids are gathered, so that a caller frees each component and tier once.

    `pools` takes from at most `leaves` nodes. `room` are free host pages for victims of a write-back tree; unused ones
    stay the caller's. Raises PrefixError for `room` in another tree.
    """

    def __init__(self, forest: Forest, room: PageIds = (), leaves: int = sys.maxsize) -> None:
        self._forest, self._leaves = forest, leaves
        self._room = words(room) if len(room) else b""
        if self._room and not isinstance(forest.config.tiers, WriteBack):
            raise PrefixError("only a tree that writes back evicts into host pages")
        forest.claim([(Tier.HOST, -1, self._room)])
        # With further components a leaf is evicted whole: without its window or state, the rest is useless.
        self._trims = forest.config.grain is EvictionGranularity.PAGE and not forest.config.components
        self._copies = list[CopyOut]()
        self._freed: dict[tuple[int, Tier], list[bytes]] = {}

    def pools(self, pages: Mapping[int, int]) -> ActionList:
        """Evict so many device pages of each component, by index, or all evictable.

        Attention KV goes first, from the ends of leaves; ids freed with it count for the others.
        """
        for index, count in sorted(pages.items()):
            count -= sum(map(len, self._freed.get((index, Tier.DEVICE), ()))) // ID_BYTES
            if index < 0:
                self._device(count)
            else:
                self._held(index, count)
        return self._outcome()

    def path(self, end: Node) -> ActionList:
        """Evict a path's device pages from its end up to a node that is locked or has device pages below it.

        A node that has neither a host copy nor room for one stays, with its ancestors.
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
        while account.evictable > aim and self._leaves and (node := account.order.first()) is not None:
            if node.device_children:
                # Re-added when its last child goes; if that child is spared, it keeps its place.
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
                self._leaves -= 1
        for node in reversed(spared):
            # A spared ancestor may have been evicted in this call, after its last child.
            if node.pages is not None:
                account.order.front(node)

    def _only_here(self, node: Node) -> bool:
        """Returns True if evicting the leaf deletes it, page by page."""
        return self._trims and node.host is None and not self._room

    def _may_go(self, node: Node, need: int) -> bool:
        """Returns True if a leaf, or `need` pages of its tail, can be evicted.

        A leaf to be deleted takes along the host nodes below it, unless one is in use.
        """
        pages = node.end - node.start
        if node.host is not None or self._room_for(min(need, pages) if self._trims else pages):
            return True
        if node.host_locks:
            return False
        self._drop_below(node)
        return True

    def _held(self, index: int, pages: int) -> None:
        """Evict a further component's device ids; a backed leaf leaves the device whole."""
        account = self._forest.held_device[index]
        aim = account.evictable - pages
        while account.evictable > aim and self._leaves and (node := account.order.first()) is not None:
            self._leaves -= 1
            if node.host is None or node.locks or node.children:
                self._bury(node, index)
            else:
                self._give_up(node)

    def host(self, pages: int) -> ActionList:
        """Evict host pages of attention KV: under write-back, copies of device pages first; then childless nodes."""
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
        """Evict host-only ids of a further component."""
        account = self._forest.held_host[index]
        aim = account.evictable - pages
        while account.evictable > aim and (node := account.order.first()) is not None:
            self._take(node, Tier.HOST, index)
        return self._outcome()

    def _trimmed(self, node: Node, need: int, account: EvictableSet) -> Node:
        """Returns the tail of `node` to evict. The front, a new node, takes its place in the order."""
        pages = node.end - node.start
        if self._trims and need < pages:
            front = self._forest.split(node, pages - need)
            front.used = node.used
            account.order.front(front)
        return node

    def _give_up(self, node: Node) -> None:
        """Evict a leaf from the device: kept on the host if backed, or if `room` suffices; else deleted."""
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
        """Make `node` a tombstone of a component, and of those of lower rank."""
        components = self._forest.config.components
        for other, held in enumerate(node.held):
            lower = components[other].rank < components[index].rank
            if other == index or (lower and held.pages is not None and not held.locks):
                self._take(node, Tier.DEVICE, other)

    def _drop_below(self, node: Node) -> None:
        """Delete the host-only descendants of an unlocked node that cannot be copied out."""
        below, waiting = list[Node](), list(node.children.values())
        while waiting:
            below.append(waiting.pop())
            waiting.extend(below[-1].children.values())
        for each in reversed(below):
            locked = each.locks or each.host_locks
            assert not locked, f"node {each.id} is locked, and node {node.id} above it is not"
            self._uproot(each)

    def _uproot(self, node: Node) -> None:
        """Delete a childless node with all its ids. Its ancestors have attention KV of their own, and stay."""
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
        """Returns the copies, then a FreePages for each component and tier. Releases unused room."""
        self._forest.in_use[Tier.HOST, -1].release(self._room)
        name, freed = self._forest.config.name, list[FreePages]()
        for index, tier in sorted(self._freed):
            freed.append(FreePages(name(index), tier, page_array(b"".join(self._freed[index, tier]))))
        return ActionList((*self._copies, *freed))
