"""Requests to SGLang: to one server, and to a prefill and a decode at once, as SGLang's own routers send them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tests.live.answers import Answer, Reply, Streamed, post, stream
from tests.live.server import Server

#: Where the halves of a request meet: the prefill's address and bootstrap port, and a number of the request's own.
Room = Mapping[str, Any]


def room_at(prefill: Server) -> Room:
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.command.bootstrap_port,
        "bootstrap_room": random.randrange(1 << 62),
    }


def rooms_at(prefill: Server, count: int) -> Room:
    """A room a prompt, as SGLang's router sends them for a list."""
    rooms = [room_at(prefill) for _ in range(count)]
    return {name: [room[name] for room in rooms] for name in rooms[0]}


def generate(
    server: Server, body: Mapping[str, Any], room: Room | None = None, timeout_s: float = 120.0
) -> list[Answer]:
    """Return an answer for each prompt of a request as it is. One that failed is one answer."""
    reply = post(f"{server.url}/generate", {**body, **(room or {})}, timeout_s)
    said: Any = reply.body
    each = said if isinstance(said, list) else [said]
    return [_answer(replace(reply, body=one)) for one in each]


def split_body(
    prefill: Server, decode: Server, body: Mapping[str, Any], patience_s: Sequence[float] = (120.0, 120.0)
) -> list[Answer]:
    """Return decode's answers to a request as it is, in a room for each prompt. After `patience_s` the clients of
    prefill and of decode leave."""
    ids = body.get("input_ids", ())
    several = len(ids) if ids and isinstance(ids[0], list) else 0
    room = rooms_at(prefill, several) if several else room_at(prefill)
    with ThreadPoolExecutor(2) as pool:
        both = zip((prefill, decode), patience_s, strict=True)
        halves = [pool.submit(generate, half, body, room, each) for half, each in both]
        return [half.result() for half in halves][1]


def tokenized(server: Server, text: str) -> list[int]:
    """Return the token ids of a text as a server has them."""
    reply = post(f"{server.url}/tokenize", {"model": "m", "prompt": text})
    assert reply.status == 200, reply.error
    return reply.body["tokens"]


def ask(
    server: Server, prompt: Sequence[int], tokens: int = 16, room: Room | None = None, timeout_s: float = 120.0
) -> Answer:
    """Greedy tokens and their log probabilities."""
    return _answer(post(f"{server.url}/generate", _payload(prompt, tokens, room), timeout_s))


def halves(
    prefill: Server,
    decode: Server,
    prompt: Sequence[int],
    tokens: int = 16,
    room: Room | None = None,
    timeout_s: float = 120.0,
) -> tuple[Answer, Answer]:
    """The same request to both at once: what the prefill answers, and what the decode does."""
    where = room or room_at(prefill)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda server: ask(server, prompt, tokens, where, timeout_s), (prefill, decode))
    return first, second


def split(prefill: Server, decode: Server, prompt: Sequence[int], tokens: int = 16, timeout_s: float = 120.0) -> Answer:
    """The decode's answer; where that failed, with what the prefill said."""
    first, second = halves(prefill, decode, prompt, tokens, timeout_s=timeout_s)
    if second.ok or first.ok:
        return second
    return replace(second, error=f"decode: {second.error}; prefill: HTTP {first.status}: {first.error}")


def ask_streamed(server: Server, prompt: Sequence[int], tokens: int, room: Room | None = None) -> Streamed:
    """Raises OSError for a request that fails."""
    return stream(f"{server.url}/generate", _payload(prompt, tokens, room))


def split_streamed(prefill: Server, decode: Server, prompt: Sequence[int], tokens: int) -> Streamed:
    """As `split`, with the times of the decode's answer."""
    room = room_at(prefill)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, prefill, prompt, tokens, room)
        second = ask_streamed(decode, prompt, tokens, room)
        assert first.result().ok, first.result().error
    return second


def tokens_of(streamed: Streamed) -> tuple[int, ...]:
    """Each part has all tokens so far."""
    return tuple(streamed.parts[-1]["output_ids"])


def _payload(prompt: Sequence[int], tokens: int, room: Room | None) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        **(room or {}),
    }


def warm(*servers: Server) -> None:
    """A step of each: the first imports for seconds."""
    with ThreadPoolExecutor(len(servers)) as pool:
        for answer in pool.map(lambda server: ask(server, range(40)), servers):
            assert answer.ok, answer.error


def usage(server: Server, within_s: float = 10.0) -> int:
    """Tokens of a server's cache that requests hold, and requests in its queues: waited for to become none.

    Asked of the scheduler: the gauges at /metrics are told every 30 s when nothing runs.
    """
    stop = time.monotonic() + within_s
    while True:
        held = loads(server)
        if not held or time.monotonic() > stop:
            return held
        time.sleep(0.2)


def uncomputed(server: Server) -> int:
    """Requests that a prefill has still to compute."""
    load = _load(server)
    return load["num_running_reqs"] + load["num_waiting_reqs"] + load["disaggregation"]["prefill_bootstrap_queue_reqs"]


def loads(server: Server) -> int:
    """Tokens that requests hold now, and requests wherever they wait."""
    load = _load(server)
    queues = (value for name, value in load["disaggregation"].items() if name.endswith("_queue_reqs"))
    return load["num_used_tokens"] + load["num_running_reqs"] + load["num_waiting_reqs"] + sum(queues)


def _load(server: Server) -> dict[str, Any]:
    (load,) = json.loads(server.get("/v1/loads")[1])["loads"]
    return load


def counted(server: Server, name: str) -> float:
    """What kvmover's own metrics say in a server's first rank."""
    return server.metrics(name, port=int(server.command.environment["KVMOVER_METRICS_PORT"]))[name]


def _answer(reply: Reply) -> Answer:
    if reply.status != 200:
        return Answer(reply.status, reply.seconds, error=reply.error)
    said = reply.body["meta_info"]
    ended = said["finish_reason"]
    if ended["type"] == "abort":
        return Answer(ended.get("status_code") or 500, reply.seconds, error=ended.get("message", ""))
    return Answer(
        200,
        reply.seconds,
        tuple(reply.body["output_ids"]),
        tuple(entry[0] for entry in said["output_token_logprobs"]),
        cached_tokens=said.get("cached_tokens", 0),
    )
