"""SGLang requests whose halves mean two prompts: they fail in a sentence, and leave no prefix cache wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.live.answers import many, prompts_of
from tests.live.checkpoints import other_tokenizer
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import Asked, mistake, sentence
from tests.live.server import Server
from tests.live.sglang_client import counted, generate, split, split_body, tokenized, usage, warm
from tests.live.sglang_partners import MISTAKES, PATIENCE, PATIENCE_S, Halves, Lab
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results

#: How both halves say that they mean two prompts, and at once.
_TWO_PROMPTS = "the KV is of"

#: The words of mistakes that are found out otherwise.
_OTHER_WORDS: Mapping[str, str] = {
    "one room for two prompts at once": "has another request in it",
    "a room whose request is over": "deadline passed",
    "KV of another prefill than computed the prompt": "deadline passed",
}


@pytest.fixture(scope="module")
def lab(plain: Server, servers: Servers, model: ModelMaker) -> Lab:
    weights = model("llama", "sglang")
    started = servers.start(
        sglang("sglang-identity-prefill", weights, mode=PREFILL, environment=PATIENCE),
        sglang("sglang-identity-decode", weights, mode=DECODE_WITH_PREFIXES, environment=PATIENCE),
        sglang("sglang-identity-elsewhere", weights, mode=PREFILL, environment=PATIENCE),
    )
    warm(plain.ready())
    return Lab(plain, Halves(*started))


@pytest.mark.parametrize("what", MISTAKES)
def test_kv_of_another_request_is_refused_and_nothing_is_cached_of_it(lab: Lab, results: Results, what: str) -> None:
    requests, way = MISTAKES[what]
    made = requests(70 + len(what))
    asked = [other for _, other in made]
    got = way(lab.halves, made, 60.0)
    words = _OTHER_WORDS.get(what, _TWO_PROMPTS)
    said = sentence(lab.halves.decode, words)
    refused = mistake(results, "sglang", what, lab.alone(asked), got, lambda: lab.through(asked), said)
    if words == _TWO_PROMPTS:
        assert max(answer.seconds for answer in got) < PATIENCE_S
        sentence(lab.halves.prefill, words)
    # Of two that are in one room one may be served.
    assert refused == len(got) or (what.startswith("one room") and refused >= len(got) // 2)
    assert usage(lab.halves.prefill, 20) == usage(lab.halves.decode, 20) == 0


def test_no_request_whose_halves_agree_is_refused(lab: Lab, results: Results) -> None:
    prompts = prompts_of(20, seed=91, most_tokens=600)
    wanted = lab.alone([Asked(prompt) for prompt in prompts])
    got = many(lambda prompt: split(lab.halves.prefill, lab.halves.decode, prompt), prompts, 8)
    assert not results.add("sglang", "after refusals", wanted, got).failed


def test_a_text_that_decode_tokenizes_otherwise_is_refused_and_token_ids_are_served(
    lab: Lab, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
) -> None:
    folder = other_tokenizer(model("llama", "sglang"), tmp_path / "model")
    decode, alone = servers.start(
        sglang("sglang-identity-tokenizer", folder, mode=DECODE_WITH_PREFIXES),
        sglang("sglang-identity-tokenizer-plain", folder),
    )
    warm(alone)
    greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    texts = [f"The quick brown fox {each} jumps. " * 9 for each in range(8)]
    bodies = [{"text": text, "sampling_params": greedy, "return_logprob": True} for text in texts]
    wanted = [answer for body in bodies for answer in generate(alone, body)]
    got = [answer for body in bodies for answer in split_body(lab.halves.prefill, decode, body)]
    prompts = [tokenized(decode, text) for text in texts]
    refused = mistake(
        results,
        "sglang",
        "KV of the same text by another tokenizer",
        wanted,
        got,
        lambda: many(lambda prompt: split(lab.halves.prefill, decode, prompt), prompts),
        sentence(decode, "the KV is of"),
    )
    assert refused == len(texts)
    assert max(answer.seconds for answer in got) < PATIENCE_S
    assert counted(decode, "kvmover_received_bytes_total") > 0
