"""Liveness: who is pinged and who is lost, whatever the caller's own pauses."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.peers.liveness import Duty, Liveness

PING_S, SILENCE_S = 0.5, 10.0


def watching(*peers: str) -> Liveness:
    liveness = Liveness(PING_S, SILENCE_S)
    for peer in peers:
        assert liveness.awaits(peer)
    return liveness


def test_a_peer_that_is_awaited_is_pinged_at_once_and_then_in_intervals():
    liveness = watching("a")
    pinged = [now for tenths in range(21) if liveness.look("a", now := tenths / 10) is Duty.PING]
    assert pinged == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_peer_is_watched_until_the_last_thing_that_is_awaited_from_it_has_come():
    liveness = watching("a")
    assert not liveness.awaits("a")
    liveness.awaits_no_more("a")
    assert set(liveness.awaited) == {"a"}
    assert liveness.look("a", 0.0) is Duty.PING
    liveness.awaits_no_more("a")
    assert not liveness.awaited
    assert liveness.due("a") == math.inf


def test_a_peer_that_nothing_is_awaited_from_is_left_alone_and_its_silence_is_no_loss():
    liveness = watching("a")
    liveness.look("a", 0.0)
    liveness.awaits_no_more("a")
    assert liveness.look("a", 5.0) is None
    assert liveness.awaits("a")
    assert liveness.look("a", 11.0) is Duty.PING  # silent since now
    assert liveness.look("a", 11.0 + SILENCE_S) is Duty.LOSE


def test_a_peer_that_answers_nothing_for_so_long_is_lost_once():
    liveness = watching("a", "b")
    assert [liveness.look(peer, 0.0) for peer in "ab"] == [Duty.PING] * 2
    liveness.heard("b")
    assert [liveness.look(peer, SILENCE_S - 0.1) for peer in "ab"] == [Duty.PING] * 2
    assert [liveness.look(peer, SILENCE_S) for peer in "ab"] == [Duty.LOSE, None]
    assert [liveness.look(peer, SILENCE_S + 0.1) for peer in "ab"] == [None, None]


def test_a_side_that_did_not_run_for_a_while_blames_nobody():
    """SIGSTOP for a minute, then CONT: the answers of that minute are heard before anybody is blamed."""
    liveness = watching("a")
    liveness.look("a", 0.0)
    liveness.heard("a")
    assert liveness.look("a", 60.0) is Duty.PING
    assert liveness.look("a", 60.0 + SILENCE_S - 0.1) is Duty.PING
    liveness.heard("a")
    assert liveness.look("a", 60.0 + SILENCE_S) is not Duty.LOSE


def test_a_seated_peer_that_nothing_is_awaited_from_is_pinged_when_it_has_been_silent_and_then_lost_once():
    liveness = Liveness(PING_S, SILENCE_S, idle_s=20.0)
    liveness.seated("a", 0.0)
    assert liveness.due("a") == 20.0
    assert liveness.look("a", 20.0) is Duty.PING
    assert liveness.due("a") == 20.0 + PING_S
    assert liveness.look("a", 20.0 + PING_S) is Duty.PING, "a ping that is lost is said again"
    assert liveness.look("a", 20.0 + SILENCE_S) is Duty.LOSE
    liveness.forget("a")
    assert liveness.due("a") == math.inf
    assert liveness.look("a", 99.0) is None


def test_a_seated_peer_that_speaks_is_pinged_no_more_than_once_in_two_looks():
    liveness, pinged = Liveness(PING_S, SILENCE_S, idle_s=20.0), list[float]()
    liveness.seated("a", 0.0)
    for now in range(201):
        if liveness.look("a", float(now)) is Duty.PING:
            pinged.append(now)
            liveness.heard("a")  # its Pong
    assert pinged == [20, 60, 100, 140, 180]


def test_a_seated_peer_that_speaks_by_itself_is_not_pinged():
    liveness = Liveness(PING_S, SILENCE_S, idle_s=20.0)
    liveness.seated("a", 0.0)
    for now in range(201):
        liveness.heard("a")
        assert liveness.look("a", float(now)) is None


def test_a_peer_that_was_greeted_is_greeted_again_until_it_says_anything():
    liveness = Liveness(PING_S, SILENCE_S)
    for peer in "ab":
        liveness.greeted(peer, 100.0)
    assert [liveness.look(peer, 100.0 + PING_S - 0.1) for peer in "ab"] == [None, None]
    assert [liveness.look(peer, 100.0 + PING_S) for peer in "ab"] == [Duty.GREET] * 2
    assert [liveness.look(peer, 100.0 + PING_S + 0.1) for peer in "ab"] == [None, None]
    liveness.heard("a")
    assert [liveness.look(peer, 100.0 + 2 * PING_S) for peer in "ab"] == [None, Duty.GREET]


def test_a_peer_that_never_answers_a_greeting_is_lost_once_and_one_that_is_forgotten_is_not():
    liveness = Liveness(PING_S, SILENCE_S)
    for peer in "ab":
        liveness.greeted(peer, 100.0)
    liveness.forget("b")
    assert [liveness.look(peer, 101.0) for peer in "ab"] == [Duty.GREET, None]
    assert [liveness.look(peer, 101.0 + SILENCE_S - 0.1) for peer in "ab"] == [Duty.GREET, None]
    assert [liveness.look(peer, 101.0 + SILENCE_S) for peer in "ab"] == [Duty.LOSE, None]
    assert [liveness.look(peer, 200.0) for peer in "ab"] == [None, None]


def test_who_greets_and_then_does_not_run_for_long_blames_nobody_for_its_own_silence():
    liveness = Liveness(PING_S, SILENCE_S)
    liveness.greeted("a", 100.0)
    assert liveness.look("a", 100.0 + 3 * SILENCE_S) is Duty.GREET
    assert liveness.look("a", 100.0 + 4 * SILENCE_S - 0.1) is Duty.GREET
    assert liveness.look("a", 100.0 + 4 * SILENCE_S) is Duty.LOSE


def test_strangers_may_be_heard():
    Liveness(PING_S, SILENCE_S).heard("stranger")


@given(
    steps=st.lists(st.tuples(st.floats(0, 3), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))),
)
def test_who_answers_every_ping_is_never_lost_and_who_answers_none_is(steps: list[tuple[float, set[str], set[str]]]):
    """And before its `due` there is nothing to do for anybody."""
    liveness, now = Liveness(PING_S, SILENCE_S), 0.0
    since: dict[str, float] = {}  # of the first ping that nothing followed
    for wait, awaited, answer in steps:
        now += wait
        for peer in "abc":
            if peer in awaited and peer not in liveness.awaited:
                liveness.awaits(peer)
            elif peer not in awaited and peer in liveness.awaited:
                liveness.awaits_no_more(peer)
        due = {peer: liveness.due(peer) for peer in "abc"}
        duties = {peer: liveness.look(peer, now) for peer in "abc"}
        assert all(duty is None for peer, duty in duties.items() if peer not in awaited or now < due[peer])
        assert all(liveness.due(peer) > now for peer in "abc" if duties[peer] is None)
        lost = {peer for peer, duty in duties.items() if duty is Duty.LOSE}
        assert lost == {peer for peer in awaited if peer in since and now - since[peer] >= SILENCE_S}
        since = {peer: at for peer, at in since.items() if peer in awaited and peer not in lost}
        since |= {peer: now for peer, duty in duties.items() if duty is Duty.PING and peer not in since}
        for peer in answer:
            liveness.heard(peer)
            since.pop(peer, None)
