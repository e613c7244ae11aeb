"""ModelFacts are sizes of the whole model that no pool of a rank shows; the engine or the operator gives them."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.engines.sglang.options import StoreOptions


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`kv_heads`, `layers`: of the main attention cache, None where nobody says. `kv_dtype`: what bytes that torch
    calls uint8 stand for: e4m3 and e5m2 are stored alike. `weights`: revision and version."""

    kv_heads: int | None = None
    layers: int | None = None
    kv_dtype: str = ""
    weights: str = ""


def said(options: StoreOptions, engine: ModelFacts) -> ModelFacts:
    """The operator's word before the engine's."""
    return ModelFacts(
        options.kv_heads or engine.kv_heads,
        options.layers or engine.layers,
        options.kv_dtype or engine.kv_dtype,
        options.weights or engine.weights,
    )


def served() -> ModelFacts:
    """The model that this process serves; nothing is known outside a running engine."""
    from kvmover.engines.sglang import engine

    config = engine.model_config()
    if config is None:
        return ModelFacts()
    return ModelFacts(config.get_total_num_kv_heads(), config.num_attention_layers, engine.kv_dtype(), engine.weights())
