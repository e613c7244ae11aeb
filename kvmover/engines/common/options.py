"""An engine's own JSON has options of an adapter, and settings of kvmover as a whole; both are read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvmover.config import ConfigError, Option, Settings, load
from kvmover.fields import nearest

#: Of both adapters: the settings of the page store, under their own names.
STORE_KEYS: Mapping[str, str] = {
    name: f"store.{name}" for name in ("root", "quota_bytes", "ttl_s", "upkeep_s", "flush_s")
}

T = TypeVar("T", bound=msgspec.Struct)


class ContentOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal for KV to be shared. `model` and `weights` default to what the engine calls its own."""

    model: str = ""
    weights: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """All of it in a line, as peers compare it.

        >>> ContentOptions("llama", tenant="blue").name
        'llama of blue'
        """
        return " ".join(each for each in (self.model, self.weights, self.tenant and f"of {self.tenant}") if each)


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
