"""Locks protect paths from eviction until their handles are released, however nodes are split meanwhile.

A node counts its own handles and its locked children, so a lock costs only the nodes that it newly locks: one step in a
chat whose last turn is locked. At a split the new front gets one locked child. Further components are locked by page
positions, which a split does not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.node import LockedPath, LockedSegment, Node
from kvmover.cache.prefix.results import LockHandle, Tier
from kvmover.errors import PrefixError, StaleHandle

#: Numbers of handles over all trees of the process: a handle is unknown in another tree.
NUMBERS = count(1)


def segments(forest: Forest, node: Node, skip: Sequence[str] = ()) -> tuple[LockedSegment, ...]:
    """Returns the segments that the end of `node` needs of components not in `skip`: windows and states."""
    components, first, end = forest.config.components, forest.columns.first_held, node.end
    if not components or node.parent is None:
        return ()
    return tuple([LockedSegment(i, first(node, i), end) for i, each in enumerate(components) if each.name not in skip])


class Locks:
    """The locks of a tree. Handle numbers are never reused."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    def device(self, node: Node, segments: tuple[LockedSegment, ...] = ()) -> LockHandle:
        """Lock `node` and its ancestors: the nodes, and their pages where they are."""
        self._forest.columns.lock(node)
        return self._handle(node, Tier.DEVICE, segments)

    def host(self, node: Node, segments: tuple[LockedSegment, ...] = ()) -> LockHandle:
        """Lock the host pages of `node` and its ancestors. Their device pages may be evicted."""
        forest, at = self._forest, node
        while True:
            at.host_locks += 1
            if at.host_locks > 1:
                break
            if at.pages is None and at.host is not None and not at.locks:
                self._pin(at)
            elif forest.writes_back:
                forest.doubles.discard(at)
            assert at.parent is not None
            at = at.parent
        return self._handle(node, Tier.HOST, segments)

    def release(self, handle: LockHandle) -> None:
        """Release a lock; its pages count as used now. Raises StaleHandle if it was released before."""
        locked = self.locked(handle)
        del self._forest.locked_paths[handle.number]
        for segment in locked.segments:
            self._shift(locked.node, segment, locked.tier, -1)
        if locked.tier is Tier.DEVICE:
            self._forest.columns.unlock(locked.node)
        else:
            self._release_host(locked.node)

    def release_component(self, handle: LockHandle, index: int) -> None:
        """Release the part of a lock that covers one component. Raises PrefixError if it does not cover it."""
        locked = self.locked(handle)
        kept = tuple(segment for segment in locked.segments if segment.index != index)
        if len(kept) == len(locked.segments):
            raise PrefixError(f"handle {handle.number} does not cover {self._forest.config.name(index)}")
        self._forest.locked_paths[handle.number] = LockedPath(locked.node, locked.tier, kept)
        for segment in locked.segments:
            if segment.index == index:
                self._shift(locked.node, segment, locked.tier, -1)

    def locked(self, handle: LockHandle) -> LockedPath:
        """Returns the path that a handle covers. Raises StaleHandle if it was released."""
        locked = self._forest.locked_paths.get(handle.number)
        if locked is None or locked.node.id != handle.node or locked.tier is not handle.tier:
            raise StaleHandle(f"handle {handle.number} for node {handle.node} is not out")
        return locked

    def needs(self, node: Node, skip: Sequence[str] = ()) -> dict[str, int]:
        """See PrefixTree.lock_needs."""
        config, path = self._forest.config, node.path()
        free = [each for each in path if each.pages is not None and not each.locks]
        found = {FULL: sum(each.end - each.start for each in free)}
        for segment in segments(self._forest, node, skip):
            component = config.components[segment.index]
            free = [each for each in path if each.end > segment.first]
            free = [each for each in free if (own := each.held[segment.index]).pages is not None and not own.locks]
            found[component.name] = sum(each.end - each.start if component.per_page else 1 for each in free)
        return found

    def pages(self, handles: Iterable[LockHandle]) -> dict[str, int]:
        """See PrefixTree.locked_pages."""
        config, forest = self._forest.config, self._forest
        found, seen = {FULL: 0, **{component.name: 0 for component in config.components}}, set[tuple[int, int]]()
        for locked in map(self.locked, handles):
            whole = LockedSegment(-1, 0, locked.node.end)
            for segment in (whole, *locked.segments):
                at, index = locked.node, segment.index
                while at.end > segment.first:
                    if at.end <= segment.stop and (index, at.id) not in seen:
                        seen.add((index, at.id))
                        if forest.ids(at, Tier.DEVICE, index) is not None:
                            per_page = index < 0 or config.components[index].per_page
                            found[config.name(index)] += at.end - at.start if per_page else 1
                    elif index < 0:
                        break  # all above it was counted with it
                    assert at.parent is not None
                    at = at.parent
        return found

    def _handle(self, node: Node, tier: Tier, segments: tuple[LockedSegment, ...]) -> LockHandle:
        for segment in segments:
            self._shift(node, segment, tier, 1)
        number = next(NUMBERS)
        self._forest.locked_paths[number] = LockedPath(node, tier, segments)
        return LockHandle(number, node.id, tier)

    def _release_host(self, node: Node) -> None:
        forest, at = self._forest, node
        forest.columns.clock += 1
        at.host_locks -= 1
        while not at.host_locks:
            if at.pages is None and at.host is not None and not at.locks:
                at.used = forest.columns.clock
                self._unpin(at)
            elif forest.writes_back:
                forest.columns.settle(at)
            assert at.parent is not None
            at = at.parent
            at.host_locks -= 1

    def _pin(self, node: Node) -> None:
        account, pages = self._forest.host, node.end - node.start
        account.evictable -= pages
        account.protected += pages
        account.order.discard(node)

    def _unpin(self, node: Node) -> None:
        account, pages = self._forest.host, node.end - node.start
        account.evictable += pages
        account.protected -= pages
        account.order.add(node)

    def _shift(self, node: Node, segment: LockedSegment, tier: Tier, by: int) -> None:
        """Add `by` to the lock count of a segment of the path that ends at `node`."""
        device, host = (by, 0) if tier is Tier.DEVICE else (0, by)
        self._forest.columns.shift(node, segment.index, segment.first, segment.stop, device, host)
