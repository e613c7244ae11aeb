"""A PrefixTree knows which pages hold the KV of a prompt's first tokens, on which tier, and which go next.

The tree decides, the caller executes. Pages belong to the caller's pools; while the tree or a record in flight has an
id, nobody else may use it, and every id comes back exactly once: in a FreePages action, or as the remainder of an
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from kvmover.cache.prefix.check import check
from kvmover.cache.prefix.columns import ID_BYTES
from kvmover.cache.prefix.components import FULL, Sidecar, TreeComponent
from kvmover.cache.prefix.config import DeviceOnly, EvictionGranularity, Tiers, TreeConfig, WriteBack
from kvmover.cache.prefix.copies import CopyRecords, FetchRecord, TierCopy, land, land_held, offered
from kvmover.cache.prefix.events import Given, Journal, KVEvent, Sink
from kvmover.cache.prefix.evict import Eviction
from kvmover.cache.prefix.forest import Forest
from kvmover.cache.prefix.hashes import PrefixNamespace, TokenIds
from kvmover.cache.prefix.insert import Insertion, Offer
from kvmover.cache.prefix.keys import DEFAULT_NAMESPACE, NO_IDS, KeyUnits, PageIds, RadixKey, page_array, words
from kvmover.cache.prefix.locks import Locks
from kvmover.cache.prefix.match import Descent, descend, join, matched, walk
from kvmover.cache.prefix.node import Node, page_hashes
from kvmover.cache.prefix.plain_tree import PlainSteps
from kvmover.cache.prefix.policy import LRU, EvictionPolicy
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
from kvmover.errors import PrefixError
from kvmover.fields import member, whole

#: More pages than any pool has.
_MOST_PAGES = 1 << 31


def _count(pages: int) -> int:
    """How many pages an eviction is asked for, of any number: below 0 is none, and more than there are is all."""
    if pages.__class__ is not int:
        pages = whole(pages, "pages to give up", PrefixError, -inf)
    return 0 if pages < 0 else pages if pages < _MOST_PAGES else _MOST_PAGES


class PrefixTree:
    """Pages by the tokens they hold, after the pages before them. Only whole pages are kept.

    A tree is one thread's: threads that share it take turns by a lock of their own. Page ids are numbers below 2**31.
    One that the tree or an operation has already, or that a call names twice, is refused with PrefixError before
    anything is changed; in the place where it stands it may be given again.

    `sink` hears of each change once the call has made it. Its error ends the call and leaves the change: events that it
    did not take, and the actions that the call could not return, come with the next call.

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
        self._forest = Forest(self.config)
        if sink is not None:
            self._forest.journal = Journal(self.config, sink)
        #: The shorter way to the same answers, where the tree is plain.
        self._plain = PlainSteps.of(self._forest)
        self._locks = Locks(self._forest)
        self._copies = CopyRecords(self._forest, self._locks)
        self._fetches: dict[int, FetchRecord] = {}

    # Asking

    def key(self, tokens: TokenIds, namespace: PrefixNamespace = DEFAULT_NAMESPACE) -> RadixKey:
        """`tokens`, converted once for all calls about the same prompt."""
        return RadixKey.of(tokens, namespace, self.config.units)

    def match(
        self,
        tokens: RadixKey | TokenIds,
        *,
        namespace: PrefixNamespace | None = None,
        limit_tokens: int | None = None,
    ) -> Match:
        """What is cached of the prompt, of its first `limit_tokens` tokens at most; the path becomes the most recently
        used.

        A request that must compute at least one token asks with a limit of one less than it has. A node that the prompt
        leaves half way is neither split nor used before somebody locks the answer or inserts below it. Nothing is
        locked: lock before the next call that may evict, or the answer is stale.
        """
        if self._plain is not None:
            return self._plain.match(self._key(tokens, namespace), limit_tokens)
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
        """What `match` would answer, and nothing counts as used: for schedulers that ask for every waiting request.

        >>> tree = PrefixTree(page_tokens=1)
        >>> first, second = tree.insert([1], [10]), tree.insert([2], [11])
        >>> tree.look([1]).tokens, tree.evict(1).page_ids().tolist()  # [1] is still the one used least recently
        (1, [10])
        """
        return matched(self._forest, self._descend(tokens, namespace, limit_tokens))

    def page_ids(self, node_id: int, first_page: int = 0) -> PageArray:
        """Device pages of attention KV from `first_page` of the path to the node's end, int32, [page], read-only.

        Raises PrefixError where some of them are not on the device.
        """
        path = [node for node in self._forest.view(node_id).path() if node.end > first_page]
        rows = [node.pages for node in reversed(path) if node.pages is not None]
        if len(rows) < len(path):
            raise PrefixError(f"the path to node {node_id} is not on the device from page {first_page} on")
        return page_array(b"".join(rows)[max(0, first_page - path[-1].start) * ID_BYTES :]) if path else NO_IDS

    def lock_needs(self, node_id: int, *, skip: Sequence[str] = ()) -> dict[str, int]:
        """Evictable device pages, by component, that a lock of the node would protect. Nothing is changed.

        So `free + sizes(c).evictable - lock_needs(node)[c]` pages of c are left for what is still to be computed.
        """
        return self._locks.needs(self._forest.view(node_id), skip)

    def page_hashes(self, node_id: int) -> list[bytes]:
        """Hashes of all pages from the root to the node's end: SHA-256, chained, as in `hashes`. Computed on demand,
        then kept.
        """
        path = self._forest.view(node_id).path()
        return [name for node in reversed(path) for name in page_hashes(node, self.config.page_words)]

    def sizes(self, component: str = FULL, tier: Tier = Tier.DEVICE) -> Sizes:
        """Pages of a component on a tier. On the host, what is on the device too counts as protected."""
        tier = member(Tier, tier, "tier", PrefixError)
        if tier is Tier.STORAGE:
            raise PrefixError("tier = storage; the tree holds no pages there, a page store does")
        index, forest = self.config.index(component), self._forest
        accounts = forest.held_device if tier is Tier.DEVICE else forest.held_host
        account = accounts[index] if index >= 0 else forest.device if tier is Tier.DEVICE else forest.host
        return Sizes(account.evictable, account.protected)

    def __len__(self) -> int:
        """Nodes, of all namespaces."""
        return len(self._forest.nodes) - 1

    # Locking

    def lock(self, node_id: int, *, skip: Sequence[str] = ()) -> LockHandle:
        """Keep a prefix: its pages on the device, and of each component not skipped what its end needs (window or
        state).

        Locks count. A handle stays right whatever is split. ROOT can be locked, to no effect.
        """
        if self._plain is not None:
            return self._plain.lock(node_id)
        node = self._forest.node(node_id)
        return self._locks.device(node, self._locks.segments(node, skip))

    def lock_host(self, node_id: int) -> LockHandle:
        """Keep the host copies of a prefix, while something reads them; the device's may go.

        Raises PrefixError for a node without one.
        """
        node = self._forest.node(node_id)
        if node.host is None:
            raise PrefixError(f"node {node_id} has no copy on the host to keep")
        return self._locks.host(node, self._locks.segments(node))

    def unlock(self, handle: LockHandle) -> None:
        """Give a lock back, once. Raises StaleHandle otherwise."""
        if self._plain is None or not self._plain.unlock(handle):
            self._locks.release(handle)

    def unlock_component(self, handle: LockHandle, component: str) -> None:
        """Give back the part that covers one component: decoding has left the window."""
        self._locks.release_component(handle, self.config.index(component))

    def locked_pages(self, handles: Iterable[LockHandle]) -> dict[str, int]:
        """Device pages, by component, that these locks keep, each counted once. O(nodes). Raises StaleHandle."""
        return self._locks.pages(handles)

    # Keeping

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
        """Keep the whole pages of `tokens`, those from `first_page` on by `page_ids`; those before are the tree's and
        locked.

        Where the tree has a page already, its own stays and the one given comes back as a duplicate, unless it is the
        same. Where it has it on the host alone, it takes the one given. `held` are ids of further components, of the
        last pages (a state: of the very last), in the same way. Requests that insert in chunks say in `counted_tokens`
        how far the last chunk went, so that each request counts once as a use. `priority` only raises.
        """
        key, ids = self._key(tokens, namespace), words(page_ids)
        if self._plain is not None and not held:
            kept = self._plain.insert(key, ids, first_page, counted_tokens)
            if kept is not None:
                return kept
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
        """Keep the whole pages of `tokens` below the prefix that `handle` locks, and lock them instead of it.

        `tokens` begin where the locked prefix ends, so that a page filled while decoding costs that page and not the
        prompt. The handle is over; `Extended.handle` keeps what it kept and these pages, of components not in `skip`.
        `Extended.kept_page_ids` are the pages to use from now on: where the tree had one, its own, and the one given is
        among the actions. Below ROOT the namespace is the call's, elsewhere the path's. Raises PrefixError, and leaves
        the handle out, for a lock of the host, a prefix that is not on the device, or ids that do not fit.

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
        longer = self._locks.device(end, self._locks.segments(end, skip))
        self._locks.release(handle)
        ids = self.page_ids(end.id, first)
        return Extended(
            kept.actions, end.id, end.end * self.config.page_tokens, kept.known_tokens, kept.backups, longer, ids
        )

    # Giving up

    def evict(self, pages: int, component: str = FULL, *, room: PageIds = ()) -> ActionList:
        """Give up at least `pages` device pages of a component, or all that nobody locked. What is backed stays on the
        host.

        Pages of attention KV go from the ends of leaves, no more than asked for; with further components, or
        EvictionGranularity.NODE, whole nodes. `room` are free host pages for a tree that writes back; those not named
        in a CopyOut stay the caller's.
        """
        return self.evict_pools({component: pages}, room=room)

    def evict_pools(self, pages: Mapping[str, int], *, room: PageIds = ()) -> ActionList:
        """As `evict`, of several components at once: what goes with the first counts for the others.

        A leaf takes its window and its state along, so that two calls after each other give up more than both need.
        """
        if self._plain is not None and len(pages) == 1 and FULL in pages:
            given_up = self._plain.evict(_count(pages[FULL]), room)
            if given_up is not None:
                return given_up
        counts = {self.config.index(name): _count(count) for name, count in pages.items()}
        return self._outcome(Eviction(self._forest, room).pools(counts))

    def demote(self, node_id: int, *, room: PageIds = ()) -> ActionList:
        """Give up the device pages at the end of a path that are on the host, or that `room` takes as in `evict`.

        Nothing that is locked, that others have pages below, or that would be lost goes. Raises StaleHandle.
        """
        end = self._forest.node(node_id)
        return self._outcome(Eviction(self._forest, room).path(end))

    def evict_host(self, pages: int, component: str = FULL) -> ActionList:
        """Give up at least `pages` host pages of a component, or all that may go: from childless nodes of the host
        alone.
        """
        if self._plain is not None and component == FULL:
            given_up = self._plain.evict_host(_count(pages))
            if given_up is not None:
                return given_up
        index, count, eviction = self.config.index(component), _count(pages), Eviction(self._forest)
        return self._outcome(eviction.host(count) if index < 0 else eviction.held_host(index, count))

    def reset(self) -> ActionList:
        """Forget everything. Raises PrefixError while a lock or an operation is out, which would lose its pages."""
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

    # Between tiers

    def is_backed(self, node_id: int) -> bool:
        """Whether the attention KV of the whole path is on the host by now, so that it can be stored or fetched below.

        Raises StaleHandle for a node that is gone.
        """
        return all(node.host is not None for node in self._forest.view(node_id).path())

    def backup_needs(self, node_id: int) -> dict[str, int]:
        """Host ids, by component, that `begin_backup` takes: of what the path has on the device alone and not on its
        way.
        """
        return self._copies.needs(self._forest.node(node_id), Tier.HOST)

    def load_needs(self, node_id: int) -> dict[str, int]:
        """Device ids, by component, that `begin_load` takes. Raises PrefixError for what is on its way already."""
        return self._copies.needs(self._forest.node(node_id), Tier.DEVICE)

    def begin_backup(self, node_id: int, page_ids: Mapping[str, PageIds]) -> TierCopy:
        """Copy the path's device pages to the host, root first. They are locked until `end`, and backed after it."""
        self._needs_host()
        if isinstance(self.config.tiers, WriteBack):
            raise PrefixError("a tree that writes back copies on eviction only")
        return self._copies.begin(self._forest.node(node_id), Tier.HOST, page_ids)

    def begin_load(self, node_id: int, page_ids: Mapping[str, PageIds]) -> TierCopy:
        """Bring what `load_needs` counts to the device. It can be matched there after `end`, and not before."""
        self._needs_host()
        return self._copies.begin(self._forest.node(node_id), Tier.DEVICE, page_ids)

    def begin_store(self, node_id: int, first_page: int = 0) -> TierCopy:
        """Copy the path's host pages from `first_page` on to storage, by hash. They are locked until `end`."""
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
        """Read pages of the prompt from storage into host pages, from `first_page` on. The path up to there is locked.

        `held` are host ids of further components, of the last pages (a state: of the very last): kept if all is done.
        Returns the operation for `end`. Raises PrefixError when the path is not on the host up to `first_page`.
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
        """Report an operation: all of it done, or its first `pages_done` pages. What landed is kept, all other ids come
        back.

        Pages whose way to the root is still in flight wait for that: their ids are kept, or come back, with its end.
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

    # Proof

    def resident(self) -> Iterator[KVEvent]:
        """What the device and the host hold now, as events that leave a router with what all so far have left it with.

        Parents come first. Take them all before the tree is changed. O(tokens), and hashes that nobody asked for yet.
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
        """Every page id of a component that the tree or an operation under way has on a tier: O(pages), for checks."""
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
        """Assert the invariants, by recomputing all that is kept incrementally: O(pages). Raises InvariantBroken."""
        fetched = [row for fetch in self._fetches.values() for row in ((-1, fetch.ids), *fetch.held)]
        check(self._forest, self._copies.records.values(), fetched)

    def _outcome(self, given: Given) -> Given:
        """Returns the result of a call: the ids that it frees are the caller's, and the sink hears what came of it."""
        forest = self._forest
        for action in given.actions:
            if isinstance(action, FreePages):
                index = self.config.index(action.component)
                forest.in_use[action.tier, index].release(action.page_ids.tobytes())
        return given if forest.journal is None else forest.journal.told(given)

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
        """A key of the namespace of `node`, or of the call's below the root of all."""
        if node.parent is None:
            return self._key(tokens, namespace)
        own = node.path()[-1].parent
        assert own is not None
        key = self._key(tokens, own.namespace if namespace is None and not isinstance(tokens, RadixKey) else namespace)
        if key.namespace != own.namespace:
            raise PrefixError(f"the path is of another namespace than the call: {own.namespace}, {key.namespace}")
        return key

    def _key(self, tokens: RadixKey | TokenIds, namespace: PrefixNamespace | None) -> RadixKey:
        """A key has its namespace; one that is given beside it must be the same."""
        if not isinstance(tokens, RadixKey):
            return RadixKey.of(tokens, namespace or DEFAULT_NAMESPACE, self.config.units)
        if namespace is not None and namespace != tokens.namespace:
            raise PrefixError(f"the key is of another namespace than the call: {tokens.namespace}, {namespace}")
        if tokens.units is not self.config.units:
            raise PrefixError(f"a key of {tokens.units.name} units is none of this tree's {self.config.units.name}")
        return tokens
