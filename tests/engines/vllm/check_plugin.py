"""vLLM's plug-in of kvmover, in vLLM's own environment: the connectors are known by name in every process."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, metadata
from typing import Any

import pytest

from kvmover.engines.vllm import KvmoverConnector, vllm_plugin
from kvmover.engines.vllm.vllm_contract import PEER_TIER, VLLM

factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory


def test_vllm_finds_the_plug_in_where_kvmover_is_installed() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="kvmover")
    assert found.load() is vllm_plugin.register


def test_a_connector_is_found_by_its_name_and_registering_twice_changes_nothing() -> None:
    vllm_plugin.register()
    known = dict(factory._registry)
    vllm_plugin.register()
    assert known == factory._registry
    assert set(vllm_plugin.CONNECTORS) <= set(known)
    assert factory.get_connector_class_by_name("KvmoverConnector") is KvmoverConnector


def test_the_name_that_tables_of_orchestrators_have_is_ours_with_our_module_and_vllms_without() -> None:
    """Dynamo asks for the name, and vLLM takes the module first."""
    config: Any = import_module("vllm.config").KVTransferConfig
    told = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    ours = config(**told, kv_connector_module_path="kvmover.engines.vllm")
    assert factory.get_connector_class(ours) is KvmoverConnector
    assert factory.get_connector_class(config(**told)) is not KvmoverConnector


@pytest.mark.parametrize(
    ("strict", "code", "said"),
    [("strict", 1, "not with 0.99.0"), ("", 0, "not with 0.99.0; it has all names that are used, and is tried")],
)
@pytest.mark.parametrize("module", ["connector", "offloading", "peer_offloading"])
def test_an_untested_release_is_tried_unless_the_operator_is_strict(
    module: str, strict: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a class that is loaded by its own module, as `kv_connector_module_path` may name it."""
    if module == "peer_offloading" and (lacking := VLLM.lacking(PEER_TIER)):
        pytest.skip(f"this release has no peer tier: it lacks {', '.join(lacking)}")
    monkeypatch.setenv("KVMOVER_ENGINE", strict)
    script = (
        "from kvmover.engines.common import contract\n"
        "contract.version = lambda package: '0.99.0'\n"
        f"import kvmover.engines.vllm.{module}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "for vLLM was tested with vllm 0.3" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith(said)
