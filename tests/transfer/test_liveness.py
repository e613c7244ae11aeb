"""Liveness: who is pinged and who is lost, whatever the caller's own pauses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.peers.liveness import Liveness

PING_S, SILENCE_S = 0.5, 10.0


def test_a_peer_that_is_awaited_is_pinged_at_once_and_then_in_intervals():
    liveness = Liveness(PING_S, SILENCE_S)
    pinged = [now for tenths in range(21) if liveness.due(["a"], now := tenths / 10)[0]]
    assert pinged == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_peer_that_nothing_is_awaited_from_is_left_alone_and_its_silence_is_no_loss():
    liveness = Liveness(PING_S, SILENCE_S)
    liveness.due(["a"], 0.0)
    assert liveness.due([], 5.0) == ([], [])
    assert liveness.due(["a"], 11.0) == (["a"], [])  # silent since now
    assert liveness.due(["a"], 11.0 + SILENCE_S)[1] == ["a"]


def test_a_peer_that_answers_nothing_for_so_long_is_lost_once():
    liveness = Liveness(PING_S, SILENCE_S)
    liveness.due(["a", "b"], 0.0)
    liveness.heard("b")
    assert liveness.due(["a", "b"], SILENCE_S - 0.1) == (["a", "b"], [])
    ping, lost = liveness.due(["a", "b"], SILENCE_S)
    assert lost == ["a"]
    assert "a" not in ping
    assert liveness.due(["b"], SILENCE_S + 0.1)[1] == []


def test_a_side_that_did_not_run_for_a_while_blames_nobody():
    """SIGSTOP for a minute, then CONT: the answers of that minute are heard before anybody is blamed."""
    liveness = Liveness(PING_S, SILENCE_S)
    liveness.due(["a"], 0.0)
    liveness.heard("a")
    assert liveness.due(["a"], 60.0) == (["a"], [])
    assert liveness.due(["a"], 60.0 + SILENCE_S - 0.1)[1] == []
    liveness.heard("a")
    assert liveness.due(["a"], 60.0 + SILENCE_S)[1] == []


def test_a_peer_that_was_greeted_is_greeted_again_until_it_says_anything():
    liveness = Liveness(PING_S, SILENCE_S)
    for peer in "ab":
        liveness.greeted(peer, 100.0)
    assert liveness.strangers(100.0 + PING_S - 0.1) == ([], [])
    assert liveness.strangers(100.0 + PING_S) == (["a", "b"], [])
    assert liveness.strangers(100.0 + PING_S + 0.1) == ([], [])
    liveness.heard("a")
    assert liveness.strangers(100.0 + 2 * PING_S) == (["b"], [])


def test_a_peer_that_never_answers_a_greeting_is_lost_once_and_one_that_is_forgotten_is_not():
    liveness = Liveness(PING_S, SILENCE_S)
    for peer in "ab":
        liveness.greeted(peer, 100.0)
    liveness.forget("b")
    assert liveness.strangers(100.0 + SILENCE_S - 0.1) == (["a"], [])
    assert liveness.strangers(100.0 + SILENCE_S) == ([], ["a"])
    assert liveness.strangers(200.0) == ([], [])


def test_strangers_may_be_heard():
    Liveness(PING_S, SILENCE_S).heard("stranger")


@given(
    steps=st.lists(st.tuples(st.floats(0, 3), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))),
)
def test_who_answers_every_ping_is_never_lost_and_who_answers_none_is(steps: list[tuple[float, set[str], set[str]]]):
    liveness, now = Liveness(PING_S, SILENCE_S), 0.0
    since: dict[str, float] = {}  # of the first ping that nothing followed
    for wait, awaited, answer in steps:
        now += wait
        ping, lost = liveness.due(awaited, now)
        assert set(ping) <= awaited
        assert set(lost) == {peer for peer in awaited if peer in since and now - since[peer] >= SILENCE_S}
        since = {peer: at for peer, at in since.items() if peer in awaited and peer not in lost}
        since |= {peer: now for peer in ping if peer not in since}
        for peer in answer:
            liveness.heard(peer)
            since.pop(peer, None)
