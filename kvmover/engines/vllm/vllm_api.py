"""All names of vLLM that the connector uses, imported in one place: the file to check against a new release.

vLLM is absent where these files are type-checked, so everything from it is `Any`.
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
from kvmover.engines.vllm.described_caches import described_caches
from kvmover.engines.vllm.request_accounts import ExternalTokens
from kvmover.engines.vllm.scheduler import RequestOutcome
from kvmover.engines.vllm.vllm_contract import CONNECTOR, V1, VLLM, dcp_sharded, prefill_lookahead
from kvmover.layout import Codec, CpOrder
from kvmover.layout.codec import VALUES

if TYPE_CHECKING:
    import torch

VLLM.require(CONNECTOR)  # in the module that every class of the adapter loads, whatever its module path

_cache: Any = VLLM.find("vllm.v1.kv_cache_interface")
_events: Any = VLLM.find("vllm.distributed.kv_events")
_platforms: Any = VLLM.find("vllm.platforms")
_backends: Any = VLLM.find("vllm.v1.attention.backends.registry:AttentionBackendEnum")
_sources: Any = VLLM.find("vllm.v1.metrics.cache_hit_source:CacheHitSource")

KVConnectorBase: Any = VLLM.find(f"{V1}.base:KVConnectorBase_V1")
SupportsHMA: Any = VLLM.find(f"{V1}.base:SupportsHMA")
HandshakeMetadata: Any = VLLM.find(f"{V1}.base:KVConnectorHandshakeMetadata")
TransferResults: Any = VLLM.find(f"{V1}.base:KVConnectorTransferResults")
WorkerMetadata: Any = VLLM.find(f"{V1}.base:KVConnectorWorkerMetadata")
Stats: Any = VLLM.find(f"{V1}.metrics:KVConnectorStats")
PromMetrics: Any = VLLM.find(f"{V1}.metrics:KVConnectorPromMetrics")
Counter: Any = VLLM.find(f"{V1}.metrics:Counter")
_role: Any = VLLM.find(f"{V1}.base:KVConnectorRole")

_mamba_dim_first: Any = VLLM.find("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first")
_named: Any = VLLM.find("vllm.v1.core.kv_cache_utils:maybe_convert_block_hash")

#: The only logger that vLLM configures.
LOG = logging.getLogger("vllm")

#: The role of each half.
SCHEDULER, WORKER = _role.SCHEDULER, _role.WORKER

#: Sources of hits in vLLM's metrics.
P2P, DISK, HOST = (getattr(_sources, name) for name in ("P2P", "DISK", "HOST"))


def groups_of(caches: Any, config: Any) -> list[CacheGroup]:
    """Returns the cache groups of a `KVCacheConfig` and its `VllmConfig`. Raises EngineUnsupported for a group that
    cannot be cut.
    """
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


#: Forms with a scale a layer, by vLLM's names.
_BY_TENSOR = {"fp8": Codec.fp8, "fp8_e4m3": Codec.fp8, "fp8_e5m2": Codec.fp8_e5m2}


def _stored(layer: str, spec: Any, config: Any) -> StoredRows | None:
    """Returns the codec of rows in e4m3 or e5m2 by the layer's scales, or of DeepSeek-V3.2's; None for plain rows and
    unknown encodings.

    Scales that vLLM computes as it runs are not known yet: such a cache is moved as bytes.
    """
    cache, values = config.cache_config, str(config.model_config.dtype).removeprefix("torch.")
    latent = type(spec) is _cache.MLAAttentionSpec
    if values not in VALUES or _platforms.current_platform.is_rocm():  # its e4m3 differs
        return None
    if latent and spec.state_content_size_bytes == 656 and spec.head_size == 576 and values == "bfloat16":
        return StoredRows(Codec.fp8_ds_mla())
    by_tensor = None if getattr(cache, "calculate_kv_scales", False) else _BY_TENSOR.get(str(cache.cache_dtype))
    if by_tensor is None or not (latent or type(spec) in (_cache.FullAttentionSpec, _cache.SlidingWindowSpec)):
        return None
    module = config.compilation_config.static_forward_context.get(layer)
    scales = [float(getattr(module, f"_{side}_scale_float", 1.0)) for side in "kv"]
    if latent:
        return StoredRows(by_tensor(values, spec.head_size), (scales[0],))
    return StoredRows(by_tensor(values, spec.head_size, spec.head_size_v), tuple(scales))


def _sides(*specs: Any) -> int:
    """Returns 2 if rows are equally long keys and values of a head, 1 for a latent, 0 otherwise."""
    if all(type(spec) is _cache.MLAAttentionSpec for spec in specs):
        return 1
    dense = all(type(spec) is _cache.FullAttentionSpec and spec.kv_quant_mode.name == "NONE" for spec in specs)
    return 2 if dense and all(spec.head_size == spec.head_size_v for spec in specs) else 0


def _format(spec: Any, config: Any) -> BlockFormat | None:
    """Returns the format of a layer's blocks; None if a row is exactly the content of one token and head.

    Cutting a block by tokens or heads needs the format, which its shape does not show.
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

