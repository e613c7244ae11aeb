"""kvmover's backend beside SGLang's own over NIXL: times of the same prompts in the same run."""

from __future__ import annotations

import pytest

from tests.live.beside import Load, Machine, Way, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask_streamed, split_streamed, tokens_of, warm
from tests.live.sglang_servers import DECODE, PREFILL, sglang

TOKENS, LOADS = 8, (Load(20, per_s=2), Load(20, per_s=5), Load(20, per_s=12))


@pytest.fixture(scope="module")
def ways(plain: Server, servers: Servers, model: ModelMaker) -> dict[str, Way]:
    weights = model("llama", "sglang")
    first, second, their_first, their_second = servers.start(
        sglang("sglang-peers-kvmover-prefill", weights, mode=PREFILL),
        sglang("sglang-peers-kvmover-decode", weights, mode=DECODE),
        sglang("sglang-peers-nixl-prefill", weights, mode=PREFILL, backend="nixl"),
        sglang("sglang-peers-nixl-decode", weights, mode=DECODE, backend="nixl"),
    )
    warm(plain.ready())

    def split_over(prefill: Server, decode: Server) -> Way:
        return Way([prefill, decode], lambda prompt: split_streamed(prefill, decode, prompt, TOKENS), tokens_of)

    return {
        "plain": Way([plain], lambda prompt: ask_streamed(plain, prompt, TOKENS), tokens_of),
        "kvmover": split_over(first, second),
        "nixl": split_over(their_first, their_second),
    }


@pytest.mark.alone
@pytest.mark.parametrize("machine", [Machine.ALONE, Machine.TOGETHER])
def test_times_beside_the_nixl_backend(ways: dict[str, Way], machine: Machine) -> None:
    measure("sglang", machine, ways, LOADS, (50, 900))
