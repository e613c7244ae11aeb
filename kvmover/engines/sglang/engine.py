"""All names of SGLang that the adapters use are imported here: what a new release has to be read for.

It is absent where these files are checked, so everything of it is `Any`; `PoolTransfer` says what is read of the
structure that it passes around.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_storage: Any = import_module("sglang.srt.mem_cache.hicache_storage")
_metrics: Any = import_module("sglang.srt.observability.metrics_collector")
_context: Any = import_module("sglang.srt.runtime_context")

HiCacheStorage: Any = _storage.HiCacheStorage
PoolTransferResult: Any = _storage.PoolTransferResult
StorageMetrics: Any = _metrics.StorageMetrics

#: Hit policies: every page of a prefix, its last ones, or something that never gates a hit.
ALL_PAGES, BLOCK_GROUPS = _storage.PoolHitPolicy.ALL_PAGES, _storage.PoolHitPolicy.BLOCK_GROUPS


class PoolTransfer(Protocol):
    """`PoolTransfer`: pages of one pool by key, and the indices of their tokens on the host and on the device."""

    name: str
    keys: Sequence[str] | None
    hit_policy: Any
    host_indices: torch.Tensor | None
    device_indices: torch.Tensor


def model_config() -> Any | None:
    """`ModelConfig` of the model that this process serves; None outside a running engine."""
    try:
        arguments = _context.get_context().server_args
    except ValueError:
        return None
    return import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(arguments)


def draft_config() -> Any | None:
    """The same of its draft model; None where it has none."""
    arguments = _context.get_context().server_args
    path, revision = (getattr(_context.get_spec(), f"speculative_draft_model_{word}") for word in ("path", "revision"))
    if path is None:
        return None
    made = import_module("sglang.srt.configs.model_config").ModelConfig
    return made.from_server_args(arguments, model_path=path, model_revision=revision, is_draft_model=True)


def kv_dtype() -> str:
    """`--kv-cache-dtype`, resolved."""
    return _context.get_model().kv_cache_dtype


def cache_dtype(args: Any) -> str:
    """Of the pages that `KVArgs` names, by torch's name or SGLang's word: with `auto`, the model's own."""
    word, config = args.kv_cache_dtype_str, model_config()
    return word if word != "auto" or config is None else str(config.dtype).removeprefix("torch.")


def weights() -> str:
    """Revision and version of the weights."""
    return f"{_context.get_model().revision or ''} {_context.get_serving().weight_version}".strip()


def served_name() -> str:
    """What the server calls its model."""
    return _context.get_serving().served_model_name
