"""The vLLM adapter: a KV connector for prefill/decode, and tiers of vLLM's offloading, loaded by their module paths.

vLLM is imported when a class is first used. Each class's module checks vLLM's release and names first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmover.engines.vllm.connector import KvmoverConnector
    from kvmover.engines.vllm.hazard_policy import HazardPolicy
    from kvmover.engines.vllm.offloading import KvmoverOffloadingConnector, KvmoverTier
    from kvmover.engines.vllm.peer_offloading import KvmoverPeerTier, LendingPolicy

_HOMES = {
    "KvmoverConnector": "connector",
    "KvmoverOffloadingConnector": "offloading",
    "KvmoverTier": "offloading",
    "KvmoverPeerTier": "peer_offloading",
    "LendingPolicy": "peer_offloading",
    "HazardPolicy": "hazard_policy",
}

#: Orchestrators have tables of connectors by name. Under this name, with our module path, vLLM makes KvmoverConnector.
_IN_TABLES = "NixlConnector"

__all__ = [
    "HazardPolicy",
    "KvmoverConnector",
    "KvmoverOffloadingConnector",
    "KvmoverPeerTier",
    "KvmoverTier",
    "LendingPolicy",
]


def __getattr__(name: str) -> object:
    name = "KvmoverConnector" if name == _IN_TABLES else name
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
