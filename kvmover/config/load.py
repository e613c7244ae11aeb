"""The loader makes Settings of defaults, a TOML file, the environment and an engine's options, and writes them."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from kvmover.config.settings import PREFIX, ConfigError, SettingKey, Settings, keys, sections, value_of
from kvmover.errors import KvmoverError, StoreError
from kvmover.fields import nearest
from kvmover.store import store_location

#: The variable with the path of the default file.
FILE_VARIABLE = "KVMOVER_CONFIG"

_NONE = "none"
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and by key name the file or variable of each that was given."""

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Option:
    """A setting's value from an engine's option, named by `origin`."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and its origin. `typed`: not the environment's text."""

    value: object
    origin: str
    typed: bool


def load(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Settings | None = None,
    options: Mapping[str, Option] | None = None,
) -> Loaded:
    """Load the file at `path`, or at $KVMOVER_CONFIG, with the environment over it.

    `defaults`: under the file. `options`: by the names of keys, over the environment. Raises ConfigError for an
    unreadable file, an unknown key, a wrong type or range.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get(FILE_VARIABLE):
        path = Path(environ[FILE_VARIABLE])
    given = dict(_of_file(path)) if path else {}
    given |= dict(_of_environment(environ))
    given |= {name: _Given(each.value, each.origin, typed=True) for name, each in (options or {}).items()}
    values = {name: _converted(_KEYS[name], each) for name, each in given.items()}
    origins = {name: each.origin for name, each in given.items()}
    return Loaded(_overlaid(defaults or Settings(), "", values, origins), origins)


_KEYS: Mapping[str, SettingKey] = {key.name: key for key in keys()}
_VARIABLES: Mapping[str, SettingKey] = {key.variable: key for key in keys()}


def _of_file(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    yield from _of_table(table, "", str(path))


def _of_table(table: Mapping[str, object], section: str, origin: str) -> Iterator[tuple[str, _Given]]:
    for word, value in table.items():
        name = f"{section}.{word}" if section else word
        if isinstance(value, dict) and name in sections():
            yield from _of_table(cast("dict[str, object]", value), name, origin)
        elif name in sections():
            raise ConfigError(f"{origin}: {name} = {value!r}, but {name} is a section, with settings in it")
        elif name not in _KEYS:
            raise ConfigError(f"{origin}: unknown key {name}{_nearest(name, [*_KEYS, *sections()])}")
        else:
            yield name, _Given(cast(object, value), origin, typed=True)


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    """Yields the environment's settings: variables with two words or more."""
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or "_" not in variable.removeprefix(PREFIX):
            continue
        if variable not in _VARIABLES:
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, list(_VARIABLES))}")
        yield _VARIABLES[variable].name, _Given(value, variable, typed=False)


def _nearest(name: str, known: list[str]) -> str:
    return nearest(name, known) or "; `kvmover config` prints all there are"


def _converted(key: SettingKey, given: _Given) -> object:
    value = given.value
    if key.optional and value == _NONE:
        return None
    try:
        if isinstance(value, str) and key.path[-1].endswith("_bytes"):
            value = bytes_in(value)
        elif get_origin(key.hint) is tuple and isinstance(value, str):
            between = os.pathsep if Path in get_args(key.hint) else ","
            value = [part.strip() for part in value.split(between) if part.strip()]
        elif str in get_args(key.hint) and Path in get_args(key.hint) and isinstance(value, str) and "://" in value:
            return store_location(value)
        elif isinstance(value, str) and any(isinstance(part, EnumType) for part in (key.hint, *get_args(key.hint))):
            value = value.lower()
        found = msgspec.convert(value, _bare(key.hint), strict=given.typed, dec_hook=_path)
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError("expected a finite number")
    except (ValueError, StoreError) as error:
        said = f"expected {key.kind}" if isinstance(error, msgspec.ValidationError) else error
        raise ConfigError(f"{given.origin}: {key.name} = {given.value!r}: {said}") from None
    return found


def _bare(hint: Any) -> Any:
    """Returns a type without None, as msgspec would accept null; for a location, its path."""
    if get_origin(hint) is UnionType:
        hint, *_ = (part for part in get_args(hint) if part is not NoneType)
    return hint


def _path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str) or not value:
        raise ValueError("expected a path")
    return Path(value).expanduser()


def bytes_in(text: str) -> int:
    """Parse a size. Raises ValueError unless it is a whole number of bytes.

    >>> bytes_in("64MiB"), bytes_in("1.5 KiB"), bytes_in("512"), bytes_in("10GB")
    (67108864, 1536, 512, 10000000000)
    """
    found = re.fullmatch(r"(\d+)(?:\.(\d+))? ?([A-Za-z]*)", text, re.ASCII)
    if found and found[3] in _UNITS:
        part = found[2] or ""
        size, rest = divmod(int(found[1] + part) * _UNITS[found[3]], 10 ** len(part))
        if not rest:
            return size
    raise ValueError("expected a whole number of bytes, in B, KiB, MiB, GiB, TiB, or kB, MB, GB, TB")


def _overlaid(section: T, name: str, values: Mapping[str, object], origins: Mapping[str, str]) -> T:
    prefix = f"{name}." if name else ""
    changed: dict[str, object] = {}
    for each in fields(cast(Any, section)):
        inner, full = getattr(section, each.name), prefix + each.name
        if is_dataclass(inner):
            changed[each.name] = _overlaid(inner, full, values, origins)
        elif full in values:
            changed[each.name] = values[full]
    try:
        return replace(cast(Any, section), **changed)
    except KvmoverError as error:
        said = dict.fromkeys(origin for full, origin in origins.items() if full.startswith(prefix))
        raise ConfigError(f"{', '.join(said)}: {error}") from error


def as_toml(loaded: Loaded) -> str:
    """Returns every setting in its table: a default as a comment, any other with its origin."""
    return "\n".join(_lines(loaded)) + "\n"


def as_data(loaded: Loaded) -> dict[str, object]:
    """Returns value and origin by name; None for a default."""
    return {
        key.name: {"value": plain(value_of(loaded.settings, key)), "from": loaded.origins.get(key.name)}
        for key in keys()
    }


def _lines(loaded: Loaded) -> Iterator[str]:
    table: tuple[str, ...] = ()
    for key in keys():
        if key.path[:-1] != table:
            if table:
                yield ""
            table = key.path[:-1]
            yield f"[{'.'.join(table)}]"
        origin = loaded.origins.get(key.name)
        line = f"{key.path[-1]} = {toml(value_of(loaded.settings, key))}"
        yield f"{line}  # {origin}" if origin else f"# {line}"


def toml(value: object) -> str:
    """Returns a value as TOML, for which None is a word."""
    flat = plain(value)
    if isinstance(flat, list):
        return f"[{', '.join(toml(each) for each in cast('list[object]', flat))}]"
    if isinstance(flat, str) or flat is None:
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        return json.dumps(flat or "none", ensure_ascii=False).replace("\x7f", "\\u007f") if flat != "" else '""'
    return json.dumps(flat)


def plain(value: object) -> object:
    """Returns a value for JSON: paths and choices as text, tuples as lists."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [plain(each) for each in cast("tuple[object, ...]", value)]
    return value
