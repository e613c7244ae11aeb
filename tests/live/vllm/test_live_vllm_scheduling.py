"""Ways in which vLLM runs a step: both model runners, prompts in chunks, asynchronously, with too little memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import ASYNC_SCHEDULING, V2_RUNNER, kvmover, vllm

#: The prefill whose name, address and port a proxy knows before it answers.
_NAME, _PORT = "prefill-of-this-test", free_port()

#: Room for 2,441 tokens: 4 layers of 4 heads of K and V of 32 float32 are 4,096 bytes a token.
_LITTLE = ("--kv-cache-memory-bytes", "10000000")


@dataclass(frozen=True, slots=True)
class Ways:
    plain: Server
    in_chunks: Server
    asynchronous: Server
    second_runner: Server
    second_runner_32: Server
    small: Server
    small_32: Server


@pytest.fixture(scope="module")
def ways(plain: Server, servers: Servers, model: ModelMaker) -> Ways:
    weights = model("qwen3", "vllm")
    known = {**kvmover(layer_wise=1, host="127.0.0.1", port=_PORT), "engine_id": _NAME}
    started = servers.start(
        vllm("vllm-in-chunks", weights, "--max-num-batched-tokens", "256", kv=known),
        vllm("vllm-async", weights, kv=kvmover(layer_wise=1), block_tokens=32, environment=ASYNC_SCHEDULING),
        vllm("vllm-v2", weights, kv=kvmover(layer_wise=2), environment=V2_RUNNER),
        vllm("vllm-v2-32", weights, kv=kvmover(), block_tokens=32, environment=V2_RUNNER),
        vllm("vllm-small", weights, *_LITTLE, kv=kvmover()),
        vllm("vllm-small-32", weights, *_LITTLE, kv=kvmover(), block_tokens=32),
    )
    warm(plain.ready(), *started)
    return Ways(plain, *started)


def test_prompts_computed_in_chunks(ways: Ways, results: Results) -> None:
    """Chunks of 256 tokens, layer by layer, to a decode that schedules asynchronously."""
    prompts = prompts_of(20, seed=30, least_tokens=1000, most_tokens=1900)
    wanted = many(lambda prompt: ask(ways.plain, prompt), prompts, at_once=4)
    got = many(lambda prompt: split(ways.in_chunks, ways.asynchronous, prompt), prompts, at_once=4)
    assert not results.add("vllm", "prefill in chunks of 256, decode asynchronous", wanted, got).failed
    assert usage(ways.in_chunks) == usage(ways.asynchronous) == 0


def test_both_halves_asked_at_the_same_time(ways: Ways, results: Results) -> None:
    """A proxy that knows the prefill sends both halves at once, under one name."""
    numbers = count()

    def both(prompt: Sequence[int]) -> Answer:
        name = f"both-{next(numbers)}"
        give = {"do_remote_decode": True, "transfer_id": name}
        take = {"do_remote_prefill": True, "transfer_id": name, "remote_engine_id": _NAME}
        take |= {"remote_host": "127.0.0.1", "remote_port": _PORT}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, ways.in_chunks, prompt, 1, give)
            second = ask(ways.asynchronous, prompt, 16, take)
            assert first.result().ok, first.result().error
        return second

    prompts = prompts_of(20, seed=31, most_tokens=1200)
    wanted = many(lambda prompt: ask(ways.plain, prompt), prompts)
    got = many(both, prompts)
    failures = ways.asynchronous.metrics("vllm:kvmover_received_failures")
    assert not results.add("vllm", "both halves at once", wanted, got).failed
    assert not any(failures.values())
    assert usage(ways.in_chunks) == usage(ways.asynchronous) == 0


def test_the_second_model_runner(ways: Ways, results: Results) -> None:
    """The default on a GPU, its kernels in Triton's interpreter, layer by layer."""
    assert "V2 Model Runner" in ways.second_runner.log()
    prompts = prompts_of(20, seed=32, most_tokens=200)
    wanted = many(lambda prompt: ask(ways.plain, prompt, 8), prompts)
    got = many(lambda prompt: split(ways.second_runner, ways.second_runner_32, prompt, 8), prompts)
    assert not results.add("vllm", "V2 model runner, layers in twos", wanted, got).failed
    assert usage(ways.second_runner) == usage(ways.second_runner_32) == 0


def test_preemption_where_memory_is_short(ways: Ways, results: Results) -> None:
    """Twenty prompts of up to 500 tokens, that grow by 64, in a cache of 2,400 tokens on either side."""
    prompts = prompts_of(20, seed=33, least_tokens=100, most_tokens=500)
    wanted = many(lambda prompt: ask(ways.plain, prompt, 64), prompts)
    got = many(lambda prompt: split(ways.small, ways.small_32, prompt, 64), prompts, at_once=20)
    preempted = ways.small_32.metrics("vllm:num_preemptions_total")["vllm:num_preemptions_total"]
    assert not results.add("vllm", "little memory", wanted, got, f"decode preempted {preempted:.0f} times").failed
    assert preempted > 0
    assert usage(ways.small) == usage(ways.small_32) == 0
