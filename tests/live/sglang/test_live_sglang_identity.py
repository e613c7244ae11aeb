"""SGLang requests whose halves mean two prompts: they fail at once, in a sentence, and leave no prefix cache wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.checkpoints import other_tokenizer
from tests.live.conftest import ModelMaker, Servers
from tests.live.partners import mistake, sentence
from tests.live.server import Server
from tests.live.sglang_client import ask, counted, generate, room_at, split, split_body, tokenized, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.table import Results

#: Both prompts by their length and digest, in whatever SGLang says around it.
_SAID = re.compile(r"the KV is of (\d+) tokens ([0-9a-f]{32}), and (\d+) tokens ([0-9a-f]{32}) were asked for")

#: Far less than any deadline here, and far more than a request takes on a machine that others use.
_AT_ONCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Trio:
    plain: Server
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def trio(plain: Server, servers: Servers, model: ModelMaker) -> Trio:
    weights = model("llama", "sglang")
    prefill, decode = servers.start(
        sglang("sglang-identity-prefill", weights, mode=PREFILL),
        sglang("sglang-identity-decode", weights, mode=DECODE_WITH_PREFIXES),
    )
    warm(plain.ready())
    return Trio(plain, prefill, decode)


def mixed_up(trio: Trio, one: list[int], other: list[int], *salts: str) -> tuple[Answer, Answer]:
    """What prefill says to prompt `one` and decode to prompt `other` in one room; `salts`: of these."""
    room = room_at(trio.prefill)
    of: list[Mapping[str, Any]] = [{**room, "cache_salt": salt} for salt in salts] or [room, room]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, trio.prefill, one, 16, of[0], 2 * _AT_ONCE_S)
        second = pool.submit(ask, trio.decode, other, 16, of[1], 2 * _AT_ONCE_S)
        return first.result(), second.result()


_MIX_UPS = {"300 of other ids": (300, 300), "300 for 290": (300, 290), "290 for 300": (290, 300), "17 for 17": (17, 17)}


def test_a_prompt_for_another_is_refused_on_both_halves_and_nothing_is_cached_of_it(
    trio: Trio, results: Results
) -> None:
    lengths = [*_MIX_UPS.values()]
    pairs = [prompts_of(2, seed=70 + at, least_tokens=300, most_tokens=300) for at in range(len(lengths))]
    began = time.monotonic()
    for (one, other), (first, second) in zip(pairs, lengths, strict=True):
        for answer in mixed_up(trio, one[:first], other[:second]):
            assert not answer.ok, "KV of another prompt was decoded"
            assert "the KV is of" in answer.error
    assert time.monotonic() - began < len(lengths) * _AT_ONCE_S
    logs = trio.prefill.log(), trio.decode.log()
    for text in logs:
        said = [(int(found[1]), int(found[3])) for found in _SAID.finditer(text) if found[2] != found[4]]
        assert set(said) >= set(lengths)
    again = [prompt for pair in pairs for prompt in pair]
    wanted = many(lambda prompt: ask(trio.plain, prompt), again)
    got = many(lambda prompt: split(trio.prefill, trio.decode, prompt), again)
    assert not results.add("sglang", "prompts that were mixed up before", wanted, got).failed
    assert usage(trio.prefill) == usage(trio.decode) == 0


def test_a_salt_for_another_is_refused_and_the_same_salt_is_not(trio: Trio) -> None:
    (prompt,) = prompts_of(1, seed=90, least_tokens=200)
    wanted = ask(trio.plain, prompt)
    for salts in (("a", "b"), ("a", ""), ("", "b")):
        assert not any(answer.ok for answer in mixed_up(trio, prompt, prompt, *salts))
    _, right = mixed_up(trio, prompt, prompt, "b", "b")
    assert right.ok, right.error
    assert right.tokens == wanted.tokens


def test_no_request_whose_halves_agree_is_refused(trio: Trio, results: Results) -> None:
    prompts = prompts_of(20, seed=91, most_tokens=600)
    wanted = many(lambda prompt: ask(trio.plain, prompt), prompts)
    got = many(lambda prompt: split(trio.prefill, trio.decode, prompt), prompts, 8)
    assert not results.add("sglang", "after refusals", wanted, got).failed


def test_a_text_that_decode_tokenizes_otherwise_is_refused_and_token_ids_are_served(
    trio: Trio, servers: Servers, model: ModelMaker, results: Results, tmp_path: Path
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
    got = [answer for body in bodies for answer in split_body(trio.prefill, decode, body)]
    prompts = [tokenized(decode, text) for text in texts]
    refused = mistake(
        results,
        "sglang",
        "KV of the same text by another tokenizer",
        wanted,
        got,
        lambda: many(lambda prompt: split(trio.prefill, decode, prompt), prompts),
        sentence(decode, "the KV is of"),
    )
    assert refused == len(texts)
    assert max(answer.seconds for answer in got) < _AT_ONCE_S
    assert counted(decode, "kvmover_received_bytes_total") > 0
