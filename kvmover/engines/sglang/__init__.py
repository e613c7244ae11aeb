"""The SGLang adapter provides a HiCache storage backend, a direct linker, a radix cache and a prefill/decode backend.

SGLang is imported only when a class is accessed; beside an untested release that raises EngineUnsupported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmover.engines.common import Tested

if TYPE_CHECKING:
    from kvmover.engines.sglang.linker import KvmoverLinker
    from kvmover.engines.sglang.storage import KvmoverStore

#: SGLang releases that these adapters were tested with.
SGLANG = Tested("SGLang", "sglang", ("0.5.23",), "kvmover.engines.sglang")

_HOME = {"KvmoverLinker": "linker", "KvmoverStore": "storage"}

__all__ = ["KvmoverLinker", "KvmoverStore"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    SGLANG.require()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
