"""Early wants: who asks before anything is sent is served when it is, and nobody fills the memory by asking."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer import tombstones
from kvmover.transfer.protocol import wire
from kvmover.transfer.source.source_driver import MAX_MESSAGES, EarlyWants


def peer(name: str = "decode0.1") -> Any:
    return SimpleNamespace(name=name, card=SimpleNamespace(place=SimpleNamespace(engine=f"engine of {name}")))


def want(request: str = "request", generation: int = 1, table_bytes: int = 0) -> wire.Want:
    pages = (b"\0" * table_bytes,) if table_bytes else ()
    return wire.Want(request, generation, 0, 64, Route.DIRECT, Replicas.STRIPE, 1 << 20, pages)


def waiting(wants: EarlyWants, request: str = "request") -> list[tuple[str, int]]:
    return [(each.peer.name, each.generation) for each in wants.take(request)]


def test_the_newest_want_of_each_peer_is_served_once():
    wants = EarlyWants()
    for name, generation in [("a", 1), ("b", 5), ("a", 3), ("a", 2)]:
        assert wants.wait(peer(name), want(generation=generation), 10.0)
    wants.wait(peer("a"), want("other"), 10.0)
    assert len(wants) == 3
    assert waiting(wants) == [("a", 3), ("b", 5)]
    assert waiting(wants) == []
    assert waiting(wants, "other") == [("a", 1)]
    assert len(wants) == 0


def test_a_want_that_comes_again_is_kept_as_long_again():
    wants = EarlyWants()
    wants.wait(peer("a"), want(generation=2), 10.0)
    wants.wait(peer("a"), want(generation=1), 20.0)
    assert wants.due("request", "a") == 10.0
    wants.wait(peer("a"), want(generation=2), 20.0)
    assert wants.due("request", "a") == 20.0
    assert len(wants) == 1


def test_what_follows_a_want_is_kept_with_it_and_not_without_end():
    wants, about = EarlyWants(), wire.Done("request", 1)
    assert not wants.follow(peer(), about)
    wants.wait(peer(), want(), 10.0)
    assert not wants.follow(peer(), wire.Done("request", 2))
    assert not wants.follow(peer("stranger"), about)
    assert all(wants.follow(peer(), about) for _ in range(MAX_MESSAGES + 5))
    (each,) = wants.take("request")
    assert each.messages() == [want(), *[about] * MAX_MESSAGES]


def test_a_want_that_names_more_pages_takes_the_place_of_the_one_before():
    wants = EarlyWants()
    for table_bytes in (8, 16, 12):
        wants.wait(peer(), want(table_bytes=table_bytes), 10.0)
    (each,) = wants.take("request")
    assert each.messages() == [want(table_bytes=16)]


def test_a_want_that_comes_again_keeps_what_followed_it():
    wants = EarlyWants()
    wants.wait(peer(), want(), 10.0)
    wants.follow(peer(), wire.Done("request", 1))
    wants.wait(peer(), want(), 20.0)
    (each,) = wants.take("request")
    assert each.messages() == [want(), wire.Done("request", 1)]


def test_a_want_is_withdrawn_by_its_own_attempt_and_the_answer_says_whether_there_was_one():
    wants = EarlyWants()
    assert not wants.withdraw(peer(), wire.Abort("request", 1, "enough"))
    wants.wait(peer(), want(generation=2), 10.0)
    assert not wants.withdraw(peer(), wire.Abort("request", 1, "of the past"))
    assert wants.withdraw(peer(), wire.Abort("request", 2, "enough"))
    assert wants == EarlyWants()


def test_messages_behind_a_want_are_kept_while_the_budget_of_their_peer_lasts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tombstones, "PEER_BYTES", 8 * tombstones.ENTRY_BYTES)
    wants = EarlyWants()
    wants.wait(peer(), want(), 10.0)
    assert all(wants.follow(peer(), wire.Done("request", 1)) for _ in range(MAX_MESSAGES))
    (each,) = wants.take("request")
    assert len(each.said) == 6
    assert wants == EarlyWants()


def test_a_want_without_room_takes_the_one_before_it_along(monkeypatch: pytest.MonkeyPatch):
    """The attempt that asked first is over: its pages are another request's."""
    monkeypatch.setattr(tombstones, "PEER_BYTES", 3000)
    wants = EarlyWants()
    assert wants.wait(peer(), want(table_bytes=1000), 10.0)
    assert not wants.wait(peer(), want(generation=2, table_bytes=3000), 10.0)
    assert wants == EarlyWants()


