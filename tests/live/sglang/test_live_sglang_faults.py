"""Faults between live SGLang servers: what the client gets and when, and that nothing is held after its deadline.

A server of SGLang tries no request twice: whose transfer ends gets HTTP 500 with the reason, and its client may ask
again, as SGLang's own router does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.live.answers import Answer, Prompt, many, prompts_of
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import Room, ask, counted, halves, loads, room_at, split, uncomputed, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, router, sglang
from tests.live.table import Results

#: A half whose other half does not come is given up after so long, and a peer that answers no ping for so long is lost.
_DEADLINE_S, _SILENCE_S = 10, 4

#: What a server on a busy machine takes beyond that to say so.
_SLACK_S = 8

Halves = tuple[Answer, Answer]


@dataclass(slots=True)
class Pair:
    """A prefill and a decode that may be replaced. `other`: a decode of another model."""

    plain: Server
    prefill: Server
    decode: Server
    other: Server
    servers: Servers

    def wanted(self, prompts: Sequence[Prompt]) -> list[Answer]:
        return many(lambda prompt: ask(self.plain, prompt), prompts)

    def held(self, within_s: float = _SLACK_S) -> int:
        """What requests hold on both sides, waited for to become nothing."""
        return usage(self.prefill, within_s) + usage(self.decode, within_s)

    @contextmanager
    def under_way(self, prompts: Sequence[Prompt]) -> Iterator[list[Future[Halves]]]:
        """All of them, with transfers of some open."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            begun = [pool.submit(halves, self.prefill, self.decode, prompt) for prompt in prompts]
            until(lambda: counted(self.decode, "kvmover_open_receives") >= 5, 20)
            yield begun


def until(condition: Callable[[], bool], within_s: float) -> None:
    """Fails when it does not become true in time."""
    stop = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < stop, f"not within {within_s} s"
        time.sleep(0.02)


#: Of SGLang's router. Its circuit breaker would leave out the one decode, which says 500 for the prefill.
_ASKS_AGAIN = (
    *("--disable-circuit-breaker", "--retry-max-retries", "6", "--retry-initial-backoff-ms", "500"),
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
)

