"""A rank's tiers are opened here over SGLang's device pools: host pools, the page store, and how they are used.

EnginePages are SGLang's device pages as tiers take and give them; LayerGates hold a forward pass before each layer
whose KV is still on its way from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvmover.cache.prefix import InvariantBroken, PageArray
from kvmover.cache.tiers import (
    Consensus,
    ControllerConfig,
    GatedLoads,
    Grouped,
    HostTier,
    LocalConsensus,
    Storage,
    TieredPool,
    TierError,
)
from kvmover.engines.common import ParallelRank, Upkeep, as_bytes
from kvmover.engines.sglang import engine, engine_linker
from kvmover.engines.sglang.device_indices import DeviceIndices
from kvmover.engines.sglang.devicepool import Strand, placement_of, strands_of
from kvmover.engines.sglang.engine_radix import FULL
from kvmover.engines.sglang.options import StorageFlags, TierFlags, parse, said, served
from kvmover.engines.sglang.page_parts import TpPlacement, part_of_rows
from kvmover.engines.sglang.store_adapter import ServedRank, StoreAdapter
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


class EnginePages:
    """Of one rank: pages of `page_tokens` tokens in SGLang's `allocator`. See `tiers.DevicePages`."""

    def __init__(self, allocator: Any, indices: DeviceIndices, page_tokens: int) -> None:
        self._allocator, self._indices, self._page_tokens = allocator, indices, page_tokens

    def __len__(self) -> int:
        """Pages that SGLang has free."""
        return self._allocator.available_size() // self._page_tokens

    def take(self, count: int) -> list[int]:
        """See `tiers.DevicePages`."""
        indices = self._allocator.alloc(count * self._page_tokens)
        if indices is None:
            raise TierError(f"{count} pages of SGLang's pool, of which {len(self)} are free")
        return self._indices.keep(indices).tolist()

    def give(self, ids: Iterable[int]) -> None:
        """See `tiers.DevicePages`."""
        row = _row(ids)
        if len(row):
            self._allocator.free_segment(self._indices.of(row), start_pos=0)
            self._indices.forget(row)

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """See `tiers.DevicePages`. On a GPU the current stream is waited for: a copy's pages are named on the host."""
        first = self._indices.of(_row(ids))[:: self._page_tokens]
        return cast(list[int], (first // self._page_tokens).tolist())  # pyright: ignore[reportUnknownMemberType]

    def check(self, others: Collection[int]) -> None:
        """See `tiers.DevicePages`: what is free is SGLang's to count."""
        if len(self._indices) != len(others):
            raise InvariantBroken(f"{len(self._indices)} pages have indices, the tree has {len(others)}")


def _row(ids: Iterable[int]) -> PageArray:
    return np.fromiter(ids, np.int32)


class LayerGates:
    """What SGLang's pools call a layer transfer counter. Whoever reads a layer waits for every load that was begun."""

    def __init__(self, loads: GatedLoads, layers: int) -> None:
        self._loads, self.num_layers = loads, layers

    @property
    def consumer_index(self) -> int:
        """0 while something is on its way, else -1: SGLang asks before it replays a graph."""
        return 0 if self._loads.closed else -1

    def set_consumer(self, index: int) -> None:
        """SGLang's own counter waits for the loads of one batch; here a batch waits for all before it too."""

    def wait_until(self, layer: int) -> None:
        """`layer` counts within the rank's own. On a GPU the current stream waits, and the host does not."""
        self._loads.wait(layer)
