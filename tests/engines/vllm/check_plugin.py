"""vLLM's plug-in of kvmover, in vLLM's own environment: the connectors are known by name in every process."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from kvmover.engines.vllm import KvmoverConnector, plugin

factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory


def test_vllm_finds_the_plug_in_where_kvmover_is_installed() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="kvmover")
    assert found.load() is plugin.register


def test_a_connector_is_found_by_its_name_and_registering_twice_changes_nothing() -> None:
    plugin.register()
    known = dict(factory._registry)
    plugin.register()
    assert known == factory._registry
    assert set(plugin.CONNECTORS) <= set(known)
    assert factory.get_connector_class_by_name("KvmoverConnector") is KvmoverConnector
