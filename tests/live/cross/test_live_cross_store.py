"""One page store under SGLang, vLLM and transformers: one reads the pages of another, its tokens are its own alone."""

from __future__ import annotations

from pathlib import Path

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import EXCHANGE, ask, exchanging_vllm
from tests.live.server import labelled
from tests.live.sglang_client import ask as ask_sglang
from tests.live.sglang_servers import linker, sglang
from tests.live.table import Results
from tests.live.transformers_servers import transformers

_PAGE_TOKENS = 16


def test_pages_serve_the_other_engine(servers: Servers, model: ModelMaker, results: Results, tmp_path: Path) -> None:
    """SGLang writes past the host and vLLM reads on two ranks in another layout; then vLLM writes and SGLang reads."""
    weights = model("llama", "sglang")
    stored = {"environment": EXCHANGE, "page_tokens": _PAGE_TOKENS}
    blnhc = {"tp": 2, "layout": "BLNHC", "root": tmp_path}
    writer, plain_vllm = servers.start(
        sglang("cross-store-sglang-1", weights, *linker(tmp_path), **stored),
        exchanging_vllm("cross-store-vllm-plain", weights),
    )
    prompts = prompts_of(20, seed=41, least_tokens=100, most_tokens=900)
    others = prompts_of(20, seed=42, least_tokens=100, most_tokens=900)
    wanted = many(lambda prompt: ask(plain_vllm, prompt), prompts)
    alone = many(lambda prompt: ask_sglang(writer, prompt), prompts)
    assert all(answer.ok and not answer.cached_tokens for answer in alone)
    servers.stop([writer, plain_vllm])

    (reader,) = servers.start(exchanging_vllm("cross-store-vllm-2", weights, **blnhc))
    got = many(lambda prompt: ask(reader, prompt), prompts)
    read = reader.metrics("vllm:kvmover_loaded_blocks")["vllm:kvmover_loaded_blocks_total"] / 2
    blocks = sum(len(prompt) // _PAGE_TOKENS for prompt in prompts)
    said = f"{read:.0f} of {blocks} blocks read"
    assert not results.add("sglang-vllm", "page store of TP1, read by TP2", wanted, got, said).failed
    # vLLM computes the last token of a prompt: one of whole blocks leaves its last one out.
    assert blocks - len(prompts) <= read <= blocks
    many(lambda prompt: ask(reader, prompt), others)
    servers.stop([reader])

    plain_sglang, third = servers.start(
        sglang("cross-store-sglang-plain", weights),
        sglang("cross-store-sglang-3", weights, *linker(tmp_path), **stored),
    )
    wanted = many(lambda prompt: ask_sglang(plain_sglang, prompt), others)
    got = many(lambda prompt: ask_sglang(third, prompt), others)
    tokens = sum(answer.cached_tokens for answer in got)
    whole = sum((len(prompt) - 1) // _PAGE_TOKENS * _PAGE_TOKENS for prompt in others)
    said = f"{tokens} of {sum(map(len, others))} prompt tokens from disk"
    assert not results.add("vllm-sglang", "page store of TP2, read by TP1", wanted, got, said).failed
    assert tokens == whole


def test_pages_serve_transformers_and_come_from_it(
    servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    """vLLM writes on two ranks and transformers reads; then transformers writes and SGLang reads."""
    weights = model("llama", "sglang")
    prompts, others = (prompts_of(20, seed=seed, least_tokens=100, most_tokens=900) for seed in (43, 44))
    writer, plain = servers.start(
        exchanging_vllm("cross-store-vllm-writes", weights, tp=2, layout="BLNHC", root=tmp_path),
        transformers("cross-store-transformers-plain", weights, page_tokens=_PAGE_TOKENS),
    )
    assert all(answer.ok for answer in many(lambda prompt: ask(writer, prompt), prompts))
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    servers.stop([writer, plain])

    (third,) = servers.start(
        transformers("cross-store-transformers", weights, page_tokens=_PAGE_TOKENS, root=str(tmp_path))
    )
    got = many(lambda prompt: ask(third, prompt), prompts)
    port = int(third.command.environment["KVMOVER_METRICS_PORT"])
    read = labelled(third, "kvmover_store_gots_total", "read", port)
    # The last token of a prompt is computed: one of whole pages leaves its last one out.
    whole = sum((len(prompt) - 1) // _PAGE_TOKENS for prompt in prompts)
    said = f"{read:.0f} of {whole} pages read"
    assert not results.add("vllm-transformers", "page store of TP2, read by transformers", wanted, got, said).failed
    assert read == whole
    many(lambda prompt: ask(third, prompt), others)
    servers.stop([third])

    plain, reader = servers.start(
        sglang("cross-store-sglang-plain", weights),
        sglang("cross-store-sglang-reads", weights, *linker(tmp_path), environment=EXCHANGE, page_tokens=_PAGE_TOKENS),
    )
    wanted = many(lambda prompt: ask_sglang(plain, prompt), others)
    got = many(lambda prompt: ask_sglang(reader, prompt), others)
    tokens = sum(answer.cached_tokens for answer in got)
    whole = sum((len(prompt) - 1) // _PAGE_TOKENS * _PAGE_TOKENS for prompt in others)
    said = f"{tokens} of {sum(map(len, others))} prompt tokens from disk"
    name = "page store of transformers, read by TP1"
    assert not results.add("transformers-sglang", name, wanted, got, said).failed
    assert tokens == whole
