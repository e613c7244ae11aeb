"""Answers to prompts: asked for over HTTP, many at once, and judged against those of a plain server."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from perf.network_cable import sockets_of

#: Log probabilities of float32 models differ by this much where requests are batched otherwise.
GAP = 1e-3

#: Those of bfloat16 models differ by steps of 2**-6, from 2 to 4.
ROUNDED = 4 * 2.0**-6

Prompt = Sequence[int]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. `status`: of HTTP, or 0 where there was no answer; `error`: what it was told then.

    `params`: the other half's `kv_transfer_params`. `cached_tokens`: of the prompt, not computed by this server.
    """

    status: int
    seconds: float
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error: str = ""
    params: Mapping[str, Any] | None = None
    cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: `status` 0 and no `body` where it did not come within the time, or the connection broke."""

    status: int
    seconds: float
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def connection_to(url: str, timeout_s: float) -> HTTPConnection:
    """Returns a connection to a server of this machine: its host is 127.0.0.1, or the network namespace it is in.

    Raises OSError where no server listens there.
    """
    parts = urlsplit(url)
    connection = HTTPConnection("127.0.0.1", parts.port, timeout=timeout_s)
    if parts.hostname != "127.0.0.1":
        with sockets_of(parts.hostname or ""):
            connection.connect()
    return connection


def post(url: str, payload: Mapping[str, Any], timeout_s: float = 120.0) -> Reply:
    """A connection of its own a request, closed by this client when `timeout_s` have passed without an answer."""
    parts = urlsplit(url)
    began = time.monotonic()
    try:
        with closing(connection_to(url, timeout_s)) as connection:
            connection.request("POST", parts.path, json.dumps(payload), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        return Reply(0, time.monotonic() - began, error=f"{type(error).__name__} {error}".strip())
    took = time.monotonic() - began
    if answer.status != 200:
        return Reply(answer.status, took, error=text[:600])
    return Reply(200, took, json.loads(text))


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer: when its first part came, when its last, in seconds from the request."""

    first_s: float
    seconds: float
    parts: tuple[Mapping[str, Any], ...]


def events(url: str, payload: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
    """Server-sent events, each JSON, up to `[DONE]`, as they come. Whoever closes this leaves: the server sees it.

    Raises OSError for any other answer, and where the connection breaks.
    """
    parts = urlsplit(url)
    connection = connection_to(url, timeout_s=120)
    try:
        body = json.dumps({**payload, "stream": True})
        connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
    except HTTPException as error:
        raise OSError(f"{type(error).__name__} {error}") from error
    finally:
        connection.close()


def stream(url: str, payload: Mapping[str, Any]) -> Streamed:
    """All `events`, and when they came. Raises OSError as they do."""
    began, first_s, found = time.monotonic(), 0.0, list[Mapping[str, Any]]()
    for event in events(url, payload):
        first_s = first_s or time.monotonic() - began
        found.append(event)
    return Streamed(first_s, time.monotonic() - began, tuple(found))


def many(call: Callable[[T], Answer], items: Sequence[T], at_once: int = 8) -> list[Answer]:
    """An answer an item, most often a prompt, in order; at most `at_once` are under way."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(call, items))


def prompts_of(
    count: int, seed: int, *, least_tokens: int = 5, most_tokens: int = 600, shared_tokens: int = 0
) -> list[list[int]]:
    """Random bytes, behind a head that all have in common."""
    chance = random.Random(seed)
    head = [chance.randrange(256) for _ in range(shared_tokens)]
    return [
        head + [chance.randrange(256) for _ in range(chance.randint(least_tokens, most_tokens))] for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answers beside a plain server's. `gap`: the largest difference of a token's log probability."""

    same: int
    wrong: tuple[str, ...]
    failed: tuple[str, ...]
    gap: float

    @property
    def requests(self) -> int:
        return self.same + len(self.wrong) + len(self.failed)


def judge(wanted: Sequence[Answer], got: Sequence[Answer], gap: float = GAP) -> Verdict:
    """An answer is the same if every greedy token is, and no log probability is further off than `gap`."""
    same, worst = 0, 0.0
    wrong: list[str] = []
    failed: list[str] = []
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        assert want.ok, f"the plain server failed: {want.error}"
        if not have.ok:
            failed.append(f"{number}: HTTP {have.status} after {have.seconds:.1f} s: {have.error}")
        elif have.tokens != want.tokens:
            wrong.append(f"{number}: {have.tokens} instead of {want.tokens}")
        else:
            off = max((abs(a - b) for a, b in zip(want.logprobs, have.logprobs, strict=True)), default=0.0)
            worst = max(worst, off)
            if off > gap:
                wrong.append(f"{number}: a log probability is off by {off:.2g}")
            else:
                same += 1
    return Verdict(same, tuple(wrong), tuple(failed), worst)
