"""Forms of request that clients send, through a prefill and a decode of vLLM, beside a plain server's answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.live.answers import Answer
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import usage, warm
from tests.live.vllm_forms import CHAT, Form, ask_choices, split_choices
from tests.live.vllm_servers import kvmover, vllm


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


#: One choice each.
SAMPLED = (
    Form("a seed", {"prompt": tokens(300, 1), "temperature": 1.0, "seed": 5}),
    Form("top_k, top_p", {"prompt": tokens(300, 2), "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 6}),
    Form("min_p", {"prompt": tokens(65, 3), "temperature": 0.8, "min_p": 0.05, "seed": 7}),
    Form(
        "penalties, a bias",
        {
            "prompt": tokens(290, 4),
            "frequency_penalty": 0.7,
            "presence_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": {"42": 5, "77": -50},
        },
    ),
    Form("allowed tokens", {"prompt": tokens(100, 5), "allowed_token_ids": list(range(60, 120))}),
    Form("a stop string", {"prompt": tokens(300, 6), "max_tokens": 100, "stop": ["a", "e"]}),
    Form("stop tokens", {"prompt": tokens(300, 7), "max_tokens": 100, "stop_token_ids": list(range(0, 256, 3))}),
    Form("five log probabilities", {"prompt": tokens(300, 8), "logprobs": 5}),
    Form("log probabilities of the prompt", {"prompt": tokens(300, 9), "prompt_logprobs": 2}),
    Form("echo", {"prompt": tokens(100, 10), "echo": True}),
    Form("a text", {"prompt": "žluťoučký kůň 🐎 " * 10}),
    Form("one token", {"prompt": tokens(300, 11), "max_tokens": 1}),
    Form("a prompt of one token", {"prompt": [65]}),
    Form("a salt", {"prompt": tokens(300, 12), "cache_salt": "s1"}),
    Form("a chat", {"messages": chat(("system", "You are a bot. " * 10), ("user", "hello"))}, path=CHAT),
)


@dataclass(frozen=True, slots=True)
class Trio:
    """A plain server, a prefill, and a decode of other blocks."""

    plain: Server
    first: Server
    second: Server

    def compare(self, forms: Sequence[Form]) -> tuple[list[Answer], list[Answer]]:
        """Return every choice of the plain server, and every choice through both halves."""
        wanted, got = list[Answer](), list[Answer]()
        for form in forms:
            wanted += ask_choices(self.plain, form)
            got += split_choices(self.first, self.second, form)
        return wanted, got


@pytest.fixture(scope="module")
def recomputes(plain: Server, servers: Servers, model: ModelMaker) -> Iterator[Trio]:
    """Both halves compute what cannot be fetched."""
    weights = model("qwen3", "vllm")
    first, second = servers.start(
        vllm("vllm-forms-prefill", weights, kv=kvmover()),
        vllm("vllm-forms-decode", weights, kv=kvmover(), block_tokens=32),
    )
    warm(plain.ready(), first, second)
    yield Trio(plain, first, second)
    servers.stop((first, second))


def test_sampling_and_what_is_said_beside_tokens(recomputes: Trio, results: Results) -> None:
    wanted, got = recomputes.compare(SAMPLED)
    moved = recomputes.second.metrics("vllm:kvmover_received_requests", "vllm:kvmover_received_failures")
    said = f"{moved['vllm:kvmover_received_requests_total']:.0f} fetched"
    assert not results.add("vllm", "seeds, top-k, top-p, penalties, stops, log probabilities", wanted, got, said).failed
    assert moved["vllm:kvmover_received_requests_total"] >= len(SAMPLED) - 3
    assert moved["vllm:kvmover_received_failures_total"] == 0
    assert usage(recomputes.first) == usage(recomputes.second) == 0
