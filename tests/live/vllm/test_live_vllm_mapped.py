"""vLLM servers of one host whose caches the other half maps: KV is copied from cache to cache, and none is sent."""

from __future__ import annotations

import pytest

from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import warm
from tests.live.vllm_pairs import same_answers
from tests.live.vllm_servers import SHARED_CACHE, kvmover, vllm


def mapped(server: Server) -> float:
    """Chunks of the first rank of a prefill that were copied from cache to cache, by whichever half."""
    port = int(server.command.environment["KVMOVER_METRICS_PORT"])
    return labelled(server, "kvmover_posted_chunks_total", "mapped", port)


@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize(("name", "tp"), [("qwen3", (2, 1)), ("qwen3", (1, 2)), ("windows", (2, 1))])
def test_caches_of_one_host_are_copied_from_one_to_the_other(
    name: str, tp: tuple[int, int], verb: str, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """`mover.route` is "mapped", which refuses a transfer that cannot go so. Blocks are of 16 and of 32 tokens."""
    weights = model(name, "vllm")
    plain, *halves = servers.start(
        vllm(f"vllm-mapped-plain-{name}", weights),
        *(
            vllm(
                f"vllm-mapped-{half}-{name}-{verb}-tp{size}",
                weights,
                kv=kvmover(route="mapped", verb=verb),
                tp=size,
                block_tokens=block_tokens,
                environment={**SHARED_CACHE, "KVMOVER_METRICS_PORT": str(free_port())},
            )
            for half, size, block_tokens in zip(("prefill", "decode"), tp, (16, 32), strict=True)
        ),
    )
    warm(plain, *halves)
    same_answers(plain, halves, results, f"mapped caches, {name}, TP{tp[0]} to TP{tp[1]}, {verb}", 79)
    assert mapped(halves[0]) > 0
    servers.stop()
