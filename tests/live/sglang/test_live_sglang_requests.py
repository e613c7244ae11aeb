"""Forms of request that clients send, through a prefill and a decode of SGLang, beside a plain server's answers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers, chats_by_openais_client
from tests.live.server import Server
from tests.live.sglang_client import ask, counted, generate, room_at, split, split_body, usage, warm
from tests.live.sglang_servers import DECODE, PREFILL, router, sglang
from tests.live.table import Results

#: SGLang compiles grammars with the one, without a GPU too, and takes seeds under the other.
_OPTIONS = ("--grammar-backend", "xgrammar", "--enable-deterministic-inference")

_GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}

_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def _form(seed: int, *, count: int = 300, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": tokens(count, seed), "sampling_params": {**_GREEDY, **sampling}, "return_logprob": True}


#: An answer each, or one a prompt.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "log probabilities of three": {**_form(1), "top_logprobs_num": 3},
    "penalties": _form(2, frequency_penalty=0.8, presence_penalty=0.2, repetition_penalty=1.1),
    "least tokens": _form(3, max_new_tokens=40, min_new_tokens=20, ignore_eos=False),
    "a stop string": _form(4, max_new_tokens=100, stop=["a", "e"]),
    "stop tokens": _form(5, max_new_tokens=100, stop_token_ids=list(range(0, 256, 3))),
    "the first token is a stop": _form(6, stop_token_ids=list(range(512))),
    "one token": _form(7, max_new_tokens=1),
    "a text": {"text": "žluťoučký kůň 馬 " * 10, "sampling_params": _GREEDY, "return_logprob": True},
    "three prompts": {
        "input_ids": [tokens(count, 8 + count) for count in (300, 40, 170)],
        "sampling_params": _GREEDY,
        "return_logprob": True,
    },
}

GRAMMARS: Mapping[str, Mapping[str, Any]] = {
    "a schema": _form(20, max_new_tokens=60, ignore_eos=False, json_schema=_SCHEMA),
    "a pattern": _form(21, max_new_tokens=40, ignore_eos=False, regex="[0-9]{3}-[a-f]{4}"),
}


#: The same prompt by other seeds, and then other prompts by one.
SEEDS: Mapping[str, Mapping[str, Any]] = {
    **{f"seed {seed}": _form(30, temperature=1.0, sampling_seed=seed) for seed in (5, 6, -7)},
    **{f"length {count}": _form(31, count=count, temperature=1.0, sampling_seed=8) for count in (1, 17, 64, 600)},
    "a few likely ones": _form(32, temperature=0.9, top_k=40, top_p=0.9, sampling_seed=9),
    "penalties": _form(33, temperature=0.8, frequency_penalty=0.8, repetition_penalty=1.1, sampling_seed=10),
}


@dataclass(frozen=True, slots=True)
class Trio:
    """A plain server, a prefill, and a decode of other pages. All of them take grammars and seeds."""

    plain: Server
    first: Server
    second: Server

    def compare(self, forms: Mapping[str, Mapping[str, Any]]) -> tuple[list[Answer], list[Answer]]:
        """Return all answers of the plain server, and all through both halves."""
        wanted, got = list[Answer](), list[Answer]()
        for body in forms.values():
            wanted += generate(self.plain, body)
            got += split_body(self.first, self.second, body)
        return wanted, got


@pytest.fixture(scope="module")
def trio(servers: Servers, model: ModelMaker) -> Trio:
    weights = model("llama", "sglang")
    started = servers.start(
        sglang("sglang-forms-plain", weights, *_OPTIONS),
        sglang("sglang-forms-prefill", weights, *_OPTIONS, mode=PREFILL),
        sglang("sglang-forms-decode", weights, *_OPTIONS, mode=DECODE, page_tokens=32),
    )
    warm(started[0])
    return Trio(*started)


@pytest.mark.parametrize(
    ("kind", "forms"), [("penalties, stops, lists", FORMS), ("grammars", GRAMMARS)], ids=["forms", "grammars"]
)
def test_forms_of_request(kind: str, forms: Mapping[str, Mapping[str, Any]], trio: Trio, results: Results) -> None:
    before = counted(trio.second, "kvmover_received_bytes_total")
    wanted, got = trio.compare(forms)
    moved = counted(trio.second, "kvmover_received_bytes_total") - before
    assert not results.add("sglang", kind, wanted, got, f"{moved / 1e6:.1f} MB moved").failed
    assert moved > 0
    assert usage(trio.first) == usage(trio.second) == 0


def test_answers_are_drawn_by_their_seeds(trio: Trio, results: Results) -> None:
    wanted, got = trio.compare(SEEDS)
    assert len({answer.tokens for answer in wanted}) == len(SEEDS)
    assert not results.add("sglang", "sampling with seeds", wanted, got).failed
    assert usage(trio.first) == usage(trio.second) == 0


#: Greedy answers, which are all alike, and some that are drawn.
SEVERAL: Mapping[str, Mapping[str, Any]] = {
    **{f"greedy, length {count}": _form(40, count=count, n=4) for count in (1, 17, 64, 100, 300, 600, 900)},
    **{f"seed {seed}": _form(41, temperature=1.0, sampling_seed=seed, n=4) for seed in range(12)},
    "two prompts": {
        "input_ids": [tokens(count, 42 + count) for count in (90, 200)],
        "sampling_params": {**_GREEDY, "n": 4},
        "return_logprob": True,
    },
}


def test_four_answers_to_each_prompt(trio: Trio, results: Results) -> None:
    """20 requests, of which one has two prompts: SGLang sends five for each, all in the prompt's room."""
    wanted, got = trio.compare(SEVERAL)
    assert len(wanted) == 4 * (len(SEVERAL) + 1) == 84
    assert not results.add("sglang", "n = 4: 20 requests, 84 answers", wanted, got).failed
    assert usage(trio.first) == usage(trio.second) == 0


