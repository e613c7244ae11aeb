"""The operator's options are read here, for the page store, transfers and tiers.

They come from SGLang's JSON, from SGLang's environment and kvmover's settings, and from SGLang's flags for a
hierarchical cache. Facts that a rank's pools do not tell come from the running engine or the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvmover.cache.prefix import Tiers, WriteBack, WriteThrough
from kvmover.cache.tiers import BestEffort, Prefetch, Store, TierPolicy, Timeout, Wait
from kvmover.config import Settings, load
from kvmover.engines.common import (
    STORE_KEYS,
    ContentOptions,
    EngineUnsupported,
    ServedWeights,
    identified,
    read_options,
)
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.transfer.config import MoverConfig

#: SGLang's own keys in the same JSON.
_ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ObjectKind(StrEnum):
    """The form of stored objects.

    SHARED: pages in kvmover's order, read by ranks of any TP, PP and host layout. NATIVE: pages as they lie in the host
    pool, stored without a copy for ranks of the same shape and layout.
    """

    SHARED = "shared"
    NATIVE = "native"


class StoreOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The store's own options, all with defaults; further options are settings (`STORE_KEYS`).

    `model` defaults to the engine's model name. `kv_heads`, `layers`, `kv_dtype`: of the whole model, overriding the
    engine's.
    """

    objects: ObjectKind = ObjectKind.SHARED
    kv_heads: _Positive | None = None
    layers: _Positive | None = None
    kv_dtype: str = ""


def parse(extra_config: Mapping[str, Any] | None) -> tuple[StoreOptions, Settings]:
    """Returns the store's options, and this process's settings overridden by the `STORE_KEYS` in `extra_config`.

    A store is optional beside peers. Raises ConfigError naming the key that is missing, unknown or out of range.
    """
    said = {key: value for key, value in (extra_config or {}).items() if key not in _ENGINE_KEYS}
    options, settings = read_options(said, StoreOptions, STORE_KEYS, "the options of kvmover's page store in SGLang")
    if settings.peers.address is None:
        settings.store.location()
    return options, settings


