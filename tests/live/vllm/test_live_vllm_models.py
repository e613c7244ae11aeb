"""vLLM servers of other models: bfloat16, a latent cache (MLA), layers with sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

from tests.live.answers import GAP
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import warm
from tests.live.vllm_forms import Form, ask_choices, split_choices
from tests.live.vllm_pairs import same_answers
from tests.live.vllm_servers import kvmover, vllm

#: Whose prompts' log probabilities are answered: of a model with windows the pages of such a prompt are not served.
OF_THE_PROMPT = (
    Form("echo", {"prompt": list(range(100)), "echo": True}),
    Form("prompt_logprobs", {"prompt": list(range(120, 250)), "prompt_logprobs": 2}),
)


def test_bfloat16(servers: Servers, model: ModelMaker, results: Results) -> None:
    """One request at a time. A decode computes the last token of a prompt by itself, which rounds otherwise than with
    all of them: log probabilities differ by up to 8 bits of mantissa, the tokens do not."""
    weights, kind = model("qwen3-bf16", "vllm"), "bfloat16"
    trio = servers.start(
        vllm("vllm-bf16-plain", weights, dtype=kind),
        vllm("vllm-bf16-16", weights, kv=kvmover(), dtype=kind),
        vllm("vllm-bf16-32", weights, kv=kvmover(), block_tokens=32, dtype=kind),
    )
    _same(trio, results, "bf16, blocks of 16 to 32", at_once=1, gap=0.1)
    servers.stop(trio)


def test_a_latent_cache(servers: Servers, model: ModelMaker, results: Results) -> None:
    weights = model("latent", "vllm")
    trio = servers.start(
        vllm("vllm-latent-plain", weights),
        vllm("vllm-latent-tp2", weights, kv=kvmover(), tp=2),
        vllm("vllm-latent-tp1", weights, kv=kvmover(verb="push", route="packed")),
    )
    _same(trio, results, "MLA, TP2 to TP1", at_once=8)
    servers.stop(trio)


def test_sliding_windows(servers: Servers, model: ModelMaker, results: Results) -> None:
    """Windows of 64 tokens in three of four layers: a prefill has given their earlier blocks back when it is asked."""
    weights = model("windows", "vllm")
    trio = servers.start(
        vllm("vllm-windows-plain", weights),
        vllm("vllm-windows-16", weights, kv=kvmover()),
        vllm("vllm-windows-32", weights, kv=kvmover(), block_tokens=32),
    )
    _same(trio, results, "sliding windows, blocks of 16 to 32", at_once=8)
    wanted = [answer for form in OF_THE_PROMPT for answer in ask_choices(trio[0], form)]
    got = [answer for form in OF_THE_PROMPT for answer in split_choices(*trio[1:], form)]
    assert not results.add("vllm", "sliding windows, log probabilities of the prompt", wanted, got).failed
    servers.stop(trio)


def test_windows_on_pipeline_stages(servers: Servers, model: ModelMaker, results: Results) -> None:
    """Each stage has a window and a layer that attends to everything."""
    weights = model("windows-by-turns", "vllm")
    trio = servers.start(
        vllm("vllm-stages-plain", weights),
        vllm("vllm-stages-pp2", weights, kv=kvmover(), pp=2),
        vllm("vllm-stages-32", weights, kv=kvmover(), block_tokens=32),
    )
    _same(trio, results, "sliding windows, PP2 to TP1, blocks of 16 to 32", at_once=8)
    servers.stop(trio)


def _same(trio: Sequence[Server], results: Results, scenario: str, at_once: int, gap: float = GAP) -> None:
    warm(*trio)
    same_answers(trio[0], trio[1:], results, scenario, at_once=at_once, gap=gap)
