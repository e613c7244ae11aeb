"""PrefixTree maps prompt prefixes to KV pages on each tier, and chooses which pages are evicted.

The tree decides, the caller executes. Pages belong to the caller's pools. A page id held by the tree or an operation is
used by it alone, and comes back exactly once: in a FreePages action, or as an operation's remainder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvmover.c_core import NATIVE
from kvmover.cache.prefix.check import check
from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.prefix.components import FULL, Sidecar, TreeComponent
from kvmover.cache.prefix.copies import CopyRecords, FetchRecord, TierCopy, land, land_held, offered
from kvmover.cache.prefix.evict import MOST_PAGES, Eviction, due_pages
from kvmover.cache.prefix.eviction_policy import LRU, EvictionPolicy
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.hashes import PrefixNamespace, TokenIds, each_hash
from kvmover.cache.prefix.insert import Insertion, Offer
from kvmover.cache.prefix.keys import DEFAULT_NAMESPACE, NO_IDS, KeyUnits, PageIds, RadixKey, page_array, words
from kvmover.cache.prefix.kv_events import BlockStored, Given, Journal, KVEvent, Sink, path_stored
from kvmover.cache.prefix.locks import Locks, segments
from kvmover.cache.prefix.match import Descent, descend, join, matched, walk
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.results import (
    ROOT,
    ActionList,
    Extended,
    FreePages,
    Inserted,
    LockHandle,
    Match,
    PageArray,
    Sizes,
    Tier,
)
from kvmover.cache.prefix.straight_steps import StraightSteps
from kvmover.cache.prefix.tree_config import DeviceOnly, EvictionGranularity, Tiers, TreeConfig, WriteBack
from kvmover.errors import PrefixError
from kvmover.fields import member

#: The most pages of an eviction's step; the most leaves, where C and where Python evicts them. With leaves of one page
#: a step took 0.06 and 0.28 ms, the longest of thousands 0.5 and 0.7 (perf.bench_prefix shapes).
_STEP_PAGES, _STEP_LEAVES, _PYTHON_STEP_LEAVES = 8192, 128, 32


class PrefixTree:
    """A prefix tree of KV pages, each found by its tokens and all tokens before it. Only whole pages are kept.

    Not thread-safe: threads take turns. Page ids are below 2**31. An id in use, or named twice in a call, raises
    PrefixError before any change, unless the tree holds it at the same position. An unknown node id raises StaleHandle.

    `sink` receives each event after the change. If it raises, the change stays; undelivered events and actions come
    with the next call.

    >>> tree = PrefixTree(page_tokens=2)
    >>> first = tree.insert([1, 2, 3, 4], [10, 11])
    >>> match = tree.match([1, 2, 3, 4, 5])
    >>> match.tokens, match.page_ids.tolist()
    (4, [10, 11])
    >>> tree.insert([1, 2, 9, 9], [20, 21]).page_ids().tolist()  # page 20 holds what page 10 does
    [20]
    >>> tree.match([1, 2, 3, 0]).page_ids.tolist()
    [10]
    >>> tree.evict(1).page_ids().tolist()  # of the leaves, [3, 4] was used least recently
    [11]
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        components: Sequence[TreeComponent | Sidecar] = (),
        policy: EvictionPolicy = LRU,
        grain: EvictionGranularity = EvictionGranularity.PAGE,
        tiers: Tiers | None = None,
        units: KeyUnits = KeyUnits.PLAIN,
        sink: Sink | None = None,
    ) -> None:
        own = tuple(each for each in components if not isinstance(each, Sidecar))
        sidecars = tuple(each for each in components if isinstance(each, Sidecar))
        self.config = TreeConfig(page_tokens, own, sidecars, policy, grain, tiers or DeviceOnly(), units)
        self._forest = Forest(self.config, journal=None if sink is None else Journal(self.config, sink))
        #: A faster implementation of the same calls, for the trees that it can serve.
        self._straight = StraightSteps.of(self._forest)
        self._locks = Locks(self._forest)
        self._copies = CopyRecords(self._forest, self._locks)
        self._fetches: dict[int, FetchRecord] = {}

    # Lookup

    def key(self, tokens: TokenIds, namespace: PrefixNamespace = DEFAULT_NAMESPACE) -> RadixKey:
        """Returns `tokens` as a key, converted once for all calls about a prompt."""
        return RadixKey.of(tokens, namespace, self.config.units)

    def match(
        self,
        tokens: RadixKey | TokenIds,
        *,
        namespace: PrefixNamespace | None = None,
        limit_tokens: int | None = None,
    ) -> Match:
        """Returns the cached prefix of the prompt's first `limit_tokens` tokens, and marks its path as used.

        A request that must compute a token passes its length less one. A node that the prompt leaves midway is split
        and marked only when the result is locked or inserted below. Lock the result before the next call that may
        evict, or it goes stale. Raises PrefixError if a key's namespace or units differ.
        """
        if self._straight is not None:
            return self._straight.match(self._key(tokens, namespace), limit_tokens)
        path, inside, pages = self._descend(tokens, namespace, limit_tokens)
        if not path:
            return matched(self._forest, (path, inside, pages))
        if not self.config.components:
            self._forest.touch(path[::-1])
            return matched(self._forest, (join(self._forest, path), inside, pages))
        found = matched(self._forest, (path, inside, pages))
        self._forest.touch(path[::-1], found.best_tokens // self.config.page_tokens)
        join(self._forest, path)
        return found

    def look(
        self,
        tokens: RadixKey | TokenIds,
        *,
        namespace: PrefixNamespace | None = None,
        limit_tokens: int | None = None,
    ) -> Match:
        """Returns the result of `match` without marking use, for schedulers that poll every waiting request.

        >>> tree = PrefixTree(page_tokens=1)
        >>> first, second = tree.insert([1], [10]), tree.insert([2], [11])
        >>> tree.look([1]).tokens, tree.evict(1).page_ids().tolist()  # [1] is still the one used least recently
        (1, [10])
        """
        return matched(self._forest, self._descend(tokens, namespace, limit_tokens))

    def page_ids(self, node_id: int, first_page: int = 0) -> PageArray:
        """Returns device pages of attention KV from `first_page` to the node's end, int32, [page], read-only.

        Raises PrefixError if one is not on the device.
        """
        node, end = self._forest.covering(node_id)
        path = node.path()
        path.reverse()
        if first_page:
            path = [node for node in path if node.end > first_page]
        if not path or end <= first_page:
            return NO_IDS
        if any(node.pages is None for node in path):
            raise PrefixError(f"the path to node {node_id} is not on the device from page {first_page} on")
        start = path[0].start
        return page_array(self._forest.columns.gather(path, end - start)[max(0, first_page - start) * ID_BYTES :])

    def lock_needs(self, node_id: int, *, skip: Sequence[str] = ()) -> dict[str, int]:
        """Returns, by component, the evictable device pages that a lock of the node would protect.

        The lock leaves `free + sizes(c).evictable - lock_needs(node)[c]` pages of c for tokens still to be computed.
        """
        return self._locks.needs(self._forest.view(node_id), skip)

    def page_hashes(self, node_id: int) -> list[bytes]:
        """Returns the chained SHA-256 of each page from the root to the node's end; computed once."""
        path = self._forest.view(node_id).path()
        return each_hash(b"".join(page_hashes(node, self.config.page_words) for node in reversed(path)))

    def path_stored(self, node_id: int, tier: Tier, first_page: int, pages: int) -> BlockStored:
        """Returns the event of `pages` pages of the path to a node, from `first_page` on, stored on a tier.

        Raises PrefixError if `tier` is no Tier.
        """
        tier = member(Tier, tier, "tier", PrefixError)
        return path_stored(self._forest.view(node_id), self.config, tier, first_page, first_page + pages)

    def sizes(self, component: str = FULL, tier: Tier = Tier.DEVICE) -> Sizes:
        """Returns a component's pages on a tier. A host page also on the device counts as protected.

        Raises PrefixError for Tier.STORAGE or an unknown component.
        """
        tier = member(Tier, tier, "tier", PrefixError)
        if tier is Tier.STORAGE:
            raise PrefixError("tier = storage; the tree holds no pages there, a page store does")
        index, forest = self.config.index(component), self._forest
        accounts = forest.held_device if tier is Tier.DEVICE else forest.held_host
        account = accounts[index] if index >= 0 else forest.device if tier is Tier.DEVICE else forest.host
        return Sizes(account.evictable, account.protected)

    def __len__(self) -> int:
        """Returns the number of nodes without roots."""
        return len(self._forest.nodes) - 1

    # Locks

    def lock(self, node_id: int, *, skip: Sequence[str] = ()) -> LockHandle:
        """Lock a prefix on the device and, of components not in `skip`, the window or state that its end needs.

        Locks count, and handles survive splits. Locking ROOT has no effect.
        """
        if self._straight is not None:
            return self._straight.lock(node_id, skip)
        node = self._forest.node(node_id)
        return self._locks.device(node, segments(self._forest, node, skip))

    def lock_host(self, node_id: int) -> LockHandle:
        """Lock a prefix's host copies while they are read; its device pages may be evicted.

        Raises PrefixError for pages of which none is on the host.
        """
        node = self._forest.node(node_id)
        path = node.path()
        if path and all(each.host is None and all(held.host is None for held in each.held) for each in path):
            raise PrefixError(f"node {node_id} has no copy on the host to keep")
        return self._locks.host(node, segments(self._forest, node))

    def unlock(self, handle: LockHandle) -> None:
        """Release a lock. Raises StaleHandle if it was released before."""
        if self._straight is None or not self._straight.unlock(handle):
            self._locks.release(handle)

    def unlock_component(self, handle: LockHandle, component: str) -> None:
        """Release the part of a lock that covers one component, such as a window that decoding has left.

        Raises PrefixError if the handle does not cover it.
        """
        self._locks.release_component(handle, self.config.index(component))

    def locked_pages(self, handles: Iterable[LockHandle]) -> dict[str, int]:
        """Returns, by component, the device pages under these locks, each counted once. O(nodes).

        Raises StaleHandle if a lock was released.
        """
        return self._locks.pages(handles)

    # Insertion

    def insert(
        self,
        tokens: RadixKey | TokenIds,
        page_ids: PageIds,
        *,
        first_page: int = 0,
        counted_tokens: int = 0,
        held: Mapping[str, PageIds] | None = None,
        priority: int = 0,
        namespace: PrefixNamespace | None = None,
    ) -> Inserted:
        """Insert the whole pages of `tokens`: `page_ids` from `first_page` on, the tree's own locked pages before it.

        A page that the tree has on the device keeps its id, and a different new id is freed in the actions; a page on
        the host alone takes the new id. `held` are further components' ids for the last pages (a state: the very last),
        treated alike. A request that inserts in chunks passes the previous chunk's end as `counted_tokens`, to count as
        one use. `priority` only raises. Raises PrefixError before any change if ids do not fit, or a page before
        `first_page` is not on the device.
        """
        key, ids = self._key(tokens, namespace), words(page_ids)
        if self._straight is not None:
            kept = self._straight.insert(key, ids, first_page, counted_tokens, held)
            if kept is not None:
                return self._told(kept)
        offer = Offer.of(
            self._forest,
            key,
            ids,
            first_page=first_page,
            counted_tokens=counted_tokens,
            held=held,
            priority=priority,
        )
        return self._outcome(Insertion(self._forest, offer, self._copies.loading).run())

    def extend(
        self,
        handle: LockHandle,
        tokens: RadixKey | TokenIds,
        page_ids: PageIds,
        *,
        held: Mapping[str, PageIds] | None = None,
        priority: int = 0,
        skip: Sequence[str] = (),
        namespace: PrefixNamespace | None = None,
    ) -> Extended:
        """Insert the whole pages of `tokens` below the prefix that `handle` locks, and move the lock to their end.

        `tokens` begin at the locked prefix's end, so a page filled in decode costs one page, not the prompt. `handle`
        is released; `Extended.handle` locks old and new pages, without components in `skip`. Use
        `Extended.kept_page_ids` from now on: the tree's own id where it had the page. `namespace` applies below ROOT;
        elsewhere it must be the path's. Raises PrefixError, and leaves `handle` locked, for a host lock, a prefix not
        on the device, or ids that do not fit.

        >>> tree = PrefixTree(page_tokens=2)
        >>> prompt = tree.extend(tree.lock(ROOT), [1, 2, 3, 4], [10, 11])
        >>> step = tree.extend(prompt.handle, [5, 6], [12])
        >>> step.tokens, step.kept_page_ids.tolist(), tree.sizes().protected
        (6, [12], 3)
        """
        node = self._locks.locked(handle).node
        if handle.tier is not Tier.DEVICE or node.pages is None:
            raise PrefixError(f"handle {handle.number} keeps no prefix on the device, below which there is nothing yet")
        key = self._key_below(node, tokens, namespace)
        first = node.end
        offer = Offer.below(self._forest, key, words(page_ids), first, held, priority)
        above = node if node.parent is not None else None
        kept = self._outcome(Insertion(self._forest, offer, self._copies.loading, above).run())
        end = self._forest.node(kept.node) if kept.node != ROOT else node
        longer = self._locks.device(end, segments(self._forest, end, skip))
        self._locks.release(handle)
        ids = self.page_ids(end.id, first)
        return Extended(
            kept.actions, end.id, end.end * self.config.page_tokens, kept.known_tokens, kept.backups, longer, ids
        )

    # Eviction

    def evict(self, pages: int, component: str = FULL, *, room: PageIds = ()) -> ActionList:
        """Evict at least `pages` device pages of a component, or all unlocked. Backed pages stay on the host.

        Attention KV goes from the ends of leaves, no more than requested; with further components, or
        EvictionGranularity.NODE, by whole nodes. `room` are free host pages of a write-back tree (PrefixError in
        others); those not in a CopyOut stay the caller's.
        """
        return self.evict_pools({component: pages}, room=room)

    def evict_pools(self, pages: Mapping[str, int], *, room: PageIds = ()) -> ActionList:
        """Evict from several components as `evict`: pages freed with the first count for the others.

        A leaf takes its window and state along, so separate calls would evict more than needed.
        """
        return self._evict_pools(pages, room, MOST_PAGES)

    def _evict_pools(self, pages: Mapping[str, int], room: PageIds, leaves: int) -> ActionList:
        self._forest.tell_room()
        if self._straight is not None:
            given_up = self._straight.evict(pages, room, leaves)
            if given_up is not None:
                return self._told(given_up)
        counts = {self.config.index(name): due_pages(count) for name, count in pages.items()}
        return self._outcome(Eviction(self._forest, room, leaves).pools(counts))

    def evict_in_steps(self, pages: Mapping[str, int]) -> Iterator[ActionList]:
        """Yield the results of steps that together evict what `evict_pools` would, each well below 1 ms.

        A step is at most 8192 pages of a component, and 128 leaves; by whole nodes alone, with a host tier or without
        the C core, 32 leaves. Other threads run between two. Carry each out before the next. Write-back trees delete:
        they get no room.

        >>> tree = PrefixTree(page_tokens=1)
        >>> for leaf in range(600):
        ...     kept = tree.insert([leaf], [leaf])
        >>> [len(step.page_ids()) for step in tree.evict_in_steps({FULL: 500})]
        [128, 128, 128, 116]
        """
        by_c = self._straight is not None and not self._forest.hosted and NATIVE is not None
        leaves = _STEP_LEAVES if by_c else _PYTHON_STEP_LEAVES
        left: dict[str, int] = {}
        for name in sorted(pages, key=self.config.index):
            left[name] = due_pages(pages[name])
        while left:
            name = next(iter(left))
            missing = left[name]
            # Pages that a component's further steps free count for the others.
            step = left if missing <= _STEP_PAGES else {name: _STEP_PAGES}
            given = self._evict_pools(step, (), leaves)
            for each in list(left):
                left[each] -= len(given.page_ids(each))
                if left[each] <= 0 or (each == name and left[each] == missing):
                    del left[each]
            if given.actions:
                yield given

    def demote(self, node_id: int, *, room: PageIds = ()) -> ActionList:
        """Evict the device pages at the end of a path that have a host copy, or get one in `room` as in `evict`.

        Stops at a page that is locked, has device pages below it, or would be lost.
        """
        end = self._forest.node(node_id)
        return self._outcome(Eviction(self._forest, room).path(end))

    def evict_host(self, pages: int, component: str = FULL) -> ActionList:
        """Evict at least `pages` host pages of a component, or all evictable.

        Attention KV goes from childless host-only nodes; a write-back tree evicts copies of device pages first.
        """
        if self._straight is not None and component == FULL:
            given_up = self._straight.evict_host(due_pages(pages))
            if given_up is not None:
                return self._told(given_up)
        index, count, eviction = self.config.index(component), due_pages(pages), Eviction(self._forest)
        return self._outcome(eviction.host(count) if index < 0 else eviction.held_host(index, count))

    def reset(self) -> ActionList:
        """Forget all nodes and free their pages. Raises PrefixError while a lock or operation is outstanding."""
        if self._forest.locked_paths:
            raise PrefixError(
                f"{len(self._forest.locked_paths)} locks and operations are out: a reset would free what they use"
            )
        freed: dict[tuple[int, Tier], list[bytes]] = {}
        for node in self._forest:
            for index in range(-1, len(self.config.components)):
                for tier in (Tier.DEVICE, Tier.HOST):
                    if ids := self._forest.ids(node, tier, index):
                        freed.setdefault((index, tier), []).append(ids)
        self._forest.clear()
        if self._forest.journal is not None:
            self._forest.journal.cleared()
        return self._outcome(
            ActionList(
                tuple(
                    FreePages(self.config.name(i), tier, page_array(b"".join(ids))) for (i, tier), ids in freed.items()
                )
            )
        )

    # Copies between tiers

    def is_backed(self, node_id: int) -> bool:
        """Returns True if the whole path's attention KV is on the host, ready to be stored or fetched below."""
        return all(node.host is not None for node in self._forest.view(node_id).path())

    def backup_needs(self, node_id: int) -> dict[str, int]:
        """Returns the host ids, by component, that `begin_backup` takes: for device-only pages not in flight."""
        return self._copies.needs(self._forest.node(node_id), Tier.HOST)

    def load_needs(self, node_id: int) -> dict[str, int]:
        """Returns the device ids, by component, that `begin_load` takes. Raises PrefixError if a page is in flight."""
        return self._copies.needs(self._forest.node(node_id), Tier.DEVICE)

    def begin_backup(self, node_id: int, page_ids: Mapping[str, PageIds]) -> TierCopy:
        """Begin a copy of the path's device pages to the host, root first. They are locked until `end`, then backed.

        Raises PrefixError unless `page_ids` are as many as `backup_needs` returns, or in a tree without WriteThrough.
        """
        self._needs_host()
        if isinstance(self.config.tiers, WriteBack):
            raise PrefixError("a tree that writes back copies on eviction only")
        return self._copies.begin(self._forest.node(node_id), Tier.HOST, page_ids)

    def begin_load(self, node_id: int, page_ids: Mapping[str, PageIds]) -> TierCopy:
        """Begin a copy of the pages that `load_needs` counts to the device. They match there after `end`.

        Raises PrefixError unless `page_ids` are as many as `load_needs` returns, or without a host tier.
        """
        self._needs_host()
        return self._copies.begin(self._forest.node(node_id), Tier.DEVICE, page_ids)

    def begin_store(self, node_id: int, first_page: int = 0) -> TierCopy:
        """Begin a copy of the path's host pages from `first_page` on to storage, by hash. They are locked until `end`.

        Raises PrefixError if one is not on the host.
        """
        self._needs_host()
        return self._copies.store(self._forest.node(node_id), first_page)

    def begin_fetch(
        self,
        tokens: RadixKey | TokenIds,
        first_page: int,
        page_ids: PageIds,
        held: Mapping[str, PageIds] | None = None,
        *,
        namespace: PrefixNamespace | None = None,
    ) -> int:
        """Begin a read of the prompt's pages from `first_page` on from storage into host pages `page_ids`.

        The path before it is locked until `end`. `held` are further components' host ids for the last pages (a state:
        the very last), kept only if all pages are read. Returns the operation for `end`. Raises PrefixError if ids do
        not fit, or the path before `first_page` is missing (under write-through: on the host).
        """
        key = self._key(tokens, namespace)
        ids = offered(self._forest, key, page_ids, first_page)
        path = walk(self._forest, key, first_page * self._forest.page_bytes)
        self._forest.touch(path[::-1])
        reached = path[-1].end if path else 0
        backed = isinstance(self.config.tiers, WriteBack) or all(node.host is not None for node in path)
        if reached < first_page or not backed:
            raise PrefixError(f"a fetch from page {first_page} on needs the path up to there on the host")
        anchor = path[-1] if path else self._forest.node(ROOT)
        others = tuple((self.config.index(name), words(row)) for name, row in (held or {}).items())
        self._forest.claim([(Tier.HOST, index, row) for index, row in ((-1, ids), *others)])
        op = self._copies.number()
        self._fetches[op] = FetchRecord(key, first_page, ids, self._locks.host(anchor), others)
        return op

    def end(self, op: int, pages_done: int | None = None) -> ActionList:
        """End an operation of which all pages, or the first `pages_done`, were copied. Returns frees of the other ids.

        Pages whose ancestors are in flight wait for that end, and are kept or freed then. Raises StaleHandle if the
        operation is not under way.
        """
        fetch = self._fetches.pop(op, None)
        if fetch is None:
            return self._outcome(self._copies.end(op, pages_done))
        count = len(fetch.ids) // ID_BYTES
        cut = (count if pages_done is None else min(count, max(0, pages_done))) * ID_BYTES
        self._locks.release(fetch.handle)
        landed = land(self._forest, fetch.key, fetch.first, fetch.ids[:cut])
        rest = (FreePages(FULL, Tier.HOST, page_array(fetch.ids[cut:])),) if fetch.ids[cut:] else ()
        if cut == len(fetch.ids):
            held = land_held(self._forest, fetch.key, fetch.held)
        else:
            held = tuple(FreePages(self.config.name(index), Tier.HOST, page_array(ids)) for index, ids in fetch.held)
        return self._outcome(ActionList((*landed.actions, *rest, *held)))

    # Checks

    def resident(self) -> Iterator[KVEvent]:
        """Yield device and host contents as events that bring a new router to the tree's state, parents first.

        Consume all before the tree changes. O(tokens), and computes missing page hashes.
        """
        events = list[KVEvent]()
        journal = Journal(self.config, events.append)
        for node in self._forest:
            for tier, ids in ((Tier.DEVICE, node.pages), (Tier.HOST, node.host)):
                if ids is not None:
                    journal.stored(node, tier)
            journal.told(ActionList())
            yield from events
            events.clear()

    def ids(self, component: str = FULL, tier: Tier = Tier.DEVICE) -> set[int]:
        """Returns every page id of a component held on a tier, operations included. O(pages), for checks."""
        tier = member(Tier, tier, "tier", PrefixError)
        index, forest = self.config.index(component), self._forest
        rows = [forest.ids(node, tier, index) or b"" for node in forest]
        records = [record for record in self._copies.records.values() if record.dst is tier]
        rows += [part.dst for record in records for part in record.parts if part.index == index]
        if tier is Tier.HOST:
            for fetch in self._fetches.values():
                rows += [fetch.ids] if index < 0 else [ids for held, ids in fetch.held if held == index]
        return {page for row in rows for page in page_array(row).tolist()}

    def check(self) -> None:
        """Recompute and assert the invariants. O(pages). Raises InvariantBroken."""
        fetched = [row for fetch in self._fetches.values() for row in ((-1, fetch.ids), *fetch.held)]
        check(self._forest, self._copies.records.values(), fetched)

    def _outcome(self, given: Given) -> Given:
        """Release the ids that a result frees, and deliver events. Returns the result."""
        forest = self._forest
        for action in given.actions:
            if isinstance(action, FreePages):
                index = self.config.index(action.component)
                forest.in_use[action.tier, index].release(action.page_ids.tobytes())
        return self._told(given)

    def _told(self, given: Given) -> Given:
        """Deliver events. Returns the result."""
        journal = self._forest.journal
        return given if journal is None else journal.told(given)

    def _needs_host(self) -> None:
        if not self._forest.hosted:
            raise PrefixError("this tree has no host tier")
        if self._forest.journal is not None and self._forest.journal.owes_copies:
            raise PrefixError("a sink's error kept copies to the host from you: evict(0) returns them, carry them out")

    def _descend(
        self, tokens: RadixKey | TokenIds, namespace: PrefixNamespace | None, limit_tokens: int | None
    ) -> Descent:
        key = self._key(tokens, namespace)
        page_bytes = self._forest.page_bytes
        pages = len(key.data) // page_bytes
        if limit_tokens is not None:
            pages = max(0, min(pages, limit_tokens // self.config.page_tokens))
        return descend(self._forest, key, pages * page_bytes)

    def _key_below(self, node: Node, tokens: RadixKey | TokenIds, namespace: PrefixNamespace | None) -> RadixKey:
        """Returns the key in the path's namespace, or below ROOT the call's. Raises PrefixError if they differ."""
        if node.parent is None:
            return self._key(tokens, namespace)
        own = node.path()[-1].parent
        assert own is not None
        key = self._key(tokens, own.namespace if namespace is None and not isinstance(tokens, RadixKey) else namespace)
        if key.namespace != own.namespace:
            raise PrefixError(f"the path is of another namespace than the call: {own.namespace}, {key.namespace}")
        return key

    def _key(self, tokens: RadixKey | TokenIds, namespace: PrefixNamespace | None) -> RadixKey:
        """Returns the key. Raises PrefixError if its namespace or units differ."""
        if not isinstance(tokens, RadixKey):
            return RadixKey.of(tokens, namespace or DEFAULT_NAMESPACE, self.config.units)
        if namespace is not None and namespace != tokens.namespace:
            raise PrefixError(f"the key is of another namespace than the call: {tokens.namespace}, {namespace}")
        if tokens.units is not self.config.units:
            raise PrefixError(f"a key of {tokens.units.name} units is none of this tree's {self.config.units.name}")
        return tokens
