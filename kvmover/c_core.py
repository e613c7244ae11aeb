"""The C core's module is NATIVE; None if not built, or forbidden by `KVMOVER_CORE=python`, as Python has all of it."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvmover.errors import KvmoverError

#: The environment variable that selects the core: `c` or `python`. Unset: C if it was built.
SETTING = "KVMOVER_CORE"


def _found() -> ModuleType | None:
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", "c", "python"):
        raise KvmoverError(f"{SETTING} = {wanted!r}: it is c or python")
    name = "kvmover._core"
    if wanted == "python":
        return None
    if find_spec(name) is None:
        if wanted == "c":
            raise KvmoverError(f"{SETTING} = c, and this kvmover was installed without a compiler: {name} is not there")
        return None
    return import_module(name)


NATIVE = _found()