#: Parts of a token, which are apart in a page. vLLM gives only the sum of their bytes: 128 keys in fp8 and their scale
#: of 4 B, for DeepGEMM; 448 B in fp8, 64 values in bf16, and 8 scales, for FlashMLA.
_INDEX_KEYS = (("index keys", 128), ("index scales", 4))
_LATENTS = (("latents", 576), ("latent scales", 8))

#: Tokens of a block in the kernels of index keys; DeepSeek V4's support one size of compressed blocks.
_INDEX_BLOCK, _V4_BLOCK = 64, 256


def _latent_format(spec: Any) -> BlockFormat | None:
    """Returns the format of sparse attention's index keys or DeepSeek V4's latents; None for rows: latents beside their
    scales.
    """
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
    """Returns the format of NVFP4 with its scales; None for rows of K and V."""
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
    first = _mamba_dim_first()
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
    kind = REPLICATED if spec.tp_replicated else spec.mamba_type.name
    tp = config.parallel_config.tensor_parallel_size
    said = RecurrentKind(kind, spec.shapes, dtypes, tp, not first)
    return states_of(replace(said, groups=_groups(config) if kind == "MAMBA2" and tp > 1 else 0))


def _groups(config: Any) -> int:
    """Returns the number of groups of B and C in the whole model, by vLLM's own calculation for one rank.

    Each rank has its own groups or, if there is one, a copy of it.
    """
    model, alone = config.model_config, copy(config)
    alone.parallel_config = copy(config.parallel_config)
    alone.parallel_config.tensor_parallel_size = 1
    found, _ = VLLM.find("vllm.model_executor.models:ModelRegistry").resolve_model_cls(
        model.architecture, model_config=model
    )
    convolution, recurrence, *_ = found.get_mamba_state_shape_from_config(alone)
    channels = convolution[0 if _mamba_dim_first() else 1]
    heads, head_dim, state_dim = recurrence
    return (channels - heads * head_dim) // 2 // state_dim


def _refuse_shares(spec: Any, parallel: Any) -> None:
    """Raise EngineUnsupported for a layer whose tokens are whole on every rank under decode context parallelism."""
    dcp, is_ring = parallel.decode_context_parallel_size, isinstance(spec, _cache.CircularBufferSpec)
    if dcp > 1 and (is_ring or not dcp_sharded(spec) or getattr(spec, "tokens_per_state", 1) != 1):
        raise EngineUnsupported(
            f"{_REFUSED} {type(spec).__name__} with decode context parallelism of {dcp}: its tokens are not shared"
        )


def _is_for_cpu_attn(spec: Any) -> bool:
    """Returns True if vLLM's CPU backend computes these layers: its caches do not show how blocks are packed.

    On the CPU platform it computes all attention but that over latents, unless another backend is registered in its
    place.
    """
    over_latents = isinstance(spec, _cache.MLAAttentionSpec | _cache.SlidingWindowMLASpec)
    return not over_latents and _platforms.current_platform.is_cpu() and not _backends.CPU_ATTN.is_overridden()


def layer_caches_of(caches: Mapping[str, torch.Tensor]) -> list[LayerCache]:
    """Returns the registered tensors as values. Content of a dtype unknown to kvmover is bytes."""
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


def check_places(registered: Sequence[LayerCache], config: Any) -> None:
    """Raise EngineUnsupported unless the registered caches lie as a `KVCacheConfig` describes them."""
    layout = VLLM.find("vllm.v1.kv_cache_layout:KVCacheLayout")[config.kv_cache_layout]
    described = described_caches(config, layout.stride_order, registered)
    VLLM.compare(CONNECTOR, {cache.layer: cache for cache in registered}, described)


