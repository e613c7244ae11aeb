"""Old names, for one release: each works as it did, and warns of the new one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module


def renamed(module: str, name: str, names: Mapping[str, str]) -> object:
    """What `module` has under the new name of `name`, which warns; for its `__getattr__`. `names`: new by old names.

    Raises AttributeError for a name that `module` never had.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module}.{name} is {names[name]} now; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(import_module(module), names[name])
