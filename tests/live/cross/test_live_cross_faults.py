"""A prefill of another make dies and comes back: decode finds it again, at the same address."""

from __future__ import annotations

import time

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.exchange import ask, exchanging_sglang, exchanging_vllm, routed
from tests.live.sglang_servers import DECODE, PREFILL, sglang
from tests.live.table import Results
from tests.live.vllm_servers import vllm

#: SGLang's decode looks after prefills every 5 s: so late it may know that another engine is at an address.
_HEARTBEAT_S = 7.0


def test_sglangs_prefill_is_killed_and_vllm_computes_until_it_is_back(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("llama", "sglang")
    prefill = exchanging_sglang("cross-killed-sglang-prefill", weights, PREFILL)
    plain, first, second = servers.start(
        vllm("cross-killed-vllm-plain", weights), prefill, exchanging_vllm("cross-killed-vllm-decode", weights)
    )
    before, during, after = (prompts_of(10, seed=seed) for seed in (36, 37, 38))
    wanted = {number: many(lambda prompt: ask(plain, prompt), of) for number, of in enumerate((before, during, after))}
    with routed(first, second) as router:
        assert (
            results.add("sglang-vllm", "before the kill", wanted[0], many(lambda p: ask(router, p), before)).same == 10
        )
        first.kill()
        began = time.monotonic()
        got = many(lambda p: ask(router, p), during)
        said = f"all tokens {time.monotonic() - began:.1f} s after it"
        assert not results.add("sglang-vllm", "kill -9 of prefill", wanted[1], got, said).failed
        servers.running.remove(first)
        servers.start(prefill)
        moved = second.metrics("vllm:kvmover_received_requests")["vllm:kvmover_received_requests_total"]
        got = many(lambda p: ask(router, p), after)
        moved = second.metrics("vllm:kvmover_received_requests")["vllm:kvmover_received_requests_total"] - moved
        said = f"{moved:.0f} moved"
        assert not results.add("sglang-vllm", "prefill restarted beside its decode", wanted[2], got, said).failed
        assert moved == len(after)


def test_vllms_prefill_is_killed_and_sglang_finds_the_next(
    servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("llama", "sglang")
    prefill = exchanging_vllm("cross-killed-vllm-prefill", weights)
    plain, first, second = servers.start(
        sglang("cross-killed-sglang-plain", weights),
        prefill,
        exchanging_sglang("cross-killed-sglang-decode", weights, DECODE),
    )
    before, after = (prompts_of(10, seed=seed) for seed in (39, 40))
    wanted = [many(lambda prompt: ask(plain, prompt), of) for of in (before, after)]
    with routed(first, second) as router:
        assert (
            results.add("vllm-sglang", "before the kill", wanted[0], many(lambda p: ask(router, p), before)).same == 10
        )
        first.kill()
        servers.running.remove(first)
        servers.start(prefill)
        time.sleep(_HEARTBEAT_S)
        got = many(lambda p: ask(router, p), after)
        assert not results.add("vllm-sglang", "prefill restarted beside its decode", wanted[1], got).failed
