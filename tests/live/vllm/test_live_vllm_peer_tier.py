"""vLLM fleets of unlike shape share what they have on their hosts: what one has computed the other reads from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_servers import DRAINED, OFFLOADING, sharing, vllm

_TIERS = ("device", "host", "storage", "peer", "computed")
_LENT = "vllm:kvmover_peer_lent_total"


def lending(name: str, model: Path, own: str, engines: Sequence[str], layout: str, **shape: int) -> Command:
    """A server that lends what it has on its host, and asks the others of `engines`; there is no page store."""
    environment = {
        **OFFLOADING,
        "VLLM_KV_CACHE_LAYOUT": layout,
        "KVMOVER_METRICS_PORT": str(free_port()),
        # Two cores for all servers: an answer may take its time.
        "KVMOVER_PEERS_ASK_S": "5",
    }
    return vllm(name, model, *DRAINED, kv=sharing(own, engines), environment=environment, **shape)


def hits(server: Server) -> dict[str, float]:
    arguments = server.command.arguments
    ranks = int(arguments[arguments.index("--tensor-parallel-size") + 1])
    port = int(server.command.environment["KVMOVER_METRICS_PORT"]) + ranks  # the scheduler's is behind its ranks'
    return {source: labelled(server, "kvmover_prompt_tokens_total", source, port) for source in _TIERS}


def lent(server: Server, chunks: int) -> None:
    """Wait until a server has lent so many chunks more than when it began."""
    stop = time.monotonic() + 60
    while server.metrics(_LENT)[_LENT] < chunks:
        assert time.monotonic() < stop, f"{server.name} lends {server.metrics(_LENT)} chunks"
        time.sleep(0.2)


def read(server: Server, outcome: str = "read") -> float:
    return labelled(server, "vllm:kvmover_peer_loads_total", outcome)


def said_of(found: dict[str, float]) -> str:
    return ", ".join(f"{tokens:,.0f} {source}" for source, tokens in found.items() if tokens)


def test_a_prefix_that_one_fleet_has_computed_another_of_unlike_shape_finds_there(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """TP2 in blocks of 16 computes, TP1 in blocks of 64 reads; the other way; then the one that lends is killed."""
    weights, names = model("qwen3", "vllm"), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    first, second = servers.start(
        lending("vllm-peer-tp2-16", weights, names[0], names, "LBNHC", tp=2, block_tokens=16),
        lending("vllm-peer-tp1-64", weights, names[1], names, "LBHNC", block_tokens=64),
    )
    warm(plain.ready(), first, second)
    prompts, others, last = (prompts_of(16, seed=seed, least_tokens=150, most_tokens=700) for seed in (90, 91, 92))
    for lender, borrower, asked, page, title in (
        (first, second, prompts, (16, 64), "TP2 in blocks of 16 to TP1 in blocks of 64"),
        (second, first, others, (64, 16), "TP1 in blocks of 64 to TP2 in blocks of 16"),
    ):
        wanted = many(lambda prompt: ask(plain, prompt), asked)
        before = lender.metrics(_LENT)[_LENT]
        alone = many(lambda prompt, lender=lender: ask(lender, prompt), asked)
        assert not results.add("vllm", f"host memory of peers, {title}, computed", wanted, alone).failed
        lent(lender, int(before) + sum(len(prompt) // page[0] for prompt in asked))
        known = hits(borrower)
        got = many(lambda prompt, borrower=borrower: ask(borrower, prompt), asked)
        found = {source: tokens - known[source] for source, tokens in hits(borrower).items()}
        assert not results.add("vllm", f"host memory of peers, {title}", wanted, got, said_of(found)).failed
        assert sum(found.values()) == sum(map(len, asked))
        # Whole blocks of both, but for the last token of a prompt, which is computed, and its block with it.
        least = sum((len(prompt) // 64 * 64 - 1) // page[1] * page[1] for prompt in asked)
        assert found["peer"] >= least
        assert found["storage"] == 0
        assert read(borrower, "failed") == 0
    assert usage(first) == usage(second) == 0

    wanted = many(lambda prompt: ask(plain, prompt), last)
    before = first.metrics(_LENT)[_LENT]
    many(lambda prompt: ask(first, prompt), last)
    lent(first, int(before) + sum(len(prompt) // 16 for prompt in last))
    known, borrowed = hits(second), read(second)
    got = list[Answer]()
    asking = Thread(target=lambda: got.extend(many(lambda prompt: ask(second, prompt), last)))
    asking.start()
    while asking.is_alive() and read(second) < borrowed + 2:
        time.sleep(0.01)
    first.kill()
    asking.join()
    found = {source: tokens - known[source] for source, tokens in hits(second).items()}
    title = "host memory of a peer that is killed as it lends"
    assert not results.add("vllm", title, wanted, got, said_of(found)).failed
    assert found["peer"] >= 2 * 64
    assert sum(found.values()) == sum(map(len, last))
    assert usage(second) == 0
    servers.stop([second])
