"""All names of vLLM that the connector uses are imported here: what a new release has to be read for.

It is absent where these files are checked, so everything of it is `Any`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvmover.engines.common import EngineUnsupported, ParallelRank
from kvmover.engines.vllm.caches import CacheGroup, LayerCache, ModelTotals
from kvmover.engines.vllm.request_accounts import ExternalTokens
from kvmover.engines.vllm.scheduler import RequestOutcome

if TYPE_CHECKING:
    import torch

_base: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_metrics: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.metrics")
_cache: Any = import_module("vllm.v1.kv_cache_interface")
_hashes: Any = import_module("vllm.v1.core.kv_cache_utils")
_events: Any = import_module("vllm.distributed.kv_events")
_request: Any = import_module("vllm.v1.request")
_platforms: Any = import_module("vllm.platforms")
_backends: Any = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
_sources: Any = import_module("vllm.v1.metrics.cache_hit_source")

KVConnectorBase: Any = _base.KVConnectorBase_V1
SupportsHMA: Any = _base.SupportsHMA
HandshakeMetadata: Any = _base.KVConnectorHandshakeMetadata
TransferResults: Any = _base.KVConnectorTransferResults
WorkerMetadata: Any = _base.KVConnectorWorkerMetadata
Stats: Any = _metrics.KVConnectorStats
PromMetrics: Any = _metrics.KVConnectorPromMetrics
Counter: Any = _metrics.Counter

#: The only logger that vLLM configures.
LOG = logging.getLogger("vllm")

#: Whose halves they are.
SCHEDULER, WORKER = _base.KVConnectorRole.SCHEDULER, _base.KVConnectorRole.WORKER

#: Where hits come from, in vLLM's metrics.
P2P, DISK, HOST = (getattr(_sources.CacheHitSource, name) for name in ("P2P", "DISK", "HOST"))


def groups_of(config: Any) -> list[CacheGroup]:
    """Cache groups of `KVCacheConfig`. Raises EngineUnsupported for those that a transfer leaves out."""
    if len(config.transfer_group_ids) != len(config.kv_cache_groups):
        raise EngineUnsupported("kvmover's vLLM connector moves all cache groups or none; HiSparse keeps some back")
    made: list[CacheGroup] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for each in _cache.iter_layer_specs(spec):
            _refuse_packing(each)
        made.append(
            CacheGroup(
                tuple(group.layer_names),
                _cache.get_kv_cache_spec_kind(spec).value,
                spec.block_size,
                _cache.get_kv_cache_spec_sliding_window(spec),
            )
        )
    return made


def _refuse_packing(spec: Any) -> None:
    """Raise EngineUnsupported unless a row of the cache is all of one token and head, and nothing but that.

    Some backends keep K and V of a block apart, or the scales of a block behind its keys: a block cut at a token, by
    heads or into others would be wrong, and its shape does not tell.
    """
    slots, mode = getattr(spec, "num_head_slots", None), getattr(spec, "kv_quant_mode", None)
    apart = slots is not None and slots != spec.num_kv_heads
    scaled = mode is not None and not mode.is_per_token_head and mode.name not in ("NONE", "FP8_PER_TENSOR")
    sparse = getattr(spec, "cache_role", None) is _cache.SparseCacheRole.INDEXER or getattr(spec, "model_version", None)
    if apart or scaled or sparse:
        raise EngineUnsupported(
            "kvmover's vLLM connector moves caches whose rows are tokens; this attention backend, quantisation"
            f" or model packs blocks in another way ({type(spec).__name__})"
        )
    if _is_for_cpu_attn(spec):
        raise EngineUnsupported(
            "kvmover's vLLM connector moves caches whose rows are tokens; vLLM's attention backend CPU_ATTN keeps K and"
            " V of a block apart"
        )


def _is_for_cpu_attn(spec: Any) -> bool:
    """Whether vLLM's own CPU backend computes these layers, whose cache says nothing of how its blocks are packed.

    On its CPU platform it computes all attention but that over latents, unless another is registered in its place.
    """
    over_tokens = isinstance(spec, _cache.AttentionSpec) and not isinstance(
        spec, _cache.MLAAttentionSpec | _cache.SlidingWindowMLASpec
    )
    return over_tokens and _platforms.current_platform.is_cpu() and not _backends.CPU_ATTN.is_overridden()


def layer_caches_of(caches: Mapping[str, torch.Tensor]) -> list[LayerCache]:
    """The registered tensors. Content of a dtype without a name of ours is bytes."""
    import torch

    from kvmover.layout import DTYPE_BYTES

    made: list[LayerCache] = []
    for layer, cache in caches.items():
        view = cache if str(cache.dtype).removeprefix("torch.") in DTYPE_BYTES else cache.view(torch.uint8)
        if view.dim() != 4:
            shape = tuple(view.shape)
            raise EngineUnsupported(f"cache of {layer} has the shape {shape}, not [block, head, token, content]")
        (a, b, c, d), (s, t, u, v) = view.shape, view.stride()
        dtype = str(view.dtype).removeprefix("torch.")
        made.append(LayerCache(layer, view.data_ptr(), (a, b, c, d), (s, t, u, v), dtype))
    return made


def backing_of(caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The one allocation that all caches are views of, flat bytes. Raises EngineUnsupported where there are several."""
    import torch

    storages = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
    if len(storages) != 1:
        raise EngineUnsupported(f"caches in {len(storages)} allocations; vLLM 0.33 has one")
    (cache,) = storages.values()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def place_of(config: Any) -> ParallelRank:
    """Where this process stands. Raises EngineUnsupported for ways to serve that the connector was not made for."""
    parallel = config.parallel_config
    for size, what in (
        (parallel.decode_context_parallel_size, "decode context parallelism"),
        (parallel.prefill_context_parallel_size, "prefill context parallelism"),
    ):
        if size > 1:
            raise EngineUnsupported(f"kvmover's vLLM connector does not serve {what} of {size}")
    if config.speculative_config is not None:
        raise EngineUnsupported("kvmover's vLLM connector does not serve speculative decoding")
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return ParallelRank.from_rank(parallel.rank % (tp * pp), tp, pp)