def test_of_clients_that_want_four_answers_those_that_leave_take_nothing_from_those_that_stay(
    trio: Trio, results: Results
) -> None:
    """Of each four one stays, one leaves its prefill, one its decode, one both; the next request of each is right."""
    bodies = [_form(50 + number, count=200, max_new_tokens=40, n=4) for number in range(16)]
    wanted = [answer for body in bodies[::4] for answer in generate(trio.plain, body)]
    patience_s = ((120.0, 120.0), (0.3, 20.0), (20.0, 0.4), (0.3, 0.4))
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(split_body, trio.first, trio.second, body, patience_s[number % 4])
            for number, body in enumerate(bodies)
        ]
        got = [answer for each in asked[::4] for answer in each.result()]
    assert not results.add("sglang", "n = 4, 12 of 16 clients leave", wanted, got).failed
    assert usage(trio.first, within_s=30.0) == usage(trio.second, within_s=30.0) == 0
    after = [answer for body in bodies[::4] for answer in split_body(trio.first, trio.second, body)]
    assert not results.add("sglang", "n = 4, after clients that left", wanted, after).failed


def test_clients_that_leave_in_a_storm_take_nothing_from_those_that_stay(trio: Trio, results: Results) -> None:
    """Of each four one stays, one leaves its prefill, one its decode, one both."""
    prompts = prompts_of(32, seed=64, least_tokens=20, most_tokens=1200)
    wanted = many(lambda prompt: ask(trio.plain, prompt), prompts[::4])

    def one(number: int) -> Answer:
        prompt, kind, room = prompts[number], number % 4, room_at(trio.first)
        if not kind:
            return split(trio.first, trio.second, prompt)
        patience_s: Sequence[float] = ((0.05, 20.0), (20.0, 0.1), (0.05, 0.1))[kind - 1]
        with ThreadPoolExecutor(2) as pool:
            halves = [
                pool.submit(ask, server, prompt, 100, room, each)
                for server, each in zip((trio.first, trio.second), patience_s, strict=True)
            ]
            return min((half.result() for half in halves), key=lambda answer: answer.status)

    got = many(one, range(32), at_once=12)
    left = sum(not answer.ok for number, answer in enumerate(got) if number % 4)
    assert not results.add("sglang", "24 of 32 clients leave", wanted, got[::4], f"{left} left").failed
    assert usage(trio.first, within_s=30.0) == usage(trio.second, within_s=30.0) == 0


def test_chats_of_openais_client_behind_the_toy_router(trio: Trio, servers: Servers, results: Results) -> None:
    (front,) = servers.start(router("sglang-forms-router", trio.first, trio.second, "--mini-lb"))
    wanted, got = (chats_by_openais_client("sglang", server.url, 6) for server in (trio.plain, front))
    assert not results.add("sglang", "chats of three streamed turns by OpenAI's client, mini_lb", wanted, got).failed
    assert usage(trio.first) == usage(trio.second) == 0
