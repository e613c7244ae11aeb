"""Requests that move from one vLLM server to another while they decode, and servers that die meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import monotonic, sleep
from typing import Any

import pytest

from perf import record
from tests.live.answers import Answer, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port, labelled
from tests.live.table import Results
from tests.live.vllm_client import ask, usage, warm
from tests.live.vllm_moves import LEAD_TOKENS, Home, Route, Way, move
from tests.live.vllm_servers import ASYNC_SCHEDULING, kvmover, vllm

#: For so long the blocks of a request stay that its client left.
_KEPT_S = 8

#: Where a request stops at its first server: within a block, at its end, and behind it. Prompts are of many lengths.
_CUTS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 40)


@dataclass(slots=True)
class Fleet:
    """Two servers of unlike shape, the second of which orders steps ahead, and one alone."""

    plain: Server
    wide: Home
    narrow: Home
    servers: Servers

    def again(self, home: Home) -> None:
        """A server that was killed, on its port; it has met the other when this returns."""
        begun = self.servers.again(home.server)
        warm(begun)
        for each in ("wide", "narrow"):
            if getattr(self, each) == home:
                setattr(self, each, Home(begun, home.engine, home.port))
        self.meet()

    def meet(self) -> None:
        for first, second in ((self.wide, self.narrow), (self.narrow, self.wide)):
            move(Route(range(40)), first, second, 2, Way.STOP)


def _command(name: str, *arguments: Any, port: int, steps: Mapping[str, str], **named: Any) -> Command:
    environment = {
        **steps,
        "KVMOVER_METRICS_PORT": str(free_port()),
        "KVMOVER_MOVER_PING_S": "0.5",
        "KVMOVER_MOVER_SILENCE_S": "3",
    }
    kv = kvmover(movable_s=_KEPT_S, host="127.0.0.1", port=port)
    more = "--enable-prompt-tokens-details"
    return vllm(name, *arguments, more, kv={**kv, "engine_id": name}, environment=environment, **named)


@pytest.fixture(scope="module")
def fleet(plain: Server, servers: Servers, model: ModelMaker) -> Fleet:
    weights, ports = model("qwen3", "vllm"), (free_port(), free_port())
    wide, narrow = servers.start(
        _command("vllm-moves-wide", weights, port=ports[0], steps={}, tp=2),
        _command("vllm-moves-narrow", weights, port=ports[1], steps=ASYNC_SCHEDULING, block_tokens=64),
    )
    warm(plain.ready(), wide, narrow)
    made = Fleet(plain, Home(wide, wide.name, ports[0]), Home(narrow, narrow.name, ports[1]), servers)
    made.meet()
    return made


def ledger(home: Home, source: str) -> float:
    """Prompt tokens of this source, as the scheduler has them, whose port is behind those of the ranks."""
    environment, arguments = home.server.command.environment, list(home.server.command.arguments)
    ranks = int(arguments[arguments.index("--tensor-parallel-size") + 1])
    port = int(environment["KVMOVER_METRICS_PORT"]) + ranks
    return labelled(home.server, "kvmover_prompt_tokens_total", source, port)


def open_receives(home: Home) -> float:
    port = int(home.server.command.environment["KVMOVER_METRICS_PORT"])
    return home.server.metrics("kvmover_open_receives", port=port)["kvmover_open_receives"]


def moved(home: Home) -> float:
    """Requests that were taken from here, as vLLM's own metrics have them."""
    return home.server.metrics("vllm:kvmover_moved_requests")["vllm:kvmover_moved_requests_total"]


def _has_moved(home: Home, requests: int) -> bool:
    return moved(home) >= requests


def until(condition: Callable[[], bool], within_s: float) -> float:
    """How long it took to become true."""
    began = monotonic()
    while not condition():
        assert monotonic() - began < within_s, f"not within {within_s} s"
        sleep(0.05)
    return monotonic() - began


def wanted(fleet: Fleet, routes: list[Route]) -> list[Answer]:
    return [ask(fleet.plain, route.prompt, route.total) for route in routes]


@pytest.mark.parametrize("way", list(Way))
def test_a_running_request_moves_and_nothing_of_it_is_computed_again(way: Way, fleet: Fleet, results: Results) -> None:
    """To another TP and block size, and back; the one token that is computed is the last, whose KV nobody had."""
    prompts = iter(prompts_of(2 * len(_CUTS), seed=90 + len(way.value), least_tokens=100, most_tokens=700))
    routes, copies = list[Route](), 0 if way is Way.STOP else 1
    for first, second in ((fleet.wide, fleet.narrow), (fleet.narrow, fleet.wide)):
        before = {source: ledger(second, source) for source in ("computed", "peer", "device")}
        mine = [move(Route(next(prompts)), first, second, cut, way) for cut in _CUTS]
        told = {source: ledger(second, source) - before[source] for source in before}
        assert told["computed"] == (1 + copies) * len(mine)
        begun = sum(route.begun_tokens + route.copied_tokens + copies for route in mine)
        assert sum(told.values()) == begun, "every token of every prompt is in one account"
        until(partial(_has_moved, first, len(mine)), 10)
        assert usage(first.server) == usage(second.server) == 0
        routes += mine
    row = _row(way, routes)
    said = (
        f"pause p50 {row['pause_p50_ms']} ms, p99 {row['pause_p99_ms']}, beside {row['token_ms']} ms a token;"
        f" the other computed its last token, and no other"
    )
    record.write("live_moves", [*_others(way), row])
    got = [route.answer() for route in routes]
    assert not results.add("vllm", f"a running request moves: {way.value}", wanted(fleet, routes), got, said).failed


