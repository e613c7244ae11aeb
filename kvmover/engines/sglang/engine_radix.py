"""All further names of SGLang that the radix cache uses are imported here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_base: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")
_registry: Any = import_module("sglang.srt.mem_cache.registry")
_components: Any = import_module("sglang.srt.mem_cache.unified_cache.component_type")
_common: Any = import_module("sglang.srt.utils.common")
_context: Any = import_module("sglang.srt.runtime_context")

BasePrefixCache: Any = _base.BasePrefixCache
DecLockRefResult: Any = _base.DecLockRefResult
EvictResult: Any = _base.EvictResult
IncLockRefResult: Any = _base.IncLockRefResult
InsertParams: Any = _base.InsertParams
InsertResult: Any = _base.InsertResult
MatchResult: Any = _base.MatchResult

_batch: Any = import_module("sglang.srt.managers.schedule_batch")
_events: Any = import_module("sglang.srt.disaggregation.kv_events")

EventPublisher: Any = _events.EventPublisher

#: An endpoint with its port moved by a data-parallel rank; None of None.
port_of_rank: Any = _events.ZmqEventPublisher.offset_endpoint_port

#: SGLang's names of attention KV and of windows.
FULL: Any = _components.ComponentType.FULL
SWA: Any = _components.ComponentType.SWA

default_radix_cache: Any = _registry.default_radix_cache_factory

#: Allocators whose free pages a cache may count and give back by token index.
ALLOCATORS = frozenset({"TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"})
#: The same, with pages of windows behind a mapping.
HYBRID_ALLOCATOR = "SWATokenToKVPoolAllocator"


def to_device(row: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A row of the host on `device`, through pinned memory and behind what the current stream does."""
    import torch

    if device.type == "cpu":
        return torch.as_tensor(row)
    return _common.async_h2d(row, dtype=torch.int64, device=device)


def has_windows(allocator: Any) -> bool:
    """Whether an allocator has pages of windows beside those of attention KV."""
    return type(allocator).__name__ == HYBRID_ALLOCATOR


def is_abort(reason: Any) -> bool:
    """Whether a request ended without an answer."""
    return isinstance(reason, _batch.FINISH_ABORT)


def disaggregated() -> bool:
    """Whether this process is a prefill or a decode."""
    return _context.get_disagg().disaggregation_mode != "null"


def rank() -> tuple[int, int]:
    """Tensor-parallel rank and size of this process, of those that serve a request together."""
    parallel = _context.get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size


def odd_windows(context: Any) -> str:
    """What makes windows of a `TreeCacheBuildContext` other than pages of requests and of the tree; empty for none."""
    params, allocator = context.params, context.params.token_to_kv_pool_allocator
    odd = {
        "windows only": context.full_tokens_per_layer == 0,
        "windows in a ring a request": getattr(allocator, "swa_req_ring", False),
        "windows that no match waits for": not params.swa_gates_prefix_match,
        "windows that are computed again": params.decoder_swa_bounded_replay,
        "a prompt's whole windows kept": getattr(context.tp_worker.model_runner, "prefill_aware_swa", False),
    }
    return ", ".join(name for name, is_odd in odd.items() if is_odd)


def asked_beside() -> str:
    """What else this process is asked for that only SGLang's own tree does; empty for nothing."""
    memory, disaggregation = _context.get_memory(), _context.get_disagg()
    asked = {
        "LMCache (--enable-lmcache)": memory.enable_lmcache,
        "FlexKV (--enable-flexkv)": memory.enable_flexkv,
        "retraction to the host's pool": disaggregation.disaggregation_decode_retraction_backup == "host_pool",
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)
