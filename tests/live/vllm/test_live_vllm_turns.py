"""Chats whose turns are prefilled by two servers in turn: each fetches what decode made of the turn before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import median
from time import monotonic, sleep
from typing import Any

import pytest

from perf import record
from tests.live.answers import Answer
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import FOR_ANOTHER, ask, prefill, split_streamed, streamed_after, tokens_of, warm
from tests.live.vllm_servers import kvmover, vllm

_TURNS, _CHATS = 5, 4
_FIRST_TOKENS, _ANSWER_TOKENS, _WORDS_TOKENS = 600, 24, 64
_KEPT_S = 20


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two prefills, a decode with other blocks, and a server alone."""

    plain: Server
    prefills: tuple[Server, Server]
    decode: Server


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked and said, what it took to the first token, and how much of the prompt the prefill had."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    first_s: float
    cached_tokens: int


@pytest.fixture(scope="module")
def fleet(servers: Servers, model: ModelMaker) -> Fleet:
    weights = model("qwen3-large", "vllm")
    how = kvmover(bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=_KEPT_S)
    plain, first, second, decode = servers.start(
        vllm("vllm-turns-plain", weights),
        *(
            vllm(
                f"vllm-turns-prefill-{n}",
                weights,
                "--enable-prompt-tokens-details",
                kv=how,
                environment={"KVMOVER_METRICS_PORT": str(free_port())},
            )
            for n in (1, 2)
        ),
        vllm("vllm-turns-decode", weights, kv=how, block_tokens=32),
    )
    warm(plain, first, second, decode)
    for each in (first, second):
        split_streamed(each, decode, range(50), 2)
    return Fleet(plain, (first, second), decode)


def chat(fleet: Fleet, rng: Random, hands_over: Mapping[str, Any] | None) -> list[Turn]:
    """Five turns. `hands_over`: {} has the prefill of each told what the last decode answered; None: not."""
    prompt = tuple(rng.randrange(256) for _ in range(_FIRST_TOKENS))
    turns, last = list[Turn](), hands_over
    for number in range(_TURNS):
        server = fleet.prefills[number % 2]
        half = prefill(server, prompt) if not last else ask(server, prompt, 1, {**FOR_ANOTHER, **last})
        assert half.ok, half.error
        got = streamed_after(half, fleet.decode, prompt, _ANSWER_TOKENS)
        turns.append(Turn(prompt, tokens_of(got), got.first_s, half.cached_tokens))
        told = [part["kv_transfer_params"] for part in got.parts if part.get("kv_transfer_params")]
        last = None if hands_over is None else told[-1]
        prompt += turns[-1].said + tuple(rng.randrange(256) for _ in range(_WORDS_TOKENS))
    return turns


def test_a_later_turn_begins_with_what_decode_made_of_the_turn_before(fleet: Fleet, results: Results) -> None:
    """Tokens are a plain server's either way; handed over, all but the user's words and a block are there already."""
    rng = Random(80)
    ways: dict[str, list[list[Turn]]] = {"handed over": [], "computed": []}
    for _ in range(_CHATS):
        ways["handed over"].append(chat(fleet, rng, {}))
        ways["computed"].append(chat(fleet, rng, None))
    every = [turn for chats in ways.values() for turns in chats for turn in turns]
    wanted = [ask(fleet.plain, turn.prompt, _ANSWER_TOKENS) for turn in every]
    got = [Answer(200, turn.first_s, turn.said, want.logprobs) for turn, want in zip(every, wanted, strict=True)]
    rows = [_row(way, number, chats) for way, chats in ways.items() for number in range(_TURNS)]
    later = {way: median(row["ttft_p50_ms"] for row in rows if row["way"] == way and row["turn"] > 1) for way in ways}
    said = f"first token of turns 2 to 5: {later['handed over']:.0f} ms, else {later['computed']:.0f} ms"
    assert not results.add("vllm", "chats, decode to the next prefill", wanted, got, said).failed
    record.write("live_turns", rows)
    for turns in ways["handed over"]:
        for turn in turns[1:]:
            assert turn.cached_tokens >= len(turn.prompt) - _WORDS_TOKENS - 32
    # What a prefill had itself, of two turns before, counts as the device's.
    fetched = sum(labelled(each, "kvmover_prompt_tokens_total", "peer", ledger_port(each)) for each in fleet.prefills)
    assert fetched > _CHATS * (_TURNS - 1) * _ANSWER_TOKENS


def test_what_no_turn_asks_for_is_free_again_and_a_late_turn_is_computed(fleet: Fleet, results: Results) -> None:
    prompt = tuple(range(100, 400))
    half = prefill(fleet.prefills[0], prompt)
    got = streamed_after(half, fleet.decode, prompt, 8)
    told = next(part["kv_transfer_params"] for part in got.parts if part.get("kv_transfer_params"))
    assert fleet.decode.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"] > 0
    stop = monotonic() + _KEPT_S + 15
    while fleet.decode.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"] and monotonic() < stop:
        sleep(0.5)
    assert fleet.decode.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"] == 0
    turn = (*prompt, *tokens_of(got), *range(30))
    late = ask(fleet.prefills[1], turn, 1, {**FOR_ANOTHER, **told})
    assert late.cached_tokens == 0
    wanted, answer = ask(fleet.plain, turn), ask(fleet.decode, turn, 16, late.params)
    assert not results.add("vllm", "a turn that comes too late", [wanted], [answer], "computed").failed


def ledger_port(server: Server) -> int:
    """The scheduler's, behind that of its one rank."""
    return int(server.command.environment["KVMOVER_METRICS_PORT"]) + 1


def _row(way: str, number: int, chats: list[list[Turn]]) -> dict[str, Any]:
    turns = [each[number] for each in chats]
    times = sorted(1e3 * turn.first_s for turn in turns)
    return {
        "way": way,
        "turn": number + 1,
        "chats": len(turns),
        "prompt_tokens": len(turns[0].prompt),
        "cached_tokens": round(median(turn.cached_tokens for turn in turns)),
        "ttft_p50_ms": round(median(times)),
        "ttft_p99_ms": round(times[-1]),
    }
