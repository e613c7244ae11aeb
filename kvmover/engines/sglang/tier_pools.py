"""A rank's tiers are opened here over SGLang's device pools: host pools, the page store, and their policies.

EnginePages are SGLang's device pages as tiers take and give them; LayerGates hold a forward pass before each layer
whose KV is still on its way from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvmover.cache.prefix import ALL_PAGES, LAST_PAGE, InvariantBroken, PageArray, Rule
from kvmover.cache.prefix import FULL as ATTENTION
from kvmover.cache.tiers import (
    Consensus,
    ControllerConfig,
    GatedLoads,
    Grouped,
    HostTier,
    LocalConsensus,
    Pipelined,
    Storage,
    TieredPool,
    TierError,
)
from kvmover.config import load
from kvmover.engines.common import ParallelRank, Upkeep, as_bytes
from kvmover.engines.sglang import engine_linker, sglang_api
from kvmover.engines.sglang.devicepool import Strand, checked_strands, part_of_strand, placement_of
from kvmover.engines.sglang.index_table import IndexTable
from kvmover.engines.sglang.page_parts import TpPlacement
from kvmover.engines.sglang.radix_components import STATE, WINDOW
from kvmover.engines.sglang.sglang_contract import RADIX, kept_window
from kvmover.engines.sglang.sglang_options import PoolSize, StorageFlags, TierFlags, parse, said, served, served_weights
from kvmover.engines.sglang.store_adapter import ServedRank, StoreAdapter
from kvmover.engines.sglang.tier_peers import EnginePeers, open_peers, refuse_unasked
from kvmover.layout import Pool
from kvmover.store import PagePart, PageStore

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger(__name__)


#: By SGLang's names of pools: the tree's component whose page ids a pool uses.
_COMPONENTS = {"kv": ATTENTION, "swa": WINDOW, "mamba": STATE}


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """The parts of a controller. It owns the host pools and the store; the device's pools are SGLang's.

    `depths`: per layer of the rank, the highest layer of a pool that must be there before it reads.
    """

    tiered_pools: tuple[TieredPool, ...]
    depths: Mapping[int, int]
    config: ControllerConfig
    storage: Storage | None = None
    adapter: StoreAdapter | None = None
    upkeep: Upkeep | None = None
    peers: EnginePeers | None = None

    @property
    def store(self) -> PageStore | None:
        """The page store, if there is one."""
        return self.adapter and self.adapter.store

    def reweigh(self) -> None:
        """Share KV of the engine's present weights, with peers and the store. Raises KvmoverError."""
        if self.peers is not None:
            self.peers.reweigh()
        if self.adapter is not None and self.storage is not None:
            self.adapter.reweigh()
            self.storage.moved(self.adapter.space)

    def close(self) -> None:
        """Close the peers, the upkeep of the store, and the store."""
        if self.peers is not None:
            self.peers.close()
        if self.upkeep is not None:
            self.upkeep.close()
        if self.store is not None:
            self.store.close()


