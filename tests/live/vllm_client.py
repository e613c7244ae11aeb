"""Requests to vLLM: to one server, and through a prefill and a decode server as vLLM's own proxies send them."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tests.live.answers import Answer, Reply, Streamed, events, post, stream
from tests.live.server import Server

#: What a proxy says to a prefill: compute it for another engine.
FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False}


def ask(
    server: Server,
    prompt: Sequence[int],
    tokens: int = 16,
    params: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
    **said: Any,
) -> Answer:
    """Greedy tokens and their log probabilities. `params`: `kv_transfer_params`, as the other half answered."""
    return _answer(post(f"{server.url}/v1/completions", {**_payload(prompt, tokens, params), **said}, timeout_s))


def prefill(server: Server, prompt: Sequence[int], timeout_s: float = 120.0) -> Answer:
    """Have a prompt computed for another engine: `params` of the answer are for that."""
    return ask(server, prompt, 1, FOR_ANOTHER, timeout_s)


def split(first: Server, second: Server, prompt: Sequence[int], tokens: int = 16, timeout_s: float = 120.0) -> Answer:
    """Prefill at the first, then all tokens from the second; the answer of the one that failed."""
    half = prefill(first, prompt, timeout_s)
    if not half.ok:
        return replace(half, error=f"prefill: {half.error}")
    answer = ask(second, prompt, tokens, half.params, timeout_s)
    return replace(answer, seconds=half.seconds + answer.seconds, params=half.params)


def ask_several(
    server: Server,
    prompt: Sequence[Any],
    tokens: int = 16,
    params: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
    **said: Any,
) -> list[Answer]:
    """An answer a choice, in order, of one request: for `n`, or for a `prompt` that is a list of prompts."""
    reply = post(f"{server.url}/v1/completions", {**_payload(prompt, tokens, params), **said}, timeout_s)
    if reply.status != 200:
        return [_answer(reply)]
    return [_answer(replace(reply, body={**reply.body, "choices": [choice]})) for choice in reply.body["choices"]]


def split_streamed(first: Server, second: Server, prompt: Sequence[int], tokens: int) -> Streamed:
    """As `split`; the time to the first token is that of both halves. Raises OSError for a half that fails."""
    half = prefill(first, prompt)
    if not half.ok:
        raise OSError(half.error)
    return streamed_after(half, second, prompt, tokens)


def streamed_after(half: Answer, second: Server, prompt: Sequence[int], tokens: int) -> Streamed:
    """The second half of a request, whose times are those of both. Raises OSError where it fails."""
    got = stream(f"{second.url}/v1/completions", _payload(prompt, tokens, half.params))
    return Streamed(half.seconds + got.first_s, half.seconds + got.seconds, got.parts)


def ask_streamed(server: Server, prompt: Sequence[int], tokens: int) -> Streamed:
    return stream(f"{server.url}/v1/completions", _payload(prompt, tokens, None))


@dataclass(slots=True)
class Stream:
    """An answer as it comes: `tokens` so far, each with its log probability and when it came."""

    server: Server
    tokens: list[int]
    logprobs: list[float]
    came: list[float]
    _events: Generator[Mapping[str, Any]]

    @classmethod
    def begin(cls, server: Server, prompt: Sequence[int], tokens: int, params: Mapping[str, Any] | None) -> Stream:
        """Nothing is sent before the first token is asked for."""
        return cls(server, [], [], [], events(f"{server.url}/v1/completions", _payload(prompt, tokens, params)))

    def until(self, tokens: int) -> bool:
        """Read on until there are so many tokens; whether there are. Raises OSError where the server breaks off."""
        while len(self.tokens) < tokens:
            event = next(self._events, None)
            if event is None:
                return False
            for choice in event["choices"]:
                self.tokens += choice.get("token_ids") or ()
                self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
            self.came += [time.monotonic()] * (len(self.tokens) - len(self.came))
        return True

    def leave(self) -> None:
        """Close the connection: the server gives the request up."""
        self._events.close()


def tokens_of(streamed: Streamed) -> tuple[int, ...]:
    choices = [choice for part in streamed.parts for choice in part["choices"]]
    return tuple(token for choice in choices for token in choice.get("token_ids") or ())


def _payload(prompt: Sequence[int], tokens: int, params: Mapping[str, Any] | None) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    return payload if params is None else {**payload, "kv_transfer_params": params}


def warm(*servers: Server) -> None:
    """One answer of each: the first step of a server compiles and imports for seconds."""
    with ThreadPoolExecutor(len(servers)) as pool:
        for answer in pool.map(lambda server: ask(server, range(40)), servers):
            assert answer.ok, answer.error


def usage(server: Server, within_s: float = 10.0) -> float:
    """The share of a server's cache that somebody holds, waited for to become none."""
    stop = time.monotonic() + within_s
    while True:
        held = server.metrics("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        if not any(held.values()) or time.monotonic() > stop:
            return held["vllm:kv_cache_usage_perc"]
        time.sleep(0.2)


def _answer(reply: Reply) -> Answer:
    if reply.status != 200:
        return Answer(reply.status, reply.seconds, error=reply.error)
    choice = reply.body["choices"][0]
    details = reply.body["usage"].get("prompt_tokens_details") or {}
    return Answer(
        200,
        reply.seconds,
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        params=reply.body.get("kv_transfer_params"),
        cached_tokens=details.get("cached_tokens") or 0,
    )
