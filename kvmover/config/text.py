"""Settings are written here as TOML, which `load` reads back, and as data for JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import cast

from kvmover.config.keys import keys, value_of
from kvmover.config.load import Loaded


def as_toml(loaded: Loaded) -> str:
    """Every setting in its table: a default as a comment, and behind any other where it was given.

    So what is printed can be kept as a file, and pins no default of this release.
    """
    return "\n".join(_lines(loaded)) + "\n"


def as_data(loaded: Loaded) -> dict[str, object]:
    """By the names of keys: value and where it was given, None for a default."""
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
    """A value as TOML writes it; None, which TOML does not have, is the word `none`."""
    flat = plain(value)
    if isinstance(flat, list):
        return f"[{', '.join(toml(each) for each in cast('list[object]', flat))}]"
    if isinstance(flat, str) or flat is None:
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        return json.dumps(flat or "none", ensure_ascii=False).replace("\x7f", "\\u007f") if flat != "" else '""'
    return json.dumps(flat)


def plain(value: object) -> object:
    """For JSON: paths and choices as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [plain(each) for each in cast("tuple[object, ...]", value)]
    return value
