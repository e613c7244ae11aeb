"""A prefill and a decode of any two releases of any two engines: `make live-pair PREFILL=vllm==0.31.0 DECODE=...`.

The tokens are those of the decode's release alone. A row for each pair is in perf/results/live_releases.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from perf import record
from tests.live import sglang_client, vllm_client
from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, routed
from tests.live.release import Release
from tests.live.server import Command, Server, labelled
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results
from tests.live.vllm_servers import DRAINED, OFFLOADING, kvmover, tiered, vllm

#: Prompts of a pair.
REQUESTS = 20

Prompt = Sequence[int]


def _alone(release: Release, weights: Path) -> Command:
    make = vllm if release.engine == "vllm" else sglang
    return release.of(make(f"release-{release.engine}-plain", weights))


def _halves(first: Release, second: Release, weights: Path) -> tuple[Command, Command]:
    """The commands of a prefill and a decode; of unlike engines in the form that both know."""
    names = f"release-{first.engine}-prefill", f"release-{second.engine}-decode"
    match first.engine, second.engine:
        case "vllm", "vllm":
            halves = vllm(names[0], weights, kv=kvmover()), vllm(names[1], weights, kv=kvmover(), block_tokens=64)
        case "sglang", "sglang":
            halves = sglang(names[0], weights, mode=PREFILL), sglang(names[1], weights, mode=DECODE)
        case "sglang", _:
            halves = exchanging_sglang(names[0], weights, PREFILL), exchanging_vllm(names[1], weights)
        case _:
            halves = exchanging_vllm(names[0], weights), exchanging_sglang(names[1], weights, DECODE)
    return first.of(halves[0]), second.of(halves[1])


def _through(first: Server, second: Server, prompts: Sequence[Prompt]) -> list[Answer]:
    if first.engine != second.engine:
        with routed(first, second) as router:
            return many(lambda prompt: ask(router, prompt), prompts)
    split: Callable[[Server, Server, Prompt], Answer] = (
        vllm_client.split if first.engine == "vllm" else sglang_client.split
    )
    return many(lambda prompt: split(first, second, prompt), prompts)


def _received_bytes(decode: Server) -> float:
    if decode.engine == "sglang":
        return sglang_client.counted(decode, "kvmover_received_bytes_total")
    return decode.metrics("vllm:kvmover_received_bytes")["vllm:kvmover_received_bytes_total"]


def test_a_prefill_and_a_decode_of_two_releases_give_the_tokens_of_the_decodes_alone(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    first, second = Release.named("PREFILL"), Release.named("DECODE")
    weights = model("llama", "sglang")
    plain, prefill, decode = servers.start(_alone(second, weights), *_halves(first, second, weights))
    prompts = prompts_of(REQUESTS, seed=53)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = _through(prefill, decode, prompts)
    verdict = results.add(f"{first.engine}-{second.engine}", f"{first} to {second}", wanted, got)
    moved = _received_bytes(decode)
    row = {
        "prefill": str(first),
        "decode": str(second),
        "requests": len(prompts),
        "same": verdict.same,
        "wrong": len(verdict.wrong),
        "failed": len(verdict.failed),
        "moved_bytes": int(moved),
    }
    record.replace("live_releases", [row], ("prefill", "decode"))
    assert verdict.same == len(prompts)
    # 4 layers of 4 heads of K and V of 32 float32 are 4,096 bytes a token.
    assert moved >= 4096 * sum(len(prompt) - 1 for prompt in prompts)


def test_the_page_store_behind_vllms_offloading_outlives_an_upgrade(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """Chunks that one release has stored are read by the other, which computes next to nothing."""
    writer, reader = Release.named("PREFILL"), Release.named("DECODE")
    if {writer.engine, reader.engine} != {"vllm"}:
        pytest.skip("vLLM's own offloading is vLLM's")
    weights, options = model("llama", "sglang"), tiered(tmp_path)
    prompts = prompts_of(REQUESTS, seed=54, least_tokens=100, most_tokens=600)
    plain, first = servers.start(
        _alone(reader, weights),
        writer.of(vllm("release-vllm-writer", weights, *DRAINED, kv=options, environment=OFFLOADING)),
    )
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    many(lambda prompt: ask(first, prompt), prompts)
    servers.stop([first])
    (second,) = servers.start(
        reader.of(vllm("release-vllm-reader", weights, *DRAINED, kv=options, environment=OFFLOADING))
    )
    got = many(lambda prompt: ask(second, prompt), prompts)
    read = labelled(second, "vllm:kvmover_tier_loads_total", "read")
    verdict = results.add("vllm-vllm", f"page store of {writer}, read by {reader}", wanted, got, f"{read:.0f} chunks")
    row = {"writer": str(writer), "reader": str(reader), "requests": len(prompts), "same": verdict.same}
    record.replace("live_upgrades", [{**row, "read_chunks": int(read)}], ("writer", "reader"))
    assert verdict.same == len(prompts)
    assert read >= sum(len(prompt) // 16 - 1 for prompt in prompts)
