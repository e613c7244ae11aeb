"""Pages of a failed receive on paper time: who may still write them is asked, and they come back when nobody may."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.destination.quarantine import ASK_S, CLOCK_DRIFT
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb

QUIET = replace(CONFIG, route=Route.DIRECT, deadline_s=300.0, silence_s=200.0)


@dataclass
class Held:
    """A receive that was aborted while the writes of all its sources, two ranks, were under way."""

    verb: Verb = Verb.PUSH
    clock: HandClock = field(default_factory=HandClock)
    network: FaultyNetwork = field(default_factory=FaultyNetwork)

    def __post_init__(self) -> None:
        config = replace(QUIET, verb=self.verb)
        self.pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config, clock=self.clock, network=self.network)
        self.network.hold()
        (self.asked,) = self.pair.receive()
        self.pair.send()
        self.pair.bench.turn(20)
        self.sources, (self.target,) = list(self.pair.src.movers), self.pair.dst.movers
        for source in self.sources:
            self.pair.bench.movers.remove(source)

    def give_up(self) -> None:
        """Abort, and wait until the sources were asked for long enough; they are stopped."""
        self.target.abort(self.asked, "enough")
        self.pass_time(QUIET.drain_s + 0.1)
        assert self.asked.ended
        assert self.asked.quarantined

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.clock.now += 0.1
            self.target.poll()

    def aborts_to(self, source: Mover) -> list[str]:
        """The reasons of Aborts that a stopped source has not heard."""
        inbox = source._transport.inbox
        said = [wire.decode(each) for note in inbox for each in wire.split(note.payload)]
        inbox.clear()
        return [each.reason for each in said if isinstance(each, wire.Abort)]


def test_each_source_that_has_not_drained_is_asked_again_in_intervals_with_the_reason() -> None:
    held = Held()
    held.give_up()
    for source in held.sources:
        held.aborts_to(source)
    before = held.target.meter.counts[Count.RESENT_MESSAGES]
    held.pass_time(3 * ASK_S)
    assert [held.aborts_to(source) for source in held.sources] == [["enough"] * 3] * 2
    assert held.target.meter.counts[Count.RESENT_MESSAGES] == before + 6


def test_a_source_that_is_lost_is_not_asked_and_its_pages_come_back_by_the_clock() -> None:
    held = Held()
    granted = held.clock.now
    held.give_up()
    held.network.cut(held.sources[0]._transport.name)
    held.pass_time(2 * ASK_S)
    assert held.target.ranks("prefill") == {1}
    before = held.target.meter.counts[Count.RESENT_MESSAGES]
    held.pass_time(3 * ASK_S)
    assert held.target.meter.counts[Count.RESENT_MESSAGES] == before + 3, "of the other one alone"
    over = granted + QUIET.lease_s * CLOCK_DRIFT + QUIET.linger_s
    held.pass_time(over - held.clock.now - 0.2)
    assert held.asked.quarantined
    held.pass_time(QUIET.drain_s + 0.5)
    assert not held.asked.quarantined


def test_a_source_that_drains_frees_its_part_and_the_last_one_the_pages() -> None:
    held = Held()
    held.give_up()
    held.network.deliver()
    for source in held.sources:
        assert held.asked.quarantined
        for _ in range(5):
            source.poll()
            held.target.poll()
    assert not held.asked.quarantined


@pytest.mark.parametrize("is_over", [False, True], ids=["while it is open", "when it is over"])
def test_a_rank_that_is_dead_is_waited_for_no_more_and_others_are(is_over: bool) -> None:
    held = Held()
    if is_over:
        held.give_up()
    held.target.forget("prefill", 1)
    held.pass_time(QUIET.drain_s + 0.1)
    assert held.asked.result is not None
    assert held.asked.result.reason == "enough" if is_over else "dead" in str(held.asked.result.reason)
    assert held.asked.quarantined, "rank 0 may write"
    held.target.forget("prefill", 0)
    assert not held.asked.quarantined


def test_pages_that_this_side_reads_into_come_back_when_the_last_read_has_ended() -> None:
    held = Held(Verb.PULL)
    held.give_up()
    held.pass_time(2 * (QUIET.lease_s + QUIET.linger_s))
    assert held.asked.quarantined, "no clock ends a read"
    for rank in range(2):
        held.target.forget("prefill", rank)
    assert held.asked.quarantined, "nor does a death"
    held.network.deliver()
    held.pass_time(0.2)
    assert not held.asked.quarantined
