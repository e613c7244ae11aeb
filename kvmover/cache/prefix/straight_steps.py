"""StraightSteps runs a tree's most frequent calls in straight lines: match, lock, unlock, insert, evict.

They are for trees that evict by use and by pages, and keep attention KV alone or, with the C core, all components on
one tier. Results equal those of the general implementation, the definition. A call that does not fit returns None
(`unlock`: False) before any change, and the general implementation runs it or raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvmover.cache.prefix.columns import ID_BYTES, PagesInUse, TierEviction
from kvmover.cache.prefix.components import FULL
from kvmover.cache.prefix.evict import due_pages
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.hashes import HASH_BYTES
from kvmover.cache.prefix.insert import due_backup
from kvmover.cache.prefix.keys import PageIds, RadixKey, page_array, unlike, words
from kvmover.cache.prefix.locks import NUMBERS, segments
from kvmover.cache.prefix.match import MISS, SHORTEST_RUN, backed, branches, descend, join, waits
from kvmover.cache.prefix.node import LockedPath, LockedSegment, Node
from kvmover.cache.prefix.results import (
    ROOT,
    Action,
    ActionList,
    CopyLeg,
    CopyOut,
    FreePages,
    Inserted,
    LoadBack,
    LockHandle,
    Match,
    Tier,
)
from kvmover.cache.prefix.tree_config import EvictionGranularity, WriteBack

_DEVICE = Tier.DEVICE
_NOTHING = ActionList()


class StraightSteps:
    """The straight steps of one tree, on its Forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._columns = forest.columns
        self._device_ids, self._host_ids = forest.in_use[Tier.DEVICE, -1], forest.in_use[Tier.HOST, -1]
        self._page_tokens, self._page_words = forest.config.page_tokens, forest.config.page_words
        #: Components with the ids of attention KV.
        self._names = (FULL, *(sidecar.name for sidecar in forest.config.sidecars))
        #: The further components in order and as a set, and the ids in use of attention KV and of each.
        self._held = tuple(component.name for component in forest.config.components)
        self._own = {*self._held}
        self._in_use = tuple(forest.in_use[_DEVICE, index] for index in range(-1, len(self._held)))
        self._writes_back = isinstance(forest.config.tiers, WriteBack)

    @classmethod
    def of(cls, forest: Forest) -> StraightSteps | None:
        """Returns the steps of a tree that can take them, None for another tree."""
        config = forest.config
        able = not config.components or (forest.columns.evict_nodes is not None and not forest.hosted)
        return cls(forest) if able and forest.by_use and config.grain is EvictionGranularity.PAGE else None

    def match(self, key: RadixKey, limit_tokens: int | None) -> Match:
        """See PrefixTree.match."""
        forest, columns = self._forest, self._columns
        root = columns.roots.get(key.namespace)
        if root is None:
            return MISS
        data, stop = key.data, len(key.data)
        if limit_tokens is not None:
            stop = min(stop, max(0, limit_tokens) // self._page_tokens * forest.page_bytes)
        if forest.hosted:
            return self._on_tiers(root, key, stop)
        last, found, whole, node, end, ids, held = columns.find(root, data, stop)
        if last is None:
            return MISS
        if whole >= SHORTEST_RUN:
            join(forest, last.path()[::-1][:whole])
        node_id = last.id if found == last.end else forest.place(last, found)
        tokens = end * self._page_tokens
        if not held:
            return Match(tokens, page_array(ids), node_id, tokens, node_id, tokens, node_id)
        if node is not last:
            node_id = ROOT if node is None else node.id
        full = found * self._page_tokens
        return Match(
            tokens,
            page_array(ids),
            node_id,
            tokens,
            node_id,
            full,
            node_id,
            (),
            branches(forest, full, tokens) if full > tokens else (),
            tuple(zip(self._held, map(page_array, held), strict=True)),
        )

    def _on_tiers(self, root: Node, key: RadixKey, stop: int) -> Match:
        """Returns the Match of the first `stop` bytes of a key. The front of its path is on the device."""
        forest = self._forest
        path, inside, inner = self._columns.descend(root, key.data, stop)
        if path:
            self._columns.touch(path[::-1])
            if len(path) >= SHORTEST_RUN:
                path = join(forest, path)
        if inside is not None:
            end = inside.start + inner
            node_id = forest.place(inside, end)
            path.append(inside)
        elif path:
            end, node_id = path[-1].end, path[-1].id
        else:
            return MISS
        tokens, ids_of = end * self._page_tokens, self._columns.gather
        host_node = node_id if self._writes_back else self._backed(path, end, node_id)
        device = next((at for at, node in enumerate(path) if node.pages is None), None)
        if device is None:
            return Match(tokens, page_array(ids_of(path, end)), node_id, tokens, node_id, tokens, host_node)
        above, first = path[:device], path[device].start
        ids = page_array(b"".join([node.host or b"" for node in path[device:]])[: (end - first) * ID_BYTES])
        positions = np.arange(first, end, dtype=np.int32)
        return Match(
            first * self._page_tokens,
            page_array(ids_of(above, first)),
            above[-1].id if above else MISS.device_node,
            tokens,
            node_id,
            tokens,
            host_node,
            tuple([LoadBack(name, positions, ids) for name in self._names]),
            waits=waits(path),
        )

    def _backed(self, path: list[Node], end: int, node_id: int) -> int:
        return node_id if path[-1].host is not None and path[-1].end > end else backed(self._forest, path)

    def lock(self, node_id: int, skip: Sequence[str]) -> LockHandle:
        """See PrefixTree.lock."""
        forest, columns = self._forest, self._columns
        node = forest.nodes.get(node_id) or forest.node(node_id)
        columns.lock(node)
        parts: tuple[LockedSegment, ...] = ()
        if self._held:
            parts = segments(forest, node, skip)
            for part in parts:
                columns.shift(node, part.index, part.first, part.stop, 1, 0)
        number = next(NUMBERS)
        forest.locked_paths[number] = LockedPath(node, _DEVICE, parts)
        return LockHandle(number, node.id, _DEVICE)

    def unlock(self, handle: LockHandle) -> bool:
        """See PrefixTree.unlock. Returns False if the lock was released, or is not a device lock."""
        locked_paths = self._forest.locked_paths
        locked = locked_paths.get(handle.number)
        if locked is None or locked.node.id != handle.node or not (locked.tier is handle.tier is _DEVICE):
            return False
        del locked_paths[handle.number]
        node, columns = locked.node, self._columns
        for part in locked.segments:
            columns.shift(node, part.index, part.first, part.stop, -1, 0)
        columns.unlock(node)
        return True

    def insert(
        self,
        key: RadixKey,
        ids: bytes,
        first_page: int,
        counted_tokens: int,
        held: Mapping[str, PageIds] | None,
    ) -> Inserted | None:
        """See PrefixTree.insert.

        Returns None if ids do not fit, pages below `first_page` are not the tree's, a page is on the host alone, or an
        id is in use or repeated.
        """
        forest, columns, data = self._forest, self._columns, key.data
        page_bytes = forest.page_bytes
        pages = len(data) // page_bytes
        if held and not held.keys() <= self._own:
            return None
        root = None if forest.hosted else columns.roots.get(key.namespace)
        if root is not None:
            brought = self._brought(held) if held else ()
            done = columns.insert(root, data, ids, first_page, self._device_ids, brought)
            if done is not None:
                node, known, twice = done
                if known < pages:
                    self._grown(key, node, known)
                actions = self._freed([FULL, *[self._held[row[0]] for row in brought]], twice) if twice else ()
                return Inserted(actions, node.id, pages * self._page_tokens, known * self._page_tokens)
        if held or self._held:
            return None
        if not pages or not 0 <= first_page <= pages or len(ids) != (pages - first_page) * ID_BYTES:
            return None
        path, inside, inner = descend(forest, key, pages * page_bytes)
        known = inside.start + inner if inside is not None else path[-1].end if path else 0
        deepest = inside or (path[-1] if path else None)
        if known < first_page or (deepest is not None and deepest.pages is None):
            return None
        double = _double(path, inside, inner, ids, first_page) if known > first_page else b""
        fresh = ids[(known - first_page) * ID_BYTES :]
        if self._device_ids.claim(double + fresh if double else fresh) >= 0:
            return None
        if double:
            self._device_ids.release(double)
        if inside is not None:
            path.append(forest.split(inside, inner))
        if forest.hosted:
            counted = counted_tokens // self._page_tokens
            for node in path:
                if node.end > counted:
                    node.hits += 1
        if known < pages:
            parent = path[-1] if path else forest.root(key.namespace)
            node = columns.grow(parent, data, pages, fresh)
            path.append(node)
            self._grown(key, node, known)
        columns.touch(path[::-1])
        actions = (FreePages(FULL, _DEVICE, page_array(double)),) if double else ()
        backups = due_backup(forest, path[::-1]) if forest.hits_due else ()
        return Inserted(actions, path[-1].id, pages * self._page_tokens, known * self._page_tokens, backups)

    def _brought(self, held: Mapping[str, PageIds]) -> tuple[tuple[int, bytes, PagesInUse], ...]:
        """Returns (index, ids, pages in use) of each component that brings ids."""
        rows: list[tuple[int, bytes, PagesInUse]] = []
        for name, page_ids in held.items():
            index, ids = self._held.index(name), words(page_ids)
            if ids:
                rows.append((index, ids, self._in_use[1 + index]))
        return tuple(rows)

    def _freed(self, names: Iterable[str], rows: Iterable[bytes]) -> tuple[Action, ...]:
        """Returns a FreePages of the device for each row that has ids."""
        actions: list[Action] = []
        for name, ids in zip(names, rows, strict=True):
            if ids:
                actions.append(FreePages(name, _DEVICE, page_array(ids)))
        return tuple(actions)

    def _grown(self, key: RadixKey, node: Node, first_page: int) -> None:
        """Give a path's new nodes, from `first_page` on, the key's hashes, if any, and record that they were stored."""
        journal, names = self._forest.journal, key.known_hashes(self._page_words)
        if journal is None and names is None:
            return
        new = [node]
        while new[-1].start > first_page:
            above = new[-1].parent
            assert above is not None
            new.append(above)
        for each in reversed(new):
            if names is not None:
                each.hashes = names[each.start * HASH_BYTES : each.end * HASH_BYTES]
            if journal is not None:
                journal.stored(each, _DEVICE)

    def evict(self, wanted: Mapping[str, int], room: PageIds, leaves: int) -> ActionList | None:
        """See PrefixTree.evict_pools; at most `leaves` leaves go.

        Returns None if the core lacks the step, or the call may have to raise.
        """
        if self._held:
            return None if len(room) else self._evict_nodes(wanted, leaves)
        if len(wanted) != 1 or FULL not in wanted:
            return None
        pages = due_pages(wanted[FULL])
        if self._forest.hosted:
            evict = self._columns.evict_device
            if evict is None or leaves < pages or (len(room) and not self._writes_back):
                return None
            free = words(room) if len(room) else b""
            if free and self._host_ids.claim(free) >= 0:
                return None
            given_up = evict(pages, free)
            if free:
                self._host_ids.release(free[sum(len(dst) for _, _, dst in given_up[2]) :])
            return self._outcome(given_up)
        if len(room):
            return None
        freed = self._columns.evict(pages, leaves)
        if not freed:
            return _NOTHING
        self._device_ids.release(freed)
        return ActionList((FreePages(FULL, _DEVICE, page_array(freed)),))

    def _evict_nodes(self, wanted: Mapping[str, int], leaves: int) -> ActionList | None:
        evict, own = self._columns.evict_nodes, (FULL, *self._held)
        if evict is None or not wanted.keys() <= {*own}:
            return None
        pages = dict.fromkeys(own, 0)
        for name, count in wanted.items():
            pages[name] = due_pages(count)
        freed = evict(tuple(pages.values()), leaves)
        for in_use, ids in zip(self._in_use, freed, strict=True):
            in_use.release(ids)
        return ActionList(self._freed(own, freed))

    def evict_host(self, pages: int) -> ActionList | None:
        """Evict at least `pages` host pages, or all evictable, as `PrefixTree.evict_host` does. Returns None if the
        tree has no host tier or the core lacks the step.
        """
        evict = self._columns.evict_host
        return self._outcome(evict(pages)) if evict is not None and self._forest.hosted else None

    def _outcome(self, given_up: TierEviction) -> ActionList:
        """Returns the copies, then a FreePages for each tier."""
        device, host, copies = given_up
        actions = list[Action]()
        for first, src, dst in copies:
            positions = np.arange(first, first + len(src) // ID_BYTES, dtype=np.int32)
            ids = page_array(src), page_array(dst)
            actions.append(CopyOut(tuple([CopyLeg(name, positions, *ids) for name in self._names])))
        if device:
            self._device_ids.release(device)
            actions.append(FreePages(FULL, _DEVICE, page_array(device)))
        if host:
            self._host_ids.release(host)
            actions.append(FreePages(FULL, Tier.HOST, page_array(host)))
        return ActionList(tuple(actions))


def _double(path: list[Node], inside: Node | None, inner: int, ids: bytes, first_page: int) -> bytes:
    """Returns those `ids`, of a path from `first_page` on, that differ from the tree's at their position.

    The path ends after `inner` pages of `inside`, if given.
    """
    parts = [(node.start, node.end, node.pages) for node in path if node.end > first_page]
    if inside is not None and inside.start + inner > first_page and inside.pages is not None:
        parts.append((inside.start, inside.start + inner, inside.pages[: inner * ID_BYTES]))
    double = list[bytes]()
    for start, end, own in parts:
        mine = ids[max(0, start - first_page) * ID_BYTES : (end - first_page) * ID_BYTES]
        assert own is not None
        if not own.endswith(mine):
            double.append(unlike(mine, own[-len(mine) :]))
    return b"".join(double)
