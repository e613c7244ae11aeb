"""kvmover's connector beside vLLM's own over NIXL, where 1 Gb/s joins prefill and decode: two network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from perf.network_cable import ADDRESSES, Cable, NotAllowed
from tests.live.beside import Load, Machine, measure
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port
from tests.live.vllm_client import warm
from tests.live.vllm_servers import kvmover, nixl_connector, vllm
from tests.live.vllm_ways import one_server, two_halves

TOKENS = 8


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    laid = Cable(bytes_per_s=125e6)
    try:
        laid.lay()
    except NotAllowed as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")
    yield laid
    laid.remove()


@pytest.mark.alone
def test_times_over_a_wire_of_1_gb_a_second(cable: Cable, plain: Server, servers: Servers, model: ModelMaker) -> None:
    weights = model("qwen3", "vllm")

    def theirs(name: str, address: str) -> Command:
        own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return vllm(f"vllm-wire-nixl-{name}", weights, kv=nixl_connector(), environment={"UCX_TLS": "tcp", **own})

    def ours(name: str, address: str) -> Command:
        return vllm(f"vllm-wire-kvmover-{name}", weights, kv=kvmover(host=address), environment={"UCX_TLS": "tcp"})

    ends = ((cable.near, ADDRESSES[0]), (cable.far, ADDRESSES[1]))
    commands = [
        replace(make(network, address), network=network) for make in (ours, theirs) for network, address in ends
    ]
    first, second, their_first, their_second = servers.start(*commands)
    warm(plain.ready(), first, second, their_first, their_second)

    ways = {
        "plain": one_server(plain, TOKENS),
        "kvmover": two_halves(first, second, TOKENS),
        "NixlConnector": two_halves(their_first, their_second, TOKENS),
    }
    measure("vllm", Machine.WIRE, ways, [Load(20, per_s=2)], (50, 900))
