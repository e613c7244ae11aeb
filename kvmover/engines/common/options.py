"""An adapter's options and kvmover's settings, read together from an engine's own JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvmover.config import ConfigError, Option, Settings, load
from kvmover.fields import nearest

#: Options of both adapters for the identity of the weights, by their setting.
WEIGHT_KEYS: Mapping[str, str] = {"weights": "exchange.weights"}

#: Options of both adapters for the page store and the weights, by their setting.
STORE_KEYS: Mapping[str, str] = {
    **WEIGHT_KEYS,
    **{name: f"store.{name}" for name in ("root", "quota_bytes", "ttl_s", "upkeep_s", "flush_s")},
}

T = TypeVar("T", bound=msgspec.Struct)


class ContentOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of KV. Only equal `tenant`s share it; `model` is a name for people, by default the engine's.

    The weights are a setting (`WEIGHT_KEYS`).
    """

    model: str = ""
    tenant: str = ""


def read_options(
    said: Mapping[str, Any], kind: type[T], keys: Mapping[str, str], where: str, defaults: Settings | None = None
) -> tuple[T, Settings]:
    """Returns `said` as options of `kind`, and as settings: `keys` maps an option to its setting.

    Such an option comes before the environment, and that before the file; an absent or null one is taken from there, or
    else from `defaults`. Raises ConfigError with the unknown or invalid option, and `where`.
    """
    known = [*kind.__struct_fields__, *keys]
    for name in said:
        if name not in known:
            raise ConfigError(f"{where}: there is no {name!r}{nearest(name, known)}")
    try:
        options = msgspec.convert({name: value for name, value in said.items() if name not in keys}, kind)
    except msgspec.ValidationError as error:
        named = next((name for name in said if f"`$.{name}" in str(error)), None)
        raise ConfigError(f"{where}: {f'{named} = {said[named]!r}: ' if named else ''}{error}") from error
    given = {
        keys[name]: Option(value, f"{name} in {where}")
        for name, value in said.items()
        if name in keys and value is not None
    }
    return options, load(defaults=defaults, options=given).settings
