"""The names of SGLang that the adapters use, with the plug-ins that need each and stand-ins for older releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def window_layout(args: Any) -> str | None:
    """Returns the order of axes in windows by `KVArgs`; None before 0.5.22, whose windows are refused."""
    return getattr(args, "swa_kv_cache_layout", None)


def allocation_policy(settings: Any) -> dict[str, str]:
    """Returns the decode engine's policy as a field of a prefill's description; {} before 0.5.22, which has none."""
    said = getattr(settings, "disaggregation_decode_allocation_policy", None)
    return {} if said is None else {"decode_allocation_policy": said}


_NEEDS = (
    Need(
        f"{_MEM}.hicache_storage", _ALL, ("HiCacheStorage", "PoolHitPolicy.ALL_PAGES", "PoolName", "PoolTransferResult")
    ),
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
            *("BasePrefixCache", "DecLockRefParams", "DecLockRefResult", "EvictResult", "IncLockRefResult"),
            *("InsertParams", "InsertResult", "MatchResult", "TreeLock"),
        ),
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
            *("CommonKVBootstrapServer", "CommonKVReceiver.ensure_abort_notified", "CommonKVSender"),
            *("CommonKVReceiver._connect_to_bootstrap_server", "CommonKVSender._prepare_send_indices"),
            *("KVTransferError", "PrefillServerInfo", "requests", "web"),
        ),
    ),
    Need(f"{_DISAGG}.base.conn", (PD,), ("KVPoll",)),
    Need("zmq", (PD,), ("ZMQError",)),
    Need(f"{_DISAGG}.utils", (CHOICES, PD), ("DisaggregationMode.PREFILL", "TransferBackend", "get_kv_class")),
    Need("sglang.srt.utils.network", (PD,), ("NetworkAddress", "get_local_ip_auto")),
    Need("sglang.srt.configs.hybrid_arch", (PD,), ("mamba2_config",)),
    Need("sglang.srt.plugins.hook_registry", (CHOICES, RADIX, PD), ("HookRegistry", "HookType")),
    Need("sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices", (CHOICES,), (), _add_backends),
    Need("sglang.srt.lora.lora_config", (PD,), ("snapshot_download",)),
)

#: The contract with SGLang, most of whose names are internals.
SGLANG = Contract(
    "SGLang",
    "sglang",
    "kvmover.engines.sglang",
    {
        CHOICES: ("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        STORE: ("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        LINKER: ("0.5.23",),
        RADIX: ("0.5.22", "0.5.23"),
        PD: ("0.5.21", "0.5.22", "0.5.23"),
    },
    _NEEDS,
)