def open_tiers(
    params: Any,
    flags: TierFlags,
    place: ParallelRank,
    group: dist.ProcessGroup | None = None,
    fences: Sequence[torch.cuda.Stream] = (),
) -> EngineTiers:
    """Returns the tiers below the device pools of `params`, SGLang's `CacheInitParams`, for the rank at `place`.

    All ranks of `group`, the whole fleet stage by stage, call this together. Raises EngineUnsupported for unknown flags
    or pools, ConfigError and StoreError for the store, TierError for host memory that cannot be had.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    pools = engine_linker.tiered_pools(kvcache, params.req_to_token_pool, params.page_size // place.cp_size)
    found = [
        _PoolPart(_COMPONENTS[str(name)], strand, part, memory)
        for name, entry in pools.entry_map.items()
        for memory in (tuple(as_bytes(buffer) for buffer in entry.kv_buffer),)
        for strand in checked_strands(RADIX, entry, kvcache.start_layer, placement_of(entry.device_pool))
        for part in (part_of_strand(str(name), strand, place, served(), pools.num_layers, params.page_size),)
    ]
    pages = flags.host_pages(_sizes(found, params))
    if group is not None:
        agreed = Grouped(group).minimum(np.array(list(pages.values()), np.int64))
        pages = dict(zip(pages, agreed.tolist(), strict=True))
    log.info("on the host: %s pages of %d tokens", pages, params.page_size)
    tiered_pools = tuple(each.tiered(pages[each.name], params) for each in found)
    config = ControllerConfig(
        flags.policy(), _consensus(place, group), fences=fences, engine=sglang_api.served_name(), rank=place.number
    )
    depths: dict[int, int] = {}
    for each in found:
        for layer, own in each.strand.layers.items():
            depths[layer] = max(depths.get(layer, 0), *own)
    if flags.storage is None:
        refuse_unasked(load().settings, "no storage")
        return EngineTiers(tiered_pools, depths, config)
    replicated = all(each.strand.rows.placement is TpPlacement.REPLICATED for each in found)
    placement = TpPlacement.REPLICATED if replicated else TpPlacement.SHARDED
    tiers = EngineTiers(tiered_pools, depths, config)
    return _behind(tiers, flags, flags.storage, place, placement, params.page_size, group)


def _behind(
    tiers: EngineTiers,
    flags: TierFlags,
    storage: StorageFlags,
    place: ParallelRank,
    placement: TpPlacement,
    page_tokens: int,
    group: dist.ProcessGroup | None,
) -> EngineTiers:
    """Add peers and the store, either of which may be absent."""
    storage.check()
    options, settings = parse(storage.options)
    if flags.write == "write_back":
        refuse_unasked(settings, "--hicache-write-policy write_back")
    facts = said(options, served())
    weights = served_weights(settings, options.model or sglang_api.served_name())
    rank, shared = ServedRank(weights, facts, place, placement), weights.of_tenant(options.tenant)
    tiers = replace(tiers, peers=open_peers(settings, shared, tiers.tiered_pools, place, page_tokens, group))
    if settings.store.root is None:
        weights.log()
        return tiers
    adapter = StoreAdapter(options, settings.store, rank, page_tokens)
    storage_of = _stored(tiers.tiered_pools, adapter)
    return replace(tiers, storage=storage_of, adapter=adapter, upkeep=Upkeep(adapter.store, adapter.settings))


def _consensus(place: ParallelRank, group: dist.ProcessGroup | None) -> Consensus:
    """Returns the ranks' agreement: schedulers of one stage run in step, and those of several do not."""
    if group is None:
        return LocalConsensus()
    return Grouped(group) if place.pp_size == 1 else Pipelined(group, place.in_stage.ranks)


@dataclass(frozen=True, slots=True)
class _PoolPart:
    """A strand of a pool. `name`: the tree's component. `memory`: the flat buffers of the whole pool."""

    name: str
    strand: Strand
    part: PagePart
    memory: tuple[torch.Tensor, ...]

    def tiered(self, pages: int, params: Any) -> TieredPool:
        """Returns the pool with `pages` on the host. A prefix needs its last state, and SGLang's windows."""
        memory = tuple(self.memory[number] for number in self.strand.buffers)
        device = Pool(self.strand.spec(self.part.component), memory)
        rules = {ATTENTION: ALL_PAGES, WINDOW: Rule(kept_window(params) or None), STATE: LAST_PAGE}
        return TieredPool.holding(self.part, device, HostTier(pages), self.name, rules[self.name])


