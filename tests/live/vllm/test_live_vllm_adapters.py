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
from tests.live.partners import mistake, sentence
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, ask_several, usage, warm
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
    one, two = (model(f"adapter-{seed}", "vllm") for seed in (1, 2))
    commands = []
    for name, third in (("prefill", "A"), ("decode", "B"), ("plain", "B")):
        folders = {"A": copies / name / "A", "B": copies / name / "B"}
        for source, folder in zip((one, two), folders.values(), strict=True):
            shutil.copytree(source, folder)
        modules = [f"{adapter}={folder}" for adapter, folder in {**folders, "C": folders[third]}.items()]
        more = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules)
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


@pytest.mark.parametrize(
    ("prefilled", "decoded", "what"),
    [
        ("A", "B", "prefilled with adapter A, decoded with B"),
        ("m", "A", "prefilled without an adapter, decoded with one"),
        ("A", "m", "prefilled with an adapter, decoded without"),
        ("C", "C", "an adapter of one name and two contents"),
    ],
)
def test_kv_of_another_adapter_is_not_taken(
    lab: Lab, results: Results, prefilled: str, decoded: str, what: str
) -> None:
    prompts = prompts_of(4, seed=170 + len(what), least_tokens=100, most_tokens=300)
    wanted = [answered(lab.plain, decoded, prompt) for prompt in prompts]
    got = [split_as(lab, prefilled, decoded, prompt) for prompt in prompts]
    refused = mistake(
        results,
        "vllm",
        what,
        wanted,
        got,
        lambda: [answered(lab.second, decoded, prompt) for prompt in prompts],
        sentence(lab.second, "is computed here: the KV is of"),
    )
    assert refused == 0
    assert usage(lab.second) == 0
