"""The further SGLang names that the radix cache and its tiers use are imported here, and mapped to the tree's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvmover.cache.prefix import POLICIES, EvictionPolicy
from kvmover.engines.common import EngineUnsupported, ParallelRank, odd_ones
from kvmover.engines.sglang.sglang_contract import RADIX, SGLANG, drafts_apart, gates_match, replays_windows
from kvmover.engines.sglang.sglang_options import StorageFlags, TierFlags
from kvmover.layout import CpOrder

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist

SGLANG.require(RADIX)

_base: Any = SGLANG.find("sglang.srt.mem_cache.base_prefix_cache")
_registry: Any = SGLANG.find("sglang.srt.mem_cache.registry")
_components: Any = SGLANG.find("sglang.srt.mem_cache.unified_cache.component_type")
_common: Any = SGLANG.find("sglang.srt.utils.common")
_context: Any = SGLANG.find("sglang.srt.runtime_context")
_environ: Any = SGLANG.find("sglang.srt.environ")
_pools: Any = SGLANG.find("sglang.srt.mem_cache.memory_pool")

BasePrefixCache: Any = _base.BasePrefixCache
DecLockRefParams: Any = _base.DecLockRefParams
DecLockRefResult: Any = _base.DecLockRefResult
EvictResult: Any = _base.EvictResult
IncLockRefResult: Any = _base.IncLockRefResult
InsertParams: Any = _base.InsertParams
InsertResult: Any = _base.InsertResult
MatchResult: Any = _base.MatchResult
TreeLock: Any = _base.TreeLock

_batch: Any = SGLANG.find("sglang.srt.managers.schedule_batch")
_events: Any = SGLANG.find("sglang.srt.disaggregation.kv_events")

EventPublisher: Any = _events.EventPublisher

#: Moves an endpoint's port by a data-parallel rank; None for None.
port_of_rank: Any = _events.ZmqEventPublisher.offset_endpoint_port

#: SGLang's names of attention KV, windows, and states of recurrent layers.
FULL: Any = _components.ComponentType.FULL
SWA: Any = _components.ComponentType.SWA
MAMBA: Any = _components.ComponentType.MAMBA

default_radix_cache: Any = _registry.default_radix_cache_factory

#: Allocators whose free pages a cache may count and free by token index.
ALLOCATORS = frozenset({"TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"})
#: The allocator with window pages behind a mapping.
HYBRID_ALLOCATOR = "SWATokenToKVPoolAllocator"
#: Pools whose buffers hold all data of a token.
_POOLS = {"MHATokenToKVPool", "MLATokenToKVPool"}
#: Pools made of two `_POOLS`, or of one and states.
_HYBRIDS = {"SWAKVPool", "HybridLinearKVPool"}


def to_device(row: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns a host row on `device`, copied through pinned memory in the current stream."""
    import torch

    if device.type == "cpu":
        return torch.as_tensor(row)
    return _common.async_h2d(row, dtype=torch.int64, device=device)


def has_windows(allocator: Any) -> bool:
    """Returns True if the allocator has window pages beside those of attention KV."""
    return type(allocator).__name__ == HYBRID_ALLOCATOR


def has_states(rows: Any) -> bool:
    """Returns True if requests have slots in a state pool beside their rows."""
    return isinstance(rows, _pools.HybridReqToTokenPool)


def state_grid(page_tokens: int) -> int:
    """Returns the grid of tokens at which the tree can name states: that of SGLang's snapshots."""
    return _context.mamba_checkpoint_grid(page_tokens)


def leaves_states_unlocked() -> bool:
    """Returns True if SGLang expects a request to unlock its state once it has copied it."""
    return _environ.envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get()


def is_abort(reason: Any) -> bool:
    """Returns True if this finish reason is an abort."""
    return isinstance(reason, _batch.FINISH_ABORT)


def disaggregated() -> bool:
    """Returns True in a prefill or decode server."""
    return _context.get_disagg().disaggregation_mode != "null"


def is_decode() -> bool:
    """Returns True in a decode server."""
    return _context.get_disagg().disaggregation_mode == "decode"


