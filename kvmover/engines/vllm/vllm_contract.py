"""The names of vLLM that the adapters use, with the plug-ins that need each and stand-ins for older releases."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kvmover.engines.common import Contract, Need, is_of, of_known_fields

#: The parts of the adapter that a release can have or lack, as messages call them.
CONNECTOR, OFFLOADING, PEER_TIER = "connector", "offloading tier", "peer tier"

_ALL, _TIERS = (CONNECTOR, OFFLOADING, PEER_TIER), (OFFLOADING, PEER_TIER)

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


def _hit_sources() -> Any:
    """Returns sources of hits for a release whose metrics have none: 0.31 and older."""
    return Enum("CacheHitSource", {"HOST": "host", "P2P": "p2p", "DISK": "disk"})


def dcp_sharded(spec: Any) -> bool:
    """Returns True if context-parallel ranks share a cache's tokens; 0.30 does not say so, and shares attention's."""
    return bool(getattr(spec, "dcp_sharded", isinstance(spec, VLLM.find("vllm.v1.kv_cache_interface:AttentionSpec"))))


def prefill_lookahead(config: Any) -> int:
    """Returns the tokens past the computed ones that a draft reads in a prefill; 0.30 has them in its scheduler."""
    said = getattr(config, "num_prefill_lookahead_tokens", None)
    if said is not None:
        return int(said)
    draft = config.speculative_config
    if draft is None or not draft.use_eagle():
        return 0
    return int(config.num_speculative_tokens) if draft.use_multi_module_mtp() else 1


def hashed_tokens(caches: Any) -> int | None:
    """Returns the tokens that a block hash covers; None if it covers a block, as it does for one group in 0.30."""
    return getattr(caches, "hash_block_size", None)


def make_tier(tier: Any, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None:
    """Run the constructor of vLLM's tiers; 0.30 gives tiers no detector of backpressure, and takes none."""
    more = {} if detector is None else {"backpressure_detector": detector}
    manager = VLLM.find("vllm.v1.kv_offload.tiering.base:SecondaryTierManager")
    manager.__init__(tier, spec, view, tier_type, **more)


#: What `chunk_content` calls a chunk without the order of ranks.
ONE_COPY = "one copy"

#: Releases of which each was seen to read the chunks of another (`make live-pair`, perf/results/live_upgrades.csv).
#: Before 0.32 the parts of several ranks lie in the order of their devices' numbers, not of the ranks.
_LAYOUT_1, _LAYOUT_1_OF_SEVERAL_RANKS = ("0.30", "0.31", "0.32", "0.33"), ("0.32", "0.33")


def layout_revision(ranks: str) -> str:
    """Returns the name of the layout in which this release offloads chunks of `ranks`: its own, but where another reads
    its chunks.
    """
    found = VLLM.installed()
    is_shared = is_of(found, _LAYOUT_1 if ranks == ONE_COPY else _LAYOUT_1_OF_SEVERAL_RANKS)
    return "layout 1" if is_shared else f"layout of {found.partition('+')[0]}"


def job_result(**said: Any) -> Any:
    """Returns the result of a tier's job; 0.30 has no field for its bytes."""
    return of_known_fields(VLLM.find("vllm.v1.kv_offload.tiering.base:JobResult"), **said)


def tell_scheduler(core: Any) -> None:
    """Give the scheduler's connector the handshake metadata of all workers, which 0.32 and older do once, inline."""
    if (tell := getattr(core, "_set_kv_connector_handshake_metadata", None)) is not None:
        tell()
        return
    connector, said = core.scheduler.get_kv_connector(), core.model_executor.get_kv_connector_handshake_metadata()
    if connector is not None and said:
        connector.set_xfer_handshake_metadata_pp_aware({k: v for ranks in said if ranks for k, v in ranks.items()})


def hit_sources(connector: Any, request: Any, external_tokens: int) -> dict[Any, int]:
    """Returns the external tokens of vLLM's offloading by their source; 0.31 and 0.30 do not say it, and have None."""
    say = getattr(connector, "get_external_cache_hit_sources", None)
    return {None: external_tokens} if say is None else dict(say(request, external_tokens))


def request_hints(request: Any) -> Any:
    """Returns an orchestrator's hints beside a request; None in 0.30, whose requests have none."""
    return getattr(request, "kv_hints", None)


