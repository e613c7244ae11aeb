"""A rolling upgrade under load: two vLLM servers of unlike shape are replaced in turn, one drained and one killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from time import sleep

from tests.live.answers import many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.load import Load
from tests.live.server import Command, Server, free_port
from tests.live.table import Results
from tests.live.vllm_client import Stream, ask, usage, warm
from tests.live.vllm_moves import Home, Route
from tests.live.vllm_servers import DRAINED, kvmover, vllm

_ANSWER_TOKENS, _CLIENTS = 40, 4

#: Requests between two events, so that each is served by who is there then.
_BETWEEN = 6

#: A server that is told to stop is gone by then: nobody waits for it any more.
_DRAIN_S = 40.0


@dataclass(slots=True)
class Router:
    """Sends requests to servers in turn. What runs on one that leaves goes on at another, which fetches its KV; what
    ran on one that died is asked of another, with the tokens that it had said.
    """

    homes: list[Home]
    leaving: set[str] = field(default_factory=set[str])
    moved: int = 0
    retried: int = 0
    _turns: Iterator[int] = field(default_factory=count)
    _running: dict[str, int] = field(default_factory=dict[str, int])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, route: Route) -> Route:
        held_by: Home | None = None
        for hop in count():
            home, name = self._next(), f"{route.name}-{hop}"
            params = held_by.holding(f"{route.name}-{hop - 1}", len(route.so_far) - 1) if held_by else {}
            stream = route.go_on(home, {**params, "kvmover_movable": name})
            leaves = self._read(route, home, stream)
            if len(route.tokens) == route.total:
                return route
            held_by = home if leaves else None
            with self._lock:
                self.moved += leaves
                self.retried += not leaves
        raise AssertionError

    def join(self, home: Home) -> None:
        with self._lock:
            self.homes.append(home)

    def part(self, home: Home) -> None:
        """It gets no further request, and what runs there moves."""
        with self._lock:
            self.homes.remove(home)
            self.leaving.add(home.engine)

    def running(self, home: Home) -> int:
        return self._running.get(home.engine, 0)

    def _next(self) -> Home:
        with self._lock:
            return self.homes[next(self._turns) % len(self.homes)]

    def _read(self, route: Route, home: Home, stream: Stream) -> bool:
        """Read on, to the end of it or of the server; whether it stopped because the server is to leave."""
        wanted, leaves = route.total - len(route.tokens), False
        self._count(home, 1)
        try:
            while len(stream.tokens) < wanted and not leaves and stream.until(len(stream.tokens) + 1):
                leaves = home.engine in self.leaving and len(stream.tokens) < wanted
        except OSError:
            with self._lock:
                if home in self.homes:
                    self.homes.remove(home)
        finally:
            stream.leave()
            self._count(home, -1)
        route.took(stream)
        return leaves

    def _count(self, home: Home, more: int) -> None:
        with self._lock:
            self._running[home.engine] = self._running.get(home.engine, 0) + more


def until_it_runs(router: Router, home: Home, requests: int) -> None:
    """There are so many on it."""
    while router.running(home) < requests:
        sleep(0.01)


def test_two_servers_are_replaced_under_load_and_every_request_is_answered(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("qwen3", "vllm")

    def command(name: str, port: int, tp: int, block_tokens: int) -> Command:
        kv = {**kvmover(movable_s=10, host="127.0.0.1", port=port), "engine_id": name}
        environment = {"KVMOVER_MOVER_PING_S": "0.5", "KVMOVER_MOVER_SILENCE_S": "3"}
        return vllm(name, weights, *DRAINED, kv=kv, tp=tp, block_tokens=block_tokens, environment=environment)

    def seated(name: str, tp: int, block_tokens: int) -> Home:
        port = free_port()
        (server,) = servers.start(command(name, port, tp, block_tokens))
        warm(server)
        return Home(server, name, port)

    first, second = seated("vllm-rolling-narrow", 1, 64), seated("vllm-rolling-wide", 2, 16)
    plain.ready()
    router = Router([first, second])
    prompts = prompts_of(2000, seed=110, least_tokens=60, most_tokens=400)
    load = Load(lambda prompt: router.serve(Route(prompt, _ANSWER_TOKENS)), prompts, _CLIENTS)
    load.more(_BETWEEN)

    # The one leaves: its successor is there first, what runs on it moves, and then it is told to stop.
    router.join(seated("vllm-rolling-narrow-next", 1, 32))
    load.more(_BETWEEN)
    until_it_runs(router, first, 2)
    router.part(first)
    load.more(_BETWEEN)
    assert router.running(first) == 0
    assert router.moved > 0
    assert router.retried == 0
    os.kill(first.server.pid, signal.SIGTERM)
    assert first.server.ended(_DRAIN_S), "it was told to stop"
    servers.stop([first.server])
    load.more(_BETWEEN)

    # The other is killed with requests on it; its successor comes later.
    until_it_runs(router, second, 1)
    second.server.kill()
    load.more(_BETWEEN)
    servers.stop([second.server])
    router.join(seated("vllm-rolling-wide-next", 2, 16))
    load.more(2 * _BETWEEN)
    done = load.end()
    assert len(router.homes) == 2
    assert router.retried > 0
    for home in router.homes:
        assert usage(home.server) == 0

    wanted = many(lambda each: ask(plain, each.prompt, _ANSWER_TOKENS), done)
    got = [each.answer.answer(each.ended - each.began) for each in done]
    said = f"one drained, {router.moved} requests moved; one killed, {router.retried} asked again; none lost"
    assert not results.add("vllm", "two servers replaced under load, TP1 and TP2", wanted, got, said).failed
