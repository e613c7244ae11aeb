"""The SGLang names that all adapters use are imported here, to be reviewed for each new release.

SGLang is absent where these files are type-checked, so its names are `Any`; `PoolTransfer` declares the fields read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from kvmover.engines.common import UnknownWeights, WeightSource, computed_once, digest_of_sources
from kvmover.engines.sglang.sglang_contract import SGLANG

if TYPE_CHECKING:
    import torch

_storage: Any = SGLANG.find("sglang.srt.mem_cache.hicache_storage")
_metrics: Any = SGLANG.find("sglang.srt.observability.metrics_collector")
_context: Any = SGLANG.find("sglang.srt.runtime_context")

HiCacheStorage: Any = _storage.HiCacheStorage
StorageMetrics: Any = _metrics.StorageMetrics

#: Hit policies: a pool needs every page of a prefix, or never gates a hit. Pools of other policies need the last pages.
ALL_PAGES: Any = _storage.PoolHitPolicy.ALL_PAGES
BLOCK_GROUPS: Any = SGLANG.find("sglang.srt.mem_cache.hicache_storage:PoolHitPolicy.BLOCK_GROUPS")


class PoolTransfer(Protocol):
    """The fields read of SGLang's `PoolTransfer`: pages of one pool by key, with token indices on host and device."""

    name: str
    keys: Sequence[str] | None
    hit_policy: Any
    host_indices: torch.Tensor | None
    device_indices: torch.Tensor


def model_config() -> Any | None:
    """Returns the `ModelConfig` of the model that this process serves; None outside a running engine."""
    try:
        arguments = _context.get_context().server_args
    except ValueError:
        return None
    return SGLANG.find("sglang.srt.configs.model_config").ModelConfig.from_server_args(arguments)


def draft_config() -> Any | None:
    """Returns the `ModelConfig` of the draft model; None without a draft. Requires a running engine."""
    arguments = _context.get_context().server_args
    path, revision = (getattr(_context.get_spec(), f"speculative_draft_model_{word}") for word in ("path", "revision"))
    if path is None:
        return None
    made = SGLANG.find("sglang.srt.configs.model_config").ModelConfig
    return made.from_server_args(arguments, model_path=path, model_revision=revision, is_draft_model=True)


def kv_dtype() -> str:
    """Returns the resolved `--kv-cache-dtype`."""
    return _context.get_model().kv_cache_dtype


def cache_dtype(args: Any) -> str:
    """Returns the dtype of the pages in `KVArgs`, by torch's name or SGLang's word; `auto` is the model's own."""
    word, config = args.kv_cache_dtype_str, model_config()
    return word if word != "auto" or config is None else str(config.dtype).removeprefix("torch.")


def weights_digest() -> str:
    """Returns one digest of the weights that this process serves, and its draft's.

    One rank of a pipeline stage reads the files for all, which call this together; stages do not run in step when
    storage is attached to a running server. Raises UnknownWeights, also outside a running engine.
    """
    return _digest_of(_weight_sources())


@lru_cache(maxsize=16)
def _digest_of(sources: tuple[WeightSource, ...]) -> str:
    """Returns the digest of `sources`, cached because the files may change after they were loaded."""
    state = SGLANG.find("sglang.srt.distributed.parallel_state")
    groups = [state.get_tp_group()] if state.model_parallel_is_initialized() else []
    return computed_once(lambda: digest_of_sources(sources), groups)


def _weight_sources() -> tuple[WeightSource, ...]:
    """Returns the source of the model's weights, and of its draft's if that has others. Raises UnknownWeights.

    A quantization that the checkpoint lacks changes the weights as they are loaded, so a source names it.
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
    """Returns the version that the caller gave SGLang's weights; "" without a version."""
    if model_config() is None:
        return ""
    version = _context.get_serving().weight_version
    return "" if version == "default" else str(version)


def model_path() -> str:
    """Returns the path or hub name from which SGLang loaded its model."""
    return _context.get_model().model_path


def served_name() -> str:
    """Returns the name under which the server offers the model."""
    return _context.get_serving().served_model_name
