"""The page store behind vLLM's own CPU tier: a second life of a server, a hybrid model, and a store that goes away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import ACCOUNTED, DRAINED, OFFLOADING, tiered, vllm


def chunks(server: Server, verb: str, outcome: str) -> float:
    """Chunks that the tier has stored or loaded, by how that ended."""
    return labelled(server, f"vllm:kvmover_tier_{verb}s_total", outcome)


@pytest.mark.parametrize("name", ["qwen3", "windows"])
def test_chunks_outlive_their_server(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path, name: str
) -> None:
    weights, options = model(name, "vllm"), tiered(tmp_path)
    plain, first = servers.start(
        vllm(f"vllm-tier-plain-{name}", weights),
        vllm(f"vllm-tier-1-{name}", weights, *DRAINED, kv=options, environment=OFFLOADING),
    )
    warm(plain, first)
    prompts = prompts_of(16, seed=70, least_tokens=100, most_tokens=700)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(first, prompt), prompts)
    written = chunks(first, "store", "written")
    assert not results.add("vllm", f"tier, first life, {name}", wanted, got, f"{written:.0f} chunks written").failed
    assert written
    assert usage(first) == 0
    servers.stop([first])

    port = free_port()
    again, robbed = servers.start(
        vllm(
            f"vllm-tier-again-{name}",
            weights,
            *DRAINED,
            kv={**options, **ACCOUNTED},
            environment={**OFFLOADING, "KVMOVER_METRICS_PORT": str(port)},
        ),
        vllm(f"vllm-tier-robbed-{name}", weights, *DRAINED, kv=options, environment=OFFLOADING),
    )
    got = many(lambda prompt: ask(again, prompt), prompts)
    read = chunks(again, "load", "read")
    tokens = {
        source: labelled(again, "kvmover_prompt_tokens_total", source, port + 1)
        for source in ("device", "host", "storage", "computed", "abandoned")
    }
    said = f"{read:.0f} chunks read, {tokens['storage']:.0f} tokens from storage"
    assert not results.add("vllm", f"tier, after a restart, {name}", wanted, got, said).failed
    assert sum(tokens.values()) == sum(map(len, prompts))
    assert tokens["storage"] > tokens["computed"]
    assert not again.metrics("kvmover_ledger_faults_total", port=port + 1)["kvmover_ledger_faults_total"]
    # All but the last whole block of a prompt, whose last token is always computed.
    assert read >= sum(len(prompt) // 16 - 1 for prompt in prompts) * (name == "qwen3")
    assert read
    assert usage(again) == 0

    # What this server knows of cannot be read when it asks, and then nothing can be written any more.
    for data in tmp_path.rglob("*.data"):
        data.write_bytes(b"")
    got = many(lambda prompt: ask(robbed, prompt), prompts)
    lost = sum(chunks(robbed, "load", outcome) for outcome in ("absent", "evicted", "failed", "poisoned"))
    assert not results.add("vllm", f"tier, its files emptied, {name}", wanted, got, f"{lost:.0f} chunks lost").failed
    assert lost
    shutil.rmtree(tmp_path)
    prompts = prompts_of(16, seed=71, least_tokens=100, most_tokens=700)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(robbed, prompt), prompts)
    assert not results.add("vllm", f"tier, its directory deleted, {name}", wanted, got).failed
    assert usage(robbed) == 0
    servers.stop()


def test_another_tensor_parallel_size_reads_the_canonical_layout(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, options = model("qwen3", "vllm"), tiered(tmp_path, canonical_layout=True)
    (first,) = servers.start(vllm("vllm-tier-tp2", weights, *DRAINED, kv=options, tp=2, environment=OFFLOADING))
    warm(plain.ready(), first)
    prompts = prompts_of(12, seed=72, least_tokens=100, most_tokens=500)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(first, prompt), prompts)
    assert not results.add("vllm", "tier, canonical, written by TP2", wanted, got).failed
    servers.stop([first])
    (other,) = servers.start(vllm("vllm-tier-tp1", weights, *DRAINED, kv=options, environment=OFFLOADING))
    got = many(lambda prompt: ask(other, prompt), prompts)
    read = chunks(other, "load", "read")
    assert not results.add("vllm", "tier, canonical, read by TP1", wanted, got, f"{read:.0f} chunks read").failed
    assert read >= sum(len(prompt) // 16 - 1 for prompt in prompts)
    servers.stop()


def test_a_speculating_server_stores_and_reads(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    weights, options = model("qwen3", "vllm"), tiered(tmp_path)
    guess = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}')
    plain.ready()
    prompts = prompts_of(12, seed=73, least_tokens=100, most_tokens=500)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    for life in ("first life", "after a restart"):
        (server,) = servers.start(
            vllm("vllm-tier-guess", weights, *DRAINED, *guess, kv=options, environment=OFFLOADING)
        )
        warm(server)
        got = many(lambda prompt, server=server: ask(server, prompt), prompts)
        read = chunks(server, "load", "read")
        said = f"{read:.0f} chunks read"
        assert not results.add("vllm", f"tier, speculating, {life}", wanted, got, said).failed
        assert bool(read) is (life == "after a restart")
        servers.stop([server])
