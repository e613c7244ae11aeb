"""Which core a tree's columns are of: the one in C where it was built, else the Python that defines it."""

from __future__ import annotations

from typing import Protocol, cast

from kvmover.cache.prefix import columns
from kvmover.cache.prefix.native import NATIVE


class TreeCore(Protocol):
    """A module that has columns: `columns`, or the one in C, whose objects have the same attributes and methods."""

    Columns: type[columns.Columns]


PYTHON_CORE: TreeCore = columns
#: None where it was not built, or must not be used.
C_CORE: TreeCore | None = cast("TreeCore | None", NATIVE)


def chosen() -> TreeCore:
    """The core of trees that nobody brings one for."""
    return C_CORE or PYTHON_CORE
