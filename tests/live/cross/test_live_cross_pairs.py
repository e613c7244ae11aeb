"""SGLang prefills for vLLM, and vLLM for SGLang: the tokens are those of the engine that decodes, alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.live.answers import many, prompts_of
from tests.live.checks import checked
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import Front, ask, exchanging_sglang, exchanging_vllm, routed
from tests.live.server import Server
from tests.live.sglang_client import usage as usage_of_sglang
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results
from tests.live.vllm_client import usage as usage_of_vllm
from tests.live.vllm_servers import vllm


def _again(
    router: Front, plain: Server, prompts: Sequence[Sequence[int]], results: Results, engine: str, name: str
) -> None:
    """The prompts with more behind them, all at once: what either side has cached ends within pages of the other."""
    longer = [[*prompt, *tail] for prompt, tail in zip(prompts, prompts_of(len(prompts), seed=35), strict=True)]
    wanted = many(lambda prompt: ask(plain, prompt), longer)
    got = many(lambda prompt: ask(router, prompt), longer, at_once=len(longer))
    assert not results.add(engine, f"{name}, all at once behind warm caches", wanted, got).failed


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
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    with routed(first, second) as router:
        got = many(lambda prompt: ask(router, prompt), prompts)
        moved = second.metrics("vllm:kvmover_received")
        _again(router, plain, prompts, results, "sglang-vllm", name)
    said = f"{moved['vllm:kvmover_received_bytes_total'] / 1e6:.1f} MB moved"
    assert not results.add("sglang-vllm", f"{name}, TP2 to TP1, pages of 64 to blocks of 16", wanted, got, said).failed
    assert moved["vllm:kvmover_received_requests_total"] == len(prompts)
    assert moved["vllm:kvmover_received_bytes_total"] == token_bytes * sum(map(len, prompts))
    later = second.metrics("vllm:kvmover_received")
    assert later["vllm:kvmover_received_requests_total"] == 2 * len(prompts)
    assert not later.get("vllm:kvmover_received_failures_total")
    assert usage_of_vllm(second) == usage_of_sglang(first) == 0
    assert checked(results, "sglang-vllm", f"{name}, beside the decode alone", (first, second))["equal_tokens"] == 16


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
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    with routed(first, second) as router:
        got = many(lambda prompt: ask(router, prompt), prompts)
        sent = first.metrics("vllm:kvmover_sent")
        _again(router, plain, prompts, results, "vllm-sglang", name)
    said = f"{sent['vllm:kvmover_sent_bytes_total'] / 1e6:.1f} MB moved"
    assert not results.add("vllm-sglang", f"{name}, TP1 to TP2, blocks of 16 to pages of 64", wanted, got, said).failed
    assert sent["vllm:kvmover_sent_requests_total"] == len(prompts)
    assert usage_of_vllm(first) == usage_of_sglang(second) == 0
    ports = int(second.command.environment["KVMOVER_METRICS_PORT"])
    words = (first, second, "--metrics", f"127.0.0.1:{ports}-{ports + 1}", "--reference", plain)
    assert checked(results, "vllm-sglang", f"{name}, beside a plain server", words)["equal_tokens"] == 16
