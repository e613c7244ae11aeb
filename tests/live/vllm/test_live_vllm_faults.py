"""Faults between live vLLM servers: what the client gets and when, and that nothing is held after its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.live.answers import Answer, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Command, Server, free_port
from tests.live.table import Results
from tests.live.vllm_client import ask, prefill, split, usage, warm
from tests.live.vllm_servers import kvmover, vllm

#: A source keeps pages for so long that nobody asks for, and a peer that answers no ping for so long is lost.
_DEADLINE_S, _SILENCE_S = 12, 3

#: Blocks that a peer writes straight into are held for so long after it was killed.
_LEASE_S, _LINGER_S = 5, 40

#: What a server on a busy machine takes beyond that to say so.
_SLACK_S = 8


@dataclass(slots=True)
class Pair:
    """A prefill and a decode that may be replaced. `other`: a decode of another model."""

    plain: Server
    first: Server
    second: Server
    other: Server
    servers: Servers

    def open_transfers(self, server: Server, gauge: str) -> float:
        """`kvmover_open_sends` or `_receives`, as kvmover itself tells Prometheus."""
        return server.metrics(gauge, port=int(server.command.environment["KVMOVER_METRICS_PORT"]))[gauge]

    def again(self, server: Server) -> Server:
        """The same server anew, on its port."""
        begun = self.servers.again(server)
        warm(begun)
        return begun


def _server(name: str, *arguments: Any, options: Mapping[str, str] | None = None, **named: Any) -> Command:
    environment = {
        "KVMOVER_MOVER_LEASE_S": str(_LEASE_S),
        "KVMOVER_MOVER_LINGER_S": str(_LINGER_S),
        "KVMOVER_METRICS_PORT": str(free_port()),
        "KVMOVER_MOVER_PING_S": "0.5",
        "KVMOVER_MOVER_SILENCE_S": str(_SILENCE_S),
    }
    kv = kvmover(deadline_s=_DEADLINE_S, **(options or {}))
    return vllm(name, *arguments, kv=kv, environment=environment, **named)


@pytest.fixture(scope="module")
def pair(plain: Server, servers: Servers, model: ModelMaker) -> Pair:
    weights = model("qwen3", "vllm")
    started = servers.start(
        _server("vllm-faults-prefill", weights),
        _server("vllm-faults-decode", weights, block_tokens=32),
        _server("vllm-faults-other-model", model("qwen3-other", "vllm")),
    )
    warm(plain.ready(), *started)
    first, second, _ = started
    assert split(first, second, range(50)).ok  # they have met
    return Pair(plain, *started, servers)


@contextmanager
def begun(call: Any, items: Sequence[Any]) -> Iterator[list[Future[Answer]]]:
    """All of them at once, under way."""
    with ThreadPoolExecutor(len(items)) as pool:
        yield [pool.submit(call, item) for item in items]


def until(condition: Any, within_s: float) -> float:
    """How long it took to become true. Fails when it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        time.sleep(0.05)
    return time.monotonic() - began


def slowest(answers: Sequence[Answer]) -> str:
    return f"{max(answer.seconds for answer in answers):.1f} s"


def is_idle(server: Server) -> bool:
    return server.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"] == 0


def halves(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Mapping[str, Any]]]:
    """Prompts that the prefill has computed, with what it said for the decode."""
    answers = many(lambda prompt: prefill(pair.first, prompt), prompts)
    return [(prompt, answer.params or {}) for prompt, answer in zip(prompts, answers, strict=True)]


def test_a_prefill_that_is_killed_while_transfers_are_open(pair: Pair, results: Results) -> None:
    """It is stopped first, so that its transfers are open for certain. Decode computes the prompts itself."""
    prompts = prompts_of(20, seed=50, least_tokens=100)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    computed = halves(pair, prompts)
    pair.first.pause()
    with begun(lambda half: ask(pair.second, half[0], 16, half[1]), computed) as answers:
        until(lambda: pair.open_transfers(pair.second, "kvmover_open_receives") >= 10, 20)
        open_ = pair.open_transfers(pair.second, "kvmover_open_receives")
        pair.first.kill()
        killed = time.monotonic()
        got = [answer.result() for answer in answers]
        took = time.monotonic() - killed
    said = f"{open_:.0f} transfers open at the kill; all tokens {took:.1f} s after it"
    assert not results.add("vllm", "kill -9 of prefill", wanted, got, said).failed
    assert took < _SILENCE_S + _SLACK_S
    assert usage(pair.second) == 0

    pair.first = pair.again(pair.first)
    _served(pair, results, "prefill restarted beside its decode", seed=51)


