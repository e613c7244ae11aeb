"""The plug-in that vLLM calls in each of its processes, which registers the connectors by name.

vLLM's MultiConnector looks a connector up by name in the API server's process, which has not loaded
`kv_connector_module_path`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Connectors by name; each is imported when vLLM makes one.
CONNECTORS = ("KvmoverConnector", "KvmoverOffloadingConnector")


def register() -> None:
    """Register the connectors with vLLM's factory, without importing them. Names that it knows stay unchanged."""
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    for name in CONNECTORS:
        if name not in factory._registry:  # vLLM loads plug-ins more than once in some processes
            factory.register_connector(name, "kvmover.engines.vllm", name)
