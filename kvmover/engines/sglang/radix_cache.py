"""KvmoverRadixCache is SGLang's prefix cache on kvmover's PrefixTree: `--radix-cache-backend kvmover`.

The scheduler matches a request, locks the match, allocates the rest, and checkpoints the request after each chunk and
at its end. The tree then takes the request's whole pages, and the request's row names the tree's pages from then on.
Pages that the tree had already are freed at once. Evicted pages go back to SGLang's allocator.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.cache.hints import PinCollector
from kvmover.cache.ledger import Credit
from kvmover.cache.prefix import FULL as ATTENTION
from kvmover.cache.prefix import (
    NO_IDS,
    PRIORITY,
    ROOT,
    ActionList,
    Inserted,
    InvariantBroken,
    KeyUnits,
    KVEvent,
    LockHandle,
    PageArray,
    PrefixTree,
    RadixKey,
    SlidingWindow,
    StaleHandle,
    State,
    Tiers,
    coalesce,
)
from kvmover.engines.sglang import engine_radix
from kvmover.engines.sglang.engine_radix import FULL, MAMBA, SWA
from kvmover.engines.sglang.event_publisher import CacheEvents
from kvmover.engines.sglang.index_table import IndexTable, index_table
from kvmover.engines.sglang.radix_accounts import Lookup, RadixAccounts
from kvmover.engines.sglang.radix_components import STATE, WINDOW, SnapshotSlots, StateSlots, WindowPages
from kvmover.engines.sglang.radix_hints import HintTerms, RadixHints
from kvmover.engines.sglang.radix_keys import RadixKeys
from kvmover.engines.sglang.sglang_contract import draft_window, kept_window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

log = logging.getLogger(__name__)

#: The tree's components by SGLang's names.
_COMPONENTS = {SWA: WINDOW, MAMBA: STATE}

#: SGLang's priorities are int64.
_HIGHEST = 2**63 - 1


class KvmoverRadixCache(engine_radix.BasePrefixCache):
    """A rank's cache on the device: attention KV, sliding windows, states. SGLang knows nodes by the tree's ids.

    `params`: SGLang's `CacheInitParams`; its pools stay SGLang's. No method waits for the device.
    """

    def __init__(
        self,
        params: Any,
        accounts: RadixAccounts | None = None,
        tiers: Tiers | None = None,
        terms: HintTerms | None = None,
    ) -> None:
        """Raises EngineUnsupported for an eviction policy that the tree lacks."""
        import torch

        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        allocator = params.token_to_kv_pool_allocator
        self._device = torch.device(allocator.device)
        self._accounts = accounts
        self._events: list[KVEvent] = []
        self._policy = engine_radix.policy_of(params.eviction_policy, params.eviction_policy_config or {})
        self.sliding_window_size: int | None = params.sliding_window_size
        self.draft_swa_window: int = draft_window(params)
        self._window = window = kept_window(params) if engine_radix.has_windows(allocator) else None
        stateful = engine_radix.has_states(params.req_to_token_pool)
        components: list[SlidingWindow | State] = [] if window is None else [SlidingWindow(window)]
        if stateful:
            components.append(State(grid_tokens=engine_radix.state_grid(self.page_size)))
        self._tree = PrefixTree(
            self.page_size,
            components=components,
            policy=self._policy,
            tiers=tiers,
            # As in SGLang's own cache, states go by tokens.
            units=KeyUnits.BIGRAM if params.is_eagle and not stateful else KeyUnits.PLAIN,
            sink=self._events.append if params.enable_kv_cache_events else None,
        )
        self._keys = RadixKeys(self._tree, params.kv_event_lora_names)
        self._indices = _table(self._device, allocator.size_full, self.page_size)
        self._windows: WindowPages | None = None
        if window is not None:
            self._windows = WindowPages(allocator, _table(self._device, allocator.size_swa, self.page_size))
        self._states: StateSlots | None = None
        if stateful:
            kind, rows = SnapshotSlots if params.enable_mamba_extra_buffer else StateSlots, params.req_to_token_pool
            self._states = kind(rows, _table(self._device, rows.mamba_allocator.size, 1))
        if params.enable_metrics:
            self.init_metrics_collector()
        self._hints = RadixHints(self._tree, self._keys, self._pool_pages(), terms or HintTerms(), accounts)
        if accounts is not None:
            accounts.show(PinCollector(self._hints.pins))

    # Requests

    def match_prefix(self, params: Any) -> Any:
        """Returns the longest cached prefix, in whole pages, unlocked."""
        req = params.req
        if req is not None:
            self._hints.came(req)
        match = self._tree.match(self._keys.of(params.key))
        if self._accounts is not None and req is not None:
            lookup = self._lookup(req, params.key, match.best_tokens)
            self._accounts.matched(req.rid, lookup, req.sampling_params.custom_params)
        node = match.device_node
        if self._states is not None and params.cow_mamba and match.tokens:
            self._states.start(req, dict(match.held)[STATE], partial(self._room_for_state, node))
        found = engine_radix.MatchResult(
            match.tokens,
            node,
            match.host_node,
            match.best_node,
            host_hit_length=match.best_tokens - match.tokens,
            full_kv_hit_length=match.full_tokens,
        )
        if not match.loads and not match.branches:
            return found
        loads = {load.component: len(load.positions) for load in match.loads}
        return found._replace(
            swa_host_hit_length=loads.get(WINDOW, 0) * self.page_size,
            mamba_host_hit_length=loads.get(STATE, 0),
            mamba_branching_seqlen=dict(match.branches).get(STATE),
        )

    def touch_prefix(self, key: Any) -> None:
        """Mark the path of a waiting request as used, so that it is evicted later."""
        self._tree.match(self._keys.of(key))

    def checkpoint(self, req: Any, *, up_to: int, **_options: Any) -> None:
        """Keep the request's pages up to `up_to` tokens, point its row at the tree's, and move its lock to them."""
        kept, states = req.kv.cache_protected_len, self._states
        reach = up_to if states is None else min(up_to, states.reach(req, up_to))
        key = self._keys.of_request(req, req.full_untruncated_fill_ids, reach)
        end = key.tokens // self.page_size * self.page_size
        if end <= kept:
            if states is not None:
                states.withhold(req)
            self._reused(req, key, end)
            return
        state = NO_IDS if states is None else self._take_state(states, req, reach == end)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        live = min(end, max(kept, req.kv.get_evicted_seqlen(SWA)))
        inserted = self._insert(key, row, kept, live, req.kv.cache_inserted_len, req.priority or 0, state)
        known, node = inserted.known_tokens, inserted.node
        if states is not None:
            states.give_back(inserted.page_ids(STATE))
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, end)
        self._raise_prompt(req, end)
        if known > kept:
            if self._accounts is not None:
                self._accounts.concurrent(req.rid, known - kept)
            theirs = self._tree.page_ids(node, kept // self.page_size)[: (known - kept) // self.page_size]
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(kept, known)), self._indices.of(theirs))
        req.kv.cache_protected_len = end
        before = req.lock
        skipped = (MAMBA,) if states is not None and engine_radix.leaves_states_unlocked() else ()
        req.lock, req.last_node = self.lock(node, skipped), node
        self.unlock(before)

    def insert(self, params: Any) -> Any:
        """Keep `params.value`, a token index per token, from `params.prev_prefix_len` on; the tree has earlier tokens.

        The slot `params.mamba_value` stays the caller's if the tree has that state.
        """
        key = self._keys.of(params.key)
        end = key.tokens // self.page_size * self.page_size
        kept = min(params.prev_prefix_len // self.page_size * self.page_size, end)
        live, state = kept, NO_IDS
        if self._windows is not None:
            live = min(end, max(kept, params.get_evicted_seqlen(SWA)))
        if self._states is not None and params.mamba_value is not None:
            state = self._states.keep(params.mamba_value)
        inserted = self._insert(key, params.value, kept, live, params.inserted_len, params.priority or 0, state)
        had_state = False
        if self._states is not None:
            double = inserted.page_ids(STATE)
            had_state = len(double) > 0
            self._states.forget(double)
        return engine_radix.InsertResult(inserted.known_tokens, end, inserted.node, had_state)

    def maybe_hand_to_session(self, req: Any) -> None:
        """Record the admission of a request that got its pages."""
        if self._accounts is not None:
            self._accounts.admitted(req.rid, Credit(device_tokens=req.prefix_len))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Record that the request was answered, aborted or retracted: SGLang has taken its pages back."""
        if self._states is not None and not checkpointed:
            self._states.release(req)
        if not req.finished():
            if self._accounts is not None:
                self._accounts.retracted(req.rid, req.kv.kv_committed_len)
        elif engine_radix.is_abort(req.finished_reason):
            self._hints.aborted(req.rid)
            if self._accounts is not None:
                self._accounts.aborted(req.rid, req.kv.kv_committed_len)
        else:
            self._hints.answered(req)
            if self._accounts is not None:
                self._accounts.answered(req.rid)

    def release_aborted_request(self, handle: Any) -> None:
        """Record that SGLang gave up a waiting request."""
        self._hints.aborted(handle.rid)
        if self._accounts is not None:
            self._accounts.aborted(handle.rid)

    def path_device_indices(self, node: int) -> torch.Tensor:
        """Returns the token indices cached up to the node's end, int64."""
        return self._indices.of(self._tree.page_ids(node))

    # Room

    def evict(self, params: Any) -> Any:
        """Evict `params.num_tokens` tokens, `params.swa_num_tokens` tokens of windows, and `params.mamba_num` states.

        Tokens go in whole pages. Locked entries stay, so fewer may go. A leaf takes its window and its state along.
        """
        began = time.perf_counter()
        wanted = {ATTENTION: -(-params.num_tokens // self.page_size)}
        if self._windows is not None:
            wanted[WINDOW] = -(-params.swa_num_tokens // self.page_size)
        if self._states is not None:
            wanted[STATE] = params.mamba_num
        freed = self._evict(wanted)
        tokens = freed[ATTENTION] * self.page_size
        self.update_eviction_metrics(tokens, began)
        return engine_radix.EvictResult(tokens, freed.get(WINDOW, 0) * self.page_size, freed.get(STATE, 0))

    def lock(self, node: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        """Lock a node as `inc_lock_ref` does, for one holder."""
        skipped = tuple(skip_lock_components)
        receipt = engine_radix.DecLockRefParams(node, skipped, self._locked(node, skipped), {})
        return engine_radix.TreeLock(node, receipt)

    def unlock(self, lock: Any) -> None:
        """Release what `lock` returned, if anything. Raises StaleHandle if it was released."""
        if lock is not None:
            self._release(lock.node, lock.receipt)

    def inc_lock_ref(self, node: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        """Lock a node, its ancestors, and the window and state at its end. The receipt carries the tree's handle."""
        skipped = tuple(skip_lock_components)
        return engine_radix.IncLockRefResult(
            node_id=node, skipped_lock_components=skipped, component_lock_uuids=self._locked(node, skipped)
        )

    def dec_lock_ref(self, node: int, params: Any = None) -> Any:
        """Release a lock by its receipt. Raises StaleHandle without a receipt, or if the lock was released."""
        self._release(node, params)
        return engine_radix.DecLockRefResult()

    def release_swa(self, lock: Any) -> None:
        """Release the window of a lock, once: decoding has left it."""
        if lock is not None and lock.node != ROOT and not lock.swa_released:
            self._tree.unlock_component(lock.receipt.get_lock_uuid(FULL), WINDOW)
            lock.swa_released = True

    def release_swa_prefix_lock(self, req: Any) -> None:
        """Release the window of a request that has decoded a window beyond its prefix."""
        self.release_swa(req.lock)

    def reset(self) -> None:
        """Forget all entries; SGLang clears its pools. Raises PrefixError while a request holds a lock."""
        self._hints.pins.forget()
        given = self._tree.reset()
        self._indices.forget(given.page_ids())
        if self._windows is not None:
            self._windows.forget(given.page_ids(WINDOW))
        if self._states is not None:
            self._states.forget(given.page_ids(STATE))

    # Sizes and reports

    def evictable_size(self) -> int:
        """Returns evictable tokens."""
        return self._tree.sizes().evictable * self.page_size

    def protected_size(self) -> int:
        """Returns locked tokens."""
        return self._tree.sizes().protected * self.page_size

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def supports_swa(self) -> bool:
        """Returns True if requests have windows."""
        return self._windows is not None

    def swa_evictable_size(self) -> int:
        """Returns tokens with evictable windows."""
        return 0 if self._windows is None else self._tree.sizes(WINDOW).evictable * self.page_size

    def swa_protected_size(self) -> int:
        """Returns tokens with locked windows."""
        return 0 if self._windows is None else self._tree.sizes(WINDOW).protected * self.page_size

    def supports_mamba(self) -> bool:
        """Returns True if requests have states of recurrent layers."""
        return self._states is not None

    def mamba_evictable_size(self) -> int:
        """Returns the number of evictable states."""
        return 0 if self._states is None else self._tree.sizes(STATE).evictable

    def mamba_protected_size(self) -> int:
        """Returns the number of locked states."""
        return 0 if self._states is None else self._tree.sizes(STATE).protected

    def swa_retain_floor(self, req: Any) -> int | None:
        """Returns the first token of the window kept with a snapshot; None without windows, states or snapshot."""
        snapshot = req.kv.mamba_last_track_seqlen
        if self._window is None or self._states is None or snapshot is None:
            return None
        return snapshot - self._window

    def all_values_flatten(self) -> torch.Tensor:
        """Returns every cached token index, int64, for SGLang's report of a leak."""
        return self._indices.of(np.fromiter(self._tree.ids(), np.int32))

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Returns every slot of a cached state, int64, for SGLang's report of a leak."""
        assert self._states is not None
        return self._states.slots(np.fromiter(self._tree.ids(STATE), np.int32))

    def total_size(self) -> int:
        """Returns cached tokens."""
        sizes = self._tree.sizes()
        return (sizes.evictable + sizes.protected) * self.page_size

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """Returns the empty prefix, of every namespace."""
        return ROOT

    def dfs_weight_order(self, node_handles: Sequence[int]) -> list[int]:
        """Returns the order of requests by matched node: depth first, heavy subtrees first, nodes after those below."""
        paths = [self._tree.page_hashes(node) for node in node_handles]
        weights = Counter(name for path in paths for name in path)
        seen = {name: place for place, name in enumerate(weights)}
        ranks = [[*((-weights[name], seen[name]) for name in path), (1, 0)] for path in paths]
        return sorted(range(len(paths)), key=ranks.__getitem__)

    def _resident(self) -> Iterator[KVEvent]:
        return self._tree.resident()

    def take_events(self) -> list[KVEvent]:
        """Returns the stores and removals since the last call, and the way to list all cached pages: `resident`."""
        events = CacheEvents(coalesce(self._events), self._resident)
        self._events.clear()
        return events

    def pretty_print(self) -> None:
        """Log the sizes, for SGLang's report of a failed allocation."""
        sizes = self._tree.sizes()
        log.info("%d nodes, %d pages evictable, %d protected", len(self._tree), sizes.evictable, sizes.protected)

    def check(self) -> None:
        """Raise InvariantBroken if the tree or its tables of indices are unsound. O(pages), for tests."""
        self._tree.check()
        self._hints.pins.check()
        tables = {ATTENTION: self._indices, WINDOW: self._windows, STATE: self._states}
        for name, table in tables.items():
            if table is None:
                continue
            sizes = self._tree.sizes(name)
            if len(table) != sizes.evictable + sizes.protected:
                raise InvariantBroken(f"{len(table)} pages of {name} have indices, the tree has {sizes}")

    # Inside

    def _locked(self, node: int, skipped: Sequence[Any]) -> dict[Any, LockHandle]:
        """Returns the handle of a new lock, where SGLang's receipts have the boundary of attention KV."""
        return {FULL: self._tree.lock(node, skip=[_COMPONENTS[each] for each in skipped] if skipped else ())}

    def _release(self, node: int, receipt: Any) -> None:
        if receipt is None or receipt.node_id != node:
            raise StaleHandle(f"a lock of node {node} is given back by its own receipt")
        self._tree.unlock(receipt.component_lock_uuids[FULL])

    def _pool_pages(self) -> dict[str, int]:
        """Returns the pages of each component's pool."""
        pages = {ATTENTION: self.token_to_kv_pool_allocator.size_full // self.page_size}
        if self._windows is not None:
            pages[WINDOW] = self.token_to_kv_pool_allocator.size_swa // self.page_size
        if self._states is not None:
            pages[STATE] = self.req_to_token_pool.mamba_allocator.size
        return pages

    def _room_for_state(self, node: int) -> None:
        """Evict a state other than that of `node`."""
        handle = self._tree.lock(node)
        self._evict({STATE: 1})
        self._tree.unlock(handle)

    def _room_beside(self, req: Any) -> None:
        """Evict a state, if need be the state that the request started from and has copied."""
        lock: Any = req.lock
        if lock is not None and lock.node != ROOT and MAMBA not in lock.receipt.skipped_lock_components:
            self._tree.unlock_component(lock.receipt.get_lock_uuid(FULL), STATE)
            lock.receipt.skipped_lock_components += (MAMBA,)
        self._evict({STATE: 1})

    def _take_state(self, states: StateSlots, req: Any, at_end: bool) -> PageArray:
        """Returns the id [1] of a request's state for the tree; empty unless the key ends with the state's token."""
        if at_end:
            return states.take(req, partial(self._room_beside, req))
        states.withhold(req)
        return NO_IDS

    def _insert(
        self, key: RadixKey, row: torch.Tensor, kept: int, live: int, counted: int, priority: int, state: PageArray
    ) -> Inserted:
        """Keep the pages of `key` behind `kept` tokens, the windows behind `live` tokens, and the state at the end.

        `row` has an index for each token of the key. Page ids are new each time, so pages that the tree had come back;
        a state that it had is the caller's.
        """
        end = key.tokens // self.page_size * self.page_size
        pages, windows, held = self._indices.keep(row, kept, end), NO_IDS, dict[str, PageArray]()
        if self._windows is not None and len(windows := self._windows.keep(row, live, end)):
            held[WINDOW] = windows
        if len(state):
            held[STATE] = state
        inserted = self._tree.insert(
            key, pages, first_page=kept // self.page_size, counted_tokens=counted, held=held, priority=priority
        )
        if self._windows is not None and inserted.known_tokens > live:
            self._adopt(self._windows, inserted, windows, live)
        self._kept(inserted, pages)
        return inserted

    def _reused(self, req: Any, key: RadixKey, end: int) -> None:
        """Handle a request at `end` without new pages: no change on a single tier."""

    def _kept(self, inserted: Inserted, pages: PageArray) -> None:
        """Carry out the tree's answer to `pages`."""
        self._give_back(inserted)

    def _evict(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Evict so many pages of each component, step by step. Returns the pages freed."""
        freed = dict.fromkeys(wanted, 0)
        for given in self._tree.evict_in_steps(wanted):
            self._give_back(given)
            if self._states is not None:
                self._states.give_back(given.page_ids(STATE))
            for name in freed:
                freed[name] += len(given.page_ids(name))
        return freed

    def _adopt(self, of: WindowPages, inserted: Inserted, windows: PageArray, live: int) -> None:
        """Point window ids that the tree took, for pages it had without windows, at these pages' indices."""
        count = (inserted.known_tokens - live) // self.page_size
        taken = ~np.isin(windows[:count], inserted.page_ids(WINDOW))
        if taken.any():
            theirs = self._tree.page_ids(inserted.node, live // self.page_size)[:count]
            of.move(windows[:count][taken], self._indices.of(theirs[taken]))

    def _give_back(self, given: ActionList) -> None:
        """Free pages at SGLang's allocator, windows first, because the pages freed next lead to them."""
        if not given.actions:
            return
        pages, pool = given.page_ids(), self.token_to_kv_pool_allocator
        if self._windows is not None:
            self._windows.give_back(given.page_ids(WINDOW))
            pool = pool.full_attn_allocator
        if len(pages):
            pool.free_page_ids(self._indices.forget(pages))

    def _raise_prompt(self, req: Any, end: int) -> None:
        """Raise a prompt's priority, so that its answer is evicted first, as in SGLang's own cache.

        Other policies evict from a leaf's end anyway.
        """
        if self._policy is not PRIORITY or self._states is not None:
            return
        key = self._keys.of_request(req, req.origin_input_ids, None)
        pages = key.tokens // self.page_size
        if 0 < pages * self.page_size < end:
            raised = min((req.priority or 0) + 1, _HIGHEST)
            self._tree.insert(key, [], first_page=pages, counted_tokens=key.tokens, priority=raised)

    def _lookup(self, req: Any, key: Any, found: int) -> Lookup:
        """Returns the look-up of a request, including a prompt's last page, which SGLang does not ask for."""
        prompt = len(req.origin_input_ids) + len(req.output_ids)
        last = 0
        if prompt == len(key.token_ids) == found + self.page_size:
            whole = self._keys.of_tokens(key.token_ids, key.extra_key, key.cache_salt)
            last = max(0, self._tree.look(whole).best_tokens - found)
        return Lookup(prompt, found, last)


def _table(device: torch.device, tokens: int, page_tokens: int) -> IndexTable:
    to_device = partial(engine_radix.to_device, device=device)
    return index_table(page_tokens, device, to_device, tokens // page_tokens)
