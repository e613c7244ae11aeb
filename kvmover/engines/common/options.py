"""An engine's own JSON has options of an adapter, and settings of kvmover as a whole; both are read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvmover.config import ConfigError, Option, Settings, load
from kvmover.fields import nearest

#: Of both adapters: which weights are served.
WEIGHT_KEYS: Mapping[str, str] = {"weights": "exchange.weights"}

#: Of both adapters: the settings of the page store, under their own names, and the weights.
STORE_KEYS: Mapping[str, str] = {
    **WEIGHT_KEYS,
    **{name: f"store.{name}" for name in ("root", "quota_bytes", "ttl_s", "upkeep_s", "flush_s")},
}

T = TypeVar("T", bound=msgspec.Struct)


class ContentOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose KV it is. `tenant` must be equal for it to be shared; `model` is what people read, by default the engine's
    name of it. Which weights are served is a setting (`WEIGHT_KEYS`).
    """

    model: str = ""
    tenant: str = ""


def read_options(
    said: Mapping[str, Any], kind: type[T], keys: Mapping[str, str], where: str, defaults: Settings | None = None
) -> tuple[T, Settings]:
    """`said` as options of `kind`, and as settings: `keys` names the setting that an option stands for.

    Such an option goes before the environment, and that before the file; one that is absent or null is as configured,
    or else as in `defaults`. Raises ConfigError that names the option which is unknown or cannot be, and `where`.
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
