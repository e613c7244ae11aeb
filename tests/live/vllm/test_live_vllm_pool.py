"""A pool of memory behind vLLM's prefix cache: four ranks write, two read, and what keeps the pages dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_partners import RESETS, forget
from tests.live.vllm_servers import kvmover, vllm
from tests.store.pool_processes import PoolProcesses

#: A writer or reader whose pool did not answer leaves it alone for 10 s: so long a prompt may be asked again.
_ROUNDS_S = 60.0


def blocks(server: Server, what: str, ranks: int) -> float:
    """Returns the sum over all ranks, divided by them: each rank has a part of every block."""
    return server.metrics(f"vllm:kvmover_{what}")[f"vllm:kvmover_{what}_total"] / ranks


def rounds(server: Server, ask_all: Callable[[], bool]) -> None:
    """Ask with an empty prefix cache, until all is there or a minute is over.

    Mooncake's client spins while it waits: on fewer cores than ranks its transfers are late at times, which costs
    blocks and no answer.
    """
    until_s = time.monotonic() + _ROUNDS_S
    while not ask_all() and time.monotonic() < until_s:
        time.sleep(2.0)
        forget(server)


@pytest.mark.alone
def test_tp2_reads_from_a_pool_what_tp4_wrote_until_donor_and_master_die(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, pool: PoolProcesses
) -> None:
    weights, options = model("qwen3", "vllm"), kvmover(root=pool.location)
    (writer,) = servers.start(vllm("vllm-pool-tp4", weights, kv=options, tp=4, environment=RESETS))
    warm(plain.ready(), writer)
    prompts = prompts_of(24, seed=43, least_tokens=100, most_tokens=500)
    whole = [len(prompt) // 16 for prompt in prompts]
    wanted = many(lambda prompt: ask(plain, prompt), prompts)

    def all_written() -> bool:
        before = blocks(writer, "failed_stores", 4)
        answers = many(lambda prompt: ask(writer, prompt), prompts, at_once=4)
        assert usage(writer, within_s=60.0) == 0  # four ranks on two cores are still storing
        stored, failed = blocks(writer, "stored_blocks", 4), blocks(writer, "failed_stores", 4)
        said = f"{stored:.0f} blocks stored, {failed:.0f} failed"
        assert not results.add("vllm", "pool of memory, written by TP4", wanted, answers, said).failed
        assert stored + failed >= sum(whole)
        return failed == before

    rounds(writer, all_written)
    servers.stop([writer])

    turned = {"VLLM_KV_CACHE_LAYOUT": "BLNHC", **RESETS}
    (reader,) = servers.start(vllm("vllm-pool-tp2", weights, kv=options, tp=2, environment=turned))

    def read_of(name: str, these: slice) -> float:
        before = blocks(reader, "loaded_blocks", 2)
        answers = many(lambda prompt: ask(reader, prompt), prompts[these], at_once=4)
        read = blocks(reader, "loaded_blocks", 2) - before
        said = f"{read:.0f} of {sum(whole[these])} blocks read"
        assert not results.add("vllm", f"pool of memory, {name}", wanted[these], answers, said).failed
        return read

    reads: list[float] = []

    def all_read() -> bool:
        reads.append(read_of("read by TP2 in another layout", slice(12)))
        assert reads[-1] <= sum(whole[:12])
        # The last token of a prompt is always computed: a prompt of whole blocks leaves its last one out.
        return reads[-1] >= sum(whole[:12]) - 12

    rounds(reader, all_read)
    assert max(reads) >= sum(whole[:12]) - 12
    pool.donors[0].kill()
    assert read_of("one of two donors killed", slice(12, 18)) < sum(whole[12:18]) - 6
    pool.master.kill()
    assert read_of("its master killed", slice(18, 24)) == 0
    assert usage(reader) == 0
