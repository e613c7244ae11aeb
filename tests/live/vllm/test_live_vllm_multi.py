"""vLLM's MultiConnector: kvmover between engines and vLLM's own offloading to the host's memory in each, at once."""

from __future__ import annotations

from typing import Any

from tests.live.answers import many, post, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import OFFLOADING, kvmover, vllm

#: `reset_prefix_cache` is a word of vLLM's development mode alone.
_ENVIRONMENT = {**OFFLOADING, "VLLM_SERVER_DEV_MODE": "1"}

#: vLLM's offloading takes caches of one kind.
_MORE = ("--enable-prompt-tokens-details", "--disable-hybrid-kv-cache-manager")


def both() -> dict[str, Any]:
    """`--kv-transfer-config` for both connectors."""
    host = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [kvmover(), host]},
    }


def test_a_pair_serves_from_each_other_and_from_the_hosts_memory(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("qwen3", "vllm")
    first, second = servers.start(
        vllm("vllm-multi-prefill", weights, *_MORE, kv=both(), environment=_ENVIRONMENT),
        vllm("vllm-multi-decode", weights, *_MORE, kv=both(), environment=_ENVIRONMENT),
    )
    warm(plain.ready(), first, second)
    prompts = prompts_of(20, seed=141, least_tokens=100)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    moved = second.metrics("vllm:kvmover_received_requests")["vllm:kvmover_received_requests_total"]
    assert not results.add("vllm", "MultiConnector: kvmover and OffloadingConnector, P/D", wanted, got).failed
    assert moved == len(prompts)
    for server in (first, second):
        assert post(f"{server.url}/reset_prefix_cache", {}).status == 200
    got = many(lambda prompt: ask(first, prompt), prompts)
    cached = sum(answer.cached_tokens for answer in got)
    said = f"{cached} of {sum(map(len, prompts))} tokens from the host's memory"
    assert not results.add("vllm", "MultiConnector: the prefill alone after a reset", wanted, got, said).failed
    assert cached > sum(map(len, prompts)) // 2
    assert usage(first) == usage(second) == 0