def backing_of(caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the one allocation behind all caches as flat bytes. Raises EngineUnsupported if there are several."""
    import torch

    storages = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
    if len(storages) != 1:
        raise EngineUnsupported(f"caches in {len(storages)} allocations; vLLM 0.33 has one")
    (cache,) = storages.values()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def weight_sources(config: Any) -> list[WeightSource]:
    """Returns the place of the model's weights, then of its draft's if that is another model.

    `quantized` names the method by which vLLM quantizes a checkpoint while loading, "" if it does not.
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
    """Returns the groups through which one rank of an engine reaches all: its pipeline group, then its TP group; [] if
    vLLM has made none, for a single rank.
    """
    state = VLLM.find("vllm.distributed.parallel_state")
    return [state.get_pp_group(), state.get_tp_group()] if state.model_parallel_is_initialized() else []


def place_of(config: Any) -> ParallelRank:
    """Returns this process's place in the grid. Raises EngineUnsupported for parallelism that the connector does not
    support.

    Ranks that share a request's tokens are neighbours and hold the same heads: in TP8 with DCP4, ranks 4 to 7 are rank
    1 of TP2.
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
    """Returns the number of consecutive tokens on a rank under context parallelism."""
    return config.parallel_config.cp_kv_cache_interleave_size


def unread_tokens(config: Any) -> int:
    """Returns the number of tokens at a prompt's end whose KV a draft of several modules computes only with later
    tokens.
    """
    return max(0, prefill_lookahead(config) - 1)


def whole_of(config: Any, layers: Iterable[str]) -> ModelTotals:
    """Returns the KV heads of the whole model, the dtype of its cache, and the `layers` of a draft model."""
    model, kv_dtype, speculation = config.model_config, config.cache_config.cache_dtype, config.speculative_config
    said = {"fp8": "fp8_e4m3"}.get(str(kv_dtype), str(kv_dtype))
    modules = config.compilation_config.static_forward_context
    drafted = [layer for layer in layers if getattr(modules.get(layer), "is_draft_layer", False)]
    heads = speculation.draft_model_config.get_total_num_kv_heads() if drafted else 0
    return ModelTotals(model.get_total_num_kv_heads(), said, dict.fromkeys(drafted, heads))


def of_all_stages(own: Mapping[str, int], stages: int) -> list[Mapping[str, int]]:
    """Returns the layers of every pipeline stage beside this rank, in order. All stages call it together."""
    if stages == 1:
        return [own]
    group = VLLM.find("vllm.distributed.parallel_state").get_pp_group().cpu_group
    given: list[Mapping[str, int]] = [own] * stages
    import_module("torch.distributed").all_gather_object(given, own, group=group)
    return given


class KvBlocks:
    """The blocks of each request, over the cache manager and the block pool of vLLM's scheduler."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.touch: Any = manager.block_pool.touch
        self.free_blocks: Any = manager.block_pool.free_blocks

    def of(self, request: str) -> list[Any]:
        """Returns all blocks of a request, of every group."""
        return [block for group in self._manager.get_blocks(request).blocks for block in group]

    @property
    def total(self) -> int:
        """Returns the number of blocks without the null block."""
        return self._manager.block_pool.num_gpu_blocks - 1

    def cached(self, request: str) -> list[Any]:
        """Returns the blocks that another request with the same prompt would find."""
        return [block for block in self.of(request) if not block.is_null and block.block_hash is not None]


def outcome_of(request: Any) -> RequestOutcome:
    """Returns the outcome of a request that the scheduler has finished."""
    status = VLLM.find("vllm.v1.request:RequestStatus")
    is_whole = request.status in (status.FINISHED_STOPPED, status.FINISHED_LENGTH_CAPPED)
    return RequestOutcome.DELIVERED if is_whole else RequestOutcome.ABORTED


def stored_event(request: Any, number: int, block_tokens: int, group: int, kind: str) -> Any:
    """Returns `BlockStored` for block `number` of a request, in the page store."""
    hashes, first = request.block_hashes, number * block_tokens
    lora = request.lora_request
    return _events.BlockStored(
        block_hashes=[_named(hashes[number])],
        parent_block_hash=_named(hashes[number - 1]) if number else None,
        token_ids=list(request.all_token_ids[first : first + block_tokens]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=_events.MEDIUM_STORAGE,
        lora_name=lora.name if lora else None,
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def own_address() -> str:
    """Returns the address of this host that vLLM gives to other processes."""
    return VLLM.find("vllm.utils.network_utils:get_ip")()


def per_engine(metric: Any, labels: Mapping[int, Sequence[object]]) -> Any:
    """Returns a metric with one instance an engine."""
    return VLLM.find("vllm.v1.metrics.utils:create_metric_per_engine")(metric, labels)


def external_of(sources: Mapping[Any, int], lenders: frozenset[Any] = frozenset()) -> ExternalTokens:
    """Returns a connector's tokens by vLLM's sources of hits. `lenders` are the sources that are other engines' host
    memory.
    """
    host, storage = sources.get(HOST, 0), sources.get(DISK, 0)
    peer = sum(tokens for source, tokens in sources.items() if source in lenders)
    return ExternalTokens(host, storage, sum(sources.values()) - host - storage - peer, peer)
