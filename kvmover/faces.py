"""A package's face imports a public name on first use, so that its import is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


def public(package: str, homes: Mapping[str, str], name: str) -> object:
    """Returns the object `name` of `package`, from its module `homes` [name]. Raises AttributeError.

    >>> public("kvmover.transfer", {"Pace": "config"}, "Pace").__name__
    'Pace'
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(f"{package}.{homes[name]}"), name)