def test_ranks_of_two_engines_that_waited_for_one_request_are_both_told_as_lost():
    wants = EarlyWants()
    for name in ("a", "b", "c"):
        wants.wait(peer(name), want(), 10.0)
    wants.wait(peer("c"), want("other"), 10.0)
    assert wants.lost("stranger", "nobody") == []
    assert wants.lost("a", "it died") == ["request"]
    assert wants.lost("b", "it is silent") == ["request"]
    assert wants.loss("request") == {"engine of a": "it died", "engine of b": "it is silent"}
    assert wants.loss("other") == {}
    assert (waiting(wants), waiting(wants, "other")) == ([("c", 1)], [("c", 1)])


@pytest.mark.parametrize("how", ["withdrawn", "lost", "late"])
def test_who_does_not_wait_any_more_is_not_served(how: str):
    wants = EarlyWants()
    wants.wait(peer("a"), want(generation=4, table_bytes=64), 10.0)
    wants.wait(peer("b"), want(), 20.0)
    if how == "withdrawn":
        wants.withdraw(peer("a"), wire.Abort("request", 3, "of the past"))
        assert len(wants) == 2
        wants.withdraw(peer("a"), wire.Abort("request", 4, "enough"))
    elif how == "lost":
        wants.lost("stranger", "it died")
        wants.lost("a", "it died")
        assert wants.loss("request") == {"engine of a": "it died"}
        assert wants.loss("request") == {}
    else:
        assert wants.due("request", "a") == 10.0
        assert not wants.drop_late("request", "a", 9.9)
        assert len(wants) == 2
        assert wants.drop_late("request", "a", 10.0)
        assert not wants.drop_late("request", "a", 10.0)
    assert len(wants) == 1
    assert waiting(wants) == [("b", 1)]
    assert wants == EarlyWants()


def test_a_loss_is_told_as_long_as_the_want_would_have_been_kept_and_nobody_asks_again():
    died = {"engine of a": "it died"}
    for then, told in [("nothing", died), ("it expires", {}), ("another asks", died), ("the same asks", {})]:
        wants = EarlyWants()
        wants.wait(peer("a"), want(generation=4), 10.0)
        wants.lost("a", "it died")
        assert not wants.peers
        wants.expire(10.0 if then == "it expires" else 9.9)
        if "asks" in then:
            wants.wait(peer("b" if then == "another asks" else "a"), want(generation=4), 20.0)
        assert wants.loss("request") == told


def test_who_waits_is_known_until_the_last_request_is_served():
    wants = EarlyWants()
    for request in ("one", "two"):
        wants.wait(peer("a"), want(request), 10.0)
    wants.wait(peer("a"), want("two", generation=2), 10.0)
    wants.wait(peer("b"), want("two"), 10.0)
    assert set(wants.peers) == {"a", "b"}
    wants.take("two")
    assert set(wants.peers) == {"a"}
    wants.take("one")
    assert not wants.peers


def test_what_is_kept_for_a_peer_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tombstones, "PEER_BYTES", 5024)
    wants = EarlyWants()
    assert wants.wait(peer("a"), want("one", 1, 2000), 10.0)
    assert not wants.wait(peer("a"), want("two", 1, 1400), 10.0)
    assert wants.wait(peer("b"), want("two", 1, 1400), 10.0), "another has its own"
    assert wants.wait(peer("a"), want("one", 2, 1000), 10.0), "in place of the one before"
    assert wants.wait(peer("a"), want("two", 1, 1000), 10.0)
    for _ in range(MAX_MESSAGES):
        assert wants.follow(peer("a"), wire.Granted("two", 1, (wire.Grant(1, 300, 300),) * 20))
    assert wants.budget.kept_bytes("a") <= 5024
    assert {each.peer.name: len(each.said) for each in wants.take("two")} == {"a": 0, "b": 0}
    assert waiting(wants, "one") == [("a", 2)]
    assert wants == EarlyWants()
