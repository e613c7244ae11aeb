"""Retransmissions: a source that owed nothing is told of its request and its end until it is known to know."""

from __future__ import annotations

import math

from kvmover.transfer.destination.quarantine import Key, Retransmissions

RESEND_S = 1.0
KEY: Key = ("prefill3.1", "request", 7)
OTHER: Key = ("prefill4.1", "request", 7)


def said(*keys: Key) -> Retransmissions:
    farewells = Retransmissions()
    for key in keys:
        farewells.said(key, key[0].encode(), due=10.0, until=15.0)
    return farewells


def test_it_is_said_again_in_intervals_and_not_for_ever():
    farewells = said(KEY)
    assert farewells.due(KEY) == 10.0
    times = [now / 2 for now in range(16, 40) if farewells.again(KEY, now / 2, RESEND_S) == b"prefill3.1"]
    assert times == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert len(farewells) == 0
    assert farewells.due(KEY) == math.inf


def test_one_answer_ends_one_farewell():
    third = ("prefill3.1", "request", 8)
    farewells = said(KEY, OTHER, third)
    farewells.heard(KEY)
    farewells.heard(("nobody", "request", 7))
    assert [farewells.due(key) for key in (KEY, OTHER, third)] == [math.inf, 10.0, 10.0]
    assert farewells.again(KEY, 10.0, RESEND_S) is None


def test_a_lost_peer_is_told_nothing_more():
    farewells = said(KEY, OTHER, ("prefill3.1", "other", 8))
    farewells.lost("prefill3.1")
    assert len(farewells) == 1
    assert farewells.again(OTHER, 10.0, RESEND_S) == b"prefill4.1"
