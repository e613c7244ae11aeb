"""kvmover's connector beside vLLM's own over NIXL: times of the same prompts in the same run."""

from __future__ import annotations

import pytest

from tests.live.beside import Load, Machine, Way, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.vllm_client import warm
from tests.live.vllm_servers import kvmover, nixl_connector, vllm
from tests.live.vllm_ways import one_server, two_halves

TOKENS, LOADS = 8, (Load(20, per_s=2), Load(20, per_s=5), Load(20, per_s=12))


@pytest.fixture(scope="module")
def ways(plain: Server, servers: Servers, model: ModelMaker) -> dict[str, Way]:
    weights = model("qwen3", "vllm")
    ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} for _ in range(2)]
    first, second, their_first, their_second = servers.start(
        vllm("vllm-peers-kvmover-1", weights, kv=kvmover()),
        vllm("vllm-peers-kvmover-2", weights, kv=kvmover()),
        vllm("vllm-peers-nixl-1", weights, kv=nixl_connector(), environment=ports[0]),
        vllm("vllm-peers-nixl-2", weights, kv=nixl_connector(), environment=ports[1]),
    )
    warm(plain.ready(), first, second, their_first, their_second)
    return {
        "plain": one_server(plain, TOKENS),
        "kvmover": two_halves(first, second, TOKENS),
        "NixlConnector": two_halves(their_first, their_second, TOKENS),
    }


@pytest.mark.alone
@pytest.mark.parametrize("machine", [Machine.ALONE, Machine.TOGETHER])
def test_times_beside_nixl_connector(ways: dict[str, Way], machine: Machine) -> None:
    measure("vllm", machine, ways, LOADS, (50, 900))
