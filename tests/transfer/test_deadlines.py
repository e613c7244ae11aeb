"""A request may have a deadline of its own, on either side."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mover_fleets import HandClock, Pair

from kvmover.errors import PlanError
from kvmover.transfer.result import Cause


@pytest.mark.parametrize("deadline_s", [1.0, 100])
def test_a_request_fails_at_the_deadline_that_it_was_given(deadline_s: float):
    clock = HandClock()
    pair = Pair.of(clock=clock)
    sent = pair.src.movers[0].send("nobody asks", pair.src_tables[0], deadline_s=deadline_s)
    wanted = pair.dst.movers[0].receive(
        "nobody sends", "prefill", range(100), pair.dst_tables[0], deadline_s=deadline_s
    )
    while clock.now < 1000.0 + deadline_s - 0.25:
        clock.now += 0.25
        pair.bench.turn(2)
    assert not sent.ended
    assert not wanted.ended
    for _ in range(16):
        clock.now += 0.25
        pair.bench.turn(2)
    assert sent.result is not None
    assert wanted.result is not None
    assert (sent.result.cause, wanted.result.cause) == (Cause.DEADLINE, Cause.DEADLINE)
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("odd", [0, -1.0, math.inf, math.nan, "10", True])
def test_a_deadline_that_is_no_time_is_refused_at_the_call(odd: Any):
    pair = Pair.of()
    with pytest.raises(PlanError, match="deadline_s"):
        pair.src.movers[0].send("request", pair.src_tables[0], deadline_s=odd)
    with pytest.raises(PlanError, match="deadline_s"):
        pair.dst.movers[0].receive("request", "prefill", range(100), pair.dst_tables[0], deadline_s=odd)
