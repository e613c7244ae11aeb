"""The vLLM adapter is a KV connector for prefill/decode and for the page store, loaded by vLLM's own module path.

Nothing of vLLM is imported before the class is asked for, nor is it handed out beside an untested version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.engines.common import Tested

if TYPE_CHECKING:
    from kvmover.engines.vllm.connector import KvmoverConnector

#: The releases of vLLM that the connector was tested with: vLLM calls the interface experimental itself.
VLLM = Tested("vLLM", "vllm", ("0.33.0",), "kvmover.engines.vllm")

__all__ = ["KvmoverConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    VLLM.require()
    from kvmover.engines.vllm import connector

    return getattr(connector, name)
