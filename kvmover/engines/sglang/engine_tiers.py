"""All further names of SGLang that the tiers of its radix cache use are imported here, which takes seconds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvmover.engines.sglang.tier_options import StorageFlags, TierFlags

if TYPE_CHECKING:
    import torch

_context: Any = import_module("sglang.srt.runtime_context")
_hybrid: Any = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
_batch: Any = import_module("sglang.srt.managers.schedule_batch")

#: Pools whose buffers are all that there is of a token.
_POOLS = {"MHATokenToKVPool", "MLATokenToKVPool"}


def flags() -> TierFlags:
    """SGLang's flags of this process. Raises ValueError for options of the storage that SGLang does not read."""
    memory = _context.get_memory()
    storage = None
    if memory.hicache_storage_backend is not None:
        options, least, base_s, per_ki_s, _prefix_keys = (
            _hybrid.HybridCacheController.parse_storage_backend_extra_config(
                memory.hicache_storage_backend_extra_config
            )
        )
        storage = StorageFlags(memory.hicache_storage_backend, options, least, base_s, per_ki_s)
    return TierFlags(
        memory.hicache_ratio,
        int(memory.hicache_size * 1e9),
        memory.hicache_write_policy,
        memory.hicache_storage_prefetch_policy,
        memory.hicache_host_memory_mode,
        storage,
    )


def odd_pools(context: Any) -> str:
    """What of a `TreeCacheBuildContext` the tiers do not bring back as it was; empty for nothing."""
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    parallel = _context.get_parallel()
    odd = {
        "windows": context.is_hybrid_swa,
        "states": context.is_hybrid_ssm,
        f"pools of {type(pool).__name__}": type(pool).__name__ not in _POOLS,
        "quantized pools with scales": getattr(pool, "is_quantized_kv_cache", False),
        "a draft's pools": bool(params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools),
        "pipeline stages": params.pp_size > 1,
        "context-parallel ranks": params.attn_cp_size > 1 or parallel.dcp_enabled,
    }
    return ", ".join(name for name, is_odd in odd.items() if is_odd)


def fences(context: Any) -> tuple[torch.cuda.Stream, ...]:
    """The stream of forward passes, which write and read pages that are copied."""
    stream = context.tp_worker.model_runner.forward_stream
    return () if stream is None or not hasattr(stream, "cuda_stream") else (stream,)


def gate(context: Any, gates: Any) -> None:
    """Let every forward pass wait at `gates`."""
    context.params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(gates)
    context.tp_worker.register_hicache_layer_transfer_counter(gates)


def tokens_by_tier(req: Any) -> tuple[int, int, int]:
    """What SGLang says that a request, just admitted, found on the device, on the host and in storage."""
    return _batch.split_cached_prefix_by_tier(
        prefix_len=req.prefix_len,
        host_hit_len=req.materialized_host_hit_len(),
        storage_hit_len=req.storage_hit_length,
        storage_hit_start=req.storage_hit_start,
        host_hit_is_storage=req.host_hit_is_storage,
    )
