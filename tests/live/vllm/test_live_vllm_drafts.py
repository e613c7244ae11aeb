"""vLLM servers that speculate with a draft model, whose cache has heads of its own and moves with the model's."""

from __future__ import annotations

import json

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import V2_RUNNER, kvmover, vllm


def test_a_draft_guesses_as_well_behind_a_prefill_as_alone(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """The draft is the same model with every KV head twice, so its guesses are right where it has the prompt's KV.

    Tokens alone would not tell: a model checks what a draft without its cache guesses, and takes none of it.
    """
    weights, draft = model("qwen3", "vllm"), model("qwen3-doubled", "vllm")
    guess = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}

    def of(tp: int) -> tuple[str, str]:
        return "--speculative-config", json.dumps({**guess, "draft_tensor_parallel_size": tp})

    trio = servers.start(
        vllm("vllm-draft-plain", weights, *of(1), environment=V2_RUNNER),
        vllm("vllm-draft-tp2", weights, *of(2), kv=kvmover(), tp=2, environment=V2_RUNNER),
        vllm("vllm-draft-32", weights, *of(1), kv=kvmover(), block_tokens=32, environment=V2_RUNNER),
    )
    plain, first, second = trio
    warm(*trio)
    prompts = prompts_of(12, seed=21, least_tokens=40, most_tokens=300)
    before = [_right(server) for server in (plain, second)]
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: split(first, second, prompt), prompts)
    alone, behind = (_right(server) - was for server, was in zip((plain, second), before, strict=True))
    said = f"{behind:.0f} guessed tokens right, {alone:.0f} alone"
    assert not results.add("vllm", "a draft with other heads, TP2 to TP1, blocks of 16 to 32", wanted, got, said).failed
    assert alone >= 11 * len(prompts)  # of 16 tokens of an answer at least four are the model's own
    assert behind >= alone - 3
    assert usage(first) == usage(second) == 0
    servers.stop(trio)


def _right(server: Server) -> float:
    """Guessed tokens that the model has taken."""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return server.metrics(name)[name]