def place() -> ParallelRank:
    """Returns this process's place among the ranks that serve a request together.

    Decode context parallelism deals tokens to neighbours in a tensor-parallel group, which hold the same heads.
    Attention context parallelism divides a prompt's work, and every rank then holds all of its KV.
    """
    parallel = _context.get_parallel()
    shares = parallel.attn_dcp_size
    return ParallelRank(
        tp=parallel.attn_tp_rank // shares,
        tp_size=parallel.attn_tp_size // shares,
        pp=parallel.pp_rank,
        pp_size=parallel.pp_size,
        cp=parallel.attn_tp_rank % shares,
        cp_size=shares,
        cp_order=CpOrder.TOKEN,
        copy=parallel.attn_cp_rank,
        copies=parallel.attn_cp_size,
    )


def data_parallel_groups() -> int:
    """Returns the number of fleets in this server that serve requests of their own."""
    parallel = _context.get_parallel()
    return parallel.dp_size * parallel.attn_dp_size


def fleet_group(place: ParallelRank, params: Any) -> dist.ProcessGroup | None:
    """Returns the CPU process group of all ranks that serve a request together, stage by stage; None for one rank.

    For several stages or copies SGLang has no such group: all ranks call this together and make one.
    """
    if place.ranks == 1:
        return None
    if place.pp_size == place.copies == 1:
        return params.attn_tp_cache_group or params.tp_cache_group
    from torch import distributed

    parallel = _context.get_parallel()
    first = parallel.attn_dp_rank * place.in_stage.ranks
    stage = range(first, first + place.in_stage.ranks)
    ranks = [stage_number * parallel.tp_size + rank for stage_number in range(place.pp_size) for rank in stage]
    made: Any = cast(Any, distributed).new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made


def odd_windows(context: Any) -> str:
    """Returns the unsupported forms of windows in a `TreeCacheBuildContext`; empty without any."""
    params, allocator = context.params, context.params.token_to_kv_pool_allocator
    odd = {
        "windows only": context.full_tokens_per_layer == 0,
        "windows in a ring a request": getattr(allocator, "swa_req_ring", False),
        "windows that no match waits for": not gates_match(params),
        "windows that are computed again": replays_windows(params),
        "a prompt's whole windows kept": getattr(context.tp_worker.model_runner, "prefill_aware_swa", False),
    }
    return odd_ones(odd)


def odd_states(context: Any) -> str:
    """Returns the unsupported forms of states in a `TreeCacheBuildContext`; empty without any."""
    params, rows, options = context.params, context.params.req_to_token_pool, _context.get_exec().mamba
    pool = getattr(rows, "mamba_pool", None)
    behind = getattr(pool, "replayssm_write_pos", None) is not None
    odd = {
        f"in {type(rows).__name__}": type(rows) is not _pools.HybridReqToTokenPool,
        "in eight bits (--enable-int8-mamba-checkpoint)": getattr(rows, "mamba_ckpt_pool", None) is not None,
        "some of a path only (--mamba-max-states-per-path)": options.mamba_max_states_per_path >= 0,
        "behind their tokens (--enable-linear-replayssm)": behind and not params.enable_mamba_extra_buffer,
        f"without snapshots in pages of {params.page_size} tokens": (
            params.page_size > 1 and not params.enable_mamba_extra_buffer
        ),
    }
    return odd_ones(odd)


def asked_beside() -> str:
    """Returns the requested features that only SGLang's own tree has; empty without any."""
    memory, disaggregation = _context.get_memory(), _context.get_disagg()
    asked = {
        "LMCache (--enable-lmcache)": memory.enable_lmcache,
        "FlexKV (--enable-flexkv)": memory.enable_flexkv,
        "retraction to the host's pool": disaggregation.disaggregation_decode_retraction_backup == "host_pool",
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)


def policy_of(name: str, options: dict[str, Any]) -> EvictionPolicy:
    """Returns the tree's policy by SGLang's name. Raises EngineUnsupported for an unknown policy, or for options."""
    if name.lower() not in POLICIES or options:
        asked = f"{name} with {options}" if options else name
        raise EngineUnsupported(
            f"kvmover's radix cache evicts by {', '.join(POLICIES)} without options, not by {asked}"
        )
    return POLICIES[name.lower()]


