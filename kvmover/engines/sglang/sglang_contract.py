"""The names of SGLang that the adapters use, with the plug-ins that need each and stand-ins for older releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from kvmover.engines.common import Contract, Need, of_known_fields

#: The parts of the adapter that a release can have or lack, as messages call them.
STORE, LINKER, RADIX, PD = "HiCache storage", "linker", "radix cache", "prefill/decode"

_ALL = (STORE, LINKER, RADIX, PD)

#: The plug-in that SGLang calls in every process, which only registers the others.
CHOICES = "plug-in"

_MEM = "sglang.srt.mem_cache"
_DISAGG = "sglang.srt.disaggregation"


def block_groups() -> Any:
    """Returns a policy that no transfer of a release before 0.5.22 has: those store no groups of blocks."""
    return object()


def _no_states() -> Any:
    """Returns a function that describes no pool of recurrent states, as no release before 0.5.23 does."""

    def refuse(*_: Any) -> Any:
        raise ValueError(f"sglang {SGLANG.installed()} does not describe its pool of recurrent states")

    return refuse


def _tell_abort() -> Any:
    """Returns the method that tells all prefill ranks of a request's failure once, which 0.5.20 has not by itself."""

    def ensure_abort_notified(receiver: Any, **_: Any) -> None:
        if not receiver.abort_notified and getattr(receiver, "bootstrap_infos", None) is not None:
            receiver._send_abort_notification()
            receiver.abort_notified = True

    return ensure_abort_notified


def holds_every_failure() -> bool:
    """Returns True if SGLang's setting holds the pages of all failed requests: 0.5.20 holds those that decode gave up,
    and has it off.
    """
    return SGLANG.has(f"{_DISAGG}.common.conn.CommonKVReceiver.ensure_abort_notified")


def hold_failure(ended: Callable[[Any, Any], None], queue: Any, request: Any) -> None:
    """Have a queue of 0.5.20 hold the pages of every request that fails: it calls this before it decides."""
    ended(queue, request)
    receiver = request.kv_receiver  # None for a request that landed
    queue.enable_deferred_kv_release = True
    if hasattr(receiver, "ensure_abort_notified"):
        receiver.kv_mgr.enable_deferred_decode_kv_release = True
        receiver.ensure_abort_notified()


def _inline() -> None:
    """Returns None for a method whose work a release does inside another, or not at all."""


def sends_inline() -> bool:
    """Returns True if SGLang has no method that sends a request's metadata, as in 0.5.20."""
    return SGLANG.find(f"{_DISAGG}.decode:DecodePreallocQueue._send_kv_metadata") is None


def _add_policies() -> Any:
    """Returns the function that adds eviction policies, which stands in another module before 0.5.20."""
    return import_module("sglang.srt.server_args").add_radix_eviction_policy_choices


def _add_backends() -> Any:
    """Returns the function that adds transfer backends, which stands in another module before 0.5.20."""
    return import_module("sglang.srt.server_args").add_disagg_transfer_backend_choices


def context_ranks(config: Any) -> int:
    """Returns the decode context parallelism of a storage configuration, which names none before 0.5.23."""
    return int(getattr(config, "dcp_size", 1))


def transfer_result(pages: int, reach: dict[str, int], lengths: Sequence[int]) -> Any:
    """Returns a lookup's result; before 0.5.20 it has no field for the lengths of all prefixes that can be restored."""
    kind = SGLANG.find(f"{_MEM}.hicache_storage").PoolTransferResult
    return of_known_fields(kind, pages, reach, restorable_prefix_pages=list(lengths))


def draft_window(params: Any) -> int:
    """Returns the tokens that a draft reads in the pool of windows; before 0.5.23 none does."""
    return int(getattr(params, "draft_swa_window", 0))


def drafts_apart(params: Any) -> tuple[Any, ...]:
    """Returns the pools of a draft that are stored apart from the model's, which no release before 0.5.23 has."""
    return tuple(getattr(params, "sidecar_draft_device_pools", ()))


def kept_window(params: Any) -> int | None:
    """Returns the tokens of a window that every reader needs; None without windows."""
    return getattr(params, "swa_retain_window", params.sliding_window_size)


def gates_match(params: Any) -> bool:
    """Returns True if a prefix needs its window to match, as every one does before 0.5.23."""
    return bool(getattr(params, "swa_gates_prefix_match", True))


def replays_windows(params: Any) -> bool:
    """Returns True if SGLang computes a window again instead of keeping it, which none does before 0.5.23."""
    return bool(getattr(params, "decoder_swa_bounded_replay", False))


def lora_name(names: Any, extra_key: str | None) -> str:
    """Returns the adapter that SGLang's table names for an extra key, "" for none; 0.5.22 may have no table."""
    return "" if names is None else names.resolve(extra_key) or ""


def status_on_stages(manager: Any) -> Any:
    """Returns the check of a request's status on all pipeline stages; 0.5.21 asks each stage by itself."""
    return getattr(manager, "check_status_pp_consensus", manager.check_status)


