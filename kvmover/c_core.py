"""Finds the C core: NATIVE is its module, or None where it was not built or `KVMOVER_CORE=python` forbids it.

It has nothing that is not defined in Python: the prefix tree's steps, moves, reads and digests on the host.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvmover.errors import KvmoverError

#: The environment variable that says which core a process uses: `c` or `python`. Without it: C where there is one.
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
