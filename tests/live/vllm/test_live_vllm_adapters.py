"""LoRA adapters between vLLM's halves: told by their bytes, whatever their name, their path and when they came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.live.answers import Answer, Prompt, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import ADAPTERS, mistake, sentence
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, ask_several, usage, warm
from tests.live.vllm_partners import Halves, alone, of_adapters, one_for_another, with_adapters
from tests.live.vllm_servers import kvmover, vllm

_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
_JSON = {"Content-Type": "application/json"}
RECEIVED = "vllm:kvmover_received_requests_total"


@dataclass(frozen=True, slots=True)
class Lab:
    """A prefill, a decode and a plain server. `A` and `B` are the same two adapters everywhere, on each server at a
    path of its own; `C` is one of them at the prefill, and the other at the decode and the plain server."""

    first: Server
    second: Server
    plain: Server
    copies: Path


def answered(server: Server, adapter: str, prompt: Prompt, params: Mapping[str, Any] | None = None) -> Answer:
    return ask_several(server, prompt, 1 if params is FOR_ANOTHER else 16, params, model=adapter)[0]


def split_as(lab: Lab, prefilled: str, decoded: str, prompt: Prompt) -> Answer:
    half = answered(lab.first, prefilled, prompt, FOR_ANOTHER)
    return answered(lab.second, decoded, prompt, half.params) if half.ok else replace(half, error="prefill")


@pytest.fixture(scope="module")
def lab(servers: Servers, model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    weights, copies = model("qwen3", "vllm"), tmp_path_factory.mktemp("adapters")
    commands = []
    for name, third in (("prefill", "A"), ("decode", "B"), ("plain", "B")):
        more = with_adapters(copies / name, third, model)
        kv = None if name == "plain" else kvmover(policy="fail")
        commands.append(vllm(f"vllm-adapters-{name}", weights, *more, kv=kv, environment=_ENVIRONMENT))
    started = servers.start(*commands)
    warm(*started)
    return Lab(*started, copies)


def test_an_adapter_is_the_same_at_two_paths(lab: Lab, results: Results) -> None:
    prompts = prompts_of(6, seed=151, least_tokens=100, most_tokens=300)
    cases = [(adapter, prompt) for adapter in ("m", "A", "B") for prompt in prompts]
    wanted = [answered(lab.plain, *case) for case in cases]
    assert len({answer.tokens for answer in wanted}) == len(cases)  # each adapter says something else
    before = lab.second.metrics(RECEIVED)[RECEIVED]
    got = [split_as(lab, adapter, adapter, prompt) for adapter, prompt in cases]
    assert not results.add("vllm", "two adapters and none, each from another path", wanted, got).failed
    assert lab.second.metrics(RECEIVED)[RECEIVED] - before == len(cases)


def test_an_adapter_that_is_loaded_while_servers_run_is_one_of_those(lab: Lab, results: Results) -> None:
    for server, name in ((lab.first, "prefill"), (lab.second, "decode"), (lab.plain, "plain")):
        shutil.copytree(lab.copies / name / "A", lab.copies / name / "later")
        where = {"lora_name": "later", "lora_path": str(lab.copies / name / "later")}
        request = Request(f"{server.url}/v1/load_lora_adapter", json.dumps(where).encode(), _JSON)
        with urlopen(request, timeout=60) as answer:
            assert b"added successfully" in answer.read()
    prompts = prompts_of(4, seed=161, least_tokens=100, most_tokens=300)
    before = lab.second.metrics(RECEIVED)[RECEIVED]
    wanted = [answered(lab.plain, "later", prompt) for prompt in prompts]
    got = [split_as(lab, "later" if number % 2 else "A", "later", prompt) for number, prompt in enumerate(prompts)]
    assert not results.add("vllm", "an adapter loaded while the servers run", wanted, got).failed
    assert lab.second.metrics(RECEIVED)[RECEIVED] - before == len(prompts)


@pytest.mark.parametrize("what", ADAPTERS)
def test_kv_of_another_adapter_is_not_taken(lab: Lab, results: Results, what: str) -> None:
    made = of_adapters(what)
    asked = [other for _, other in made]
    got = one_for_another(Halves(lab.first, lab.second, lab.first), made, 60.0)
    said = sentence(lab.second, "is computed here: the KV is of")
    assert mistake(results, "vllm", what, alone(lab.plain, asked), got, lambda: alone(lab.second, asked), said) == 0
    assert usage(lab.second) == 0
