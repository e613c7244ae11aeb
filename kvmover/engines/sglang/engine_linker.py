"""All further names of SGLang that the direct linker uses are imported here, which takes seconds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_linker: Any = import_module("sglang.srt.mem_cache.unified_cache.unified_cache_linker")
_pools: Any = import_module("sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler")
_components: Any = import_module("sglang.srt.mem_cache.unified_cache.component_type")
_storage: Any = import_module("sglang.srt.mem_cache.hicache_storage")
_utils: Any = import_module("sglang.srt.utils")

UnifiedCacheLinker: Any = _linker.UnifiedCacheLinker
LayerWiseLoadCounter: Any = _linker.LayerWiseLoadCounter

MAMBA: Any = _storage.PoolName.MAMBA

#: Pools of models with nothing but attention. SGLang's own linkers leave those out; nothing about them is harder.
_PLAIN = {"MHATokenToKVPool", "MLATokenToKVPool"}


def device_pools(kvcache: Any, params: Any, components: Any) -> Any:
    """SGLang's `DevicePoolGroup` of what a rank holds. Raises ValueError for models that it does not describe."""
    if type(kvcache).__name__ in _PLAIN and set(components) == {_components.ComponentType.FULL}:
        return _plain(kvcache, params.page_size)
    return _pools.resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=params.page_size, params=params, components=components
    )


def _plain(kvcache: Any, page_size: int) -> Any:
    layers, latent = kvcache.layer_num, hasattr(kvcache, "kv_buffer")
    entry = _pools.DevicePoolEntry(
        name=_storage.PoolName.KV,
        indices_from_pool=_storage.PoolName.KV,
        device_pool=kvcache,
        components=[kvcache.kv_buffer] if latent else [[*kvcache.k_buffer, *kvcache.v_buffer]],
        layer_mapping={layer: layer if latent else (layer, layers + layer) for layer in range(layers)},
        page_size=page_size,
        rows_are_pages=False,
    )
    return _pools.DevicePoolGroup([entry], layers, page_size, rank_replicated=latent)


def rank_in(group: Any) -> tuple[int, int]:
    """Rank and size in a process group; (0, 1) without one."""
    import torch

    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def recorded() -> Any:
    """An event of the current stream, which has passed all that was queued before."""
    event = _utils.get_device_module().Event()
    event.record()
    return event


def device_of(kvcache: Any) -> torch.device:
    """The device that a KV cache of SGLang's lies on."""
    import torch

    return torch.device(kvcache.device)
