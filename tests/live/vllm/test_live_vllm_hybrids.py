"""vLLM servers of hybrid models, layers of recurrent states beside attention: short convolutions, Mamba-2 of one group
and of two, gated delta networks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from perf import record
from tests.live.answers import Answer, judge, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.hybrid_models import KINDS
from tests.live.server import Command, Server, ServerDied, free_port
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_pairs import same_answers
from tests.live.vllm_servers import kvmover, nixl_connector, vllm

#: Prompts in chunks of 128 tokens, whose states are continued.
_CHUNKS = ("--max-num-batched-tokens", "128")

#: Room for some 2,000 tokens, so that requests are preempted and computed again behind the state that came. One layer
#: of a model of gated delta networks has attention, of two KV heads.
_LITTLE_BYTES = {"deltas": 3_500_000}
_USUAL_BYTES = 7_000_000


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Servers of one model. `small`: its blocks are longer, and its memory little."""

    kind: str
    plain: Server
    tp2: Server
    tp1: Server
    small: Server


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, servers: Servers, model: ModelMaker) -> Hybrid:
    servers.stop()
    name: str = request.param
    weights, little = model(name, "vllm"), str(_LITTLE_BYTES.get(name, _USUAL_BYTES))
    started = servers.start(
        vllm(f"vllm-{name}-plain", weights),
        vllm(f"vllm-{name}-tp2", weights, *_CHUNKS, kv=kvmover(), tp=2),
        vllm(f"vllm-{name}-tp1", weights, kv=kvmover()),
        vllm(f"vllm-{name}-small", weights, "--kv-cache-memory-bytes", little, kv=kvmover(), block_tokens=32),
    )
    warm(*started)
    return Hybrid(KINDS[name], *started)


def test_states_are_cut_and_joined_between_tp2_and_tp1(hybrid: Hybrid, results: Results) -> None:
    """The prefill of TP2 computes its prompts in chunks."""
    for words, halves, seed in (
        ("TP2 in chunks to TP1", (hybrid.tp2, hybrid.tp1), 70),
        ("TP1 to TP2 in chunks", (hybrid.tp1, hybrid.tp2), 71),
    ):
        same_answers(hybrid.plain, halves, results, f"{hybrid.kind}, {words}", seed)


def test_prompts_that_share_a_prefix_go_on_from_a_state_that_is_cached(hybrid: Hybrid, results: Results) -> None:
    """Of the second ten prompts prefill and decode have the first 96 tokens in their caches."""
    prompts = [[7, 9, 11] * 32 + tail for tail in prompts_of(20, seed=72)]
    wanted = many(lambda prompt: ask(hybrid.plain, prompt), prompts)

    def through(prompt: Sequence[int]) -> Answer:
        return split(hybrid.tp2, hybrid.tp1, prompt)

    got = many(through, prompts[:10])
    before = hybrid.tp2.metrics("vllm:prefix_cache_hits")["vllm:prefix_cache_hits_total"]
    got += many(through, prompts[10:])
    hits = hybrid.tp2.metrics("vllm:prefix_cache_hits")["vllm:prefix_cache_hits_total"] - before
    seen = f"{hits:.0f} tokens of the second ten in the prefill's cache"
    assert not results.add("vllm", f"{hybrid.kind}, a shared prefix", wanted, got, seen).failed
    assert hits > 0
    assert usage(hybrid.tp2) == usage(hybrid.tp1) == 0


def test_a_decode_that_is_short_of_memory_preempts(hybrid: Hybrid, results: Results) -> None:
    prompts = prompts_of(20, seed=73, least_tokens=300, most_tokens=500)
    wanted = many(lambda prompt: ask(hybrid.plain, prompt, 64), prompts)
    got = many(lambda prompt: split(hybrid.tp1, hybrid.small, prompt, 64), prompts, at_once=10)
    preempted = hybrid.small.metrics("vllm:num_preemptions_total")["vllm:num_preemptions_total"]
    seen = f"decode preempted {preempted:.0f} times"
    assert not results.add("vllm", f"{hybrid.kind}, blocks of 16 to 32, little memory", wanted, got, seen).failed
    assert preempted > 0
    assert usage(hybrid.tp1) == usage(hybrid.small) == 0


def test_states_of_gated_delta_networks_are_cut_from_tp2_to_tp4(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """Attention has two KV heads: two ranks have a copy of each. The networks have a head of keys a rank."""
    servers.stop()
    weights = model("deltas", "vllm")
    plain, *fleets = servers.start(
        vllm("vllm-deltas-plain", weights),
        vllm("vllm-deltas-tp2", weights, kv=kvmover(), tp=2),
        vllm("vllm-deltas-tp4", weights, kv=kvmover(), block_tokens=32, tp=4),
    )
    warm(plain, *fleets)
    two, four = fleets
    for words, halves, seed in (("TP2 to TP4", (two, four), 79), ("TP4 to TP2", (four, two), 80)):
        same_answers(plain, halves, results, f"{KINDS['deltas']}, {words}", seed)


@pytest.mark.parametrize("name", KINDS)
def test_the_answers_of_vllms_own_connector_stand_beside(name: str, servers: Servers, model: ModelMaker) -> None:
    """The same prompts through both connectors, TP1 to TP2. No answer of vLLM's own fails this."""
    servers.stop()
    weights = model(name, "vllm")
    plain = servers.start(vllm(f"vllm-{name}-plain", weights))[0]
    prompts = prompts_of(20, seed=74)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)

    def half(tp: int, kv: Mapping[str, Any]) -> Command:
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        label = str(kv["kv_connector"])
        return vllm(f"vllm-{name}-{label}-tp{tp}", weights, kv=kv, tp=tp, environment=port)

    def row(kv: Mapping[str, Any]) -> dict[str, object]:
        said = {"model": KINDS[name], "halves": "TP1 to TP2", "connector": kv["kv_connector"]}
        try:
            halves = servers.start(half(1, kv), half(2, kv))
        except ServerDied:
            logs = "".join(server.log() for server in servers.running)
            reason = re.findall(r"NotImplementedError: [^,\n]*", logs)[0]
            return {**said, "requests": 0, "same": 0, "wrong": 0, "failed": 0, "said": reason}
        verdict = judge(wanted, many(lambda prompt: split(*halves, prompt), prompts))
        counts = {"requests": 20, "same": verdict.same, "wrong": len(verdict.wrong), "failed": len(verdict.failed)}
        return {**said, **counts, "said": ""}

    rows = [row(kvmover()), row(nixl_connector())]
    record.replace("live_hybrids", rows, ("model", "halves", "connector"))
    assert rows[0]["same"] == 20
