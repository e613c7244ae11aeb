"""vLLM servers of unlike tensor and pipeline parallelism, block size, layout and way to move, as prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import ask, split, usage, warm
from tests.live.vllm_servers import kvmover, router, vllm


@dataclass(frozen=True, slots=True)
class Shapes:
    """By their tensor or pipeline parallelism, tokens a block, and what else is theirs."""

    plain: Server
    tp1_16: Server
    tp1_32_pull: Server
    tp2_16_packed: Server
    pp2_16_direct: Server
    tp1_64_blnhc_push: Server


@pytest.fixture(scope="module")
def shapes(plain: Server, servers: Servers, model: ModelMaker) -> Shapes:
    weights = model("qwen3", "vllm")
    tokens_first, layers_first = {"VLLM_KV_CACHE_LAYOUT": "BLNHC"}, {"VLLM_KV_CACHE_LAYOUT": "LBNHC"}
    started = servers.start(
        vllm("vllm-tp1-16", weights, kv=kvmover()),
        vllm("vllm-tp1-32-pull", weights, kv=kvmover(verb="pull"), block_tokens=32),
        vllm("vllm-tp2-16-packed", weights, kv=kvmover(route="packed"), tp=2),
        vllm("vllm-pp2-16-direct", weights, kv=kvmover(route="direct"), pp=2, environment=layers_first),
        vllm("vllm-tp1-64-blnhc-push", weights, kv=kvmover(verb="push"), block_tokens=64, environment=tokens_first),
    )
    warm(plain.ready(), *started)
    return Shapes(plain, *started)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2_16_packed", "tp1_64_blnhc_push"),
        ("tp1_64_blnhc_push", "tp2_16_packed"),
        ("pp2_16_direct", "tp1_32_pull"),
        ("tp1_32_pull", "pp2_16_direct"),
        ("tp2_16_packed", "pp2_16_direct"),
    ],
)
def test_tokens_are_a_plain_servers(first: str, second: str, shapes: Shapes, results: Results) -> None:
    prompts = prompts_of(20, seed=len(first) * 31 + len(second))
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    one, other = getattr(shapes, first), getattr(shapes, second)
    got = many(lambda prompt: split(one, other, prompt), prompts)
    moved = other.metrics("vllm:kvmover_received")["vllm:kvmover_received_bytes_total"]
    assert not results.add("vllm", f"{first} to {second}", wanted, got).failed
    assert moved > 0
    assert usage(one) == usage(other) == 0


def test_fifty_at_once(shapes: Shapes, results: Results) -> None:
    prompts = prompts_of(50, seed=2, most_tokens=1200)
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts, at_once=16)
    got = many(lambda prompt: split(shapes.tp1_16, shapes.tp1_32_pull, prompt), prompts, at_once=50)
    assert not results.add("vllm", "50 at once", wanted, got).failed
    assert usage(shapes.tp1_16) == usage(shapes.tp1_32_pull) == 0


def test_prompts_of_one_to_three_tokens(shapes: Shapes, results: Results) -> None:
    prompts = [prompt for seed in range(7) for prompt in ([seed], [seed, 200], [seed, 201, seed])]
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    got = many(lambda prompt: split(shapes.tp2_16_packed, shapes.tp1_32_pull, prompt), prompts)
    assert not results.add("vllm", "prompts of 1 to 3 tokens", wanted, got).failed


def test_prefix_caches_warm_on_both_sides(shapes: Shapes, results: Results) -> None:
    """The same prompts again, and some with more behind them: what either side holds is neither computed nor moved."""
    first = prompts_of(10, seed=4, least_tokens=200)
    second = first + [[*prompt, *tail] for prompt, tail in zip(first, prompts_of(10, seed=5), strict=True)]
    wanted = many(lambda prompt: ask(shapes.plain, prompt), second)
    before = _through(shapes, first)
    moved = shapes.tp1_64_blnhc_push.metrics("vllm:kvmover_received_bytes")
    got = _through(shapes, second)
    again = shapes.tp1_64_blnhc_push.metrics("vllm:kvmover_received_bytes")
    (less,) = (again[name] - moved[name] for name in moved)
    said = f"{less / 1e6:.1f} MB moved for {sum(map(len, second))} tokens"
    assert all(answer.ok for answer in before)
    assert not results.add("vllm", "prefix caches warm on both sides", wanted, got, said).failed
    # 4 layers of 4 heads of K and V in float32: 4,096 bytes a token. The ten prompts that come again are there.
    assert less < 4096 * (sum(map(len, second)) - sum(map(len, first)))


def _through(shapes: Shapes, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    return many(lambda prompt: split(shapes.tp1_16, shapes.tp1_64_blnhc_push, prompt), prompts)


def test_behind_vllms_own_router(shapes: Shapes, servers: Servers, results: Results) -> None:
    (front,) = servers.start(router("vllm-router", shapes.tp2_16_packed, shapes.tp1_32_pull))
    prompts = prompts_of(20, seed=6)
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    before = shapes.tp1_32_pull.metrics("vllm:kvmover_received_requests_total")
    got = many(lambda prompt: ask(front, prompt), prompts)
    after = shapes.tp1_32_pull.metrics("vllm:kvmover_received_requests_total")
    assert not results.add("vllm", "behind vllm-router", wanted, got).failed
    assert sum(after.values()) - sum(before.values()) == len(prompts)
