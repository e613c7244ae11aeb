"""TieredRadixCache is the radix cache with host memory and a page store below it: `--enable-hierarchical-cache`.

The scheduler has storage asked for each waiting request, loads the host's pages on admission, and starts the forward
pass at once: each layer waits for its own KV. Every step polls, and operations done on all ranks end.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from kvmover.cache.ledger import Credit, Loss
from kvmover.cache.prefix import FULL as ATTENTION
from kvmover.cache.prefix import (
    NO_IDS,
    ROOT,
    CopyOut,
    FreePages,
    Inserted,
    KVEvent,
    PageArray,
    PrefixError,
    RadixKey,
    StaleHandle,
)
from kvmover.cache.tiers import Controller, DevicePages, FreeList, GatedLoad, Restore, TierCollector
from kvmover.config import load
from kvmover.engines.common import EngineUnsupported
from kvmover.engines.sglang import engine_radix
from kvmover.engines.sglang.radix_accounts import Lookup, RadixAccounts, accounts_of
from kvmover.engines.sglang.radix_cache import KvmoverRadixCache
from kvmover.engines.sglang.radix_components import STATE, WINDOW
from kvmover.engines.sglang.radix_hints import HintTerms
from kvmover.engines.sglang.sglang_options import TierFlags
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.engines.sglang.tier_pools import EnginePages, EngineTiers, EngineWindows, LayerGates, open_tiers
from kvmover.observe.endpoint import ServedMetrics, serve_metrics
from kvmover.store import StoreCollector

#: Age at which the tier counts for scrapes are renewed, s.
_SNAPSHOT_S = 0.5


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The sizes of host memory that SGLang's gauges read, in tokens."""

    pages: FreeList
    page_tokens: int

    @property
    def logical_size(self) -> int:
        """Tokens that the host can hold."""
        return self.pages.pages * self.page_tokens

    def available_size(self) -> int:
        """Returns the tokens for which it has room."""
        return len(self.pages) * self.page_tokens


