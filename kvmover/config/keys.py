"""A SettingKey is one setting: its name, type, default and text. All of them are found by walking the Settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from kvmover.config.settings import Settings
from kvmover.config.texts import TEXTS

#: How environment variables begin; those with one word behind it are no settings.
PREFIX = "KVMOVER_"

#: Read from files that the configuration names, so that they are printed nowhere.
_ELSEWHERE = {("mover", "keys")}


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting. `path` is its sections and its name: ("mover", "backoff", "first_s")."""

    path: tuple[str, ...]
    hint: Any
    default: object

    @property
    def name(self) -> str:
        """As in messages and in TOML's dotted form: `mover.backoff.first_s`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """The environment variable: `KVMOVER_MOVER_BACKOFF_FIRST_S`."""
        return PREFIX + "_".join(self.path).upper()

    @property
    def text(self) -> str:
        """What the setting says, in a sentence with its unit."""
        return TEXTS[self.name]

    @property
    def optional(self) -> bool:
        """Whether it may be `none`."""
        return NoneType in get_args(self.hint)

    @property
    def kind(self) -> str:
        """Its type in words: `integer`, `number or none`, `push or pull`."""
        parts = get_args(self.hint) if get_origin(self.hint) is UnionType else (self.hint,)
        return " or ".join(_word(part) for part in parts)


_WORDS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    NoneType: "none",
}


def _word(hint: Any) -> str:
    if isinstance(hint, EnumType):
        return " or ".join(str(each.value) for each in cast("type[Enum]", hint))
    return _WORDS.get(hint) or "list of paths"


@cache
def keys() -> tuple[SettingKey, ...]:
    """All settings, in the order of their sections."""
    return tuple(_walk(Settings(), ()))


@cache
def sections() -> frozenset[str]:
    """Names of all tables: `mover`, `mover.backoff`."""
    return frozenset(".".join(key.path[:depth]) for key in keys() for depth in range(1, len(key.path)))


def value_of(settings: Settings, key: SettingKey) -> object:
    """The value of a setting, by its key."""
    found: object = settings
    for name in key.path:
        found = getattr(found, name)
    return found


def _walk(section: Any, path: tuple[str, ...]) -> Iterator[SettingKey]:
    """The values of a section first, so that they stand above its tables, as TOML wants them."""
    hints = get_type_hints(section.__class__)
    inner: list[tuple[str, object]] = []
    for each in fields(section):
        value = cast(object, getattr(section, each.name))
        if is_dataclass(value):
            inner.append((each.name, value))
        elif (*path, each.name) not in _ELSEWHERE:
            yield SettingKey((*path, each.name), hints[each.name], value)
    for name, value in inner:
        yield from _walk(value, (*path, name))
