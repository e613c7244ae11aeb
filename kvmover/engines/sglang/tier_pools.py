"""A rank's tiers are opened here over SGLang's device pools: host pools, the page store, and how they are used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.cache.tiers import (
    Consensus,
    ControllerConfig,
    Grouped,
    HostTier,
    LocalConsensus,
    Storage,
    TieredPool,
)
from kvmover.engines.common import ParallelRank, Upkeep, as_bytes
from kvmover.engines.sglang import engine, engine_linker
from kvmover.engines.sglang.devicepool import Strand, placement_of, strands_of
from kvmover.engines.sglang.engine_radix import FULL
from kvmover.engines.sglang.options import parse, said, served
from kvmover.engines.sglang.page_parts import TpPlacement, part_of_rows
from kvmover.engines.sglang.store_adapter import ServedRank, StoreAdapter
from kvmover.engines.sglang.tier_options import StorageFlags, TierFlags
from kvmover.layout import Pool
from kvmover.store import PagePart, PageStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """What a controller is made of. The host pools and the store are ours, the device's pools are SGLang's."""

    tiered_pools: tuple[TieredPool, ...]
    config: ControllerConfig
    storage: Storage | None = None
    store: PageStore | None = None
    upkeep: Upkeep | None = None

    @property
    def layers(self) -> int:
        """Layers of this rank."""
        return max(tiered_pool.part.box.layers.count for tiered_pool in self.tiered_pools)


def open_tiers(params: Any, flags: TierFlags, place: ParallelRank, fences: Sequence[torch.cuda.Stream]) -> EngineTiers:
    """The tiers below the device pool of `params`, SGLang's `CacheInitParams`, for the rank at `place`.

    All ranks call this together. Raises EngineUnsupported for flags or pools that are not understood, ConfigError and
    StoreError for the store, TierError for host memory that cannot be had.
    """
    allocator, page_tokens = params.token_to_kv_pool_allocator, params.page_size
    kvcache = allocator.get_kvcache()
    group = params.attn_tp_cache_group or params.tp_cache_group
    consensus: Consensus = Grouped(group) if place.tp_size > 1 else LocalConsensus()
    fleet = place.fleet(page_tokens)
    found = [
        (strand, part, Pool(strand.spec(part.component), tuple(memory[number] for number in strand.buffers)))
        for entry in engine_linker.device_pools(kvcache, params, {FULL}).entry_map.values()
        for memory in ([as_bytes(buffer) for buffer in entry.kv_buffer],)
        for strand in strands_of(entry, kvcache.start_layer, placement_of(entry.device_pool))
        for part in (_part(strand, place, page_tokens),)
    ]
    page_bytes = sum(part.nbytes for _, part, _ in found)
    pages = flags.host_pages(allocator.size // page_tokens, page_bytes)
    pages = int(consensus.minimum(np.array([pages], np.int64))[0])
    log.info("%d pages of %d tokens, %d bytes each, on the host", pages, page_tokens, page_bytes)
    pools = tuple(
        TieredPool.of(part.component, fleet, place.rank, device, HostTier(pages)) for _, part, device in found
    )
    config = ControllerConfig(flags.policy(), consensus, fences=fences, engine=engine.served_name(), rank=place.rank)
    if flags.storage is None:
        return EngineTiers(pools, config)
    replicated = all(strand.rows.placement is TpPlacement.REPLICATED for strand, _, _ in found)
    return _stored(pools, config, flags.storage, place, page_tokens, replicated)


def _stored(
    pools: tuple[TieredPool, ...],
    config: ControllerConfig,
    flags: StorageFlags,
    place: ParallelRank,
    page_tokens: int,
    replicated: bool,
) -> EngineTiers:
    flags.check()
    options, settings = parse(flags.options)
    placement = TpPlacement.REPLICATED if replicated else TpPlacement.SHARDED
    name = options.model or engine.served_name()
    rank = ServedRank(name, said(options, served()), place, placement)
    adapter = StoreAdapter(options, settings.store, rank, page_tokens)
    storage = Storage(adapter.store, adapter.space, pools, place.fleet(page_tokens), place.rank)
    return EngineTiers(pools, config, storage, adapter.store, Upkeep(adapter.store, settings.store))


def _part(strand: Strand, place: ParallelRank, page_tokens: int) -> PagePart:
    return part_of_rows(strand.rows, place, served(), page_tokens)
