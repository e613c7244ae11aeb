"""All further names of vLLM that the tier uses are imported here: what a new release has to be read for."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from kvmover.transport import Memory, MemoryKind

_offload: Any = import_module("vllm.v1.kv_offload.base")
_tiers: Any = import_module("vllm.v1.kv_offload.tiering.base")
_metrics: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
_platform: Any = import_module("vllm.platforms").current_platform

SecondaryTierManager: Any = _tiers.SecondaryTierManager
AsyncLookupManager: Any = import_module("vllm.v1.kv_offload.tiering.async_lookup").AsyncLookupManager
JobResult: Any = _tiers.JobResult
RequestOffloadingContext: Any = _offload.RequestOffloadingContext
OffloadingEvent: Any = _offload.OffloadingEvent
CounterMetadata: Any = _offload.OffloadingCounterMetadata
TierStats: Any = _metrics.OffloadingConnectorStats

#: What vLLM knows of a key.
HIT, MISS, RETRY = (getattr(_offload.LookupResult, name) for name in ("HIT", "MISS", "RETRY"))

STORAGE: Any = _offload.Medium.STORAGE
Locality: Any = _offload.Locality


def memory_of_view(view: memoryview) -> Memory:
    """All of a view [chunk, byte], dense, of host memory. It is not held on to: vLLM releases it after the tier."""
    return Memory(MemoryKind.HOST, np.asarray(view).ctypes.data, view.nbytes)


def chunk_tokens(config: Any) -> int:
    """Tokens of a chunk of the first cache group of an `OffloadingConfig`."""
    return config.groups[0].tokens_per_block * config.cache.blocks_per_chunk


def chunk_content(offloading_spec: Any) -> str:
    """What the bytes of a chunk are, in words: only where all of them are equal do two chunks of a key mean the same.

    The order of the bytes is vLLM's: it may change with its release, and with the attention backend, which it chooses
    by the device. Ranks lie one after the other, each in its own order; with one rank, or one copy for all, or vLLM's
    canonical layout, nothing of the ranks is left.
    """
    config = offloading_spec.config
    parallel, cache = config.parallel, config.cache
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        ranks = "canonical"
    elif offloading_spec.replicated_layout or parallel.world_size == 1:
        ranks = "one copy"
    else:
        sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
        ranks = "TP{} PP{} PCP{} DCP{}".format(*sizes) + ", canonical" * config.canonical_layout
    groups = repr([(group.tokens_per_block, sorted(group.layer_names)) for group in config.groups])
    return ", ".join(
        (
            f"vLLM {version('vllm').partition('+')[0]} on {_platform.device_type} {_capability()}",
            f"{cache.blocks_per_chunk} blocks of {cache.tokens_per_hash} tokens a hash",
            f"{config.model.dtype} {config.kv_cache_layout}",
            ranks,
            f"groups {sha256(groups.encode()).hexdigest()[:16]}",
        )
    )


def _capability() -> str:
    """Of the device, as far as the platform knows one."""
    found = _platform.get_device_capability()
    return "" if found is None else found.as_version_str()
