"""SGLang prefills for vLLM, and vLLM for SGLang: the tokens are those of the engine that decodes, alone."""

from __future__ import annotations

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, routed
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results
from tests.live.vllm_servers import vllm


@pytest.mark.parametrize(("name", "token_bytes"), [("llama", 4096), ("latent-yarn", 4 * 576 * 4)])
def test_sglang_prefills_for_vllm(
    name: str, token_bytes: int, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """SGLang on two ranks with pages of 64 tokens, vLLM on one with blocks of 16."""
    weights = model(name, "sglang")
    plain, first, second = servers.start(
        vllm(f"cross-{name}-vllm-plain", weights),
        exchanging_sglang(f"cross-{name}-sglang-prefill", weights, PREFILL, tp=2, page_tokens=64),
        exchanging_vllm(f"cross-{name}-vllm-decode", weights),
    )
    prompts = prompts_of(20, seed=31)
    with routed(first, second) as router:
        wanted = many(lambda prompt: ask(plain, prompt), prompts)
        got = many(lambda prompt: ask(router, prompt), prompts)
    moved = second.metrics("vllm:kvmover_received")
    said = f"{moved['vllm:kvmover_received_bytes_total'] / 1e6:.1f} MB moved"
    assert not results.add("sglang-vllm", f"{name}, TP2 to TP1, pages of 64 to blocks of 16", wanted, got, said).failed
    assert moved["vllm:kvmover_received_requests_total"] == len(prompts)
    assert moved["vllm:kvmover_received_bytes_total"] == token_bytes * sum(map(len, prompts))


@pytest.mark.parametrize("name", ["llama", "latent-yarn"])
def test_vllm_prefills_for_sglang(name: str, servers: Servers, model: ModelMaker, results: Results) -> None:
    """vLLM on one rank with blocks of 16 tokens, SGLang on two with pages of 64."""
    weights = model(name, "sglang")
    plain, first, second = servers.start(
        sglang(f"cross-{name}-sglang-plain", weights),
        exchanging_vllm(f"cross-{name}-vllm-prefill", weights),
        exchanging_sglang(f"cross-{name}-sglang-decode", weights, DECODE_WITH_PREFIXES, tp=2, page_tokens=64),
    )
    prompts = prompts_of(20, seed=32)
    with routed(first, second) as router:
        wanted = many(lambda prompt: ask(plain, prompt), prompts)
        got = many(lambda prompt: ask(router, prompt), prompts)
    sent = first.metrics("vllm:kvmover_sent")
    said = f"{sent['vllm:kvmover_sent_bytes_total'] / 1e6:.1f} MB moved"
    assert not results.add("vllm-sglang", f"{name}, TP1 to TP2, blocks of 16 to pages of 64", wanted, got, said).failed
    assert sent["vllm:kvmover_sent_requests_total"] == len(prompts)
