"""All names of SGLang that the adapters use are imported here: what a new release has to be read for.

It is absent where these files are checked, so everything of it is `Any`; `PoolTransfer` says what is read of the
structure that it passes around.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from kvmover.engines.common import UnknownWeights, WeightSource, computed_once, digest_of_sources

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


def weights_digest() -> str:
    """Returns one digest of the weights that this process serves, and its draft's.

    One rank of a pipeline stage looks at the files, and tells those beside it, which call this together; stages do not
    run in step when storage is attached to a server that runs. Raises UnknownWeights, and so
    outside a running engine.
    """
    return _digest_of(_weight_sources())


@lru_cache(maxsize=16)
def _digest_of(sources: tuple[WeightSource, ...]) -> str:
    """Kept, for what lies in the files later is not what was loaded."""
    state = import_module("sglang.srt.distributed.parallel_state")
    groups = [state.get_tp_group()] if state.model_parallel_is_initialized() else []
    return computed_once(lambda: digest_of_sources(sources), groups)


def _weight_sources() -> tuple[WeightSource, ...]:
    """The model's, and its draft's where that has others. Numbers are changed on the way in where a quantization is
    asked for that the checkpoint does not have.
    """
    config = model_config()
    if config is None:
        raise UnknownWeights("no SGLang runs in this process")
    model, draft, cache = _context.get_model(), _context.get_spec(), _context.get_model().download_dir
    sources = [WeightSource(model.model_path, model.revision, model.load_format, cache, _changed(config))]
    path, form = draft.speculative_draft_model_path, draft.speculative_draft_load_format or model.load_format
    if path is not None and path != model.model_path:
        of_draft = _changed(draft_config())
        sources.append(WeightSource(path, draft.speculative_draft_model_revision, form, cache, of_draft))
    return tuple(sources)


def _changed(config: Any) -> str:
    is_stored = getattr(config.hf_config, "quantization_config", None) is not None
    return "" if is_stored else str(config.quantization or "")


def weight_version() -> str:
    """Returns the caller's word for SGLang's weights; "" where it has not said."""
    if model_config() is None:
        return ""
    version = _context.get_serving().weight_version
    return "" if version == "default" else str(version)


def model_path() -> str:
    """Returns the place that SGLang has its model from."""
    return _context.get_model().model_path


def served_name() -> str:
    """What the server calls its model."""
    return _context.get_serving().served_model_name
