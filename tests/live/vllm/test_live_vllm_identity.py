"""Requests of vLLM that get the parameters, the name or the partner of another one: never its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import mistake, sentence
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, ask, ask_several, prefill, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm

#: Four answers that are sampled from the likeliest token alone: vLLM takes no `n` for greedy ones.
FOUR = {"n": 4, "temperature": 0.7, "top_k": 1}

#: Lengths of the prompt that was prefilled and of the one that was to be decoded.
LENGTHS = ((300, 300), (300, 290), (200, 300), (64, 64), (17, 17), (500, 499))


@dataclass(frozen=True, slots=True)
class Engines:
    """A prefill, and decodes by vLLM's two policies; the second has no prefix cache."""

    first: Server
    fail: Server
    recompute: Server


@pytest.fixture(scope="module")
def engines(plain: Server, servers: Servers, model: ModelMaker) -> Engines:
    weights = model("qwen3", "vllm")
    started = servers.start(
        vllm("vllm-identity-prefill", weights, kv=kvmover()),
        vllm("vllm-identity-fail", weights, kv=kvmover(policy="fail"), block_tokens=32),
        vllm("vllm-identity-recompute", weights, "--no-enable-prefix-caching", kv=kvmover()),
    )
    warm(plain.ready(), *started)
    return Engines(*started)


def pairs(seed: int) -> list[tuple[list[int], list[int]]]:
    """Two prompts of each pair of lengths."""
    drawn = prompts_of(2 * len(LENGTHS), seed, least_tokens=512, most_tokens=512)
    return [(drawn[2 * at][:a], drawn[2 * at + 1][:b]) for at, (a, b) in enumerate(LENGTHS)]


def mixed(engines: Engines, decode: Server, seed: int, without: Sequence[str] = ()) -> list[Answer]:
    """Each second prompt decoded with what the prefill has answered of the first."""
    got = list[Answer]()
    for ours, theirs in pairs(seed):
        params = prefill(engines.first, ours).params or {}
        got.append(ask(decode, theirs, 16, {key: each for key, each in params.items() if key not in without}))
    return got


def alone(server: Server, prompts: Sequence[list[int]]) -> list[Answer]:
    """The prompts, and each with a few tokens more, without any parameters."""
    return many(lambda prompt: ask(server, prompt), [*prompts, *([*each, 1, 2, 3] for each in prompts)])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_parameters_of_another_prompt_are_computed_under_either_policy(
    engines: Engines, plain: Server, results: Results, policy: str
) -> None:
    decode, seed = getattr(engines, policy), 71 + len(policy)
    prompts = [theirs for _, theirs in pairs(seed)]
    wanted, got = alone(plain, prompts), mixed(engines, decode, seed)
    said = sentence(decode, "were asked for")
    refused = mistake(
        results,
        "vllm",
        f"parameters of another prompt, policy {policy}",
        wanted[: len(got)],
        got,
        lambda: alone(decode, prompts)[: len(got)],
        said,
    )
    assert refused == 0
    assert "is computed here: the KV is of" in said


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_parameters_of_another_prompt_that_a_router_has_cut_are_refused_by_the_prefill(
    engines: Engines, plain: Server, results: Results, policy: str
) -> None:
    decode, seed = getattr(engines, policy), 81 + len(policy)
    prompts = [theirs for _, theirs in pairs(seed)]
    wanted, got = alone(plain, prompts), mixed(engines, decode, seed, ["kvmover_content"])
    refused = mistake(
        results,
        "vllm",
        f"the same from a router that drops what it does not know, policy {policy}",
        wanted[: len(got)],
        got,
        lambda: alone(decode, prompts)[: len(got)],
        sentence(decode, "was not received: the KV is of"),
    )
    assert refused == (len(got) if policy == "fail" else 0)
    assert max(answer.seconds for answer in got) < 15  # and not by its deadline of 20 s
    sentence(engines.first, "refused")


def test_one_name_for_two_prompts_serves_one_of_them(engines: Engines, plain: Server, results: Results) -> None:
    """A client or router that takes one `transfer_id` for all: whoever's KV it is, nobody gets another one's."""
    prompts = prompts_of(8, seed=91, least_tokens=200, most_tokens=200)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    got = list[Answer]()
    for number, two in enumerate(zip(prompts[::2], prompts[1::2], strict=True)):
        params = {**FOR_ANOTHER, "transfer_id": f"same-{number}"}
        with ThreadPoolExecutor(2) as pool:
            halves = list(pool.map(lambda prompt, params=params: ask(engines.first, prompt, 1, params), two))
            params = [{**(half.params or {}), "kvmover_content": None} for half in halves]
            got += pool.map(lambda each: ask(engines.recompute, each[0], 16, each[1]), zip(two, params, strict=True))
    refused = mistake(
        results,
        "vllm",
        "one transfer_id for two prompts at once",
        wanted,
        got,
        lambda: many(lambda prompt: ask(engines.recompute, prompt), prompts),
        sentence(engines.recompute, "was not received"),
    )
    assert refused == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_list_of_prompts_is_answered_prompt_by_prompt(
    engines: Engines, plain: Server, results: Results, policy: str
) -> None:
    """The prefill's answer names the first prompt alone: decode computes the others."""
    decode, prompts = getattr(engines, policy), prompts_of(4, seed=101 + len(policy), least_tokens=90, most_tokens=300)
    wanted = [ask(plain, prompt) for prompt in prompts]
    (half, *_) = ask_several(engines.first, prompts, 1, FOR_ANOTHER)
    got = ask_several(decode, prompts, 16, half.params)
    assert not results.add("vllm", f"a list of 4 prompts, policy {policy}", wanted, got).failed


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_several_answers_to_one_prompt_are_one_fetch_or_one_each_without_a_prefix_cache(
    engines: Engines, plain: Server, results: Results, policy: str
) -> None:
    decode, prompts = getattr(engines, policy), prompts_of(4, seed=111 + len(policy), least_tokens=120, most_tokens=300)
    name = "vllm:kvmover_received_requests_total"
    before = decode.metrics(name)[name]
    wanted, got = list[Answer](), list[Answer]()
    for prompt in prompts:
        wanted += [ask(plain, prompt)] * 4
        (half, *_) = ask_several(engines.first, prompt, 1, FOR_ANOTHER, **FOUR)
        answers = ask_several(decode, prompt, 16, half.params, **FOUR)
        got += answers if len(answers) == 4 else answers * 4
    assert not results.add("vllm", f"n = 4, policy {policy}", wanted, got).failed
    fetched = decode.metrics(name)[name] - before
    assert fetched == len(prompts) * (1 if policy == "fail" else 4)
    assert usage(engines.first) == usage(decode) == 0


def test_requests_that_mean_what_their_partner_has_are_all_served(
    engines: Engines, plain: Server, results: Results
) -> None:
    prompts = prompts_of(20, seed=121, shared_tokens=40)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    refused = engines.first.log().count("refused")
    got = many(lambda prompt: split(engines.first, engines.fail, prompt), prompts)
    assert not results.add("vllm", "right partners beside the wrong ones: no false refusal", wanted, got).failed
    assert engines.first.log().count("refused") == refused
    assert usage(engines.first) == usage(engines.fail) == usage(engines.recompute) == 0
