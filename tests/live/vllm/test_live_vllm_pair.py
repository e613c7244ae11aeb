"""The smallest live proof: one prefill and one decode of vLLM with other blocks, in another layout. CI runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvmover.observe.runlog import read_lines
from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm


def test_a_prefill_and_a_decode_give_a_plain_servers_tokens(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, logs = model("qwen3", "vllm"), [tmp_path / "prefill.jsonl", tmp_path / "decode.jsonl"]
    own, other = ({"KVMOVER_RECORD_RUN_LOG": str(log)} for log in logs)
    other["VLLM_KV_CACHE_LAYOUT"] = "BLNHC"
    first, second = servers.start(
        vllm("vllm-pair-prefill", weights, kv=kvmover(), environment=own),
        vllm("vllm-pair-decode", weights, kv=kvmover(), block_tokens=64, environment=other),
    )
    warm(plain.ready(), first, second)
    prompts = prompts_of(20, seed=1)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    moved = second.metrics("vllm:kvmover_received_requests", "vllm:kvmover_received_bytes")
    assert not results.add("vllm", "TP1 to TP1, blocks of 16 to 64 in another layout", wanted, got).failed
    assert moved["vllm:kvmover_received_requests_total"] == len(prompts)
    # 4 layers of 4 heads of K and V of 32 float32 are 4,096 bytes a token.
    assert moved["vllm:kvmover_received_bytes_total"] == 4096 * sum(map(len, prompts))
    assert usage(first) == usage(second) == 0
    servers.stop((first, second))
    ended = [Counter((line.verb, line.cause) for line in read_lines([log]).transfers) for log in logs]
    assert ended == [{("send", None): len(prompts)}, {("receive", None): len(prompts)}], "a server's log has its end"
