"""A poller wakes for the end of a transfer that its costs foresee: counted on virtual time, without a clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.layout import Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Pace
from kvmover.transfer.expected_ends import ExpectedEnds
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Gate
from tests.transfer.mover_fleets import CONFIG, HandClock, Pair

times = st.integers(0, 1000)


def waited(pace: Pace, ends: ExpectedEnds, over: float) -> tuple[int, float]:
    """The naps until an event at `over` is seen, begun at 0, and how late it is seen."""
    now, naps = 0.0, 0
    while now < over:
        now += pace.nap_s(now, 1, ends.distance_s(now))
        naps += 1
    return naps, now - over


@given(st.lists(times, max_size=6), st.lists(times, min_size=1, max_size=6))
def test_the_nearest_expected_end_counts_whether_ahead_or_passed(ends: list[int], asked: list[int]) -> None:
    expected = ExpectedEnds()
    for end in ends:
        expected.add(end, 0.0)
    for now in sorted(asked):
        assert expected.distance_s(now) == min((abs(end - now) for end in ends), default=math.inf)


@pytest.mark.parametrize(("over", "late_s"), [(0.0300, 1e-4), (0.0302, 1e-4), (0.0310, 3e-4), (0.0270, 8e-4)])
def test_an_end_near_its_expected_time_is_seen_sooner_at_few_naps_more(over: float, late_s: float) -> None:
    ends = ExpectedEnds()
    ends.add(0.03, 0.0)
    naps, late = waited(Pace(), ends, over)
    assert late <= late_s
    assert naps <= waited(Pace(), ExpectedEnds(), over)[0] + 30


def test_ends_that_have_passed_are_dropped_though_nobody_asks() -> None:
    ends = ExpectedEnds()
    for now in range(1000):
        ends.add(now + 3.0, now)
    assert len(ends) == 3
    assert ends.distance_s(1000.0) == 0.0


def test_without_an_expected_end_naps_are_as_before() -> None:
    assert Pace().nap_s(2e-3, 1, ExpectedEnds().distance_s(5.0)) == Pace().nap_s(2e-3, 1)


@pytest.mark.parametrize("route", [Route.DIRECT, Route.PACKED])
@pytest.mark.parametrize("verb", list(Verb))
def test_both_sides_expect_the_end_that_the_costs_of_the_route_give(route: Route, verb: Verb) -> None:
    clock = HandClock()
    pair = Pair.of(Fleet(page_tokens=4), config=replace(CONFIG, route=route, verb=verb), clock=clock)
    movers = pair.bench.movers
    assert {mover.to_expected_end_s() for mover in movers} == {math.inf}
    transfers = [*pair.send("r"), *pair.receive("r")]
    pair.bench.ended(transfers)
    (result,) = {(each.landed().nbytes, each.landed().runs) for each in transfers}
    due_s = CONFIG.costs.us(route, *result) / 1e6
    assert [mover.to_expected_end_s() for mover in movers] == pytest.approx([due_s, due_s])
    clock.now += due_s + 1.0
    assert [mover.to_expected_end_s() for mover in movers] == pytest.approx([1.0, 1.0])


def test_nothing_is_expected_of_a_request_that_is_still_computed_and_has_no_pages() -> None:
    pair = Pair.of(Fleet(page_tokens=4), clock=HandClock())
    pair.src.send("request", pair.src_tables, [Gate(Never())])
    pair.dst.movers[0].receive("request", "prefill", range(pair.tokens), None)
    pair.bench.turn()
    assert {mover.to_expected_end_s() for mover in pair.bench.movers} == {math.inf}


class Never:
    def query(self) -> bool:
        return False
