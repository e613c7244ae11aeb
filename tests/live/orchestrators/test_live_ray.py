"""Ray Serve LLM's prefill and decode of vLLM with kvmover between them, by the file of the docs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.live.answers import Verdict
from tests.live.conftest import ModelMaker, Servers, chats_by_openais_client
from tests.live.orchestrators.orchestrated import TOKEN_IDS, Way, until_served
from tests.live.release import Release, laid, over
from tests.live.server import ENVIRONMENTS, ROOT, Command, Ground, free_port
from tests.live.table import Results
from tests.live.vllm_servers import ENVIRONMENT, vllm

#: Ray pins vLLM 0.29.0, which is before kvmover's window, and does not import 0.33.
_VLLM, _LATER = Release("vllm", "0.32.0"), "vllm 0.33.0"
_RAY = "Ray 2.60.0"

_EXAMPLE = ROOT / "docs" / "examples" / "orchestrators" / "ray-serve.yaml"

#: In place of a GPU's settings.
_ON_A_CPU = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 300_000_000,
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
}


def _served(name: str, model: Path, folder: Path) -> Command:
    """Returns the command of Ray, of two replicas of vLLM, and of the HTTP server in front of them."""
    (application,) = yaml.safe_load(_EXAMPLE.read_text())["applications"]
    halves: dict[str, Any] = application["args"]
    for half in halves.values():
        half["model_loading_config"] = {"model_id": "m", "model_source": str(model)}
        half["accelerator_config"] = {"kind": "cpu"}
        half["engine_kwargs"] |= _ON_A_CPU
    told = folder / "application.json"
    told.write_text(json.dumps(halves))
    port = free_port()
    own = {"KVMOVER_RECORD_RUN_LOG": str(folder / "run.jsonl"), "RAY_USAGE_STATS_ENABLED": "0"}
    ground, arguments = Ground("vllm", (), ENVIRONMENT), [str(told), str(port)]
    command = Command(name, ground, "ray_application", arguments, port, own, health="/v1/models")
    return over(_VLLM.of(command), laid("orchestrator.sh", "ray"), str(Path(__file__).parent))


def test_answers_through_ray_are_those_of_a_plain_server(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights = model("llama", "sglang")
    front, plain = servers.start(
        _served("ray-front", weights, tmp_path), _VLLM.of(vllm("ray-plain", weights, block_tokens=64))
    )
    until_served(front.url)
    way = Way(_RAY, str(_VLLM), "kv_connector KvmoverConnector, TP2 to TP1")
    way.compare(results, plain.url, front.url, tmp_path / "run.jsonl", TOKEN_IDS)
    wanted, got = (chats_by_openais_client("vllm", server.url, 6) for server in (plain, front))
    assert not results.add("orchestrators", f"{_RAY}, {_VLLM}, chats of three streamed turns", wanted, got).failed
    servers.stop([front, plain])


def test_ray_does_not_import_vllm_0_33() -> None:
    """Where it does, this test ends, and the docs name the newest release that kvmover takes."""
    path = os.pathsep.join([laid("orchestrator.sh", "ray"), str(ROOT)])
    done = subprocess.run(
        [ENVIRONMENTS / "vllm" / "bin" / "python", "-c", "import ray.llm._internal.serve.engines.vllm.vllm_engine"],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    seen = done.stderr.splitlines()[-1]
    Way(_RAY, _LATER, "imported").keep(Verdict(0, (), ("not imported",), 0.0), seen=seen)
    assert seen == "ModuleNotFoundError: No module named 'vllm.entrypoints.launchers.cli_args'"