def transfer_settings(timeout_s: float, given_s: float | None) -> Settings:
    """Returns this process's settings for prefill/decode.

    `timeout_s`: SGLang's timeout; `given_s`: the same if the operator set it. The deadline of a transfer is
    `mover.deadline_s` if configured, else SGLang's timeout; if both are set, the shorter.
    """
    settings = load(defaults=Settings(mover=MoverConfig(deadline_s=timeout_s))).settings
    if given_s is None:
        return settings
    return replace(settings, mover=replace(settings.mover, deadline_s=min(settings.mover.deadline_s, given_s)))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model that its pools do not tell.

    `kv_heads`, `layers`: of the main attention cache, None if unknown. `kv_dtype`: meaning of bytes that torch calls
    uint8, because e4m3 and e5m2 are stored alike. `exchange`: the model's name at engines of any make, which then share
    its pages; "": only SGLang shares them.
    """

    kv_heads: int | None = None
    layers: int | None = None
    kv_dtype: str = ""
    exchange: str = ""


def said(options: StoreOptions, engine: ModelFacts) -> ModelFacts:
    """Returns the operator's facts, filled up with the engine's."""
    return ModelFacts(
        options.kv_heads or engine.kv_heads,
        options.layers or engine.layers,
        options.kv_dtype or engine.kv_dtype,
        engine.exchange,
    )


def served() -> ModelFacts:
    """Returns the facts of the served model; outside a running engine only `exchange`."""
    from kvmover.engines.sglang import sglang_api

    config, exchange = sglang_api.model_config(), load().settings.exchange.model or ""
    if config is None:
        return ModelFacts(exchange=exchange)
    return ModelFacts(config.get_total_num_kv_heads(), config.num_attention_layers, sglang_api.kv_dtype(), exchange)


def served_weights(settings: Settings, called: str) -> ServedWeights:
    """Returns the weights of this process, named `called` unless `exchange.model` is configured.

    Ranks of a pipeline stage call this together. A version given to SGLang is part of the weights' identity. Raises
    ConfigError for weights that cannot be identified.
    """
    from kvmover.engines.sglang import sglang_api

    found = identified(settings.exchange.model or called, settings.exchange, sglang_api.weights_digest)
    version = sglang_api.weight_version()
    return UPDATES.current(found.updated(version) if version else found)


#: The class that `--hicache-storage-backend dynamic` has to name.
_STORE = "KvmoverStore"


@dataclass(frozen=True, slots=True)
class StorageFlags:
    """The storage backend of `--hicache-storage-backend`: SGLang's own options as fields, all others in `options`."""

    backend: str
    options: Mapping[str, Any]
    least_tokens: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25

    def check(self) -> None:
        """Raise EngineUnsupported unless the backend is kvmover's page store."""
        if self.backend != "dynamic" or self.options.get("class_name") != _STORE:
            named = f"{self.backend} with class_name {self.options.get('class_name')}"
            raise EngineUnsupported(
                f"kvmover's radix cache keeps pages in kvmover's page store: --hicache-storage-backend dynamic with"
                f" class_name {_STORE}, not {named}"
            )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a component on the device: number of pages or states, and the bytes of one in all its pools."""

    pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class TierFlags:
    """The flags of SGLang's hierarchical cache, and the storage, if any.

    `host_bytes`: `--hicache-size`, or 0. `write`, `prefetch`: `--hicache-write-policy`,
    `--hicache-storage-prefetch-policy`. `host_memory`: `--hicache-host-memory-mode`.
    """

    ratio: float
    host_bytes: int = 0
    write: str = "write_through"
    prefetch: str = "timeout"
    host_memory: str = "cache"
    storage: StorageFlags | None = field(default=None)

    def tiers(self) -> Tiers:
        """Returns the policy of copies to the host. Raises EngineUnsupported for an unknown `write`."""
        known: dict[str, Tiers] = {
            "write_through": WriteThrough(1),
            "write_through_selective": WriteThrough(2),
            "write_back": WriteBack(),
        }
        if self.write not in known:
            raise EngineUnsupported(f"pages are written by {', '.join(known)}, not by {self.write}")
        return known[self.write]

    def policy(self) -> TierPolicy:
        """Returns the policy of storage reads and writes. Raises EngineUnsupported for an unknown `prefetch`."""
        if self.storage is None:
            return TierPolicy(store=Store.NEVER)
        storage = self.storage
        known: dict[str, Prefetch] = {
            "best_effort": BestEffort(),
            "wait_complete": Wait(),
            "timeout": Timeout(storage.timeout_s, storage.timeout_per_ki_token_s),
        }
        if self.prefetch not in known:
            raise EngineUnsupported(f"storage is read by {', '.join(known)}, not by {self.prefetch}")
        return TierPolicy(prefetch=known[self.prefetch], least_tokens=storage.least_tokens)

    def host_pages(self, device: Mapping[str, PoolSize]) -> dict[str, int]:
        """Returns the host's pages by component.

        They are `ratio` times the device's, or those that fit `host_bytes` together in the device's proportions. Raises
        EngineUnsupported if a component gets no page.

        >>> device = {"full": PoolSize(pages=1000, page_bytes=4096), "swa": PoolSize(pages=250, page_bytes=16384)}
        >>> TierFlags(ratio=2.0).host_pages(device), TierFlags(2.0, host_bytes=10**9).host_pages(device)
        ({'full': 2000, 'swa': 500}, {'full': 122070, 'swa': 30517})
        """
        whole = sum(size.pages * size.page_bytes for size in device.values())
        found: dict[str, int] = {}
        for name, size in device.items():
            given = size.pages * self.host_bytes // whole if self.host_bytes else int(size.pages * self.ratio)
            if given < 1:
                raise EngineUnsupported(
                    f"the host holds no page of {name} of {size.page_bytes} bytes: --hicache-size {self.host_bytes}"
                    f" bytes, --hicache-ratio {self.ratio} of {size.pages} pages"
                )
            found[name] = given
        return found
