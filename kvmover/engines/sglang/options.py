"""An operator's options are read here: of the page store in SGLang's JSON, of transfers in its environment and ours.

So is what a rank's pools do not say of the model, from the running engine or from the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvmover.config import Settings, load
from kvmover.engines.common import STORE_KEYS, ContentOptions, read_options
from kvmover.transfer.config import MoverConfig

#: Keys of the same JSON that are SGLang's own.
_ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Objects(StrEnum):
    """SHARED: pages in kvmover's order, which ranks of any TP, PP and host layout read. NATIVE: as they lie in the
    host pool, so without a copy, for ranks of the same shape and layout only."""

    SHARED = "shared"
    NATIVE = "native"


class StoreOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The store's own, all of which have a default; what else there is to say of it are settings (`STORE_KEYS`).

    `model` and `weights` default to the engine's model name, and its revision and weight version. `kv_heads`, `layers`,
    `kv_dtype`: of the whole model, where the engine is not to be asked.
    """

    objects: Objects = Objects.SHARED
    kv_heads: _Positive | None = None
    layers: _Positive | None = None
    kv_dtype: str = ""


def parse(extra_config: Mapping[str, Any] | None) -> tuple[StoreOptions, Settings]:
    """The store's options, and the settings of this process with those of `STORE_KEYS` over them.

    Raises ConfigError that names the key which is missing, unknown or out of range.
    """
    said = {key: value for key, value in (extra_config or {}).items() if key not in _ENGINE_KEYS}
    options, settings = read_options(said, StoreOptions, STORE_KEYS, "the options of kvmover's page store in SGLang")
    settings.store.directory()
    return options, settings


def transfer_settings(timeout_s: float, given_s: float | None) -> Settings:
    """The settings of this process for prefill/decode. `timeout_s`: SGLang's; `given_s`: the same where it was given.

    A transfer has `mover.deadline_s` where that is configured, else SGLang's timeout. Where both were given each is a
    promise, so the shorter holds.
    """
    settings = load(defaults=Settings(mover=MoverConfig(deadline_s=timeout_s))).settings
    if given_s is None:
        return settings
    return replace(settings, mover=replace(settings.mover, deadline_s=min(settings.mover.deadline_s, given_s)))


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
