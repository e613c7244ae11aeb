"""All names of vLLM that the connector uses are imported here: what a new release has to be read for.

It is absent where these files are checked, so everything of it is `Any`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvmover.engines.common import EngineUnsupported, ParallelRank, RankGroup, WeightSource
from kvmover.engines.vllm.block_format import (
    REPLICATED,
    BlockFormat,
    BlockScaled,
    PlanarRows,
    RecurrentKind,
    TokenRing,
    states_of,
)
from kvmover.engines.vllm.caches import RING, CacheGroup, LayerCache, ModelTotals, StoredRows
from kvmover.engines.vllm.request_accounts import ExternalTokens
from kvmover.engines.vllm.scheduler import RequestOutcome
from kvmover.layout import Codec, CpOrder
from kvmover.layout.codec import VALUES

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
_mamba: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils")
_models: Any = import_module("vllm.model_executor.models")
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


def groups_of(caches: Any, config: Any) -> list[CacheGroup]:
    """Cache groups of a `KVCacheConfig` and its `VllmConfig`. Raises EngineUnsupported for what cannot be cut."""
    if len(caches.transfer_group_ids) != len(caches.kv_cache_groups):
        raise EngineUnsupported("kvmover's vLLM connector moves all cache groups or none; HiSparse keeps some back")
    return [_group(group, config) for group in caches.kv_cache_groups]


def _group(group: Any, config: Any) -> CacheGroup:
    spec, names = group.kv_cache_spec, tuple(group.layer_names)
    specs = dict(getattr(spec, "kv_cache_specs", dict.fromkeys(names, spec)))
    formats = {layer: _format(each, config) for layer, each in specs.items()}
    rows = {layer: getattr(each, "tokens_per_state", 1) for layer, each in specs.items()}
    is_ring = bool(specs) and all(isinstance(each, _cache.CircularBufferSpec) for each in specs.values())
    return CacheGroup(
        names,
        RING if is_ring else _cache.get_kv_cache_spec_kind(spec).value,
        spec.block_size,
        _cache.get_kv_cache_spec_sliding_window(spec),
        {layer: found for layer, found in formats.items() if found is not None},
        {layer: count for layer, count in rows.items() if count > 1},
        getattr(spec, "num_speculative_blocks", 0),
        _sides(*specs.values()),
        {layer: found for layer, each in specs.items() if (found := _stored(layer, each, config)) is not None},
    )


def _stored(layer: str, spec: Any, config: Any) -> StoredRows | None:
    """Rows in e4m3 by the layer's scales, or DeepSeek-V3.2's; None where they are as is meant, or nobody knows how.

    Scales that vLLM computes as it runs are not known yet: such a cache goes by its bytes.
    """
    cache, values = config.cache_config, str(config.model_config.dtype).removeprefix("torch.")
    latent = type(spec) is _cache.MLAAttentionSpec
    if values not in VALUES or _platforms.current_platform.is_rocm():  # whose e4m3 is another
        return None
    if latent and spec.state_content_size_bytes == 656 and spec.head_size == 576 and values == "bfloat16":
        return StoredRows(Codec.fp8_ds_mla())
    by_tensor = str(cache.cache_dtype) in ("fp8", "fp8_e4m3") and not getattr(cache, "calculate_kv_scales", False)
    if not by_tensor or not (latent or type(spec) in (_cache.FullAttentionSpec, _cache.SlidingWindowSpec)):
        return None
    module = config.compilation_config.static_forward_context.get(layer)
    scales = [float(getattr(module, f"_{side}_scale_float", 1.0)) for side in "kv"]
    if latent:
        return StoredRows(Codec.fp8(values, spec.head_size), (scales[0],))
    return StoredRows(Codec.fp8(values, spec.head_size, spec.head_size_v), tuple(scales))


def _sides(*specs: Any) -> int:
    """Of layers alike: 2 for keys before values of a head, as long as each other; 1 for a latent; 0: anything else."""
    if all(type(spec) is _cache.MLAAttentionSpec for spec in specs):
        return 1
    dense = all(type(spec) is _cache.FullAttentionSpec and spec.kv_quant_mode.name == "NONE" for spec in specs)
    return 2 if dense and all(spec.head_size == spec.head_size_v for spec in specs) else 0


def _format(spec: Any, config: Any) -> BlockFormat | None:
    """How blocks of a layer are made up; None where a row is all of one token and head, and nothing but that.

    A block cut at a token, by heads or into others would be wrong otherwise, and its shape does not tell.
    """
    _refuse_shares(spec, config.parallel_config)
    if isinstance(spec, _cache.MambaSpec):
        return _states(spec, config)
    if not isinstance(spec, _cache.AttentionSpec):
        return None  # of a kind that is refused by its name
    if isinstance(spec, _cache.CircularBufferSpec):
        return TokenRing()
    if spec.tokens_per_state != int(spec.tokens_per_state):
        raise EngineUnsupported(f"{_REFUSED} {type(spec).__name__} with {spec.tokens_per_state} tokens a state")
    if _is_for_cpu_attn(spec):
        raise EngineUnsupported(f"{_REFUSED} vLLM's attention backend CPU_ATTN, which keeps K and V of a block apart")
    if isinstance(spec, _cache.MLAAttentionSpec | _cache.SlidingWindowMLASpec):
        return _latent_format(spec)
    return _head_format(spec, config)


_REFUSED = "kvmover's vLLM connector does not move caches of"

#: Parts of a token, which stand apart in a page: by the bytes that vLLM gives them together. 128 keys in fp8 and their
#: scale of 4 B, for DeepGEMM; 448 B in fp8, 64 values in bf16, and 8 scales, for FlashMLA.
_INDEX_KEYS = (("index keys", 128), ("index scales", 4))
_LATENTS = (("latents", 576), ("latent scales", 8))

#: Tokens of a block in the kernels of index keys; those of DeepSeek V4 know compressed blocks of one size.
_INDEX_BLOCK, _V4_BLOCK = 64, 256


def _latent_format(spec: Any) -> BlockFormat | None:
    """Index keys of sparse attention, DeepSeek V4's latents, or rows: latents that stand beside their scales."""
    content, ratio = spec.state_content_size_bytes, int(spec.tokens_per_state)
    is_bytes = str(spec.dtype) == "torch.uint8"
    if is_bytes and content == 132 and not _platforms.current_platform.is_rocm():
        return PlanarRows(_INDEX_KEYS, _INDEX_BLOCK if ratio == 1 else _V4_BLOCK // ratio)
    if is_bytes and content == 584 and spec.model_version == "deepseek_v4":
        return PlanarRows(_LATENTS, None if ratio == 1 else _V4_BLOCK // ratio)
    role = getattr(spec, "cache_role", None)
    rows_of_bytes = (spec.head_size, *((656, 352) if getattr(spec, "model_version", None) is None else ()))
    if is_bytes and (content not in rows_of_bytes or role is _cache.SparseCacheRole.INDEXER):
        raise EngineUnsupported(
            f"{_REFUSED} {type(spec).__name__} with {content} B a row, {getattr(role, 'value', None)} role, for"
            f" {spec.model_version or 'any model'}: how its blocks are packed is not known"
        )
    return None


def _head_format(spec: Any, config: Any) -> BlockFormat | None:
    """NVFP4 with its scales, or rows of K and V."""
    slots, mode = spec.num_head_slots, spec.kv_quant_mode
    blackwell = _platforms.current_platform.is_device_capability_family(100)
    content, side = spec.state_content_size_bytes, spec.head_size // 2 + spec.head_size // 16
    if mode.name == "NVFP4" and slots == 2 * spec.num_kv_heads and content == side and not blackwell:
        return BlockScaled(config.model_config.get_total_num_kv_heads())
    values = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    is_row = content == values if mode.name in ("NONE", "FP8_PER_TENSOR") else mode.is_per_token_head
    if slots not in (None, spec.num_kv_heads) or not is_row:
        raise EngineUnsupported(
            f"{_REFUSED} {type(spec).__name__} quantised as {mode.name}, with {slots or spec.num_kv_heads} slots for"
            f" {spec.num_kv_heads} heads" + " on sm_100" * blackwell + ": how its blocks are packed is not known"
        )
    return None


def _states(spec: Any, config: Any) -> BlockFormat:
    first = _mamba.is_conv_state_dim_first()
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
    kind = REPLICATED if spec.tp_replicated else spec.mamba_type.name
    tp = config.parallel_config.tensor_parallel_size
    said = RecurrentKind(kind, spec.shapes, dtypes, tp, not first)
    return states_of(replace(said, groups=_groups(config) if kind == "MAMBA2" and tp > 1 else 0))


def _groups(config: Any) -> int:
    """Groups of B and C in the whole model: ranks of their own or, where there is one, a copy on each. By vLLM's own
    sum, for the model on one rank."""
    model, alone = config.model_config, copy(config)
    alone.parallel_config = copy(config.parallel_config)
    alone.parallel_config.tensor_parallel_size = 1
    found, _ = _models.ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    convolution, recurrence, *_ = found.get_mamba_state_shape_from_config(alone)
    channels = convolution[0 if _mamba.is_conv_state_dim_first() else 1]
    heads, head_dim, state_dim = recurrence
    return (channels - heads * head_dim) // 2 // state_dim


def _refuse_shares(spec: Any, parallel: Any) -> None:
    """Raise EngineUnsupported for a layer whose tokens every rank holds while ranks share those of others."""
    dcp, is_ring = parallel.decode_context_parallel_size, isinstance(spec, _cache.CircularBufferSpec)
    if dcp > 1 and (is_ring or not spec.dcp_sharded or getattr(spec, "tokens_per_state", 1) != 1):
        raise EngineUnsupported(
            f"{_REFUSED} {type(spec).__name__} with decode context parallelism of {dcp}: its tokens are not shared"
        )


def _is_for_cpu_attn(spec: Any) -> bool:
    """Whether vLLM's own CPU backend computes these layers, whose cache says nothing of how its blocks are packed.

    On its CPU platform it computes all attention but that over latents, unless another is registered in its place.
    """
    over_latents = isinstance(spec, _cache.MLAAttentionSpec | _cache.SlidingWindowMLASpec)
    return not over_latents and _platforms.current_platform.is_cpu() and not _backends.CPU_ATTN.is_overridden()


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


def weight_sources(config: Any) -> list[WeightSource]:
    """Returns the places of the model's weights, and its draft's where that has others. Numbers change on the way in
    where a quantization is asked for that the checkpoint does not have.
    """
    model, speculation, load = config.model_config, config.speculative_config, config.load_config
    sources = [_source(model, load)]
    draft = getattr(speculation, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        sources.append(_source(draft, getattr(speculation, "draft_load_config", None) or load))
    return sources


def _source(model: Any, load: Any) -> WeightSource:
    is_stored = getattr(model.hf_config, "quantization_config", None) is not None
    return WeightSource(
        str(getattr(model, "model_weights", "") or model.model),
        model.revision,
        str(load.load_format),
        load.download_dir,
        "" if is_stored else str(model.quantization or ""),
    )


def rank_groups() -> list[RankGroup]:
    """Groups through which one rank of an engine reaches all: the stages beside it, then its own. None where vLLM has
    made none, around a rank that is alone.
    """
    state = import_module("vllm.distributed.parallel_state")
    return [state.get_pp_group(), state.get_tp_group()] if state.model_parallel_is_initialized() else []


def place_of(config: Any) -> ParallelRank:
    """Where this process stands. Raises EngineUnsupported for ways to serve that the connector was not made for.

    Ranks of a group that shares tokens are neighbours, and hold the same heads: of TP8 with DCP4, ranks 4 to 7 are
    rank 1 of TP2.
    """
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise EngineUnsupported(
            "kvmover's vLLM connector does not serve prefill context parallelism of"
            f" {parallel.prefill_context_parallel_size}"
        )
    tp, pp, dcp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    stage, rank = divmod(parallel.rank % (tp * pp), tp)
    order = CpOrder.TOKEN if parallel.cp_kv_cache_interleave_size == 1 else CpOrder.PAGE
    return ParallelRank(rank // dcp, tp // dcp, stage, pp, rank % dcp, dcp, order)


def run_tokens(config: Any) -> int:
    """How many tokens in a row a rank holds, where ranks share tokens."""
    return config.parallel_config.cp_kv_cache_interleave_size


def unread_tokens(config: Any) -> int:
    """How many tokens at the end of a prompt a draft of several modules cannot keep before those behind are known."""
    return max(0, config.num_prefill_lookahead_tokens - 1)


def whole_of(config: Any, layers: Iterable[str]) -> ModelTotals:
    """KV heads of the whole model, the dtype of its cache, and which `layers` a draft model has."""
    model, kv_dtype, speculation = config.model_config, config.cache_config.cache_dtype, config.speculative_config
    said = {"fp8": "fp8_e4m3"}.get(str(kv_dtype), str(kv_dtype))
    modules = config.compilation_config.static_forward_context
    drafted = [layer for layer in layers if getattr(modules.get(layer), "is_draft_layer", False)]
    heads = speculation.draft_model_config.get_total_num_kv_heads() if drafted else 0
    return ModelTotals(model.get_total_num_kv_heads(), said, dict.fromkeys(drafted, heads))


def of_all_stages(own: Mapping[str, int], stages: int) -> list[Mapping[str, int]]:
    """What the pipeline stages beside this rank give, first to last. All call this at the same time."""
    if stages == 1:
        return [own]
    group = import_module("vllm.distributed.parallel_state").get_pp_group().cpu_group
    given: list[Mapping[str, int]] = [own] * stages
    import_module("torch.distributed").all_gather_object(given, own, group=group)
    return given


class KvBlocks:
    """Blocks by request, over the cache manager and the pool of vLLM's scheduler."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.touch: Any = manager.block_pool.touch
        self.free_blocks: Any = manager.block_pool.free_blocks

    def of(self, request: str) -> list[Any]:
        """All that it has, of every group."""
        return [block for group in self._manager.get_blocks(request).blocks for block in group]

    @property
    def total(self) -> int:
        """All but the one that stands for no block."""
        return self._manager.block_pool.num_gpu_blocks - 1

    def cached(self, request: str) -> list[Any]:
        """Those that another request with the same prompt would find."""
        return [block for block in self.of(request) if not block.is_null and block.block_hash is not None]


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


def external_of(sources: Mapping[Any, int], lenders: frozenset[Any] = frozenset()) -> ExternalTokens:
    """What a connector brings, by vLLM's sources of hits. `lenders`: those that are other engines' host memory."""
    host, storage = sources.get(HOST, 0), sources.get(DISK, 0)
    peer = sum(tokens for source, tokens in sources.items() if source in lenders)
    return ExternalTokens(host, storage, sum(sources.values()) - host - storage - peer, peer)
