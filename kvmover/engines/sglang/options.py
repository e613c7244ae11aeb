"""What an operator may say in the engine's JSON about the page store behind it: typed, and nothing unknown."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvmover.errors import StoreError

#: Keys of the same JSON that are SGLang's own.
_ENGINE_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Objects(StrEnum):
    """SHARED: pages in kvmover's order, which ranks of any TP, PP and host layout read. NATIVE: as they lie in the
    host pool, so without a copy, for ranks of the same shape and layout only."""

    SHARED = "shared"
    NATIVE = "native"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`root` is a directory that exists, the same on all ranks. All else has a default.

    `model`, `weights`, `tenant`: what must be equal for pages to be shared; the first two default to the engine's model
    name, and its revision and weight version. `kv_heads`, `layers`, `kv_dtype`: of the whole model, where the engine is
    not to be asked. `quota_bytes`, `ttl_s`: see `store.Policy`. `upkeep_s`: how often quota and TTL are kept.
    `flush_s`: how often pages are made safe from a power cut and visible to other machines.
    """

    root: str
    model: str = ""
    weights: str = ""
    tenant: str = ""
    objects: Objects = Objects.SHARED
    kv_heads: _Positive | None = None
    layers: _Positive | None = None
    kv_dtype: str = ""
    quota_bytes: _Positive | None = None
    ttl_s: _Seconds | None = None
    upkeep_s: _Seconds = 5.0
    flush_s: _Seconds = 30.0


def parse(extra_config: Mapping[str, Any] | None) -> Options:
    """Raises StoreError that names the key which is missing, unknown or out of range."""
    own = {key: value for key, value in (extra_config or {}).items() if key not in _ENGINE_KEYS}
    try:
        return msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        raise StoreError(f"options of kvmover's page store in SGLang: {error}") from error
