"""An operator's options are read here: of the page store in SGLang's JSON, of transfers in its environment and ours, of
tiers in SGLang's flags for a hierarchical cache.

So is what a rank's pools do not say of the model, from the running engine or from the operator.
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
from kvmover.engines.sglang.weight_updates import UPDATES
from kvmover.transfer.config import MoverConfig

#: Keys of the same JSON that are SGLang's own.
_ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ObjectKind(StrEnum):
    """SHARED: pages in kvmover's order, which ranks of any TP, PP and host layout read. NATIVE: as they lie in the
    host pool, so without a copy, for ranks of the same shape and layout only."""

    SHARED = "shared"
    NATIVE = "native"


class StoreOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The store's own, all of which have a default; what else there is to say of it are settings (`STORE_KEYS`).

    `model` defaults to the engine's model name. `kv_heads`, `layers`, `kv_dtype`: of the whole model, where the engine
    is not to be asked.
    """

    objects: ObjectKind = ObjectKind.SHARED
    kv_heads: _Positive | None = None
    layers: _Positive | None = None
    kv_dtype: str = ""


def parse(extra_config: Mapping[str, Any] | None) -> tuple[StoreOptions, Settings]:
    """The store's options, and the settings of this process with those of `STORE_KEYS` over them.

    There may be peers and no store. Raises ConfigError that names the key which is missing, unknown or out of range.
    """
    said = {key: value for key, value in (extra_config or {}).items() if key not in _ENGINE_KEYS}
    options, settings = read_options(said, StoreOptions, STORE_KEYS, "the options of kvmover's page store in SGLang")
    if settings.peers.address is None:
        settings.store.location()
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
    calls uint8 stand for: e4m3 and e5m2 are stored alike. `exchange`: what engines of any make call the model: pages
    are shared with these then; "": with SGLang's alone."""

    kv_heads: int | None = None
    layers: int | None = None
    kv_dtype: str = ""
    exchange: str = ""


def said(options: StoreOptions, engine: ModelFacts) -> ModelFacts:
    """The operator's word before the engine's."""
    return ModelFacts(
        options.kv_heads or engine.kv_heads,
        options.layers or engine.layers,
        options.kv_dtype or engine.kv_dtype,
        engine.exchange,
    )


def served() -> ModelFacts:
    """The model that this process serves; nothing is known outside a running engine."""
    from kvmover.engines.sglang import engine

    config, exchange = engine.model_config(), load().settings.exchange.model or ""
    if config is None:
        return ModelFacts(exchange=exchange)
    return ModelFacts(config.get_total_num_kv_heads(), config.num_attention_layers, engine.kv_dtype(), exchange)


def served_weights(settings: Settings, called: str) -> ServedWeights:
    """The weights that this process serves, and others call `called` unless the engine's configuration says otherwise.

    Ranks of one pipeline stage call it together. A version that SGLang was given for its weights is a part of them.
    Raises ConfigError where nobody can tell them from others.
    """
    from kvmover.engines.sglang import engine

    found = identified(settings.exchange.model or called, settings.exchange, engine.weights_digest)
    version = engine.weight_version()
    return UPDATES.current(found.updated(version) if version else found)


#: What `--hicache-storage-backend dynamic` has to name.
_STORE = "KvmoverStore"


@dataclass(frozen=True, slots=True)
class StorageFlags:
    """`--hicache-storage-backend` and its options: SGLang's own by name, all others in `options`."""

    backend: str
    options: Mapping[str, Any]
    least_tokens: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25

    def check(self) -> None:
        """Raise EngineUnsupported unless pages are to be kept in kvmover's page store."""
        if self.backend != "dynamic" or self.options.get("class_name") != _STORE:
            named = f"{self.backend} with class_name {self.options.get('class_name')}"
            raise EngineUnsupported(
                f"kvmover's radix cache keeps pages in kvmover's page store: --hicache-storage-backend dynamic with"
                f" class_name {_STORE}, not {named}"
            )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Of one component on the device: `pages`, or states, and the bytes of one in all its pools."""

    pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class TierFlags:
    """`--hicache-ratio`, `--hicache-size` in bytes or 0, `--hicache-write-policy`, `--hicache-storage-prefetch-policy`,
    and the storage, if any. `host_memory`: `--hicache-host-memory-mode`.
    """

    ratio: float
    host_bytes: int = 0
    write: str = "write_through"
    prefetch: str = "timeout"
    host_memory: str = "cache"
    storage: StorageFlags | None = field(default=None)

    def tiers(self) -> Tiers:
        """When pages are copied to the host. Raises EngineUnsupported for a policy of another name."""
        known: dict[str, Tiers] = {
            "write_through": WriteThrough(1),
            "write_through_selective": WriteThrough(2),
            "write_back": WriteBack(),
        }
        if self.write not in known:
            raise EngineUnsupported(f"pages are written by {', '.join(known)}, not by {self.write}")
        return known[self.write]

    def policy(self) -> TierPolicy:
        """What storage is written and read for. Raises EngineUnsupported for a prefetch of another name."""
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
        """Pages of the host, by component: `ratio` times those of the device, or as many as fit `host_bytes` together,
        in the proportions of the device.

        Raises EngineUnsupported where that is none.

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
