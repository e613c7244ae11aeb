"""kvmover's connector beside vLLM's own over NIXL: times of the same prompts in the same run."""

from __future__ import annotations

import pytest

from tests.live.answers import prompts_of
from tests.live.beside import Way, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.vllm_client import ask_streamed, split_streamed, tokens_of, warm
from tests.live.vllm_servers import kvmover, nixl_connector, vllm


@pytest.mark.alone
def test_times_beside_nixl_connector(plain: Server, servers: Servers, model: ModelMaker) -> None:
    weights, tokens = model("qwen3", "vllm"), 8
    ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} for _ in range(2)]
    first, second, their_first, their_second = servers.start(
        vllm("vllm-peers-kvmover-1", weights, kv=kvmover()),
        vllm("vllm-peers-kvmover-2", weights, kv=kvmover()),
        vllm("vllm-peers-nixl-1", weights, kv=nixl_connector(), environment=ports[0]),
        vllm("vllm-peers-nixl-2", weights, kv=nixl_connector(), environment=ports[1]),
    )
    warm(plain.ready(), first, second, their_first, their_second)
    ways = {
        "plain": Way([plain], lambda prompt: ask_streamed(plain, prompt, tokens), tokens_of),
        "kvmover": Way([first, second], lambda prompt: split_streamed(first, second, prompt, tokens), tokens_of),
        "NixlConnector": Way(
            [their_first, their_second],
            lambda prompt: split_streamed(their_first, their_second, prompt, tokens),
            tokens_of,
        ),
    }
    for way in ways.values():  # both halves meet
        way.answer(range(50))
    prompts = prompts_of(30, seed=70, least_tokens=300, most_tokens=300)
    measure("vllm", ways, prompts, prompts_of(20, seed=71, least_tokens=100, most_tokens=600))
