"""The vLLM adapter is a KV connector for prefill/decode, and a tier of vLLM's offloading, loaded by its module paths.

Nothing of vLLM is imported before the class is asked for, nor is it handed out beside an untested version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmover.engines.common import Tested

if TYPE_CHECKING:
    from kvmover.engines.vllm.connector import KvmoverConnector
    from kvmover.engines.vllm.offloading import KvmoverOffloadingConnector, KvmoverTier
    from kvmover.engines.vllm.peer_offloading import KvmoverPeerTier, LendingPolicy

#: The releases of vLLM that the adapters were tested with: vLLM calls the interfaces experimental itself.
VLLM = Tested("vLLM", "vllm", ("0.33.0",), "kvmover.engines.vllm")

_HOMES = {
    "KvmoverConnector": "connector",
    "KvmoverOffloadingConnector": "offloading",
    "KvmoverTier": "offloading",
    "KvmoverPeerTier": "peer_offloading",
    "LendingPolicy": "peer_offloading",
}

__all__ = ["KvmoverConnector", "KvmoverOffloadingConnector", "KvmoverPeerTier", "KvmoverTier", "LendingPolicy"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    VLLM.require()
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