def _others(way: Way) -> list[dict[str, Any]]:
    path = record.RESULTS / "live_moves.csv"
    return [dict(row) for row in record.read("live_moves") if row["way"] != way.value] if path.exists() else []


def _row(way: Way, routes: list[Route]) -> dict[str, Any]:
    pauses = sorted(1e3 * route.pause_s for route in routes)
    return {
        "way": way.value,
        "moves": len(routes),
        "pause_p50_ms": round(median(pauses)),
        "pause_p99_ms": round(pauses[-1]),
        "token_ms": round(1e3 * median(route.token_s for route in routes), 1),
        "moved_tokens": round(median(route.begun_tokens - 1 for route in routes)),
        "copied_before_tokens": round(median(route.copied_tokens for route in routes)),
    }


def test_the_second_server_dies_before_it_says_a_token_and_the_first_has_all_of_it(
    fleet: Fleet, results: Results
) -> None:
    """Who has not left goes on where it is. Who has left comes back: its blocks are still in the prefix cache."""
    prompts = prompts_of(4, seed=95, least_tokens=200, most_tokens=600)
    stays, leaves = ([Route(prompt, 60) for prompt in prompts[n : n + 2]] for n in (0, 2))
    streams = [route.begin(fleet.wide) for route in stays + leaves]
    for stream in streams:
        assert stream.until(10)
    for route, stream in zip(leaves, streams[2:], strict=True):
        stream.leave()
        route.took(stream)
    fleet.narrow.server.pause()
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(_refused, route, stream, fleet) for route, stream in zip(stays + leaves, streams, strict=True)
        ]
        sleep(1.0)
        fleet.narrow.server.kill()
        assert all(each.result() for each in asked)
    for route, stream in zip(stays, streams[:2], strict=True):
        assert stream.until(60)
        route.took(stream)
    for route in leaves:
        back = ask(fleet.wide.server, route.so_far, route.total - len(route.tokens))
        assert back.cached_tokens >= len(route.so_far) - 17
        route.tokens += back.tokens
        route.logprobs += back.logprobs
        route.pause_s = back.seconds
    got = [route.answer() for route in stays + leaves]
    said = "2 went on where they were, 2 came back"
    assert not results.add("vllm", "kill -9 of where requests move to", wanted(fleet, stays + leaves), got, said).failed
    until(lambda: usage(fleet.wide.server) == 0, _KEPT_S + 8)
    fleet.again(fleet.narrow)


def _refused(route: Route, stream: Any, fleet: Fleet) -> bool:
    so_far = route.so_far if route.tokens else [*route.prompt, *stream.tokens]
    where = fleet.wide.holding(route.name, len(so_far) - 1)
    return not ask(fleet.narrow.server, so_far, 30, where).ok


def test_the_first_server_dies_in_the_middle_of_a_move_and_the_second_computes(fleet: Fleet, results: Results) -> None:
    """It is stopped when the second asks, so that its KV is on its way for certain, and never arrives."""
    prompts = prompts_of(6, seed=96, least_tokens=200, most_tokens=600)
    routes = [Route(prompt, 50) for prompt in prompts]
    streams = [route.begin(fleet.wide) for route in routes]
    for route, stream in zip(routes, streams, strict=True):
        assert stream.until(12)
        route.took(stream)
    fleet.wide.server.pause()
    with ThreadPoolExecutor(len(routes)) as pool:
        on = [route.go_on(fleet.narrow, fleet.wide.holding(route.name, len(route.so_far) - 1)) for route in routes]
        begun = [
            pool.submit(stream.until, route.total - len(route.tokens)) for route, stream in zip(routes, on, strict=True)
        ]
        until(lambda: open_receives(fleet.narrow) >= len(routes), 20)
        fleet.wide.server.kill()
        killed = monotonic()
        assert all(each.result() for each in begun)
        took = monotonic() - killed
    for route, before, stream in zip(routes, streams, on, strict=True):
        route.took(stream)
        route.pause_s = stream.came[0] - before.came[-1]
    got = [route.answer() for route in routes]
    said = f"{len(routes)} moves open at the kill; all tokens {took:.1f} s after it"
    assert not results.add("vllm", "kill -9 of where requests move from", wanted(fleet, routes), got, said).failed
    assert usage(fleet.narrow.server) == 0
    fleet.again(fleet.wide)
    (prompt,) = prompts_of(1, seed=97, least_tokens=200)
    route = move(Route(prompt), fleet.wide, fleet.narrow, LEAD_TOKENS, Way.STOP)
    assert not results.add(
        "vllm", "a move from one that was restarted", wanted(fleet, [route]), [route.answer()]
    ).failed
