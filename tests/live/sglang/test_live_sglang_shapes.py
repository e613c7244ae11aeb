"""SGLang servers of unlike tensor and pipeline parallelism and ways to move, as prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, counted, split, usage, warm
from tests.live.sglang_servers import DECODE, DECODE_WITH_PREFIXES, PREFILL, router, sglang
from tests.live.table import Results

#: Of the model: 4 layers of 4 heads of K and V, 32 float32 each.
_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shapes:
    """By what they do, their tensor or pipeline parallelism, and what else is theirs. A decode chooses how KV moves."""

    plain: Server
    prefill_tp1: Server
    prefill_tp2: Server
    prefill_pp2_chunked: Server
    decode_tp1_push_direct: Server
    decode_tp2_pull_packed: Server


@pytest.fixture(scope="module")
def shapes(plain: Server, servers: Servers, model: ModelMaker) -> Shapes:
    weights = model("llama", "sglang")
    direct = {"KVMOVER_MOVER_VERB": "push", "KVMOVER_MOVER_ROUTE": "direct"}
    packed = {"KVMOVER_MOVER_VERB": "pull", "KVMOVER_MOVER_ROUTE": "packed"}
    chunked = ("--chunked-prefill-size", "256")
    started = servers.start(
        sglang("sglang-prefill-tp1", weights, mode=PREFILL),
        sglang("sglang-prefill-tp2", weights, mode=PREFILL, tp=2),
        sglang("sglang-prefill-pp2-chunked", weights, *chunked, mode=PREFILL, pp=2),
        sglang("sglang-decode-tp1-push-direct", weights, mode=DECODE_WITH_PREFIXES, environment=direct),
        sglang("sglang-decode-tp2-pull-packed", weights, mode=DECODE, tp=2, environment=packed),
    )
    warm(plain.ready())
    return Shapes(plain, *started)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("prefill_tp1", "decode_tp1_push_direct"),
        ("prefill_tp2", "decode_tp1_push_direct"),
        ("prefill_tp1", "decode_tp2_pull_packed"),
        ("prefill_tp2", "decode_tp2_pull_packed"),
        ("prefill_pp2_chunked", "decode_tp1_push_direct"),
        ("prefill_pp2_chunked", "decode_tp2_pull_packed"),
    ],
)
def test_tokens_are_a_plain_servers(first: str, second: str, shapes: Shapes, results: Results) -> None:
    one, other = getattr(shapes, first), getattr(shapes, second)
    most = 1900 if "chunked" in first else 600
    prompts = prompts_of(20, seed=crc32(f"{first} {second}".encode()), most_tokens=most)
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    got, moved = _through(one, other, prompts)
    scenario = f"{first} to {second}" + (", prompts of up to 1,900 tokens in chunks of 256" if most > 600 else "")
    assert not results.add("sglang", scenario, wanted, got, f"{moved / 1e6:.1f} MB moved").failed
    assert moved >= sum(map(len, prompts)) * _TOKEN_BYTES // (2 if "decode_tp2" in second else 1)
    assert usage(one) == usage(other) == 0


def _through(
    first: Server, second: Server, prompts: Sequence[Sequence[int]], at_once: int = 8
) -> tuple[list[Answer], float]:
    """What a prefill and a decode answer, and how many bytes the decode's first rank received for that."""
    before = counted(second, "kvmover_received_bytes_total")
    got = many(lambda prompt: split(first, second, prompt), prompts, at_once)
    return got, counted(second, "kvmover_received_bytes_total") - before


def test_kv_moves_as_the_decode_was_told(shapes: Shapes) -> None:
    """A destination that is written to posts nothing, and scatters nothing where bytes go straight to its pages."""
    posts, scatters = "kvmover_post_seconds_count", "kvmover_scatter_seconds_count"
    for decode, moves in ((shapes.decode_tp1_push_direct, False), (shapes.decode_tp2_pull_packed, True)):
        warm_up = prompts_of(1, seed=9, least_tokens=100)
        assert _through(shapes.prefill_tp1, decode, warm_up)[0][0].ok
        assert (counted(decode, posts) > 0, counted(decode, scatters) > 0) == (moves, moves)


def test_fifty_at_once(shapes: Shapes, results: Results) -> None:
    first, second = shapes.prefill_tp1, shapes.decode_tp1_push_direct
    prompts = prompts_of(50, seed=2, most_tokens=1200)
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts, at_once=16)
    got, _ = _through(first, second, prompts, at_once=50)
    assert not results.add("sglang", "50 at once", wanted, got).failed
    assert usage(first) == usage(second) == 0


def test_prompts_of_one_to_three_tokens(shapes: Shapes, results: Results) -> None:
    first, second = shapes.prefill_tp2, shapes.decode_tp1_push_direct
    prompts = [prompt for seed in range(7) for prompt in ([seed], [seed, 200], [seed, 201, seed])]
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    got, _ = _through(first, second, prompts)
    assert not results.add("sglang", "prompts of 1 to 3 tokens", wanted, got).failed
    assert usage(first) == usage(second) == 0


def test_prefix_caches_warm_on_both_sides(shapes: Shapes, results: Results) -> None:
    """The same prompts again, and with more behind them: what the decode holds is not moved."""
    first, second = shapes.prefill_tp1, shapes.decode_tp1_push_direct
    once = prompts_of(10, seed=4, least_tokens=200)
    twice = once + [[*prompt, *tail] for prompt, tail in zip(once, prompts_of(10, seed=5), strict=True)]
    wanted = many(lambda prompt: ask(shapes.plain, prompt), twice)
    before, _ = _through(first, second, once)
    got, moved = _through(first, second, twice)
    said = f"{moved / 1e6:.1f} MB moved for {sum(map(len, twice))} tokens"
    assert all(answer.ok for answer in before)
    assert not results.add("sglang", "prefix caches warm on both sides", wanted, got, said).failed
    # Ten prompts are there, and come twice: what is behind them moves, and at most a page of 16 tokens beside each.
    tails = sum(map(len, twice)) - 2 * sum(map(len, once))
    assert moved <= _TOKEN_BYTES * (tails + 2 * 16 * len(twice))
    assert usage(first) == usage(second) == 0


@pytest.mark.parametrize("kind", ["--mini-lb", "--policy=round_robin"])
def test_behind_sglangs_own_routers(kind: str, shapes: Shapes, servers: Servers, results: Results) -> None:
    """The toy among them, and the one for production, which serves when it has found its servers."""
    toy = kind == "--mini-lb"
    (front,) = servers.start(router("sglang-router", shapes.prefill_tp2, shapes.decode_tp1_push_direct, kind))
    stop = time.monotonic() + 60
    while not toy and front.get("/readiness")[0] != 200 and time.monotonic() < stop:
        time.sleep(0.2)
    prompts = prompts_of(20, seed=6 + toy)
    wanted = many(lambda prompt: ask(shapes.plain, prompt), prompts)
    before = counted(shapes.decode_tp1_push_direct, "kvmover_received_bytes_total")
    got = many(lambda prompt: ask(front, prompt), prompts)
    moved = counted(shapes.decode_tp1_push_direct, "kvmover_received_bytes_total") - before
    scenario = "behind SGLang's toy router (mini_lb)" if toy else "behind SGLang's router"
    assert not results.add("sglang", scenario, wanted, got, f"{moved / 1e6:.1f} MB moved").failed
    assert moved > 0
    assert usage(shapes.prefill_tp2) == usage(shapes.decode_tp1_push_direct) == 0
