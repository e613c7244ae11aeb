"""Tries to reach a lost peer come later and later, stop at once when they are pointless, and never come all at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.transfer import backoff
from kvmover.transfer.backoff import Backoff, Dial, Dialling, GiveUp, Idle, Lost, Reached, Replaced, Tick, Waiting, step

STEADY = Backoff(jitter=0)
GENERATIONS = st.integers(0, 3)
EVENTS = st.one_of(
    st.builds(Lost, GENERATIONS, st.just("cut off")),
    st.builds(Reached, GENERATIONS),
    st.builds(Replaced, GENERATIONS),
    st.just(Tick()),
)


def dial_times(policy: Backoff, name: str = "peer") -> list[float]:
    """When a peer that never answers is dialled, by a caller that wakes when told to."""
    state, now, times = Idle(name, 1), 0.0, list[float]()
    state, actions = step(policy, state, Lost(1, "died"), now)
    while not any(isinstance(action, GiveUp) for action in actions):
        now = backoff.due(state)
        state, actions = step(policy, state, Tick(), now)
        assert actions == (Dial(name, 1),)
        times.append(now)
        state, actions = step(policy, state, Lost(1, "refused"), now)
    return times


def test_the_waits_double_from_half_a_second_to_half_a_minute() -> None:
    times = dial_times(STEADY)
    waits = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30]


def test_giving_up_says_after_how_many_tries_and_why_the_last_one_failed() -> None:
    state, actions = step(Backoff(attempts=2), Dialling("d3", 7, 1), Lost(7, "connection refused"), 5.0)
    assert actions == (GiveUp("d3", "d3 was not reached in 2 tries: connection refused"),)
    assert state == Idle("d3", 7)
    assert backoff.due(state) == math.inf


def test_a_peer_that_was_given_up_is_tried_again_when_it_is_lost_again() -> None:
    state, actions = step(STEADY, Idle("d3", 7), Lost(7, "cut off"), 100.0)
    assert (state, actions) == (Waiting("d3", 7, 0, 100.5, "cut off"), ())


def test_an_answer_ends_the_tries_and_the_next_loss_starts_from_half_a_second() -> None:
    state, actions = step(STEADY, Dialling("d3", 7, 5), Reached(7), 40.0)
    assert (state, actions) == (Idle("d3", 7), ())
    state, _ = step(STEADY, state, Lost(7, "cut off"), 50.0)
    assert backoff.due(state) == 50.5


def test_an_answer_that_comes_while_waiting_ends_the_tries_too() -> None:
    state, actions = step(STEADY, Waiting("d3", 7, 2, 9.0, "cut off"), Reached(7), 8.0)
    assert (state, actions) == (Idle("d3", 7), ())
    assert step(STEADY, state, Tick(), 9.0) == (state, ())


@pytest.mark.parametrize("state", [Waiting("d3", 7, 2, 9.0, "died"), Dialling("d3", 7, 2)], ids=["waiting", "dialling"])
def test_a_newer_generation_of_the_same_place_cancels_the_tries(state: backoff.State) -> None:
    after, actions = step(STEADY, state, Replaced(8), 8.5)
    assert (after, actions) == (Idle("d3", 8), ())
    assert step(STEADY, after, Tick(), 1e9) == (after, ())
    # What is still heard of the old one, from a dial that was under way, starts nothing.
    assert step(STEADY, after, Lost(7, "refused"), 9.0) == (after, ())
    assert step(STEADY, after, Reached(7), 9.0) == (after, ())


def test_the_same_generation_announced_again_cancels_nothing() -> None:
    waiting = Waiting("d3", 7, 2, 9.0, "cut off")
    assert step(STEADY, waiting, Replaced(7), 8.0) == (waiting, ())


def test_a_second_loss_while_waiting_neither_hastens_nor_delays_the_next_try() -> None:
    state, actions = step(STEADY, Waiting("d3", 7, 2, 9.0, "cut off"), Lost(7, "no answer"), 8.9)
    assert (state, actions) == (Waiting("d3", 7, 2, 9.0, "no answer"), ())


def test_a_tick_before_its_time_does_nothing() -> None:
    waiting = Waiting("d3", 7, 2, 9.0, "cut off")
    assert step(STEADY, waiting, Tick(), 8.999) == (waiting, ())


def test_jitter_is_the_same_for_a_name_and_spreads_many_over_a_quarter_of_the_wait() -> None:
    waits = [Backoff().wait_s(f"decode-{rank} > prefill-0", 6) for rank in range(1000)]
    assert waits == [Backoff().wait_s(f"decode-{rank} > prefill-0", 6) for rank in range(1000)]
    assert all(22.5 < wait <= 30 for wait in waits)
    tenths = [sum(22.5 + 0.75 * i < wait <= 22.5 + 0.75 * (i + 1) for wait in waits) for i in range(10)]
    assert min(tenths) > 60, tenths


def test_no_wait_is_longer_than_the_longest_whatever_the_attempt() -> None:
    assert all(0 < Backoff().wait_s("peer", attempt) <= 30 for attempt in (0, 7, 63, 64, 1000, 10**9))


@pytest.mark.parametrize(
    "wrong",
    [{"first_s": 0}, {"first_s": 31}, {"most_s": math.inf}, {"jitter": 1}, {"jitter": -0.1}, {"attempts": 0}],
    ids=str,
)
def test_a_wait_that_is_no_time_is_refused_by_its_name_and_value(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(LayoutError, match=rf"^backoff\.{name} = {wrong[name]}: must be "):
        Backoff(**wrong)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 50))), st.integers(1, 4))
def test_whatever_happens_no_more_dials_follow_a_loss_than_the_limit_and_none_is_for_an_old_generation(
    history: list[tuple[backoff.Event, float]], attempts: int
) -> None:
    policy = Backoff(attempts=attempts)
    state: backoff.State = Idle("peer", 0)
    newest, in_a_row, now = 0, 0, 0.0
    for event, later in history:
        now += later
        before = state
        state, actions = step(policy, state, event, now)
        if not isinstance(event, Tick):
            newest = max(newest, event.generation)
        assert state.generation == newest
        for action in actions:
            if isinstance(action, Dial):
                assert action.generation == newest
                assert isinstance(before, Waiting)
                assert now >= before.due
                in_a_row += 1
        if isinstance(state, Idle) or state.generation != before.generation:
            in_a_row = 0
        assert in_a_row <= attempts
        assert (backoff.due(state) < math.inf) == isinstance(state, Waiting)
