"""The plug-in that vLLM calls in each of its processes makes the connectors known by name.

vLLM's MultiConnector looks a connector up by its name in the API server's process, where nothing has loaded the module
that `kv_connector_module_path` names.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Connectors by name, which are imported when vLLM makes one.
CONNECTORS = ("KvmoverConnector", "KvmoverOffloadingConnector")


def register() -> None:
    """Make the connectors known to vLLM's factory; those that it knows stay as they are. Imports none of them."""
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    for name in CONNECTORS:
        if name not in factory._registry:  # vLLM loads plug-ins more than once in some processes
            factory.register_connector(name, "kvmover.engines.vllm", name)