_NEEDS = (
    Need("vllm.v1.kv_cache_interface", _ALL),
    Need("vllm.distributed.kv_events", _ALL),
    Need(
        f"{V1}.base:KVConnectorBase_V1",
        _ALL,
        (
            *("bind_connector_metadata", "bind_kv_cache_manager", "get_num_new_matched_tokens", "request_finished"),
            *("_get_connector_metadata", "_kv_cache_config", "_kv_transfer_config", "_role"),
        ),
    ),
    Need(f"{V1}.base:SupportsHMA", _ALL),
    Need(f"{V1}.base:KVConnectorHandshakeMetadata", _ALL),
    Need(f"{V1}.base:KVConnectorTransferResults", _ALL),
    Need(f"{V1}.base:KVConnectorWorkerMetadata", _ALL),
    Need(f"{V1}.base:KVConnectorRole", _ALL, ("SCHEDULER", "WORKER")),
    Need(f"{V1}.metrics:KVConnectorStats", _ALL),
    Need(f"{V1}.metrics:KVConnectorPromMetrics", _ALL, ("_counter_cls",)),
    Need(f"{V1}.metrics:Counter", _ALL),
    Need("vllm.v1.kv_cache_interface:get_kv_cache_spec_kind", _ALL),
    Need("vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window", _ALL),
    Need(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        _ALL,
        ("kv_cache_groups", "kv_cache_layout", "kv_cache_tensors", "num_blocks", "transfer_group_ids"),
    ),
    Need("vllm.v1.kv_cache_interface:KVCacheTensor", _ALL, ("block_stride", "layer_stride", "layers", "offset")),
    Need("vllm.v1.kv_cache_interface:KVCacheSpec", _ALL, ("get_num_kernel_states", "num_heads")),
    Need("vllm.v1.kv_cache_layout:KVCacheLayout", _ALL, ("stride_order",)),
    Need(
        "vllm.v1.kv_cache_interface:AttentionSpec",
        _ALL,
        ("head_size", "head_size_v", "kv_quant_mode", "num_head_slots", "state_content_size_bytes", "tokens_per_state"),
    ),
    Need("vllm.v1.kv_cache_interface:FullAttentionSpec", _ALL),
    Need("vllm.v1.kv_cache_interface:SlidingWindowSpec", _ALL),
    Need("vllm.v1.kv_cache_interface:MLAAttentionSpec", _ALL, ("cache_role", "model_version")),
    Need("vllm.v1.kv_cache_interface:SlidingWindowMLASpec", _ALL),
    Need("vllm.v1.kv_cache_interface:CircularBufferSpec", _ALL),
    Need("vllm.v1.kv_cache_interface:MambaSpec", _ALL, ("shapes", "dtypes", "mamba_type", "tp_replicated")),
    Need("vllm.v1.kv_cache_interface:SparseCacheRole", _ALL, ("INDEXER",)),
    Need("vllm.v1.core.kv_cache_utils:maybe_convert_block_hash", _ALL),
    Need("vllm.distributed.kv_events:BlockStored", _ALL, ("group_idx", "kv_cache_spec_kind", "lora_name", "medium")),
    Need("vllm.distributed.kv_events:MEDIUM_STORAGE", _ALL),
    Need("vllm.v1.request:RequestStatus", _ALL, ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")),
    Need("vllm.v1.request:Request", _ALL, ("block_hashes", "all_token_ids", "lora_request", "status")),
    Need("vllm.platforms", _ALL),
    Need("vllm.v1.attention.backends.registry:AttentionBackendEnum", _ALL, ("CPU_ATTN", "is_overridden")),
    Need("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first", _ALL),
    Need("vllm.model_executor.models:ModelRegistry", _ALL, ("resolve_model_cls",)),
    Need("vllm.v1.metrics.cache_hit_source:CacheHitSource", _ALL, ("HOST", "P2P", "DISK"), _hit_sources),
    Need("vllm.distributed.parallel_state", _ALL, ("get_pp_group", "get_tp_group", "model_parallel_is_initialized")),
    Need("vllm.utils.network_utils:get_ip", _ALL),
    Need("vllm.v1.metrics.utils:create_metric_per_engine", _ALL),
    Need(
        "vllm.v1.engine.core:EngineCore",
        _ALL,
        ("collective_rpc", "set_weight_version", "post_step"),
    ),
    Need("vllm.v1.kv_offload.base:RequestOffloadingContext", _TIERS),
    Need("vllm.v1.kv_offload.base:ReqContext.get_offload_key_position", (PEER_TIER,)),
    Need("vllm.v1.kv_offload.base:OffloadingEvent", _TIERS),
    Need("vllm.v1.kv_offload.base:OffloadingCounterMetadata", _TIERS),
    Need("vllm.v1.kv_offload.base:LookupResult", _TIERS, ("HIT", "MISS", "RETRY")),
    Need("vllm.v1.kv_offload.base:Medium", _TIERS, ("STORAGE",)),
    Need("vllm.v1.kv_offload.base:Locality", _TIERS),
    Need("vllm.v1.kv_offload.tiering.base:SecondaryTierManager", _TIERS),
    Need("vllm.v1.kv_offload.tiering.base:JobResult", _TIERS),
    Need(f"{V1}.offloading.metrics:OffloadingConnectorStats", _TIERS),
    Need(
        f"{V1}.offloading_connector:OffloadingConnector",
        _TIERS,
        (
            *("_kv_transfer_config", "_role", "build_connector_meta", "get_num_new_matched_tokens", "on_new_request"),
            *("request_finished", "request_finished_all_groups", "shutdown", "update_state_after_alloc"),
        ),
    ),
    Need("vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy", (PEER_TIER,), ("chunks", "clear", "evict")),
)

#: The contract with vLLM, whose interfaces for connectors and tiers are experimental.
VLLM = Contract(
    "vLLM",
    "vllm",
    "kvmover.engines.vllm",
    {
        CONNECTOR: ("0.30", "0.31", "0.32", "0.33"),
        OFFLOADING: ("0.30", "0.31", "0.32", "0.33"),
        PEER_TIER: ("0.31", "0.32", "0.33"),
    },
    _NEEDS,
)