def refuse(context: Any) -> None:
    """Raise EngineUnsupported if a `TreeCacheBuildContext` needs SGLang's own tree."""
    asked = asked_beside()
    if asked:
        raise EngineUnsupported(f"{asked} goes with SGLang's own radix cache: leave out --radix-cache-backend kvmover")
    odd = odd_states(context) if context.is_hybrid_ssm else ""
    if odd:
        raise EngineUnsupported(f"kvmover's radix cache keeps states in slots of SGLang's pool, and not {odd}")
    odd = odd_windows(context) if context.is_hybrid_swa else ""
    if odd:
        raise EngineUnsupported(f"kvmover's radix cache keeps windows in pages, and not {odd}")
    params = context.params
    allocator = params.token_to_kv_pool_allocator
    known = {HYBRID_ALLOCATOR} if context.is_hybrid_swa else ALLOCATORS
    if type(allocator).__name__ not in known or allocator.page_size != params.page_size:
        raise EngineUnsupported(
            f"kvmover's radix cache works with {', '.join(sorted(known))} of its own page size,"
            f" not with {type(allocator).__name__} of {allocator.page_size} tokens for {params.page_size}"
        )


def tier_flags() -> TierFlags:
    """Returns SGLang's flags of this process. Raises ValueError for storage options that SGLang cannot parse."""
    memory = _context.get_memory()
    storage = None
    if memory.hicache_storage_backend is not None:
        controllers: Any = SGLANG.find("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
        parse = controllers.HybridCacheController.parse_storage_backend_extra_config
        options, least, base_s, per_ki_s, _prefix_keys = parse(memory.hicache_storage_backend_extra_config)
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
    """Returns the parts of a `TreeCacheBuildContext` that tiers cannot restore; empty without any."""
    params, rows, parallel = context.params, context.params.req_to_token_pool, _context.get_parallel()
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    within = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
    strange = [type(each).__name__ for each in within if type(each).__name__ not in _POOLS]
    if within != [pool] and type(pool).__name__ not in _HYBRIDS:
        strange.append(type(pool).__name__)
    odd = {
        f"pools of {' and '.join(strange)}": bool(strange),
        "quantized pools with scales": any(getattr(each, "is_quantized_kv_cache", False) for each in within),
        "side states of recurrent layers": has_states(rows)
        and (rows.short_conv_pool.enabled or rows.ngram_pool.enabled),
        "windows or states written back (--hicache-write-policy write_back)": (
            tier_flags().write == "write_back" and (within != [pool] or has_states(rows))
        ),
        "a draft's pools": bool(params.is_eagle or params.mtp_draft_device_pools or drafts_apart(params)),
        "pipeline stages of a decode server (--pp-size)": params.pp_size > 1 and is_decode(),
        "states of context-parallel ranks (--attn-cp-size, --dcp-size)": has_states(rows)
        and (params.attn_cp_size > 1 or parallel.dcp_enabled),
        "windows beside tokens that ranks divide (--dcp-size)": hasattr(pool, "swa_kv_pool") and parallel.dcp_enabled,
    }
    return odd_ones(odd)


def fences(context: Any) -> tuple[torch.cuda.Stream, ...]:
    """Returns the streams of forward passes, which write and read the pages that are copied."""
    stream = context.tp_worker.model_runner.forward_stream
    return () if stream is None or not hasattr(stream, "cuda_stream") else (stream,)


def gate(context: Any, gates: Any) -> None:
    """Let every forward pass wait at `gates`."""
    context.params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(gates)
    if has_states(context.params.req_to_token_pool):
        context.params.req_to_token_pool.register_layer_transfer_counter(gates)
    context.tp_worker.register_hicache_layer_transfer_counter(gates)


def tokens_by_tier(req: Any) -> tuple[int, int, int]:
    """Returns the tokens that a just admitted request found on device, on host and in storage, by SGLang's count."""
    return _batch.split_cached_prefix_by_tier(
        prefix_len=req.prefix_len,
        host_hit_len=req.materialized_host_hit_len(),
        storage_hit_len=req.storage_hit_length,
        storage_hit_start=req.storage_hit_start,
        host_hit_is_storage=req.host_hit_is_storage,
    )
