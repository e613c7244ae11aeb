"""Requests of vLLM that get the parameters, the name or the partner of another one: never its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.checkpoints import other_tokenizer
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import DROPPED, MIX_UPS, mistake, mixed_up, sentence
from tests.live.server import Server
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, ask, ask_several, prefill, split, usage, warm
from tests.live.vllm_forms import Form, ask_choices, split_choices
from tests.live.vllm_partners import MISTAKES, Halves, alone, served
from tests.live.vllm_servers import DEADLINE_S, kvmover, vllm

#: Four answers that are sampled from the likeliest token alone: vLLM takes no `n` for greedy ones.
FOUR = {"n": 4, "temperature": 0.7, "top_k": 1}


@dataclass(frozen=True, slots=True)
class Engines:
    """Two prefills, and decodes by vLLM's two policies; the second has no prefix cache."""

    first: Server
    fail: Server
    recompute: Server
    elsewhere: Server

    def halves(self, policy: str) -> Halves:
        return Halves(self.first, getattr(self, policy), self.elsewhere)


@pytest.fixture(scope="module")
def engines(plain: Server, servers: Servers, model: ModelMaker) -> Engines:
    weights = model("qwen3", "vllm")
    started = servers.start(
        vllm("vllm-identity-prefill", weights, kv=kvmover()),
        vllm("vllm-identity-fail", weights, kv=kvmover(policy="fail"), block_tokens=32),
        vllm("vllm-identity-recompute", weights, "--no-enable-prefix-caching", kv=kvmover()),
        vllm("vllm-identity-elsewhere", weights, kv=kvmover()),
    )
    warm(plain.ready(), *started)
    return Engines(*started)


#: How decode says at once that its prompt is another than the parameters', and who asks whom nobody knows there.
_AT_ONCE, _NOBODY = "is computed here: the KV is of", "was not received: deadline passed"

#: The words of mistakes that are found out by other means than by the parameters.
_WORDS: Mapping[str, str] = {
    "one transfer_id for two prompts at once": "was not received",
    "KV of another prefill than computed the prompt": _NOBODY,
}


@pytest.mark.parametrize("what", MISTAKES)
def test_kv_of_another_request_is_not_taken(engines: Engines, plain: Server, results: Results, what: str) -> None:
    """Decode computes what the parameters name another prompt for, under either policy: each has half of them."""
    requests, way = MISTAKES[what]
    made = requests(70 + len(what))
    asked = [other for _, other in made]
    with ThreadPoolExecutor(2) as pool:
        halves = engines.halves("fail"), engines.halves("recompute")
        parts = pool.map(lambda each, part: way(each, part, 60.0), halves, (made[:2], made[2:]))
        got = [answer for part in parts for answer in part]
    said = sentence(engines.fail, _WORDS.get(what, _AT_ONCE))
    refused = mistake(results, "vllm", what, alone(plain, asked), got, lambda: alone(engines.fail, asked), said)
    assert refused == 0 or (what in _WORDS and all(answer.ok for answer in got[2:]))
    if _WORDS.get(what, _AT_ONCE) != _NOBODY:
        assert max(answer.seconds for answer in got) < DEADLINE_S  # and so not by it


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_parameters_of_another_prompt_that_a_router_has_cut_are_refused_by_the_prefill(
    engines: Engines, plain: Server, results: Results, policy: str
) -> None:
    decode, made = getattr(engines, policy), mixed_up(next(iter(MIX_UPS)), 81 + len(policy))
    asked, got = [other for _, other in made], list[Answer]()
    for one, other in made:
        params = dict(prefill(engines.first, one.prompt).params or {})
        params.pop("kvmover_content")
        got.append(served(decode, other, params))
    refused = mistake(
        results,
        "vllm",
        f"{DROPPED}, policy {policy}",
        alone(plain, asked),
        got,
        lambda: alone(decode, asked),
        sentence(decode, "was not received: the KV is of"),
    )
    assert refused == (len(got) if policy == "fail" else 0)
    assert max(answer.seconds for answer in got) < DEADLINE_S
    sentence(engines.first, "refused")


def test_a_text_that_decode_tokenizes_otherwise_is_computed_there_and_token_ids_are_fetched(
    engines: Engines, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    folder = other_tokenizer(model("qwen3", "vllm"), tmp_path / "model")
    decode, alone_there = servers.start(
        vllm("vllm-identity-tokenizer", folder, kv=kvmover(policy="fail"), block_tokens=32),
        vllm("vllm-identity-tokenizer-plain", folder),
    )
    warm(decode, alone_there)
    texts = [Form(f"text {each}", {"prompt": f"The quick brown fox {each} jumps. " * 9}) for each in range(8)]
    refused = mistake(
        results,
        "vllm",
        "KV of the same text by another tokenizer",
        [answer for text in texts for answer in ask_choices(alone_there, text)],
        [answer for text in texts for answer in split_choices(engines.first, decode, text)],
        lambda: [answer for text in texts for answer in ask_choices(decode, text)],
        sentence(decode, "were asked for"),
    )
    assert refused == 0
    prompts = prompts_of(8, seed=95, least_tokens=100)
    wanted = many(lambda prompt: ask(alone_there, prompt), prompts)
    got = many(lambda prompt: split(engines.first, decode, prompt), prompts)
    assert not results.add("vllm", "token ids beside another tokenizer: no false refusal", wanted, got).failed
    received = decode.metrics("vllm:kvmover_received_requests")
    assert received["vllm:kvmover_received_requests_total"] == len(prompts)


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
    # A prompt that nobody has asked for is held until its deadline.
    assert usage(engines.first, 40) == usage(decode) == 0


def test_requests_that_mean_what_their_partner_has_are_all_served(
    engines: Engines, plain: Server, results: Results
) -> None:
    prompts = prompts_of(20, seed=121, shared_tokens=40)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    refused = engines.first.log().count("refused")
    got = many(lambda prompt: split(engines.first, engines.fail, prompt), prompts)
    assert not results.add("vllm", "right partners beside the wrong ones: no false refusal", wanted, got).failed
    assert engines.first.log().count("refused") == refused
    assert usage(engines.first, 40) == usage(engines.fail) == usage(engines.recompute) == 0