class TieredRadixCache(KvmoverRadixCache):
    """A rank's cache on device, host and in storage. All ranks call it in the same order."""

    #: Read by SGLang's scheduler: a prefetch needs no hashes of the prefix.
    hicache_storage_pass_prefix_keys = False

    def __init__(
        self,
        params: Any,
        flags: TierFlags,
        tiers: EngineTiers,
        accounts: RadixAccounts | None = None,
        terms: HintTerms | None = None,
    ) -> None:
        """Take over the host pools and the store of `tiers`."""
        super().__init__(params, accounts, flags.tiers(), terms)
        self._tiers = tiers
        lent = tiers.peers.tier if tiers.peers is not None else None
        config = replace(tiers.config, sink=self._events.append) if params.enable_kv_cache_events else tiers.config
        self._controller = Controller(self._tree, tiers.tiered_pools, tiers.storage, config, self._device_pages(), lent)
        self._hints.reach(self._controller)
        self._hints.fetches = lent is not None
        self.token_to_kv_pool_host = HostRoom(self._controller.allocator.host[ATTENTION], self.page_size)
        self.gates = LayerGates(self._controller.loads, tiers.depths)
        #: By request: the restore from storage that it waits for.
        self.ongoing_prefetch: dict[Any, Restore] = {}
        #: By request: end of the prompt's part that was read from a peer, tokens.
        self._lent: dict[str, int] = {}
        #: By request: tokens of its prompt that storage has and did not bring, by reason.
        self._left: dict[str, Mapping[Loss, int]] = {}
        #: Requests whose host copies found no room on the device.
        self._no_room: set[str] = set()
        self._snapshot = self._controller.snapshot()
        self._snapshot_s = time.monotonic()
        engine, number = tiers.config.engine, tiers.config.rank
        shown: list[TierCollector | StoreCollector] = [TierCollector(lambda: self._snapshot)]
        shown += [StoreCollector(tiers.store, engine, number)] if tiers.store is not None else []
        self._served: ServedMetrics | None = None
        if accounts is not None:
            accounts.show(*shown)
        else:  # a prefill or decode, whose transfer has the port of this rank
            self._served = serve_metrics(load().settings.metrics, number, *shown)
        UPDATES.follow(self)

    # Requests

    def prefetch_from_storage(
        self,
        handle: Any,
        last_host_node: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: Any = None,
        *,
        matched_prefix_tokens: Any,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **_options: Any,
    ) -> bool:
        """Begin to bring a prompt's KV from peers or storage to the host. Returns True if a prefetch began."""
        if handle in self.ongoing_prefetch or not self.enable_storage:
            return False
        tokens = np.concatenate([np.asarray(matched_prefix_tokens, np.int64), np.asarray(new_input_tokens, np.int64)])
        key = self._keys.of_tokens(tokens, extra_key, cache_salt)
        self.ongoing_prefetch[handle] = self._controller.prefetch(key, key.tokens, self._hints.source(handle.rid))
        return True

    def check_prefetch_progress(self, handle: Any) -> bool:
        """Returns True if the request need not wait for storage: it has no prefetch, or that is done."""
        restore = self.ongoing_prefetch.get(handle)
        if restore is None:
            return True
        if not restore.done:
            self._controller.want(restore)
        return restore.done

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """End a request's prefetch, before SGLang matches it again. Returns the tokens that came, and where they begin.

        Without a prefetch that is 0 and None.
        """
        restore = self.ongoing_prefetch.pop(handle, None)
        if restore is None:
            return 0, None
        self._controller.release(restore)
        first = restore.state.best_tokens
        came = max(0, self._tree.look(restore.key).best_tokens - first)
        lent = min(came, max(0, restore.state.peer_tokens - first))
        if self._tiers.storage is None:  # other requests have brought or computed the rest since
            came = lent
        self._left[handle.rid] = restore.state.reasons
        if lent:
            self._lent[handle.rid] = restore.state.peer_tokens
        if restore.source is not None:
            self._hints.brought(handle.rid, lent or restore.miss)
        return came, first

    def init_load_back(self, params: Any) -> tuple[int, int]:
        """Load a request's part on the host to the device. Returns the number of tokens, and the node at their end.

        For a part that is too short or finds no room that is 0 and the request's own node.
        """
        req, node = params.req, params.best_match_node
        if params.host_hit_length < self._controller.config.policy.least_load_tokens:
            return 0, req.last_node
        try:
            pages = self._controller.load(node)
        except StaleHandle:  # the match has left the host since
            pages = None
        if pages is None:
            self._no_room.add(req.rid)
            return 0, req.last_node
        if self._states is not None:
            key = self._keys.of_request(req, req.full_untruncated_fill_ids, req.prefix_len + params.host_hit_length)
            state = dict(self._tree.look(key).held)[STATE]
            try:
                self._states.start(req, state, partial(self._room_for_state, node))
            except PrefixError:  # no slot for the request's copy: the loaded pages serve the next request
                self._no_room.add(req.rid)
                return 0, req.last_node
        return params.host_hit_length, node

    def maybe_hand_to_session(self, req: Any) -> None:
        """Record the admission of a request that got its pages, by tier."""
        if self._accounts is not None:
            why = Loss.DEVICE_CAPACITY if req.rid in self._no_room else Loss.THRESHOLD
            device, host, stored = engine_radix.tokens_by_tier(req)
            lent = min(stored, max(0, self._lent.get(req.rid, 0) - (req.storage_hit_start or 0)))
            self._accounts.admitted(req.rid, Credit(device, host, stored - lent, lent), why)
        self._forget(req.rid)

    def release_aborted_request(self, handle: Any) -> None:
        """End the prefetch of a waiting request that SGLang gave up."""
        restore = self.ongoing_prefetch.pop(handle, None)
        if restore is not None and restore.done:
            self._controller.release(restore)
        elif restore is not None:
            self._controller.abort(restore)
        self._forget(handle.rid)
        self._lent.pop(handle.rid, None)
        super().release_aborted_request(handle)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Release the request. Its hits are counted again if it is rescheduled."""
        super().on_release(req, checkpointed=checkpointed)
        if req.finished():
            self._lent.pop(req.rid, None)

    # Steps of the scheduler

    def ready_to_load_host_cache(self) -> int:
        """Returns the number under which a new batch waits at the gates."""
        return self.gates.consumer_index

    def check_hicache_events(self) -> None:
        """End operations that are done on all ranks, and begin the next: one collective while any is open."""
        self._controller.poll()
        now = time.monotonic()
        if now >= self._snapshot_s + _SNAPSHOT_S:
            self._snapshot, self._snapshot_s = self._controller.snapshot(), now

    def _resident(self) -> Iterator[KVEvent]:
        return self._controller.resident()

    def reset(self) -> None:
        """Forget device and host, but not storage. Raises PrefixError while a request holds a lock."""
        self._hints.pins.forget()
        self._controller.reset()

    def reweigh(self) -> None:
        """Share KV of the engine's present weights. Until a reset, the tree may hold KV of earlier weights."""
        self._tiers.reweigh()

    def clear_storage_backend(self) -> bool:
        """Delete the pages of this model, page size and tenant from storage. Returns True if there is a store."""
        if self._tiers.store is not None:
            self._tiers.store.clear()
        return self._tiers.store is not None

    def attach_storage_backend(self, *_given: Any, **_options: Any) -> tuple[bool, str]:
        """Returns False and the reason: storage is chosen at the start."""
        return False, "kvmover's radix cache has the storage that the server was started with"

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Returns the same as `attach_storage_backend`."""
        return self.attach_storage_backend()

    def release_host_resources(self) -> None:
        """End the storage's thread, close the store and part from peers. Waiting writes are dropped."""
        UPDATES.leave(self)
        if self._served is not None:
            self._served.close()
        self._controller.close()
        self._tiers.close()

    # SGLang's questions before it waits, flushes or sleeps

    @property
    def enable_storage(self) -> bool:
        """True if there is a page store, or peers that are read like one."""
        return self._tiers.storage is not None or self._tiers.peers is not None

    @property
    def ongoing_load_back(self) -> Collection[Any]:
        """Loads that have not ended on all ranks."""
        return self._controller.loads.open

    @property
    def ongoing_write_through(self) -> Collection[Any]:
        """Operations that have not ended on all ranks, or a stand-in if some are due."""
        return self._controller.collectives.open or [self] * (not self._controller.idle)

    @property
    def ongoing_backup(self) -> Collection[Any]:
        """Always empty: writes to storage are in `ongoing_write_through`."""
        return ()

    def is_root(self, node: int) -> bool:
        """Returns True for the empty prefix."""
        return node == ROOT

    def is_backuped(self, node: int) -> bool:
        """Returns True: storage may be asked behind every node, as a prefetch begins where the host's copy ends."""
        return True

    def get_last_hash_value(self, node: int) -> None:
        """Returns None: a prefetch here needs no hash of SGLang's."""

    def check(self) -> None:
        """Check the tree and all tiers. For tests."""
        super().check()
        self._controller.check({})

    # Inside

    def _reused(self, req: Any, key: RadixKey, end: int) -> None:
        """Count a hit, once per request: the path may be due to be written through."""
        counted = req.kv.cache_inserted_len
        if counted < end:
            used = self._tree.insert(key, NO_IDS, first_page=end // self.page_size, counted_tokens=counted)
            req.kv.cache_inserted_len = end
            self._controller.kept(used, NO_IDS)

    def _kept(self, inserted: Inserted, pages: PageArray) -> None:
        """Hand the tree's answer to the controller, without states that the tree had: the caller frees them."""
        ours = tuple(action for action in inserted.actions if not _is_state(action))
        self._controller.kept(structs.replace(inserted, actions=ours), pages)

    def _evict(self, wanted: Mapping[str, int]) -> dict[str, int]:
        given = self._controller.evict_pools(wanted)
        return {name: len(given.page_ids(name)) for name in wanted}

    def _device_pages(self) -> dict[str, DevicePages]:
        """Returns SGLang's pages of each component."""
        allocator, page_tokens = self.token_to_kv_pool_allocator, self.page_size
        if self._windows is None:
            free = allocator.free_page_ids
            pages: dict[str, DevicePages] = {ATTENTION: EnginePages(allocator, free, self._indices, page_tokens)}
        else:
            full = allocator.full_attn_allocator
            pages = {ATTENTION: EnginePages(full, full.free_page_ids, self._indices, page_tokens)}
            pages[WINDOW] = EngineWindows(allocator, self._windows.indices, self._indices, page_tokens)
        if self._states is not None:
            slots = self.req_to_token_pool.mamba_allocator
            pages[STATE] = EnginePages(slots, slots.free, self._states.indices, 1)
        return pages

    def _lookup(self, req: Any, key: Any, found: int) -> Lookup:
        lookup, left = super()._lookup(req, key, found), self._left.get(req.rid)
        if left:
            room = lookup.prompt_tokens - found - lookup.last_page_tokens
            lookup.left = left_within(left, room)
        return lookup

    def _forget(self, rid: str) -> None:
        self._left.pop(rid, None)
        self._no_room.discard(rid)


class DecodeRadixCache(TieredRadixCache):
    """A decode server's cache. Its look-ups tell the prefill how much of a prompt need not be sent.

    SGLang then locks the device's part, and loads the rest later. Here a look-up loads the host's part first, so every
    promised token is on the device. Storage is written for other engines, and not read.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.cache_controller = _DecodeController(self.gates)
        #: Loads under way when SGLang asked for a number, by that number, until they have landed.
        self._under_way: dict[int, tuple[GatedLoad, ...]] = {}
        self._number = 0

    def match_prefix(self, params: Any) -> Any:
        """Returns the match, with the host's part on its way to the device, or left out."""
        found = super().match_prefix(params)
        if found.host_hit_length >= self._controller.config.policy.least_load_tokens:
            try:
                self._controller.load(found.best_match_node)
            except StaleHandle:  # another of its components took its room on the host
                pass
            else:
                found = super().match_prefix(params)
        return found._replace(
            best_match_node=found.last_device_node, host_hit_length=0, swa_host_hit_length=0, mamba_host_hit_length=0
        )

    def query_storage_hit_length(self, *_given: Any, **_options: Any) -> int:
        """Returns 0: tokens in storage would have to be here before they are promised."""
        return 0

    def has_free_load_back_slot(self) -> bool:
        """Returns True: look-ups begin loads."""
        return True

    def ready_to_load_host_cache(self) -> int:
        """Returns a number for the loads under way."""
        self._number += 1
        loads = tuple(load for load in self._controller.loads.open if load.gate is not None)
        if loads:
            self._under_way[self._number] = loads
        return self._number

    def is_load_back_event_done(self, number: int) -> bool:
        """Returns True if the loads of this number have landed on this rank."""
        if any(load.gate is not None for load in self._under_way.get(number, ())):
            return False
        self._under_way.pop(number, None)
        return True


class _DecodeController:
    """The attributes that SGLang reads and sets of its own controller in a decode server. The gates have no numbers."""

    storage_backend = None
    storage_backend_type = "kvmover"
    load_fence_stream: Any = None
    write_fence_stream: Any = None

    def __init__(self, gates: LayerGates) -> None:
        self.layer_done_counter = gates


def _is_state(action: FreePages | CopyOut) -> bool:
    return isinstance(action, FreePages) and action.component == STATE


def left_within(reasons: Mapping[Loss, int], tokens: int) -> dict[Loss, int]:
    """Returns the tokens that storage did not bring, by reason, at most `tokens` in sum.

    Other requests may have brought the rest since. A load that was not asked for yet is no loss of storage's.

    >>> left_within({Loss.LATE: 32, Loss.THRESHOLD: 16}, 20)
    {<Loss.LATE: 'late'>: 20}
    """
    left: dict[Loss, int] = {}
    for reason, count in reasons.items():
        if reason is not Loss.THRESHOLD and tokens > 0:
            left[reason] = min(count, tokens)
            tokens -= left[reason]
    return left


def open_radix_cache(context: Any) -> TieredRadixCache:
    """Returns one rank's cache and its tiers. Raises EngineUnsupported for caches that need SGLang's own tree."""
    flags, odd = engine_radix.tier_flags(), engine_radix.odd_pools(context)
    if odd or flags.host_memory != "cache":
        asked = odd or f"host memory as {flags.host_memory} (--hicache-host-memory-mode)"
        raise EngineUnsupported(
            f"kvmover's tiers keep attention KV, windows and states, and not {asked}: leave out"
            " --enable-hierarchical-cache, or --radix-cache-backend kvmover"
        )
    params = context.params
    place = engine_radix.place()
    group = engine_radix.fleet_group(place, params)
    tiers = open_tiers(params, flags, place, group, engine_radix.fences(context))
    terms = HintTerms.of(load().settings.hints, place, group)
    kind = DecodeRadixCache if engine_radix.is_decode() else TieredRadixCache
    cache = kind(params, flags, tiers, accounts_of(), terms)
    engine_radix.gate(context, cache.gates)
    return cache
