"""What a router does that moves a running request from one vLLM server to another, as docs/vllm.md says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any

from tests.live.answers import Answer
from tests.live.server import Server
from tests.live.vllm_client import Stream, ask

#: So long before it stops, in tokens, what a request has is copied for the first time.
LEAD_TOKENS = 12

#: What a request that moves is asked for at first, more than any copy takes, and after it has moved.
MOST_TOKENS, AFTER_TOKENS = 800, 40

_names = count()


@dataclass(frozen=True, slots=True)
class Home:
    """A server, and where its ranks are found: what a router is configured with."""

    server: Server
    engine: str
    port: int

    def holding(self, name: str, tokens: int, **more: Any) -> dict[str, Any]:
        """For another server: the first `tokens` tokens' KV of a request is here."""
        where = {"remote_engine_id": self.engine, "remote_host": "127.0.0.1", "remote_port": self.port}
        return {"do_remote_prefill": True, "remote_request_id": name, "remote_num_tokens": tokens, **where, **more}


class Way(Enum):
    """STOP: it leaves the first server, then the second is asked. COPY: what is there is copied while it decodes, then
    it leaves. OVER: as COPY, but it leaves only when the second has said a token."""

    STOP = "stop and copy"
    COPY = "copied while it decodes, then stopped"
    OVER = "copied while it decodes, stopped when the other has a token"


@dataclass(slots=True)
class Route:
    """A request on its way: its prompt, how many tokens are wanted, and what came of it so far."""

    prompt: Sequence[int]
    total: int = MOST_TOKENS
    name: str = field(default_factory=lambda: f"r-{next(_names)}")
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    pause_s: float = 0.0
    token_s: float = 0.0
    copied_tokens: int = 0
    begun_tokens: int = 0

    @property
    def so_far(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    def begin(self, home: Home) -> Stream:
        return Stream.begin(home.server, self.prompt, self.total, {"kvmover_movable": self.name})

    def took(self, stream: Stream) -> None:
        """What a server said of it, all of it from here on."""
        self.tokens += stream.tokens
        self.logprobs += stream.logprobs

    def go_on(self, home: Home, params: Mapping[str, Any] | None) -> Stream:
        return Stream.begin(home.server, self.so_far, self.total - len(self.tokens), params)

    def answer(self, seconds: float | None = None) -> Answer:
        """`seconds`: that it took; None: the pause."""
        took = self.pause_s if seconds is None else seconds
        return Answer(200, took, tuple(self.tokens), tuple(self.logprobs))


def move(route: Route, first: Home, second: Home, cut: int, way: Way) -> Route:
    """Begin at the first, go on at the second after `cut` tokens, or when what was there is copied, to the end."""
    stream = route.begin(first)
    with ThreadPoolExecutor(1) as pool:
        copied = _copied(pool, route, stream, first, second, cut) if way is not Way.STOP else None
        assert stream.until(cut)
        while copied is not None and not copied.done():
            assert stream.until(len(stream.tokens) + 1), "it ended before it was copied"
    route.took(stream)
    last, route.total = stream.came[-1], len(route.tokens) + AFTER_TOKENS
    route.token_s = (last - stream.came[0]) / max(1, len(stream.came) - 1)
    if way is not Way.OVER:
        stream.leave()
    route.begun_tokens = len(route.so_far)
    on = route.go_on(second, first.holding(route.name, len(route.so_far) - 1))
    assert on.until(1)
    stream.leave()
    route.pause_s = on.came[0] - last
    on.until(route.total - len(route.tokens))
    route.took(on)
    return route


def _copied(
    pool: ThreadPoolExecutor, route: Route, stream: Stream, first: Home, second: Home, cut: int
) -> Future[Answer]:
    """The second fetches what there is while the first goes on: it is asked for one token, which nobody uses."""
    assert stream.until(max(1, cut - LEAD_TOKENS))
    known = [*route.prompt, *stream.tokens]
    route.copied_tokens = len(known) - 1
    return pool.submit(ask, second.server, known, 1, first.holding(route.name, len(known) - 1, kvmover_copy=True))
