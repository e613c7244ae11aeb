"""Requests through an orchestrator: their answers in tokens and text, the transfers behind them, a row for the docs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from kvmover.observe.runlog import Moved, read_lines
from perf import record
from tests.live.answers import Answer, Verdict, many, post, prompts_of
from tests.live.table import Results

#: Prompts through each orchestrator.
REQUESTS = 20

#: Tokens of printable characters are those below. A detokenizer that begins within a character may say anything.
_CHARACTERS = 94

#: How token ids are asked for, of the engines and of Dynamo.
TOKEN_IDS = {"return_token_ids": True}
DYNAMOS_TOKEN_IDS = {"nvext": {"extra_fields": ["completion_token_ids"]}}

#: 4 layers of 4 heads of K and V of 32 float32.
TOKEN_BYTES = 4096


def ask(url: str, prompt: Sequence[int], said: Mapping[str, Any] = TOKEN_IDS) -> Answer:
    """Returns the greedy tokens of an answer, followed by the bytes of its text, and the tokens' log probabilities.

    Bytes that are no UTF-8 are left out of the text: each detokenizer has its own number of signs for them.
    """
    payload = {"model": "m", "prompt": list(prompt), "max_tokens": 16, "temperature": 0, "ignore_eos": True, **said}
    reply = post(f"{url}/v1/completions", {**payload, "logprobs": 1})
    if reply.status != 200:
        return Answer(reply.status, reply.seconds, error=reply.error)
    choice = reply.body["choices"][0]
    tokens = choice["token_ids"] if said is TOKEN_IDS else reply.body["nvext"]["completion_token_ids"]
    text = choice["text"].replace("\N{REPLACEMENT CHARACTER}", "").encode()
    return Answer(200, reply.seconds, (*tokens, *text), tuple(choice["logprobs"]["token_logprobs"]))


def until_served(url: str, said: Mapping[str, Any] = TOKEN_IDS, within_s: float = 120.0) -> None:
    """Ask for a first answer until one comes: an orchestrator serves once it has found a worker of each half."""
    stop = time.monotonic() + within_s
    while not (answer := ask(url, range(40), said)).ok:
        assert time.monotonic() < stop, answer.error
        time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Way:
    """How requests go: through an orchestrator of a release, to an engine of a release. `how`: by which setting."""

    orchestrator: str
    engine: str
    how: str

    def prompts(self, **lengths: int) -> list[list[int]]:
        """Returns 20 prompts of printable characters, others for each way."""
        drawn = prompts_of(REQUESTS, seed=crc32(str(self).encode()), **lengths)
        return [[token % _CHARACTERS for token in prompt] for prompt in drawn]

    def compare(self, results: Results, plain: str, front: str, log: Path, said: Mapping[str, Any]) -> None:
        """Ask 20 prompts of a plain server and through the orchestrator, and keep the row.

        Fails at an answer that differs or did not come, and where the KV of a prompt did not come over kvmover.
        """
        prompts = self.prompts()
        wanted = many(lambda prompt: ask(plain, prompt), prompts)
        before = len(received(log))
        got = many(lambda prompt: ask(front, prompt, said), prompts)
        moved = received(log, before + len(prompts))[before:]
        verdict = results.add("orchestrators", str(self), wanted, got, f"{_sum_bytes(moved) / 1e6:.1f} MB moved")
        self.keep(verdict, _sum_bytes(moved))
        assert verdict.same == len(prompts), verdict.failed
        assert [each.cause for each in moved] == [None] * len(prompts)
        assert _sum_bytes(moved) >= TOKEN_BYTES * sum(len(prompt) - 1 for prompt in prompts)

    def keep(self, verdict: Verdict, moved_bytes: int = 0, seen: str = "") -> None:
        """Write the row into live_orchestrators.csv. `seen`: what stopped it."""
        row = {
            "orchestrator": self.orchestrator,
            "engine": self.engine,
            "how": self.how,
            "requests": verdict.requests,
            "same": verdict.same,
            "wrong": len(verdict.wrong),
            "failed": len(verdict.failed),
            "moved_bytes": moved_bytes,
            "seen": seen,
        }
        record.replace("live_orchestrators", [row], ("orchestrator", "engine", "how"))

    def __str__(self) -> str:
        return f"{self.orchestrator}, {self.engine}, {self.how}"


def received(log: Path, least: int = 0, within_s: float = 10.0) -> list[Moved]:
    """Returns the transfers that decode ranks have received, once there are so many or the time is over."""
    stop = time.monotonic() + within_s
    while True:
        lines = read_lines([log]).transfers if log.exists() else ()
        found = [line for line in lines if line.verb == "receive"]
        if len(found) >= least or time.monotonic() > stop:
            return found
        time.sleep(0.1)


def _sum_bytes(moved: Sequence[Moved]) -> int:
    return sum(line.nbytes for line in moved)
