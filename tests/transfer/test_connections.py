"""Reconnector: lost peers are tried again by their policy until they answer, are followed, or are given up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.transfer.config import Backoff
from kvmover.transfer.events import Tick
from kvmover.transfer.peers.connections import (
    Dial,
    Dialling,
    Event,
    GiveUp,
    Idle,
    Lost,
    Reconnector,
    State,
    Waiting,
    step,
)

STEADY = Backoff(jitter=0)
EVENTS = st.one_of(st.just(Lost("cut off")), st.just(Tick()))


def dial_times(policy: Backoff, name: str = "peer") -> list[float]:
    """When a peer that never answers is dialled, by a caller that wakes when it is due."""
    now, times = 0.0, list[float]()
    state, action = step(policy, Idle(name), Lost("died"), now)
    while not isinstance(action, GiveUp):
        assert isinstance(state, Waiting)
        now = state.due
        state, action = step(policy, state, Tick(), now)
        assert action == Dial()
        times.append(now)
        state, action = step(policy, state, Lost("refused"), now)
    return times


def test_the_waits_double_from_half_a_second_to_half_a_minute() -> None:
    times = dial_times(STEADY)
    waits = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30]


def test_giving_up_says_after_how_many_tries_and_why_the_last_one_failed() -> None:
    state, action = step(Backoff(attempts=2), Dialling("d3", 1), Lost("connection refused"), 5.0)
    assert action == GiveUp("d3 was not reached in 2 tries: connection refused")
    assert state == Idle("d3")
    assert step(STEADY, state, Tick(), 1e9) == (state, None)


def test_a_peer_that_was_given_up_is_tried_again_when_it_is_lost_again() -> None:
    assert step(STEADY, Idle("d3"), Lost("cut off"), 100.0) == (Waiting("d3", 0, 100.5, "cut off"), None)


def test_a_second_loss_while_waiting_neither_hastens_nor_delays_the_next_try() -> None:
    after = step(STEADY, Waiting("d3", 2, 9.0, "cut off"), Lost("no answer"), 8.9)
    assert after == (Waiting("d3", 2, 9.0, "no answer"), None)


def test_a_tick_before_its_time_does_nothing() -> None:
    waiting = Waiting("d3", 2, 9.0, "cut off")
    assert step(STEADY, waiting, Tick(), 8.999) == (waiting, None)


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


def test_who_is_refused_many_times_for_one_greeting_waits_and_does_not_use_up_its_tries() -> None:
    """A refusal that a network repeats is heard after the peer is lost: what speaks then says nothing new."""
    reconnector, now = Reconnector(Backoff(first_s=1.0, most_s=8.0, jitter=0.0, attempts=4), 10.0), 100.0
    reconnector.refused("peer", now)
    reconnector.lost("peer", b"card", ("engine", 0), "no seat", now)
    due = reconnector.next_due()
    assert due > now
    for _ in range(20):
        assert not reconnector.heard("peer", now + 0.1)
    assert reconnector.next_due() == due
    assert reconnector.due(due - 0.1) == ([], [])
    assert reconnector.due(due) == ([("peer", b"card")], [])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 50))), st.integers(1, 4))
def test_whatever_happens_no_more_dials_follow_a_loss_than_the_limit_and_none_comes_early(
    history: list[tuple[Event, float]], attempts: int
) -> None:
    policy = Backoff(attempts=attempts)
    state: State = Idle("peer")
    in_a_row, now = 0, 0.0
    for event, later in history:
        now += later
        before = state
        state, action = step(policy, state, event, now)
        if isinstance(action, Dial):
            assert isinstance(before, Waiting)
            assert now >= before.due
            in_a_row += 1
        assert isinstance(action, GiveUp) == (isinstance(state, Idle) and not isinstance(before, Idle))
        if isinstance(state, Idle):
            in_a_row = 0
        assert in_a_row <= attempts


POLICY = Backoff(first_s=0.5, most_s=4.0, jitter=0, attempts=3)
ANSWER_S = 10.0
SEAT = ("prefill", 0)


def lost(now: float = 0.0, name: str = "prefill0.1") -> Reconnector:
    redial = Reconnector(POLICY, ANSWER_S)
    redial.lost(name, b"card", SEAT, "cut off", now)
    return redial


def test_a_lost_peer_is_dialled_with_its_card_after_the_first_wait():
    redial = lost()
    assert redial.due(0.4) == ([], [])
    assert redial.due(0.5) == ([("prefill0.1", b"card")], [])
    assert redial.due(0.6) == ([], [])


def test_a_peer_that_answers_is_back_once():
    redial = lost()
    redial.due(0.5)
    assert redial.heard("prefill0.1", 0.6)
    assert not redial.heard("prefill0.1", 0.7)
    assert redial.due(1e9) == ([], [])


def test_a_peer_that_speaks_while_we_wait_is_dialled_at_once_but_is_not_back_yet():
    redial = lost()
    assert not redial.heard("prefill0.1", 0.1)
    assert redial.due(0.1) == ([("prefill0.1", b"card")], [])
    assert redial.heard("prefill0.1", 0.2)


def test_strangers_and_peers_that_were_never_lost_are_not_back():
    assert not lost().heard("prefill1.1", 0.0)


def test_a_dial_that_nobody_answers_is_told_of_until_it_is_counted_as_a_loss():
    redial = lost()
    redial.due(0.5)
    assert redial.due(0.5 + ANSWER_S - 0.1) == ([], [])
    assert redial.due(0.5 + ANSWER_S) == ([], ["prefill0.1"])
    redial.lost("prefill0.1", b"card", SEAT, "does not answer", 10.5)
    assert redial.due(11.4) == ([], [])
    assert redial.due(11.5) == ([("prefill0.1", b"card")], [])  # the wait doubled


def test_tries_come_later_and_later_and_end():
    redial, now, dials = lost(), 0.0, list[float]()
    while now < 100:
        if redial.due(now)[0]:
            dials.append(now)
            redial.lost("prefill0.1", b"card", SEAT, "refused", now)
        now += 0.25
    assert dials == [0.5, 1.5, 3.5]
    redial.lost("prefill0.1", b"card", SEAT, "cut off", 200.0)  # it was back in between, or a late message says so
    assert redial.due(200.5)[0] == [("prefill0.1", b"card")]


def test_more_news_of_a_loss_do_not_put_the_try_off():
    redial = lost()
    for tenths in range(1, 5):
        redial.lost("prefill0.1", b"card", SEAT, "ping failed", tenths / 10)
    assert redial.due(0.5)[0]


def test_a_successor_ends_the_tries_at_its_predecessor_and_at_nobody_else():
    redial = lost()
    redial.lost("prefill1.1", b"other", ("prefill", 1), "cut off", 0.0)
    redial.seated(SEAT, "prefill0.1")  # the same one
    redial.seated(SEAT, "prefill0.2")
    assert redial.due(math.inf)[0] == [("prefill1.1", b"other")]


def test_a_peer_that_is_given_up_is_told_of_once_with_the_number_of_tries_and_the_last_reason(
    caplog: pytest.LogCaptureFixture,
):
    redial = lost()
    for attempt, now in enumerate((0.5, 1.5, 3.5)):
        assert len(redial) == 1
        assert redial.due(now)[0]
        redial.lost("prefill0.1", b"card", SEAT, f"refused {attempt}", now)
    assert len(redial) == 0
    assert caplog.messages == ["prefill0.1 was not reached in 3 tries: refused 2; it is dialled no more"]
