"""Waiting for a prefill is quiet, and a poll in which nothing is due asks nobody: counted on virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvmover.layout import Fleet
from kvmover.transfer import mover as mover_module
from kvmover.transfer.destination import destination_machine
from kvmover.transfer.events import Tick
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import MAX_TIMERS, Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.result import Gate
from kvmover.transfer.source import source_driver, source_machine
from tests.transfer.mover_fleets import CONFIG, HandClock, Pair
from tests.transfer.mover_network import FaultyNetwork

#: Requests that wait, and for how long each time.
OPEN, SECONDS = 100, 10.0
STEP_S = 0.05


class Never:
    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return False


class Heard(FaultyNetwork):
    """Counts what is said, by its kind, and how many notes it took."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.notes, self.loses = Counter[type](), 0, Counter[type]()

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        self.notes += 1
        for encoded in wire.split(note):
            message = wire.decode(encoded)
            self.said[type(message)] += 1
            if self.loses[type(message)] > 0:
                self.loses[type(message)] -= 1
                return
        FaultyNetwork.tell(self, sender, peer, note)


def waiting(tp: int = 1, requests: int = OPEN) -> Pair:
    config = replace(CONFIG, deadline_s=300.0, silence_s=100.0, ping_s=0.5, resend_s=1.0)
    pair = Pair.of(
        Fleet(tp=tp, page_tokens=4), config=config, network=Heard(), clock=HandClock(), pages=2 * wire.MAX_BATCH
    )
    for number in range(requests):
        pair.dst.movers[0].receive(f"r{number}", "prefill", range(8), [[2 * number, 2 * number + 1]])
    pair.bench.turn()
    return pair


def wait(pair: Pair, seconds: float = SECONDS) -> None:
    for _ in range(round(seconds / STEP_S)):
        pair.bench.clock.now += STEP_S
        pair.bench.turn(1)


def test_a_request_that_waits_for_its_prefill_is_asked_for_once():
    pair = waiting(tp=2)
    network = pair.bench.network
    assert (network.said[wire.Want], network.said[wire.Noted]) == (2 * OPEN, 2 * OPEN)
    wait(pair)
    assert (network.said[wire.Want], network.said[wire.Noted]) == (2 * OPEN, 2 * OPEN)
    assert network.said.keys() <= {wire.Hello, wire.Ping, wire.Pong, wire.Want, wire.Noted}


def test_what_is_said_while_requests_wait_does_not_grow_with_them():
    """Pings both ways and their answers, twice a second each, of 8 ranks and one."""
    many, few = waiting(tp=8, requests=OPEN), waiting(tp=8, requests=1)
    for pair in (many, few):
        pair.bench.network.notes = 0
        wait(pair)
        assert pair.bench.network.notes <= 2 * 8 * 2 * 2 * SECONDS


def test_a_noted_that_is_lost_costs_one_more_want():
    pair = waiting(requests=0)
    network = pair.bench.network
    network.loses[wire.Noted] = 1
    pair.dst.movers[0].receive("r", "prefill", range(8), [[0, 1]])
    pair.bench.turn()
    wait(pair)
    assert (network.said[wire.Want], network.said[wire.Noted]) == (2, 2)


def test_who_says_hello_again_is_asked_again():
    """It lost us for a moment, and has dropped what it had noted."""
    pair = waiting(requests=3)
    source, network = pair.src.movers[0], pair.bench.network
    source._lose(pair.dst.movers[0]._transport.name, "cut off for a moment")
    assert not len(source._source.early)
    wait(pair, 5.0)
    assert len(source._source.early) == 3
    assert network.said[wire.Want] == 6


def test_what_is_said_to_a_peer_in_one_poll_is_one_note():
    pair = waiting(requests=0)
    source, target, network = pair.src.movers[0], pair.dst.movers[0], pair.bench.network
    target.poll()
    network.notes = 0
    for number in range(wire.MAX_BATCH):
        target.receive(f"many{number}", "prefill", range(8), [[2 * number, 2 * number + 1]])
    assert network.notes == 0
    target.poll()
    assert network.notes == 2  # a ping is one more than one note holds
    source.poll()
    assert network.said[wire.Noted] == wire.MAX_BATCH
    assert network.notes == 4
    assert target.meter.counts[Count.NOTES] < target.meter.counts[Count.MESSAGES]


