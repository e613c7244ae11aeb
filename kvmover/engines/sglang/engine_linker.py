"""The further SGLang names that the direct linker and the tiers use are imported here, because that takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvmover.engines.sglang.sglang_contract import SGLANG

if TYPE_CHECKING:
    import torch

_linker: Any = SGLANG.find("sglang.srt.mem_cache.unified_cache.unified_cache_linker")
_pools: Any = SGLANG.find("sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler")
_states: Any = SGLANG.find("sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler:_mamba_device_pool_entry")
_components: Any = SGLANG.find("sglang.srt.mem_cache.unified_cache.component_type")
_storage: Any = SGLANG.find("sglang.srt.mem_cache.hicache_storage")
_utils: Any = SGLANG.find("sglang.srt.utils")

UnifiedCacheLinker: Any = _linker.UnifiedCacheLinker
LayerWiseLoadCounter: Any = _linker.LayerWiseLoadCounter

MAMBA: Any = _storage.PoolName.MAMBA

#: Pools of attention-only models, which SGLang's own linkers leave out.
_PLAIN = {"MHATokenToKVPool", "MLATokenToKVPool"}


def device_pools(kvcache: Any, params: Any, components: Any) -> Any:
    """Returns SGLang's `DevicePoolGroup` of a rank's pools. Raises ValueError for models unknown to SGLang."""
    if type(kvcache).__name__ in _PLAIN and set(components) == {_components.ComponentType.FULL}:
        return _plain(kvcache, params.page_size)
    return _pools.resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=params.page_size, params=params, components=components
    )


def tiered_pools(kvcache: Any, rows: Any, page_size: int) -> Any:
    """Returns the `DevicePoolGroup` for tiers: attention KV, windows beside it, and states if requests have them.

    `rows`: SGLang's pool of requests. `page_size`: rows of the cache per page. Raises ValueError for states that SGLang
    does not describe.
    """
    first = kvcache.start_layer
    if hasattr(kvcache, "swa_kv_pool"):
        full, window = (
            {layer - first: own for layer, (own, is_window) in kvcache.layers_mapping.items() if is_window is wanted}
            for wanted in (False, True)
        )
        entries = [_attention(_storage.PoolName.KV, kvcache.full_kv_pool, full, page_size)]
        entries.append(_attention(_storage.PoolName.SWA, kvcache.swa_kv_pool, window, page_size))
    elif hasattr(kvcache, "full_kv_pool"):
        full = {layer - first: own for layer, own in kvcache.full_attention_layer_id_mapping.items()}
        entries = [_attention(_storage.PoolName.KV, kvcache.full_kv_pool, full, page_size)]
    else:
        return _plain(kvcache, page_size)
    if hasattr(rows, "mamba_pool"):
        entries.append(_states(rows, first))
    return _pools.DevicePoolGroup(entries, 1 + max(max(entry.layer_mapping) for entry in entries), page_size)


def _plain(kvcache: Any, page_size: int) -> Any:
    layers = kvcache.layer_num
    entry = _attention(_storage.PoolName.KV, kvcache, {layer: layer for layer in range(layers)}, page_size)
    return _pools.DevicePoolGroup([entry], layers, page_size, rank_replicated=hasattr(kvcache, "kv_buffer"))


def _attention(name: Any, pool: Any, layers: dict[int, int], page_size: int) -> Any:
    """Returns the pool entry of attention KV. `layers`: per layer of the rank, the pool's own."""
    latent, count = hasattr(pool, "kv_buffer"), pool.layer_num
    return _pools.DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[pool.kv_buffer] if latent else [[*pool.k_buffer, *pool.v_buffer]],
        layer_mapping={layer: own if latent else (own, count + own) for layer, own in layers.items()},
        page_size=page_size,
        rows_are_pages=False,
    )


def rank_in(group: Any) -> tuple[int, int]:
    """Returns (rank, size) in a process group; (0, 1) without a group."""
    import torch

    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def recorded() -> Any:
    """Returns an event recorded on the current stream, behind all work queued so far."""
    event = _utils.get_device_module().Event()
    event.record()
    return event


def device_of(kvcache: Any) -> torch.device:
    """Returns the device that holds an SGLang KV cache."""
    import torch

    return torch.device(kvcache.device)
