"""The manifests for Kubernetes: what they set is there, and what is at one end of a wire is at the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmover.config import load
from kvmover.engines.vllm.vllm_options import ConnectorOptions

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
ENGINES = ("vllm", "sglang")


def objects(engine: str) -> dict[tuple[str, str], Any]:
    text = (FOLDER / f"kubernetes-{engine}.yaml").read_text()
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def pod(engine: str, name: str) -> dict[str, Any]:
    return objects(engine)["Deployment", name]["spec"]["template"]["spec"]


def container(engine: str, name: str) -> dict[str, Any]:
    (found,) = pod(engine, name)["containers"]
    return found


def options(engine: str, name: str) -> dict[str, str]:
    """Of the command line: `--port=8100` and `--port 8100` alike, positions left out."""
    words = [part for word in container(engine, name)["args"] for part in word.split("=", 1 if word[0] == "-" else 0)]
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def ports(engine: str, name: str) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(engine, name)["ports"]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_is_configured_as_the_code_understands_it(engine: str, role: str, tmp_path: Path) -> None:
    variables = {each["name"]: each.get("value") for each in container(engine, role)["env"]}
    file = tmp_path / "kvmover.toml"
    file.write_text(objects(engine)["ConfigMap", "kvmover"]["data"]["kvmover.toml"])
    own = {name: value for name, value in variables.items() if name.startswith("KVMOVER_") and name != "KVMOVER_CONFIG"}
    settings = load(file, own).settings
    assert settings.metrics.port == ports(engine, role)["metrics"]
    assert settings.metrics.address == ""
    mounts = {each["name"]: each["mountPath"] for each in container(engine, role)["volumeMounts"]}
    assert {each["name"] for each in pod(engine, role)["volumes"]} == set(mounts)
    assert variables["KVMOVER_CONFIG"] == f"{mounts['settings']}/kvmover.toml"
    (key,) = objects(engine)["Secret", "kvmover-key"]["stringData"]
    assert str(settings.security.shared_key_file) == f"{mounts['key']}/{key}"
    assert pod(engine, role)["enableServiceLinks"] is False


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_listens_where_its_service_its_probe_and_its_router_look(engine: str, role: str) -> None:
    listens, given = ports(engine, role), options(engine, role)
    service = objects(engine)["Service", role]["spec"]["ports"]
    assert {each["name"]: each["port"] for each in service} == listens
    assert int(given["--port"]) == listens["http"] == container(engine, role)["readinessProbe"]["httpGet"]["port"]
    assert options(engine, "router")[f"--{role}"] == f"http://{role}:{listens['http']}"


@pytest.mark.parametrize("engine", ENGINES)
def test_both_servers_may_stand_on_one_machine(engine: str) -> None:
    assert not {*ports(engine, "prefill").values()} & {*ports(engine, "decode").values()}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_options_of_vllms_connector_are_known_and_its_cards_are_served(role: str) -> None:
    given = json.loads(options("vllm", role)["--kv-transfer-config"])
    assert set(given["kv_connector_extra_config"]) <= set(ConnectorOptions.__struct_fields__)
    assert given["kv_connector_extra_config"]["port"] == ports("vllm", role)["cards"]
    page = (FOLDER.parent / "vllm.md").read_text()
    for name in ("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"):
        assert f'"{name}": "{given[name]}"' in page


def test_sglangs_router_and_its_prefill_agree_on_the_bootstrap_port() -> None:
    router, prefill = container("sglang", "router")["args"], options("sglang", "prefill")
    assert router[router.index("--prefill") + 2] == prefill["--disaggregation-bootstrap-port"] == "8998"
    assert ports("sglang", "prefill")["bootstrap"] == 8998
    for role in ("prefill", "decode"):
        assert options("sglang", role)["--disaggregation-mode"] == role
        assert options("sglang", role)["--disaggregation-transfer-backend"] == "kvmover"