def stepped(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each state machine is told of time from now on."""
    ticks = Counter[str]()
    for machine in (destination_machine, source_machine):

        def counted(
            state: Any, event: Any, now: float, honest: Any = machine.step, name: str = machine.__name__
        ) -> Any:
            ticks[name] += isinstance(event, Tick)
            return honest(state, event, now)

        monkeypatch.setattr(machine, "step", counted)
    return ticks


def test_a_poll_in_which_nothing_is_due_steps_no_attempt(monkeypatch: pytest.MonkeyPatch):
    pair, event = waiting(), Never()
    for number in range(0, OPEN, 2):  # half of them are being computed
        pair.src.movers[0].send(f"r{number}", [[0, 1]], gates=[Gate(event)])
    wait(pair, 3.0)
    ticks, asked = stepped(monkeypatch), event.asked
    pair.bench.turn(10)
    assert not ticks
    assert event.asked == asked + 10 * OPEN // 2, "each gate once a poll, and of nothing else"


def test_gates_of_requests_that_nobody_asked_for_are_not_asked():
    pair, event = waiting(requests=0), Never()
    pair.src.movers[0].send("r", [[0, 1]], gates=[Gate(event)])
    pair.bench.turn()
    assert event.asked == 0


def test_of_more_gates_than_a_poll_asks_each_has_its_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_driver, "MAX_GATES", 30)
    pair, events = waiting(), [Never() for _ in range(OPEN)]
    for number, event in enumerate(events):
        pair.src.movers[0].send(f"r{number}", [[0, 1]], gates=[Gate(event)])
    before = sum(event.asked for event in events)
    pair.src.movers[0].poll()
    assert sum(event.asked for event in events) == before + 30
    pair.bench.turn(7)
    assert all(event.asked >= 2 for event in events)


def test_what_falls_due_at_once_is_worked_off_over_several_polls(monkeypatch: pytest.MonkeyPatch):
    pair = waiting(requests=3 * MAX_TIMERS)
    ticks, target = stepped(monkeypatch), pair.dst.movers[0]
    pair.bench.clock.now += 1.0  # all were asked at one time
    for _ in range(10):
        before = ticks.total()
        busy = target.poll()
        assert ticks.total() - before <= MAX_TIMERS
        assert busy or ticks.total() - before < MAX_TIMERS
    assert ticks.total() == 3 * MAX_TIMERS


def test_what_is_said_at_once_is_heard_over_several_polls(monkeypatch: pytest.MonkeyPatch):
    pair = waiting(tp=8, requests=0)
    monkeypatch.setattr(mover_module, "MAX_HEARD", 4)
    heard, target, answer = Counter[str](), pair.dst.movers[0], Mover._answer
    monkeypatch.setattr(
        Mover, "_answer", lambda mover, *said: (heard.update([mover._core.card.place.engine]), answer(mover, *said))
    )
    for number in range(3):
        target.receive(f"r{number}", "prefill", range(8), [[2 * number, 2 * number + 1]])
    target.poll()
    for mover in pair.src.movers:  # a note of up to three Noted from each of 8 ranks
        mover.poll()
    heard.clear()
    polls = 0
    while target.poll():
        polls += 1
        assert heard["decode"] <= polls * (4 + 2)
        assert heard["decode"] >= polls * 4 or not target._events
    assert heard["decode"] >= 3 * 8


def test_deadlines_pass_however_many_fall_due_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mover_module, "MAX_TIMERS", 4)
    pair = waiting()
    target: Mover = pair.dst.movers[0]
    pair.bench.clock.now += 301.0
    pair.bench.turn(2 * OPEN)
    pair.bench.clock.now += CONFIG.drain_s
    pair.bench.turn(OPEN)
    assert not target._destination._attempts
    assert not target.snapshot().gauges["open_receives"]
