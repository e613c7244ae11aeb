"""The page store behind vLLM's prefix cache: a second life of a server, and another shape over the same pages."""

from __future__ import annotations

from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import kvmover, vllm


def test_pages_outlive_their_server(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, options = model("qwen3", "vllm"), kvmover(root=str(tmp_path))
    (first,) = servers.start(vllm("vllm-store-1", weights, kv=options))
    warm(plain.ready(), first)
    prompts = prompts_of(20, seed=40, least_tokens=100, most_tokens=900)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(first, prompt), prompts)
    assert not results.add("vllm", "page store, first life", wanted, got).failed
    assert usage(first) == 0
    servers.stop([first])

    again, other = servers.start(
        vllm("vllm-store-2", weights, kv=options),
        vllm("vllm-store-tp2", weights, kv=options, tp=2, environment={"VLLM_KV_CACHE_LAYOUT": "BLNHC"}),
    )
    blocks = sum(len(prompt) // 16 for prompt in prompts)
    for server, scenario in (
        (again, "page store, after a restart"),
        (other, "page store, read by TP2 in another layout"),
    ):
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        read = server.metrics("vllm:kvmover_loaded_blocks")["vllm:kvmover_loaded_blocks_total"]
        assert not results.add("vllm", scenario, wanted, got, f"{read:.0f} blocks read").failed
        # The last token of a prompt is always computed: a prompt of whole blocks leaves its last one out.
        assert read >= blocks - len(prompts)
        assert usage(server) == 0
