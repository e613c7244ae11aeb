"""A pool of memory behind SGLang: four ranks write past the host, two read through it, as donor and master die."""

from __future__ import annotations

import pytest

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, usage, warm
from tests.live.sglang_servers import hicache, linker, sglang
from tests.live.table import Results
from tests.store.pool_processes import PoolProcesses

_PAGE_TOKENS = 16


@pytest.mark.alone
def test_tp2_reads_from_a_pool_what_tp4_wrote_until_donor_and_master_die(
    plain: Server, servers: Servers, model: ModelMaker, results: Results, pool: PoolProcesses
) -> None:
    """By the linker and by HiCache: the keys and objects are the same."""
    weights = model("llama", "sglang")
    (writer,) = servers.start(sglang("sglang-pool-tp4", weights, *linker(pool.location), tp=4))
    warm(plain.ready(), writer)
    prompts = prompts_of(40, seed=44, least_tokens=100, most_tokens=500)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = many(lambda prompt: ask(writer, prompt), prompts)
    assert not results.add("sglang", "pool of memory, written by a linker of TP4", wanted, got).failed
    assert not any(answer.cached_tokens for answer in got)
    assert usage(writer) == 0
    servers.stop([writer])

    (reader,) = servers.start(sglang("sglang-pool-tp2", weights, *hicache(pool.location, "layer_first"), tp=2))
    whole = [(len(prompt) - 1) // _PAGE_TOKENS * _PAGE_TOKENS for prompt in prompts]

    def read_of(name: str, these: slice) -> int:
        answers = many(lambda prompt: ask(reader, prompt), prompts[these])
        read = sum(answer.cached_tokens for answer in answers)
        said = f"{read} of {sum(map(len, prompts[these]))} prompt tokens from the pool"
        assert not results.add("sglang", f"pool of memory, {name}", wanted[these], answers, said).failed
        return read

    read = read_of("read by TP2 through HiCache in another host layout", slice(20))
    # A master that is too late, on a machine with fewer cores than ranks, costs hits and no answer.
    assert read == sum(whole[:20]) or "the pool's master does not answer" in reader.log()
    assert 0 < read <= sum(whole[:20])
    pool.donors[0].kill()
    assert read_of("one of two donors killed", slice(20, 30)) < sum(whole[20:30])
    pool.master.kill()
    assert read_of("its master killed", slice(30, 40)) == 0
    assert usage(reader) == 0