#: Packed, so that no page is held for longer than its request: see `_WRITTEN`.
_ENVIRONMENT = {
    "KVMOVER_MOVER_ROUTE": "packed",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(_DEADLINE_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(_DEADLINE_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "KVMOVER_MOVER_PING_S": "0.5",
    "KVMOVER_MOVER_SILENCE_S": str(_SILENCE_S),
}

#: Pages that a peer writes straight into are held for `lease_s` and `linger_s` after it was killed.
_LEASE_S, _LINGER_S = 5, 40
_WRITTEN = {
    **_ENVIRONMENT,
    "KVMOVER_MOVER_ROUTE": "direct",
    "KVMOVER_MOVER_LEASE_S": str(_LEASE_S),
    "KVMOVER_MOVER_LINGER_S": str(_LINGER_S),
}


@pytest.fixture(scope="module")
def pair(plain: Server, servers: Servers, model: ModelMaker) -> Pair:
    weights, prefixes = model("llama", "sglang"), DECODE_WITH_PREFIXES
    started = servers.start(
        sglang("sglang-faults-prefill", weights, mode=PREFILL, environment=_ENVIRONMENT),
        sglang("sglang-faults-decode", weights, mode=prefixes, environment=_ENVIRONMENT),
        sglang("sglang-faults-other", model("llama-other", "sglang"), mode=prefixes, environment=_ENVIRONMENT),
    )
    warm(plain.ready())
    pair = Pair(plain, *started, servers)
    # A pair meets at its first request: without that, a half that is stopped would not be found at all.
    assert split(pair.prefill, pair.decode, range(40)).ok
    return pair


def _served(pair: Pair, results: Results, scenario: str, seed: int) -> None:
    """As if nothing had been."""
    prompts = prompts_of(20, seed=seed)
    wanted = pair.wanted(prompts)
    before = counted(pair.decode, "kvmover_received_bytes_total")
    got = many(lambda prompt: split(pair.prefill, pair.decode, prompt), prompts)
    assert not results.add("sglang", scenario, wanted, got).failed
    assert counted(pair.decode, "kvmover_received_bytes_total") > before
    assert pair.held() == 0


@pytest.mark.alone
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_half_that_is_stopped_for_less_than_its_peers_patience(who: str, pair: Pair, results: Results) -> None:
    prompts = prompts_of(20, seed=50, least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)
    stopped: Server = getattr(pair, who)
    with pair.under_way(prompts) as begun:
        stopped.pause()
        time.sleep(_SILENCE_S / 2)
        stopped.resume()
        got = [each.result()[1] for each in begun]
    assert not results.add("sglang", f"SIGSTOP of {who} for {_SILENCE_S / 2:.0f} s", wanted, got).failed
    assert pair.held() == 0


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_half_that_is_stopped_for_thirty_seconds(who: str, pair: Pair, results: Results) -> None:
    """It is lost, and with it the requests that were under way. Their clients are told, those of the stopped half after
    it is back, at the deadline of its requests. A prefill's are told that late, too, where the transport still reads
    their pages for a decode that takes nothing: SGLang would give the pages to others. Then it serves."""
    prompts = prompts_of(20, seed=51, least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)
    stopped: Server = getattr(pair, who)
    with pair.under_way(prompts) as begun:
        stopped.pause()
        since = time.monotonic()
        time.sleep(30)
        stopped.resume()
        both = [each.result() for each in begun]
    took = time.monotonic() - since
    got = [second for _, second in both]
    of_the_other = [first if who == "decode" else second for first, second in both]
    slowest = max(answer.seconds for answer in of_the_other)
    failed = sum(not answer.ok for answer in got)
    said = f"{failed} failed; the other half was told within {slowest:.1f} s, all within {took:.1f} s"
    results.add("sglang", f"SIGSTOP of {who} for 30 s", wanted, got, said)
    assert failed
    assert all(answer.error for answer in got if not answer.ok)
    assert slowest < (30 if who == "decode" else _DEADLINE_S) + _SLACK_S
    assert took < 30 + _DEADLINE_S + _SLACK_S
    assert pair.held() == 0
    _served(pair, results, f"after SIGSTOP of {who} for 30 s", seed=52)


def test_a_prefill_that_is_killed_while_transfers_are_open(pair: Pair, results: Results) -> None:
    prompts = prompts_of(20, seed=53, least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)
    with pair.under_way(prompts) as begun:
        opened = counted(pair.decode, "kvmover_open_receives")
        pair.prefill.kill()
        since = time.monotonic()
        got = [each.result()[1] for each in begun]
    took = time.monotonic() - since
    failed = sum(not answer.ok for answer in got)
    said = f"{opened:.0f} transfers open; {failed} failed, the last {took:.1f} s after the kill"
    results.add("sglang", "kill -9 of prefill", wanted, got, said)
    held = usage(pair.decode, _SLACK_S)
    pair.prefill = pair.servers.again(pair.prefill)
    assert failed > 0
    assert took < _SILENCE_S + _SLACK_S
    assert held == 0
    _served(pair, results, "prefill restarted beside its decode", seed=54)


def test_sglangs_router_asks_the_other_prefill_for_requests_of_one_that_is_killed(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights, modes = model("llama", "sglang"), {"first": PREFILL, "second": PREFILL, "decode": DECODE_WITH_PREFIXES}
    first, second, decode = servers.start(
        *(sglang(f"sglang-again-{name}", weights, mode=mode, environment=_ENVIRONMENT) for name, mode in modes.items())
    )
    also = ("--prefill", second.url, str(second.command.bootstrap_port))
    (front,) = servers.start(router("sglang-again-router", first, decode, *also, *_ASKS_AGAIN))
    warm(plain.ready())
    assert all(split(prefill, decode, range(40)).ok for prefill in (first, second))
    prompts = prompts_of(20, seed=70, least_tokens=600, most_tokens=1500)
    wanted = many(lambda prompt: ask(plain, prompt), prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = [pool.submit(ask, front, prompt) for prompt in prompts]
        until(lambda: counted(decode, "kvmover_open_receives") >= 5, 20)
        opened = counted(decode, "kvmover_open_receives")
        first.kill()
        got = [each.result() for each in begun]
    scenario = "kill -9 of one of two prefills, SGLang's router asks again"
    verdict = results.add("sglang", scenario, wanted, got, f"{opened:.0f} transfers open")
    held = usage(decode, _SLACK_S) + usage(second, _SLACK_S)
    servers.stop([front, second, decode])
    assert verdict.same == len(prompts), verdict.failed
    assert held == 0


def test_clients_are_told_that_a_prefill_was_killed_long_before_the_pages_are_free_that_it_might_write(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("llama", "sglang")
    prefill, decode = servers.start(
        sglang("sglang-faults-prefill-direct", weights, mode=PREFILL, environment=_WRITTEN),
        sglang("sglang-faults-decode-direct", weights, mode=DECODE_WITH_PREFIXES, environment=_WRITTEN),
    )
    warm(plain.ready())
    pair = Pair(plain, prefill, decode, decode, servers)
    assert split(prefill, decode, range(40)).ok
    prompts = prompts_of(20, seed=69, least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)
    with pair.under_way(prompts) as begun:
        opened = counted(decode, "kvmover_open_receives")
        prefill.kill()
        since = time.monotonic()
        got = [each.result()[1] for each in begun]
    took, held = time.monotonic() - since, loads(decode)
    until(lambda: loads(decode) == 0, _LEASE_S + _LINGER_S + _SLACK_S)
    freed = time.monotonic() - since
    failed = sum(not answer.ok for answer in got)
    said = f"{opened:.0f} transfers open; {failed} told within {took:.1f} s; {held} tokens free after {freed:.1f} s"
    results.add("sglang", "kill -9 of prefill, direct", wanted, got, said)
    servers.stop([prefill, decode])
    assert failed > 0
    assert took < _SILENCE_S + _SLACK_S
    assert held > 0
    assert freed > _LINGER_S / 2


def test_a_decode_that_is_killed_while_transfers_are_open(pair: Pair, results: Results) -> None:
    """It had asked for some, which fail when it is lost; the others fail at a deadline from their computation on."""
    prompts = prompts_of(20, seed=55, least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)
    with pair.under_way(prompts) as begun:
        opened = counted(pair.decode, "kvmover_open_receives")
        pair.decode.kill()
        until(lambda: not uncomputed(pair.prefill), 60)
        since = time.monotonic()
        both = [each.result() for each in begun]
        took = time.monotonic() - since
        held = usage(pair.prefill, _DEADLINE_S + _SLACK_S)
    freed = time.monotonic() - since
    told = sum(not first.ok for first, _ in both)
    said = f"{opened:.0f} transfers open; {told} prefills told within {took:.1f} s, its cache free after {freed:.1f} s"
    results.add("sglang", "kill -9 of decode", wanted, [second for _, second in both], said)
    pair.decode = pair.servers.again(pair.decode)
    assert any(not second.ok for _, second in both)
    assert held == 0
    assert took < _DEADLINE_S + _SLACK_S
    _served(pair, results, "decode restarted beside its prefill", seed=56)


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_clients_that_leave(who: str, pair: Pair, results: Results) -> None:
    """Of a client that leaves one half, the other half's answer is right, or says why there is none."""
    prompts = prompts_of(20, seed=57 + len(who), least_tokens=600, most_tokens=1500)
    wanted = pair.wanted(prompts)

    def leave(prompt: Prompt) -> Halves:
        room = room_at(pair.prefill)
        patience = {half: 0.3 if who in (half, "both") else 60.0 for half in ("prefill", "decode")}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, pair.prefill, prompt, 100, room, patience["prefill"])
            second = ask(pair.decode, prompt, 16, room, patience["decode"])
            return first.result(), second

    with ThreadPoolExecutor(len(prompts)) as pool:
        both = list(pool.map(leave, prompts))
    began = time.monotonic()
    assert pair.held(_DEADLINE_S + _SLACK_S) == 0
    freed = time.monotonic() - began
    left = sum(answer.status == 0 for halves_ in both for answer in halves_)
    said = f"{left} left; nothing held {freed:.1f} s after the last answer"
    results.add("sglang", f"clients that leave {who}", wanted, [second for _, second in both], said)
    assert left >= 10
    _served(pair, results, f"after clients that left {who}", seed=61 + len(who))


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_half_whose_other_half_never_comes(who: str, pair: Pair, results: Results) -> None:
    prompts = prompts_of(20, seed=66, least_tokens=100)
    server: Server = getattr(pair, who)
    got = many(lambda prompt: ask(server, prompt, room=room_at(pair.prefill)), prompts, at_once=20)
    slowest = max(answer.seconds for answer in got)
    results.add("sglang", f"asked of {who} alone", pair.wanted(prompts), got, f"all told within {slowest:.1f} s")
    assert all(answer.status == 500 and answer.error for answer in got)
    assert slowest < _DEADLINE_S + _SLACK_S
    assert pair.held() == 0


def test_two_requests_in_one_room(pair: Pair, results: Results) -> None:
    """The second is refused at once where it comes to the first. A half that is done with the first by then takes it,
    and waits for the other half, which refused it, until the deadline. A room may come again when it is free."""
    prompts = [prompt for prompt in prompts_of(10, seed=67, least_tokens=300) for _ in range(2)]
    wanted = pair.wanted(prompts)
    rooms: list[Room] = [room for _ in range(10) for room in [room_at(pair.prefill)] * 2]

    def enter(number: int) -> Answer:
        return halves(pair.prefill, pair.decode, prompts[number], 16, rooms[number])[1]

    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(enter, range(len(prompts))))
    refused = [answer for answer in got if not answer.ok]
    alone = [answer for answer in refused if "has another request in it" not in answer.error]
    said = f"{len(refused)} refused, {len(alone)} of them by one half"
    results.add("sglang", "two requests in one room", wanted, got, said)
    assert not [answer.error for answer in alone if "deadline passed" not in answer.error]
    assert len(alone) < len(refused)
    assert max(answer.seconds for answer in refused) < _DEADLINE_S + _SLACK_S
    assert pair.held() == 0
    again = [enter(number) for number in range(0, len(prompts), 2)]
    assert not results.add("sglang", "a room that comes again", wanted[::2], again).failed
    assert pair.held() == 0


def test_a_decode_of_another_model(pair: Pair, results: Results) -> None:
    """It is told what differs, and the prefill that nobody will ask: neither waits for a deadline."""
    prompts = prompts_of(20, seed=68, least_tokens=100)
    wanted = many(lambda prompt: ask(pair.plain, prompt), prompts)
    with ThreadPoolExecutor(8) as pool:
        both = list(pool.map(lambda prompt: halves(pair.prefill, pair.other, prompt), prompts))
    slowest = max(answer.seconds for each in both for answer in each)
    said = f"both halves told within {slowest:.1f} s"
    results.add("sglang", "decode of another model", wanted, [second for _, second in both], said)
    assert all("peer holds weights" in second.error for _, second in both)
    assert not any(first.ok for first, _ in both)
    assert slowest < _DEADLINE_S
    assert usage(pair.prefill) == usage(pair.other) == 0
    assert counted(pair.other, "kvmover_received_bytes_total") == 0
