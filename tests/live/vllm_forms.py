"""Forms of request that clients send to vLLM, and every choice of an answer as one that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.live.answers import Answer, Reply, post
from tests.live.server import Server
from tests.live.vllm_client import FOR_ANOTHER

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: Parts of a request that each form has, unless it says otherwise.
_ALL = {"model": "m", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Form:
    """A request by its name. `own`: what it has beside `_ALL`; `choices`: how many it is answered."""

    name: str
    own: Mapping[str, Any]
    choices: int = 1
    path: str = COMPLETIONS

    @property
    def body(self) -> dict[str, Any]:
        logprobs = {"logprobs": True, "top_logprobs": 1} if self.path == CHAT else {"logprobs": 1}
        return {**_ALL, **logprobs, **self.own}


def ask_choices(server: Server, form: Form, params: Mapping[str, Any] | None = None) -> list[Answer]:
    """Return an answer a choice, in their order."""
    body = form.body if params is None else {**form.body, "kv_transfer_params": params}
    return choices_of(post(f"{server.url}{form.path}", body), form)


def split_choices(first: Server, second: Server, form: Form) -> list[Answer]:
    """Send a form to a prefill as vLLM's proxies do, for one token, and then to decode. Return an answer a choice."""
    half = post(f"{first.url}{form.path}", {**form.body, "max_tokens": 1, "kv_transfer_params": FOR_ANOTHER})
    if half.status != 200:
        failed = Answer(half.status, half.seconds, error=f"prefill: {half.error}")
        return [failed] * form.choices
    answers = ask_choices(second, form, half.body.get("kv_transfer_params"))
    return [replace(answer, seconds=half.seconds + answer.seconds) for answer in answers]


def choices_of(reply: Reply, form: Form) -> list[Answer]:
    """Return an answer a choice of a reply, or the failure as often as choices were asked for."""
    if reply.status != 200:
        return [Answer(reply.status, reply.seconds, error=reply.error)] * form.choices
    choices = sorted(reply.body["choices"], key=lambda choice: choice["index"])
    assert len(choices) == form.choices, f"{form.name}: {len(choices)} choices"
    return [Answer(200, reply.seconds, _said(choice), tuple(_logprobs(choice))) for choice in choices]


def _said(choice: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of a choice, its text and why it ended, as numbers."""
    text = choice.get("text")
    if text is None:
        text = choice["message"].get("content") or ""
    ended = f"{choice['finish_reason']} {choice.get('stop_reason')}"
    return (*(choice.get("token_ids") or ()), -1, *text.encode(), -1, *ended.encode())


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    """Return the log probabilities of a choice's tokens, and of its prompt's where they were asked for."""
    said = choice.get("logprobs") or {}
    found: Sequence[float | None] = said.get("token_logprobs") or [
        each["logprob"] for each in said.get("content") or ()
    ]
    prompt = [each for token in choice.get("prompt_logprobs") or () if token for each in token.values()]
    ranked = sorted((each["logprob"] for each in prompt), reverse=True)
    return [*(each for each in found if each is not None), *ranked]
