"""The SGLang adapter provides a HiCache storage backend, a direct linker, a radix cache and a prefill/decode backend.

SGLang is imported only when a class is accessed. Each class's module checks SGLang's release and names first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmover.engines.sglang.hicache_store import KvmoverStore
    from kvmover.engines.sglang.linker import KvmoverLinker

_HOME = {"KvmoverLinker": "linker", "KvmoverStore": "hicache_store"}

__all__ = ["KvmoverLinker", "KvmoverStore"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
