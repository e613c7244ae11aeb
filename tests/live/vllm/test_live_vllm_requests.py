"""Forms of request that clients send, through a prefill and a decode of vLLM, beside a plain server's answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from tests.live.answers import Answer, many, post, prompts_of
from tests.live.conftest import ModelMaker, Servers, chats_by_openais_client
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import Stream, ask, prefill, split, usage, warm
from tests.live.vllm_forms import CHAT, Form, ask_choices, split_choices
from tests.live.vllm_partners import RESETS
from tests.live.vllm_servers import kvmover, router, vllm, vllm_bench


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


#: Several choices each, of one prompt or of several.
SEVERAL = (
    Form("n=3, sampled", {"prompt": tokens(300, 20), "n": 3, "temperature": 0.9, "seed": 11}, 3),
    Form("four prompts", {"prompt": [tokens(each, 21 + each) for each in (400, 120, 260, 33)]}, 4),
    Form("two prompts, n=2", {"prompt": [tokens(300, 22), tokens(300, 23)], "n": 2, "temperature": 1, "seed": 3}, 4),
    Form("beams", {"prompt": tokens(300, 24), "use_beam_search": True, "n": 4, "max_tokens": 6}, 4),
    Form("a chat, n=2", {"messages": chat(("user", "hi " * 40)), "n": 2, "temperature": 1, "seed": 4}, 2, CHAT),
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
        vllm("vllm-forms-prefill", weights, kv=kvmover(), environment=RESETS),
        vllm("vllm-forms-decode", weights, kv=kvmover(), block_tokens=32, environment=RESETS),
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


def test_clients_that_leave_in_a_storm_take_nothing_from_those_that_stay(recomputes: Trio, results: Results) -> None:
    """Of each four one stays, one leaves its prefill, one its decode at once, one its decode after two tokens."""
    first, second = recomputes.first, recomputes.second
    prompts = prompts_of(32, seed=64, least_tokens=20, most_tokens=1200)
    wanted = many(lambda prompt: ask(recomputes.plain, prompt), prompts[::4])

    def one(number: int) -> Answer:
        prompt, kind = prompts[number], number % 4
        if kind == 1:
            return prefill(first, prompt, 0.05)
        half = prefill(first, prompt)
        if kind == 2:
            return ask(second, prompt, 100, half.params, 0.02)
        if kind == 3:
            begun = Stream.begin(second, prompt, 200, half.params)
            begun.until(2)
            begun.leave()
            return half
        return ask(second, prompt, 16, half.params)

    got = many(one, range(32), at_once=12)
    left = sum(not answer.ok for number, answer in enumerate(got) if number % 4)
    assert not results.add("vllm", "24 of 32 clients leave", wanted, got[::4], f"{left + 8} left").failed
    assert usage(first, within_s=30.0) == usage(second, within_s=30.0) == 0


def test_prefix_caches_that_are_emptied_while_requests_run(recomputes: Trio, results: Results) -> None:
    """Both halves', their own and what is behind their connectors."""
    prompts = prompts_of(16, seed=65, least_tokens=100, shared_tokens=64)
    wanted = many(lambda prompt: ask(recomputes.plain, prompt), prompts)
    ended, statuses = Event(), Counter[int]()

    def reset() -> None:
        while not ended.wait(0.2):
            for server in (recomputes.first, recomputes.second):
                for query in ("", "?reset_external=true"):
                    statuses[post(f"{server.url}/reset_prefix_cache{query}", {}).status] += 1

    with ThreadPoolExecutor(1) as pool:
        resetting = pool.submit(reset)
        try:
            got = many(lambda prompt: split(recomputes.first, recomputes.second, prompt), prompts, at_once=4)
        finally:
            ended.set()
        resetting.result()
    said = f"{statuses.total()} resets"
    assert not results.add("vllm", "prefix caches emptied meanwhile", wanted, got, said).failed
    assert set(statuses) == {200}
    assert usage(recomputes.first) == usage(recomputes.second) == 0


def test_chats_of_openais_client_and_vllms_own_load_behind_its_router(
    recomputes: Trio, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    (front,) = servers.start(router("vllm-forms-router", recomputes.first, recomputes.second))
    wanted, got = (chats_by_openais_client("vllm", server.url, 6) for server in (recomputes.plain, front))
    assert not results.add("vllm", "chats of three streamed turns by OpenAI's client, vllm-router", wanted, got).failed
    before = recomputes.second.metrics("vllm:kvmover_received_requests")
    load = Server.start(vllm_bench("vllm-forms-bench", front, model("qwen3", "vllm"), 24, tmp_path))
    assert load.ended(within_s=100.0), load.log()[-3000:]
    (told,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert (told["completed"], told["failed"]) == (24, 0)
    after = recomputes.second.metrics("vllm:kvmover_received_requests")
    assert sum(after.values()) - sum(before.values()) >= 24
    assert usage(recomputes.first) == usage(recomputes.second) == 0
    servers.stop([front])


def test_several_answers_and_several_prompts(recomputes: Trio, results: Results) -> None:
    wanted, got = recomputes.compare(SEVERAL)
    assert not results.add("vllm", "n, lists of prompts, beams", wanted, got).failed
    assert usage(recomputes.second) == 0


def test_the_same_where_a_failed_fetch_fails_its_request(
    recomputes: Trio, servers: Servers, model: ModelMaker, results: Results
) -> None:
    """As vLLM does it by default."""
    (second,) = servers.start(vllm("vllm-forms-decode-fail", model("qwen3", "vllm"), kv=kvmover(policy="fail")))
    warm(second)
    wanted, got = Trio(recomputes.plain, recomputes.first, second).compare((*SEVERAL, *SAMPLED[:3]))
    failures = second.metrics("vllm:kvmover_received_failures")["vllm:kvmover_received_failures_total"]
    assert not results.add("vllm", "n, lists of prompts, beams, kv_load_failure_policy fail", wanted, got).failed
    assert failures == 0
    assert usage(second) == 0
    servers.stop([second])
