"""transformers prefills or decodes, with itself, vLLM and SGLang: the tokens are those of the decode, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, received_bytes, routed
from tests.live.server import Command
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results
from tests.live.transformers_servers import transformers
from tests.live.vllm_servers import vllm

MODEL = "llama"
#: Bytes of a token: 4 layers of K and V, 4 heads of 32 numbers of 4 bytes.
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4


def plain(make: str, folder: Path) -> Command:
    """The engine that decodes, alone."""
    if make == "transformers":
        return transformers(f"cross-{make}-plain", folder)
    return (vllm if make == "vllm" else sglang)(f"cross-transformers-{make}-plain", folder)


def prefill(make: str, folder: Path) -> Command:
    """An engine whose pages have another size than those of its decode; SGLang's heads lie on two ranks."""
    name = f"cross-transformers-{make}-prefill"
    if make == "transformers":
        return transformers(name, folder, page_tokens=16, chunk_tokens=64)
    if make == "vllm":
        return exchanging_vllm(name, folder)
    return exchanging_sglang(name, folder, PREFILL, tp=2, page_tokens=64)


def decode(make: str, folder: Path) -> Command:
    """See `prefill`."""
    name = f"cross-transformers-{make}-decode"
    if make == "transformers":
        return transformers(name, folder, page_tokens=32)
    if make == "vllm":
        return exchanging_vllm(name, folder)
    return exchanging_sglang(name, folder, DECODE_WITH_PREFIXES, tp=2, page_tokens=64)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("transformers", "transformers"),
        ("transformers", "vllm"),
        ("vllm", "transformers"),
        ("transformers", "sglang"),
        ("sglang", "transformers"),
    ],
)
def test_one_prefills_for_the_other(
    first: str, second: str, servers: Servers, model: ModelMaker, results: Results
) -> None:
    folder = model(MODEL, "sglang")
    alone, giver, taker = servers.start(plain(second, folder), prefill(first, folder), decode(second, folder))
    prompts = prompts_of(20, seed=61)
    wanted = many(lambda prompt: ask(alone, prompt), prompts)
    with routed(giver, taker) as router:
        got = many(lambda prompt: ask(router, prompt), prompts)
    landed, name = (
        received_bytes(taker, second, 2 if second == "sglang" else 1),
        f"{MODEL}, {first} prefills, {second} decodes",
    )
    said = f"{landed / 1e6:.1f} MB moved"
    verdict = results.add(f"{first}-{second}", name, wanted, got, said)
    assert not verdict.failed
    assert verdict.same == len(prompts)
    assert landed == TOKEN_BYTES * sum(map(len, prompts))
    servers.stop()
