"""States of hybrid models come back with their attention: from the host after a reset, from storage after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.answers import Answer, many, post, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.hybrid_models import KINDS
from tests.live.server import Command, Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm.test_live_vllm_tier import chunks
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import ACCOUNTED, DRAINED, OFFLOADING, tiered, vllm

_PROMPTS = prompts_of(20, seed=75, least_tokens=100)


def storing(name: str, weights: Path, root: Path, tp: int) -> Command:
    """A server with vLLM's host memory, the page store behind it, and a ledger; its cache can be reset."""
    environment = {**OFFLOADING, "VLLM_SERVER_DEV_MODE": "1", "KVMOVER_METRICS_PORT": str(free_port())}
    return vllm(name, weights, *DRAINED, kv={**tiered(root), **ACCOUNTED}, environment=environment, tp=tp)


def sources(server: Server, tp: int) -> dict[str, float]:
    """Prompt tokens by where they came from, of the ledger, whose port is behind those of the ranks."""
    port = int(server.command.environment["KVMOVER_METRICS_PORT"]) + tp
    named = ("device", "host", "storage", "computed", "abandoned")
    return {source: labelled(server, "kvmover_prompt_tokens_total", source, port) for source in named}


@pytest.mark.parametrize("name", KINDS)
def test_states_come_back_from_the_host_and_from_storage(
    name: str, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """Servers of TP1, then of TP2, which share a directory: the states of a chunk are those of its TP alone."""
    weights = model(name, "vllm")
    (plain,) = servers.start(vllm(f"vllm-{name}-plain", weights))
    wanted = many(lambda prompt: ask(plain, prompt), _PROMPTS)
    for tp in (1, 2):
        title = f"tier, {KINDS[name]}, TP{tp}"
        (first,) = servers.start(storing(f"vllm-{name}-stores-tp{tp}", weights, tmp_path, tp))
        warm(first)
        found = _same(first, tp, wanted, results, f"{title}, first life")
        assert not found["host"] + found["storage"]
        assert post(f"{first.url}/reset_prefix_cache", {}).status == 200
        found = _same(first, tp, wanted, results, f"{title}, from the host after a reset")
        assert found["host"] > 10 * found["computed"]
        servers.stop([first])
        (again,) = servers.start(storing(f"vllm-{name}-again-tp{tp}", weights, tmp_path, tp))
        found = _same(again, tp, wanted, results, f"{title}, from storage after a restart")
        assert found["storage"] > 10 * found["computed"]
        servers.stop([again])
    servers.stop()


def _same(server: Server, tp: int, wanted: list[Answer], results: Results, scenario: str) -> dict[str, float]:
    """Returns the prompt tokens by source of the prompts asked once more; the answers are the plain server's."""
    before, read = sources(server, tp), chunks(server, "load", "read")
    got = many(lambda prompt: ask(server, prompt), _PROMPTS)
    found = {source: tokens - before[source] for source, tokens in sources(server, tp).items()}
    read = chunks(server, "load", "read") - read
    said = ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items() if tokens)
    said += f"; {read:.0f} chunks read" * bool(read)
    assert not results.add("vllm", scenario, wanted, got, said).failed
    assert sum(found.values()) == sum(map(len, _PROMPTS))
    assert bool(read) == bool(found["storage"])
    assert usage(server) == 0
    return found
