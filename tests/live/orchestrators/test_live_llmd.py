"""llm-d's sidecar in front of vLLM and SGLang with kvmover."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.live.conftest import ModelMaker, Servers, chats_by_openais_client
from tests.live.orchestrators.orchestrated import TOKEN_IDS, Way, until_served
from tests.live.orchestrators.sidecar import KVConnector, decode_body, prefill_body, sidecar_of, with_cached
from tests.live.server import Command
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results
from tests.live.vllm_servers import kvmover, vllm

_LLMD = "llm-d-router ebab6879's sidecar"


def _vllm(weights: Path) -> tuple[Command, ...]:
    return (
        vllm("llmd-vllm-plain", weights),
        vllm("llmd-vllm-prefill", weights, kv=kvmover(), tp=2),
        vllm("llmd-vllm-decode", weights, kv=kvmover(), block_tokens=64),
    )


def _sglang(weights: Path) -> tuple[Command, ...]:
    return (
        sglang("llmd-sglang-plain", weights),
        sglang("llmd-sglang-prefill", weights, mode=PREFILL, tp=2),
        sglang("llmd-sglang-decode", weights, mode=DECODE),
    )


@pytest.mark.parametrize(
    ("connector", "commands", "release"),
    [(KVConnector.NIXLV2, _vllm, "vllm 0.33.0"), (KVConnector.SGLANG, _sglang, "sglang 0.5.23")],
    ids=["vllm", "sglang"],
)
def test_answers_behind_the_sidecar_are_those_of_a_plain_server(
    servers: Servers,
    model: ModelMaker,
    results: Results,
    tmp_path: Path,
    connector: KVConnector,
    commands,
    release: str,
) -> None:
    log = tmp_path / "run.jsonl"
    logged = [
        replace(command, environment={**command.environment, "KVMOVER_RECORD_RUN_LOG": str(log)})
        for command in commands(model("llama", "sglang"))
    ]
    plain, first, second = servers.start(*logged)
    with sidecar_of(first, second, connector) as front:
        until_served(front)
        Way(_LLMD, release, f"kv-connector {connector}, TP2 to TP1").compare(results, plain.url, front, log, TOKEN_IDS)
        wanted, got = (chats_by_openais_client(plain.engine, url, 6) for url in (plain.url, front))
        assert not results.add(
            "orchestrators", f"{_LLMD}, {release}, chats of three streamed turns", wanted, got
        ).failed
    servers.stop([plain, first, second])


def test_the_sidecar_says_the_words_of_llm_d() -> None:
    """Those that the sidecar's own tests ask for."""
    asked = {"prompt": "a", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    half = prefill_body(asked)
    assert {name: half[name] for name in ("max_tokens", "stream")} == {"max_tokens": 1, "stream": False}
    assert "stream_options" not in half
    params = half["kv_transfer_params"]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    nowhere = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
    assert [params[name] for name in nowhere] == [None] * 4
    answered = {"kv_transfer_params": {"remote_host": "ahost"}, "usage": {}}
    assert decode_body(asked, answered) == {**asked, "kv_transfer_params": {"remote_host": "ahost"}}
    assert with_cached(b'{"usage": {"prompt_tokens_details": null}}', 7) == (
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}'
    )
    assert with_cached(b"data: [DONE]\n", 7) == b"data: [DONE]\n"