def whole_of(config: Any) -> ModelTotals:
    """KV heads and hidden layers of the whole model, and the dtype of its cache."""
    model, kv_dtype = config.model_config, config.cache_config.cache_dtype
    said = {"fp8": "fp8_e4m3"}.get(str(kv_dtype), str(kv_dtype))
    return ModelTotals(model.get_total_num_kv_heads(), model.get_total_num_hidden_layers(), said)


class KvBlocks:
    """Blocks by request, over the cache manager and the pool of vLLM's scheduler."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.touch: Any = manager.block_pool.touch
        self.free_blocks: Any = manager.block_pool.free_blocks

    def of(self, request: str) -> list[Any]:
        """All that it has, of every group."""
        return [block for group in self._manager.get_blocks(request).blocks for block in group]


def outcome_of(request: Any) -> RequestOutcome:
    """How a request ended that the scheduler has finished."""
    status = _request.RequestStatus
    is_whole = request.status in (status.FINISHED_STOPPED, status.FINISHED_LENGTH_CAPPED)
    return RequestOutcome.DELIVERED if is_whole else RequestOutcome.ABORTED


def stored_event(request: Any, number: int, block_tokens: int, group: int, kind: str) -> Any:
    """`BlockStored` of block `number` of a request, in the page store."""
    hashes, first = request.block_hashes, number * block_tokens
    lora = request.lora_request
    return _events.BlockStored(
        block_hashes=[_hashes.maybe_convert_block_hash(hashes[number])],
        parent_block_hash=_hashes.maybe_convert_block_hash(hashes[number - 1]) if number else None,
        token_ids=list(request.all_token_ids[first : first + block_tokens]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=_events.MEDIUM_STORAGE,
        lora_name=lora.name if lora else None,
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def own_address() -> str:
    """The address of this host that vLLM tells others."""
    return import_module("vllm.utils.network_utils").get_ip()


def per_engine(metric: Any, labels: Mapping[int, Sequence[object]]) -> Any:
    """A metric with an instance an engine."""
    return import_module("vllm.v1.metrics.utils").create_metric_per_engine(metric, labels)


def external_of(sources: Mapping[Any, int]) -> ExternalTokens:
    """What a connector brings, by vLLM's sources of hits."""
    host, storage = sources.get(HOST, 0), sources.get(DISK, 0)
    return ExternalTokens(host, storage, sum(sources.values()) - host - storage)