def known_settings(kind: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a prefill's settings for this release's dataclass, without those of a later release that are off.

    Off is false, none, or the policy that 0.5.21 has without a name.
    """
    off = {"decode_allocation_policy": "early"}
    return {
        name: value
        for name, value in said.items()
        if name in kind.__dataclass_fields__ or (value and value != off.get(name))
    }


def shares_heads_over_context(parallel: Any) -> bool:
    """Returns True if context-parallel ranks hold a share of the heads each, which none does before 0.5.22."""
    return bool(getattr(parallel, "enable_cp_tp_group_sharing", False))


def compresses_latents(args: Any) -> bool:
    """Returns True if `KVArgs` are of latents compressed by layer; a decode of 0.5.20 does not say so, and its prefill,
    which does, refuses it for other caches.
    """
    return bool(getattr(args, "mla_compression_ratios", None))


def window_layout(args: Any) -> str | None:
    """Returns the order of axes in windows by `KVArgs`; None before 0.5.22, whose windows are refused."""
    return getattr(args, "swa_kv_cache_layout", None)


def sends_checksums(settings: Any) -> bool:
    """Returns True if checksums of KV stand behind the rooms of the metadata, which 0.5.20 does not have."""
    return bool(getattr(settings, "disaggregation_enable_kv_checksum", False))


def allocation_policy(settings: Any) -> dict[str, str]:
    """Returns the decode engine's policy as a field of a prefill's description; {} before 0.5.22, which has none."""
    said = getattr(settings, "disaggregation_decode_allocation_policy", None)
    return {} if said is None else {"decode_allocation_policy": said}


_NEEDS = (
    Need(
        f"{_MEM}.hicache_storage", _ALL, ("HiCacheStorage", "PoolHitPolicy.ALL_PAGES", "PoolName", "PoolTransferResult")
    ),
    Need(f"{_MEM}.hicache_storage:HiCacheStorage", (STORE,), ("register_mem_host_pool_v2", "register_mem_pool_host")),
    Need(f"{_MEM}.hicache_storage:PoolHitPolicy.BLOCK_GROUPS", (STORE, LINKER), (), block_groups),
    Need("sglang.srt.observability.metrics_collector", (STORE, LINKER), ("StorageMetrics",)),
    Need("sglang.srt.configs.model_config", _ALL, ("AttentionArch", "ModelConfig.from_server_args")),
    Need(
        "sglang.srt.runtime_context",
        _ALL,
        (
            *("get_context", "get_device", "get_disagg", "get_exec", "get_lora", "get_memory", "get_model"),
            *("get_parallel", "get_serving", "get_spec"),
        ),
    ),
    Need("sglang.srt.distributed.parallel_state", _ALL, ("get_tp_group", "model_parallel_is_initialized")),
    Need(f"{_MEM}.unified_cache.unified_cache_linker", (LINKER, RADIX), ("LayerWiseLoadCounter", "UnifiedCacheLinker")),
    Need(f"{_MEM}.unified_cache.unified_cache_linker:UnifiedCacheLinker", (LINKER,), ("record_offload_ready",)),
    Need(
        f"{_MEM}.hybrid_cache.linker_pool_assembler",
        (LINKER, RADIX),
        ("DevicePoolEntry", "DevicePoolGroup", "resolve_hybrid_device_pool_group"),
    ),
    Need(f"{_MEM}.hybrid_cache.linker_pool_assembler:_mamba_device_pool_entry", (LINKER, RADIX), (), _no_states),
    Need(
        f"{_MEM}.unified_cache.component_type",
        (LINKER, RADIX),
        ("ComponentType.FULL", "ComponentType.MAMBA", "ComponentType.SWA"),
    ),
    Need("sglang.srt.utils", (LINKER, RADIX), ("get_device_module",)),
    Need(
        f"{_MEM}.base_prefix_cache",
        (RADIX,),
        (
            *("DecLockRefParams", "DecLockRefResult", "EvictResult", "IncLockRefResult"),
            *("InsertParams", "InsertResult", "MatchResult", "TreeLock"),
        ),
    ),
    Need(
        f"{_MEM}.base_prefix_cache:BasePrefixCache",
        (RADIX,),
        ("init_metrics_collector", "unlock", "update_eviction_metrics"),
    ),
    Need(
        f"{_MEM}.registry",
        (CHOICES, RADIX),
        ("default_radix_cache_factory", "register_radix_cache_backend", "registered_radix_cache_backends"),
    ),
    Need(f"{_MEM}.hybrid_cache.hybrid_cache_controller", (RADIX,), ("HybridCacheController",)),
    Need("sglang.srt.utils.common", (RADIX,), ("async_h2d",)),
    Need(f"{_MEM}.memory_pool", (RADIX,), ("HybridReqToTokenPool",)),
    Need("sglang.srt.managers.schedule_batch", (RADIX,), ("FINISH_ABORT", "split_cached_prefix_by_tier")),
    Need(
        f"{_DISAGG}.kv_events",
        (CHOICES, RADIX),
        ("EventPublisher", "EventPublisherFactory", "ZmqEventPublisher.offset_endpoint_port"),
    ),
    Need("sglang.srt.environ", (RADIX, PD), ("envs",)),
    Need(
        f"{_DISAGG}.common.conn",
        (PD,),
        (
            *("CommonKVReceiver._send_abort_notification", "CommonKVReceiver._connect_to_bootstrap_server"),
            *("KVTransferError", "PrefillServerInfo", "requests", "web"),
        ),
    ),
    Need(f"{_DISAGG}.common.conn:CommonKVBootstrapServer", (PD,), ("_setup_routes", "app")),
    Need(
        f"{_DISAGG}.common.conn:CommonKVManager",
        (PD,),
        (
            *("_handle_node_failure", "_send_multipart_locked", "_start_heartbeat_checker_thread", "update_status"),
            *("addr_to_rooms_tracker", "connection_lock", "connection_pool", "disaggregation_mode", "failure_records"),
            *("kv_args", "local_ip", "prefill_info_table", "rank_port", "record_failure", "register_to_bootstrap"),
            *("req_to_decode_prefix_len", "request_status", "server_socket", "try_ensure_parallel_info"),
        ),
    ),
    Need(
        f"{_DISAGG}.common.conn:CommonKVReceiver",
        (PD,),
        (
            *("_setup_bootstrap_infos", "abort", "bootstrap_addr", "bootstrap_room", "clear", "init.prefill_dp_rank"),
            *("invalidate_cached_bootstrap_infos", "kv_mgr"),
        ),
    ),
    Need(
        f"{_DISAGG}.common.conn:CommonKVSender",
        (PD,),
        (
            *("_check_bootstrap_timeout", "_prepare_send_indices", "_record_transfer_indices", "abort", "aux_index"),
            *("bootstrap_room", "clear", "kv_mgr"),
        ),
    ),
    Need(f"{_DISAGG}.common.conn:CommonKVReceiver.ensure_abort_notified", (PD,), (), _tell_abort),
    Need(f"{_DISAGG}.base.conn", (PD,), ("KVPoll",)),
    Need("zmq", (PD,), ("ZMQError",)),
    Need(f"{_DISAGG}.utils", (CHOICES, PD), ("DisaggregationMode.PREFILL", "TransferBackend", "get_kv_class")),
    Need("sglang.srt.utils.network", (PD,), ("NetworkAddress", "get_local_ip_auto")),
    Need("sglang.srt.configs.hybrid_arch", (PD,), ("mamba2_config",)),
    Need("sglang.srt.plugins.hook_registry", (CHOICES, RADIX, PD), ("HookRegistry", "HookType")),
    Need("sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices", (CHOICES,), (), _add_backends),
    Need("sglang.srt.arg_groups.choices:add_radix_eviction_policy_choices", (CHOICES,), (), _add_policies),
    Need("sglang.srt.lora.lora_config", (PD,), ("snapshot_download",)),
)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

_HOOKS = (
    Need(f"{_DISAGG}.decode:DecodeTransferQueue._defer_release", (PD,)),
    Need(f"{_DISAGG}.decode:DecodeTransferQueue._clean_hicache_prefetch_resources", (PD,)),
    Need(f"{_DISAGG}.decode:DecodePreallocQueue._send_kv_metadata", (PD,), (), _inline),
    Need(f"{_DISAGG}.decode:DecodeRequest.__init__", (PD,)),
    Need(f"{_DISAGG}.prefill:PrefillBootstrapQueue.create_sender", (PD,)),
    Need(f"{_DISAGG}.common.conn:PrefillServerInfo.__init__", (PD,)),
    Need("sglang.srt.lora.lora_manager:LoRAManager.load_lora_adapter", (PD,)),
    Need("sglang.srt.lora.lora_registry:LoRARef.deterministic_id", (CHOICES,)),
    Need("sglang.srt.managers.tokenizer_manager:TokenizerManager._handle_batch_request", (CHOICES,)),
    Need("sglang.srt.managers.tokenizer_manager:TokenizerManager._send_one_request", (CHOICES,)),
    Need(f"{_UPDATER}.update_weights_from_disk", _ALL),
    Need(f"{_UPDATER}.update_weights_from_ipc", _ALL),
    Need(f"{_UPDATER}.update_weights_from_tensor", _ALL),
    Need(f"{_UPDATER}.update_weights_from_distributed", _ALL),
    Need(f"{_UPDATER}.begin_weight_update", _ALL, (), _inline),
    Need(f"{_UPDATER}.end_weight_update", _ALL, (), _inline),
    Need("sglang.srt.managers.scheduler:Scheduler.record_weight_version_change", _ALL, (), _inline),
    Need("sglang.srt.managers.scheduler:Scheduler.flush_cache", _ALL),
)

#: The contract with SGLang, most of whose names are internals.
SGLANG = Contract(
    "SGLang",
    "sglang",
    "kvmover.engines.sglang",
    {
        CHOICES: ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        STORE: ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        LINKER: ("0.5.23",),
        RADIX: ("0.5.22", "0.5.23"),
        PD: ("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    },
    _NEEDS,
    _HOOKS,
)