def _sizes(found: Sequence[_PoolPart], params: Any) -> dict[str, PoolSize]:
    """Returns the size of each component that SGLang allocates; a pool has one more page or slot, never used."""
    allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
    sizes: dict[str, PoolSize] = {}
    for name in dict.fromkeys(each.name for each in found):
        page_bytes = sum(each.part.nbytes for each in found if each.name == name)
        if name == STATE:
            sizes[name] = PoolSize(rows.mamba_allocator.size, page_bytes)
        else:
            tokens = allocator.size_full if name == ATTENTION else allocator.size_swa
            sizes[name] = PoolSize(tokens // params.page_size, page_bytes)
    return sizes


def _stored(tiered_pools: tuple[TieredPool, ...], adapter: StoreAdapter) -> Storage:
    own = adapter.rank.place.in_stage
    fleet = own.fleet(adapter.page_tokens // own.cp_size)
    return Storage(adapter.store, adapter.space, tiered_pools, fleet, own.rank, own.writes)


class EnginePages:
    """The pages of one component, of `page_tokens` tokens in SGLang's `allocator`: see `tiers.DevicePages`.

    States are pages of one slot. `free`: gives pages, by number, back to SGLang.
    """

    def __init__(
        self, allocator: Any, free: Callable[[torch.Tensor], object], indices: IndexTable, page_tokens: int
    ) -> None:
        self._allocator, self._free, self._indices, self._page_tokens = allocator, free, indices, page_tokens

    def __len__(self) -> int:
        """Returns the pages that SGLang has free."""
        return self._allocator.available_size() // self._page_tokens

    def take(self, count: int) -> list[int]:
        """Take free pages: see `tiers.DevicePages`."""
        indices = self._allocator.alloc(count * self._page_tokens)
        if indices is None:
            raise TierError(f"{count} pages of SGLang's pool, of which {len(self)} are free")
        return self._indices.keep(indices).tolist()

    def give(self, ids: Iterable[int]) -> None:
        """Give pages back: see `tiers.DevicePages`."""
        row = _row(ids)
        if len(row):
            self._free(self._indices.forget(row))

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns page numbers: see `tiers.DevicePages`. On a GPU the host waits for the current stream."""
        first = self._indices.of(_row(ids))[:: self._page_tokens]
        return cast(list[int], (first // self._page_tokens).tolist())  # pyright: ignore[reportUnknownMemberType]

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """Do nothing: SGLang finds the pages `ids` by their own index, without the attention page `beside` each."""

    def check(self, others: Collection[int]) -> None:
        """Check the ids in use: see `tiers.DevicePages`. Free pages are SGLang's to count."""
        if len(self._indices) != len(others):
            raise InvariantBroken(f"{len(self._indices)} pages have indices, the tree has {len(others)}")


class EngineWindows(EnginePages):
    """The pages of windows, which SGLang finds by the index of attention KV. `attention`: ids of that.

    A page that is being loaded has such an index only once `loaded` names the attention page beside it.
    """

    def __init__(self, allocator: Any, indices: IndexTable, attention: IndexTable, page_tokens: int) -> None:
        super().__init__(allocator.swa_attn_allocator, allocator.swa_attn_allocator.free_page_ids, indices, page_tokens)
        self._hybrid, self._attention = allocator, attention
        self._unplaced: set[int] = set()

    def take(self, count: int) -> list[int]:
        """Take free pages: see `tiers.DevicePages`."""
        ids = super().take(count)
        self._unplaced.update(ids)
        return ids

    def give(self, ids: Iterable[int]) -> None:
        """Give pages back: see `tiers.DevicePages`."""
        row = _row(ids)
        unplaced = np.isin(row, list(self._unplaced))
        super().give(row[unplaced].tolist())
        self._unplaced.difference_update(row[unplaced].tolist())
        placed = row[~unplaced]
        if len(placed):
            self._hybrid.free_swa_segment(self._indices.of(placed), start_pos=0)
            self._indices.forget(placed)

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns page numbers: see `tiers.DevicePages`. On a GPU it waits for the current stream."""
        row = _row(ids)
        if self._unplaced.intersection(row.tolist()):
            return super().places(ids)
        first = self._hybrid.translate_loc_from_full_to_swa(self._indices.of(row)[:: self._page_tokens])
        return (first // self._page_tokens).tolist()

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """Map these pages from the attention pages beside them: see `tiers.DevicePages`."""
        row = _row(ids)
        found = self._attention.of(_row(beside))
        self._hybrid.set_full_to_swa_mapping(found, self._indices.of(row))
        self._indices.replace(row, found)
        self._unplaced.difference_update(row.tolist())


def _row(ids: Iterable[int]) -> PageArray:
    return np.fromiter(ids, np.int32)


class LayerGates:
    """A layer transfer counter for SGLang's pools. A reader of a layer waits for every load that was begun.

    `depths`: see EngineTiers.
    """

    def __init__(self, loads: GatedLoads, depths: Mapping[int, int]) -> None:
        self._loads, self._depths, self.num_layers = loads, depths, len(depths)

    @property
    def consumer_index(self) -> int:
        """0 while a load is on its way, else -1: SGLang asks before it replays a graph."""
        return 0 if self._loads.closed else -1

    def set_consumer(self, index: int) -> None:
        """Ignore the batch: SGLang's counter waits for a batch's loads, this counter also for all earlier loads."""

    def wait_until(self, layer: int) -> None:
        """Wait for `layer`, counted within the rank. On a GPU the current stream waits, and the host does not."""
        self._loads.wait(self._depths[layer])
