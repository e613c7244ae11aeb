"""kvmover's backend beside SGLang's own over NIXL: times of the same prompts in the same run."""

from __future__ import annotations

import pytest

from tests.live.answers import prompts_of
from tests.live.beside import Way, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask_streamed, split_streamed, tokens_of, warm
from tests.live.sglang_servers import DECODE, PREFILL, sglang


@pytest.mark.alone
def test_times_beside_the_nixl_backend(plain: Server, servers: Servers, model: ModelMaker) -> None:
    weights, tokens = model("llama", "sglang"), 8
    first, second, their_first, their_second = servers.start(
        sglang("sglang-peers-kvmover-prefill", weights, mode=PREFILL),
        sglang("sglang-peers-kvmover-decode", weights, mode=DECODE),
        sglang("sglang-peers-nixl-prefill", weights, mode=PREFILL, backend="nixl"),
        sglang("sglang-peers-nixl-decode", weights, mode=DECODE, backend="nixl"),
    )
    warm(plain.ready())
    ways = {
        "plain": Way([plain], lambda prompt: ask_streamed(plain, prompt, tokens), tokens_of),
        "kvmover": Way([first, second], lambda prompt: split_streamed(first, second, prompt, tokens), tokens_of),
        "nixl": Way(
            [their_first, their_second],
            lambda prompt: split_streamed(their_first, their_second, prompt, tokens),
            tokens_of,
        ),
    }
    for way in ways.values():  # both halves meet
        way.answer(range(50))
    prompts = prompts_of(30, seed=70, least_tokens=300, most_tokens=300)
    measure("sglang", ways, prompts, prompts_of(20, seed=71, least_tokens=100, most_tokens=600))
