"""The manifests for Kubernetes: valid, two engines in a namespace, and what is at one end of a wire is at the other."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvmover.config import load
from kvmover.engines.vllm.vllm_options import ConnectorOptions
from tests.deploy.kustomize import composed, containers_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
ENGINES, ROLES = ("vllm", "sglang"), ("prefill", "decode")
SERVERS = [(engine, role) for engine in ENGINES for role in ROLES]
#: The oldest and a new Kubernetes.
RELEASES = ("1.29", "1.36")
KEY = "0123456789abcdef0123456789abcdef\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a site copies, with its secrets in it."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("site") / "kubernetes") / "example"
    (folder / "key").write_text(KEY)
    (folder / "token").write_text("hf_token")
    return folder


@pytest.fixture(scope="module")
def objects(site: Path) -> dict[tuple[str, str], Any]:
    found = composed(site)
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found), "two objects of one kind have one name"
    return named


Objects = dict[tuple[str, str], Any]


def server(objects: Objects, engine: str, role: str) -> dict[str, Any]:
    (found,) = containers_of(objects["StatefulSet", f"{engine}-{role}"])
    return found


def pod(objects: Objects, engine: str, role: str) -> dict[str, Any]:
    return objects["StatefulSet", f"{engine}-{role}"]["spec"]["template"]["spec"]


def router(objects: Objects, engine: str) -> dict[str, Any]:
    (found,) = containers_of(objects["Deployment", f"{engine}-router"])
    return found


def options(container: dict[str, Any]) -> dict[str, str]:
    """Of the command line: `--port=8100` and `--port 8100` alike, positions left out."""
    words = [part for word in container["args"] for part in word.split("=", 1 if word[0] == "-" else 0)]
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def ports(container: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def tp(objects: Objects, engine: str, role: str) -> int:
    given = options(server(objects, engine, role))
    return int(given["--tensor-parallel-size" if engine == "vllm" else "--tp-size"])


def test_kustomize_itself_composes_what_the_reader_of_these_tests_does(site: Path, objects: Objects) -> None:
    tools = {"kubectl": ["kubectl", "kustomize"], "kustomize": ["kustomize", "build"]}
    tool = next((words for name, words in tools.items() if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither kubectl nor kustomize is here")
    ran = subprocess.run([*tool, str(site)], capture_output=True, text=True, timeout=60, check=True)
    plain = re.sub(r"\b(kvmover|kvmover-key|hf-token)-[a-z0-9]{10}\b", r"\1", ran.stdout)
    built = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(plain)}
    assert built.keys() == objects.keys()
    for name, each in built.items():
        if name[0] == "Secret":
            each["data"] = {key: re.sub(r"\s", "", value) for key, value in each["data"].items()}
        assert each == objects[name]


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_is_valid_to_the_last_field(objects: Objects, release: str) -> None:
    for (kind, _), each in objects.items():
        if kind != "PodMonitor":  # the operator's own kind: its fields are compared below
            kubernetes_validate.validate(each, release, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_not_valid(objects: Objects) -> None:
    wrong = json.loads(json.dumps(objects["StatefulSet", "vllm-prefill"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[0], strict=True)


def test_servers_of_both_engines_may_stand_on_one_node(objects: Objects) -> None:
    taken = [port for each in SERVERS for port in ports(server(objects, *each)).values()]
    assert len({*taken}) == len(taken)
    assert not [port for port in taken if port >= 30000], "Kubernetes gives these to nodes and Linux to clients"


@pytest.mark.parametrize(("engine", "role"), SERVERS)
def test_a_server_is_configured_as_the_code_understands_it(
    objects: Objects, engine: str, role: str, tmp_path: Path
) -> None:
    container = server(objects, engine, role)
    variables = {each["name"]: each.get("value") for each in container["env"]}
    file = tmp_path / "kvmover.toml"
    file.write_text(objects["ConfigMap", "kvmover"]["data"]["kvmover.toml"])
    own = {name: value for name, value in variables.items() if name.startswith("KVMOVER_") and name != "KVMOVER_CONFIG"}
    settings = load(file, own).settings
    ranks, first = tp(objects, engine, role), settings.metrics.port or 0
    served = {f"metrics-{rank}": first + rank for rank in range(ranks)}
    served |= {"ledger": first + ranks} if engine == "vllm" else {}
    assert {name: port for name, port in ports(container).items() if name.startswith(("metrics", "ledger"))} == served
    assert settings.metrics.address == ""
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod(objects, engine, role)["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert variables["KVMOVER_CONFIG"] == f"{mounts['settings']}/kvmover.toml"
    assert volumes["settings"]["configMap"]["name"] == "kvmover"
    assert str(settings.security.shared_key_file) == f"{mounts['key']}/key"
    assert volumes["key"]["secret"]["secretName"] == "kvmover-key"
    assert variables["HF_HOME"] == mounts["weights"]
    claim = volumes["weights"]["persistentVolumeClaim"]["claimName"]
    assert ("PersistentVolumeClaim", claim) in objects
    assert pod(objects, engine, role)["enableServiceLinks"] is False
    assert "UCX_NET_DEVICES" not in variables, "one for all ranks"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks > 1


def test_secrets_are_files_of_the_site_and_no_text_of_ours_can_be_applied(objects: Objects, site: Path) -> None:
    data = objects["Secret", "kvmover-key"]["data"]
    assert base64.b64decode(data["key"]).decode() == KEY
    token = next(each for each in server(objects, "vllm", "prefill")["env"] if each["name"] == "HF_TOKEN")
    reference = token["valueFrom"]["secretKeyRef"]
    assert reference["key"] in objects["Secret", reference["name"]]["data"]
    assert not [*FOLDER.rglob("key"), *FOLDER.rglob("token")]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/deploy/kubernetes/**/key", "/deploy/kubernetes/**/token"} <= {*ignored}


@pytest.mark.parametrize(("engine", "role"), SERVERS)
def test_a_server_listens_where_its_service_its_probes_and_its_router_look(
    objects: Objects, engine: str, role: str
) -> None:
    container, name = server(objects, engine, role), f"{engine}-{role}"
    listens, given = ports(container), options(container)
    service = objects["Service", name]["spec"]
    assert service["clusterIP"] == "None"
    assert {each["name"]: each["port"] for each in service["ports"]} == listens
    labels = objects["StatefulSet", name]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert objects["StatefulSet", name]["spec"]["serviceName"] == name
    assert int(given["--port"]) == listens["http"]
    assert f"http://{name}-0.{name}:{listens['http']}" in " ".join(router(objects, engine)["args"])


@pytest.mark.parametrize(("engine", "role"), SERVERS)
def test_a_server_may_take_an_hour_to_start_two_minutes_to_answer_and_drains_before_it_is_killed(
    objects: Objects, engine: str, role: str
) -> None:
    container = server(objects, engine, role)
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {each["httpGet"]["port"] for each in probes.values()} == {"http"}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 3600
    busy_s = probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"]
    assert busy_s >= 120 > load(environ={}).settings.mover.silence_s
    _, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    drains_s = int(options(container).get("--shutdown-timeout", 120))
    assert pod(objects, engine, role)["terminationGracePeriodSeconds"] > int(pause_s) + drains_s


@pytest.mark.parametrize("engine", ENGINES)
def test_a_router_is_ready_when_it_has_servers_and_alive_before(objects: Objects, engine: str) -> None:
    container = router(objects, engine)
    listens, service = ports(container), objects["Service", f"{engine}-router"]["spec"]["ports"]
    assert {each["name"]: each["port"] for each in service} == listens
    assert int(options(container)["--port"]) == listens["http"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/liveness", "readiness": "/readiness", "liveness": "/liveness"}


def test_every_port_with_metrics_is_scraped(objects: Objects) -> None:
    (monitor,) = [each for (kind, _), each in objects.items() if kind == "PodMonitor"]
    assert {*monitor["spec"]} == {"selector", "podTargetLabels", "podMetricsEndpoints"}
    scraped = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    for each in SERVERS:
        labels = objects["StatefulSet", "-".join(each)]["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert {*ports(server(objects, *each))} - {"cards", "bootstrap"} <= {*scraped}
    assert "--enable-metrics" in server(objects, "sglang", "decode")["args"]


@pytest.mark.parametrize("role", ROLES)
def test_the_options_of_vllms_connector_are_known_its_cards_are_served_and_its_name_is_its_pods(
    objects: Objects, role: str
) -> None:
    container = server(objects, "vllm", role)
    given = json.loads(options(container)["--kv-transfer-config"])
    assert set(given["kv_connector_extra_config"]) <= set(ConnectorOptions.__struct_fields__)
    assert given["kv_connector_extra_config"]["port"] == ports(container)["cards"]
    assert given["engine_id"] == "$(POD_NAME)"
    name = next(each for each in container["env"] if each["name"] == "POD_NAME")
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    page = (ROOT / "docs" / "vllm.md").read_text()
    for key in ("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"):
        assert f'"{key}": "{given[key]}"' in page


def test_sglangs_router_and_its_prefill_agree_on_the_bootstrap_port(objects: Objects) -> None:
    given, prefill = router(objects, "sglang")["args"], server(objects, "sglang", "prefill")
    assert given[given.index("--prefill") + 2] == options(prefill)["--disaggregation-bootstrap-port"]
    assert ports(prefill)["bootstrap"] == int(options(prefill)["--disaggregation-bootstrap-port"])
    for role in ROLES:
        asked = options(server(objects, "sglang", role))
        assert asked["--disaggregation-mode"] == role
        assert asked["--disaggregation-transfer-backend"] == "kvmover"
