"""Reconnector: lost peers are tried again by their policy until they answer, are followed, or are given up."""

from __future__ import annotations

import math

import pytest

from kvmover.transfer.config import Backoff
from kvmover.transfer.peers.connections import Reconnector

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
