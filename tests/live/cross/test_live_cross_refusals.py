"""Engines of unlike make that hold unlike models: they say so with both lists, and no token is of the other's KV."""

from __future__ import annotations

import re

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, routed
from tests.live.sglang_servers import DECODE, PREFILL
from tests.live.table import Results
from tests.live.vllm_servers import vllm

_FOUR, _SIX = "of tiny (attention 4x2x4x32 float32)", "of tiny (attention 6x2x4x32 float32)"


def test_vllm_computes_what_sglang_of_another_model_would_prefill(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    other = model("llama-other", "sglang")
    plain, first, second = servers.start(
        vllm("cross-other-vllm-plain", other),
        exchanging_sglang("cross-other-sglang-prefill", model("llama", "sglang"), PREFILL),
        exchanging_vllm("cross-other-vllm-decode", other),
    )
    prompts = prompts_of(10, seed=33)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    with routed(first, second) as router:
        got = many(lambda prompt: ask(router, prompt), prompts)
    slowest = f"slowest {max(answer.seconds for answer in got):.1f} s"
    assert not results.add("sglang-vllm", "decode of another model", wanted, got, slowest).failed
    assert re.search(f"peer holds weights [0-9a-f]{{12}} {re.escape(_FOUR)};", second.log())
    assert re.search(f"this side holds weights [0-9a-f]{{12}} {re.escape(_SIX)}", second.log())


def test_sglang_fails_what_vllm_of_another_model_would_prefill(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    """SGLang's decode computes no prompt, so the client gets an error, soon."""
    first, second = servers.start(
        exchanging_vllm("cross-other-vllm-prefill", model("llama-other", "sglang")),
        exchanging_sglang("cross-other-sglang-decode", model("llama", "sglang"), DECODE),
    )
    prompts = prompts_of(10, seed=34)
    with routed(first, second) as router:
        got = many(lambda prompt: ask(router, prompt), prompts)
    assert not any(answer.ok for answer in got)
    assert max(answer.seconds for answer in got) < 20
    assert all(_SIX in answer.error for answer in got), got[0].error
    assert _FOUR in second.log()