def test_prompts_are_computed_long_before_the_blocks_are_free_that_a_killed_prefill_might_write(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, written = model("qwen3", "vllm"), {"verb": "push", "route": "direct"}
    first, second = servers.start(
        _server("vllm-faults-prefill-direct", weights, options=written),
        _server("vllm-faults-decode-direct", weights, options=written),
    )
    warm(plain.ready(), first, second)
    assert split(first, second, range(50)).ok
    pair = Pair(plain, first, second, second, servers)
    prompts = prompts_of(20, seed=62, least_tokens=100)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    computed = halves(pair, prompts)
    first.pause()
    with begun(lambda half: ask(second, half[0], 16, half[1]), computed) as answers:
        until(lambda: pair.open_transfers(second, "kvmover_open_receives") >= 10, 20)
        first.kill()
        killed = time.monotonic()
        got = [answer.result() for answer in answers]
        took = time.monotonic() - killed
    held = not is_idle(second)
    until(lambda: is_idle(second), _LEASE_S + _LINGER_S + _SLACK_S)
    freed = time.monotonic() - killed
    said = f"all tokens {took:.1f} s after it, the blocks that it might write {freed:.1f} s"
    servers.stop([first, second])
    assert not results.add("vllm", "kill -9 of prefill, direct", wanted, got, said).failed
    assert took < _SILENCE_S + _SLACK_S
    assert held
    assert freed > _LINGER_S / 2


def _served(pair: Pair, results: Results, scenario: str, seed: int) -> None:
    prompts = prompts_of(20, seed=seed)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    before = pair.second.metrics("vllm:kvmover_received_requests_total")
    got = many(lambda prompt: split(pair.first, pair.second, prompt), prompts)
    after = pair.second.metrics("vllm:kvmover_received_requests_total")
    moved = sum(after.values()) - sum(before.values())
    assert not results.add("vllm", scenario, wanted, got, f"{moved:.0f} moved").failed
    assert moved >= len(prompts) - 2
    assert usage(pair.first) == usage(pair.second) == 0


def test_a_decode_that_is_killed_while_transfers_are_open(pair: Pair, results: Results) -> None:
    """What it had asked for is given up when it is lost, what nobody asked for at its deadline."""
    prompts = prompts_of(20, seed=52, least_tokens=100)
    computed = halves(pair, prompts)
    made = time.monotonic()
    held = pair.first.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"]
    pair.first.pause()
    with begun(lambda half: ask(pair.second, half[0], 16, half[1]), computed[:10]) as answers:
        until(lambda: pair.open_transfers(pair.second, "kvmover_open_receives") >= 10, 20)
        pair.second.kill()
        got = [answer.result() for answer in answers]
    assert all(answer.status == 0 for answer in got)
    pair.first.resume()
    lost = until(lambda: pair.open_transfers(pair.first, "kvmover_open_sends") <= 10, _SILENCE_S + _SLACK_S)
    left = pair.first.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"]
    until(lambda: is_idle(pair.first), _DEADLINE_S + _SLACK_S)
    freed = time.monotonic() - made
    said = f"cache {held:.0%} held, {left:.0%} {lost:.1f} s after it came back, none {freed:.1f} s after the prefill"
    pair.second = pair.again(pair.second)
    prompts = prompts_of(20, seed=53)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    got = many(lambda prompt: split(pair.first, pair.second, prompt), prompts)
    assert not results.add("vllm", "kill -9 of decode, then a new one", wanted, got, said).failed
    assert usage(pair.first) == usage(pair.second) == 0


@pytest.mark.parametrize("who", ["first", "second"])
def test_a_half_that_is_stopped_for_thirty_seconds(who: str, pair: Pair, results: Results) -> None:
    """A stopped prefill: decode computes in its stead. A stopped decode: its clients wait, and get the right tokens."""
    prompts = prompts_of(20, seed=54, least_tokens=100)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    computed = halves(pair, prompts)
    stopped: Server = getattr(pair, who)
    stopped.pause()
    began = time.monotonic()
    with begun(lambda half: ask(pair.second, half[0], 16, half[1]), computed) as answers:
        time.sleep(max(0.0, began + 30 - time.monotonic()))
        stopped.resume()
        got = [answer.result() for answer in answers]
    names = {"first": "prefill", "second": "decode"}
    assert not results.add("vllm", f"SIGSTOP of {names[who]} for 30 s", wanted, got, f"slowest {slowest(got)}").failed
    until(lambda: is_idle(pair.first) and is_idle(pair.second), _DEADLINE_S + _SLACK_S)
    _served(pair, results, f"after SIGSTOP of {names[who]}", seed=55)


def test_clients_that_leave_and_answers_nobody_asks_for(pair: Pair, results: Results) -> None:
    prompts = prompts_of(20, seed=56, least_tokens=200, most_tokens=1200)
    computed = halves(pair, prompts)
    at_decode = many(lambda half: ask(pair.second, half[0], 200, half[1], 0.3), computed[:10], at_once=10)
    long = prompts_of(10, seed=57, least_tokens=900, most_tokens=1900)
    at_prefill = many(lambda prompt: prefill(pair.first, prompt, 0.1), long, at_once=10)
    left = sum(answer.status == 0 for answer in at_decode + at_prefill)
    freed = until(lambda: is_idle(pair.first) and is_idle(pair.second), _DEADLINE_S + _SLACK_S)
    assert left >= 10
    prompts = prompts_of(20, seed=58)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    got = many(lambda prompt: split(pair.first, pair.second, prompt), prompts)
    said = f"{left} clients left, 10 answers never asked for; cache free after {freed:.1f} s"
    assert not results.add("vllm", "clients that leave", wanted, got, said).failed


def test_an_answer_asked_for_twice_and_late(pair: Pair, results: Results) -> None:
    """Twice at the same time, again when it was served, after the prefill's deadline: nobody waits for a deadline."""
    prompts = prompts_of(7, seed=59, least_tokens=100)
    wanted = [answer for answer in many(lambda prompt: ask(pair.plain, prompt), prompts) for _ in range(3)]
    computed = halves(pair, prompts)
    got: list[Answer] = []
    for prompt, params in computed[:4]:
        with begun(lambda _, p=prompt, q=params: ask(pair.second, p, 16, q), [0, 1]) as answers:
            got += [answer.result() for answer in answers]
        got.append(ask(pair.second, prompt, 16, params))
    time.sleep(_DEADLINE_S + 1)
    for prompt, params in computed[4:]:
        got += [ask(pair.second, prompt, 16, params) for _ in range(3)]
    assert not results.add("vllm", "asked twice, again and late", wanted, got, f"slowest {slowest(got)}").failed
    assert max(answer.seconds for answer in got) < _DEADLINE_S
    assert usage(pair.first) == usage(pair.second) == 0


def _remote(engine: Any, request: Any, host: Any, port: Any) -> dict[str, Any]:
    where = {"remote_engine_id": engine, "remote_request_id": request, "remote_host": host, "remote_port": port}
    return {"do_remote_prefill": True, **where}


#: What a client may send. Whatever it is, its prompt is computed or it is told what is wrong, and the server lives.
JUNK: Sequence[Any] = [
    {},
    {"do_remote_prefill": True},
    _remote(1, [1], {}, []),
    *(_remote("x", "y", "127.0.0.1", port) for port in ("z", -1, 1e9, 1, True, 1.5, [9])),
    _remote("x", "y", "no such host", 9),
    _remote("x" * 100_000, "y", "a" * 70_000, 9),
    {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": {"a": 1}},
    {"do_remote_decode": 7, "transfer_id": [None]},
    {"do_remote_prefill": None, "remote_port": float(1 << 62), "other": "\x00"},
]


def test_junk_in_kv_transfer_params(pair: Pair, results: Results) -> None:
    """Beside junk of its own, a right answer's parameters with one value wrong."""
    prompt = prompts_of(1, seed=60, least_tokens=100)[0]
    plain = ask(pair.plain, prompt)
    right = halves(pair, [prompt])[0][1]
    keys = [key for key in right if key.startswith("remote_")]
    wrong = [{**right, key: value} for key in keys for value in (None, -1, "x", [], {"a": 1})]
    sent = [*JUNK, *wrong]
    answers = [ask(pair.second, prompt, 16, params) for params in sent]
    got = [answer for answer in answers if answer.ok]
    refused = [answer for answer in answers if not answer.ok]
    assert all(400 <= answer.status < 500 for answer in refused), refused
    said = f"{len(refused)} refused with HTTP 4xx, slowest {slowest(answers)}"
    results.add("vllm", "junk in kv_transfer_params", [plain] * len(got), got, said)
    assert ask(pair.second, prompt).tokens == plain.tokens
    until(lambda: is_idle(pair.first) and is_idle(pair.second), _DEADLINE_S + _SLACK_S)


def test_a_decode_of_another_model(pair: Pair, results: Results) -> None:
    """It does not take KV of another model: its tokens are its own."""
    prompts = prompts_of(20, seed=61, least_tokens=100)
    wanted = many(lambda prompt: ask(pair.other, prompt), prompts)
    got = many(lambda prompt: split(pair.first, pair.other, prompt), prompts)
    moved = pair.other.metrics("vllm:kvmover_received_bytes_total")
    assert not results.add("vllm", "decode of another model", wanted, got, f"slowest {slowest(got)}").failed
    assert not any(moved.values())
    until(lambda: is_idle(pair.first), _DEADLINE_S + _SLACK_S)
