"""A request is mostly Python's overhead a call, on both sides: its calls are counted, so that none creeps in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.protocol.wire import Verb
from tests.steps_of import calls_of
from tests.transfer.mover_fleets import CONFIG, Bench, HandClock

KV, FLEET = Component.attention(2, 2, 16, "bfloat16"), Fleet(page_tokens=16)

#: Calls of both sides together for a request of one chunk, with the polls of the loopback transport.
MOST = {
    (Route.DIRECT, Verb.PUSH): 770,
    (Route.DIRECT, Verb.PULL): 905,
    (Route.PACKED, Verb.PUSH): 970,
    (Route.PACKED, Verb.PULL): 1160,
}


@pytest.mark.parametrize(("route", "verb"), MOST)
def test_a_request_of_one_chunk_takes_few_calls(route: Route, verb: Verb) -> None:
    bench = Bench((KV,), replace(CONFIG, route=route, verb=verb), HandClock())
    target, source = (bench.engine(name, FLEET).movers[0] for name in ("decode", "prefill"))
    target.connect(source.card)
    bench.turn()

    def moved(request: str) -> None:
        source.send(request, [[1]])
        landing = target.receive(request, "prefill", range(16), [[3]])
        while not landing.ended:
            source.poll()
            target.poll()

    moved("first")
    moved("second")
    assert calls_of(lambda: moved("third")) <= MOST[route, verb]


def test_an_idle_poll_takes_few_calls() -> None:
    bench = Bench((KV,), CONFIG, HandClock())
    mover = bench.engine("decode", FLEET).movers[0]
    mover.poll()
    assert calls_of(mover.poll) <= 10
