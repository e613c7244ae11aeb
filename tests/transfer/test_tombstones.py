"""Tombstones: a source remembers for a while how attempts and requests ended, and no more than fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mover_fleets import Pair

from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer import tombstones
from kvmover.transfer import tombstones as closed
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.source.source_driver import EarlyWants
from kvmover.transfer.tombstones import ENTRY_BYTES, HALF, Budget, Tombstones, TtlMap


def test_an_entry_is_there_until_its_end_and_no_longer():
    table = TtlMap[str, int](8)
    table.keep("a", 1, until=2.0)
    table.keep("b", 2, until=3.0)
    table.expire(1.9)
    assert (table.get("a"), table.get("b")) == (1, 2)
    table.expire(2.0)
    assert (table.get("a"), table.get("b"), len(table)) == (None, 2, 1)


def test_a_full_table_forgets_what_it_was_told_first():
    table = TtlMap[int, None](3)
    for key in range(5):
        table.keep(key, None, until=9.0)
    assert [key in table for key in range(5)] == [False, False, True, True, True]


def test_what_is_kept_again_counts_as_new():
    table = TtlMap[str, int](2)
    table.keep("a", 1, until=1.0)
    table.keep("b", 2, until=2.0)
    table.keep("a", 3, until=5.0)
    table.keep("c", 4, until=6.0)
    assert (table.get("a"), table.get("b"), table.get("c")) == (3, None, 4)
    table.expire(1.0)
    assert table.get("a") == 3, "its first end no longer counts"


def test_looking_for_ends_visits_only_what_has_ended():
    """A poll is many times a second, and a busy rank remembers tens of thousands."""
    visits = 0

    class Counted(float):
        def __le__(self, other: object) -> bool:
            nonlocal visits
            visits += 1
            return float(self) <= float(other)  # type: ignore[arg-type]

        def __gt__(self, other: object) -> bool:
            return not self <= other

    table = TtlMap[int, None](10_000)
    for key in range(1000):
        table.keep(key, None, until=Counted(1.0 if key < 10 else 2.0))
    table.expire(1.5)
    assert (len(table), visits) == (990, 11)


KEY = ("request", "decode0.1")


def reason(memory: Tombstones, generation: int) -> str | None:
    outcome = memory.of(*KEY, generation)
    return None if outcome is None else outcome.reason or "landed"


def test_an_attempt_and_those_before_it_are_over_and_later_ones_are_not():
    memory = Tombstones()
    memory.close(KEY, 7, "enough", 10.0)
    assert [reason(memory, generation) for generation in (6, 7, 8)] == ["enough", "enough", None]
    assert memory.of("request", "decode1.1", 7) is None
    assert memory.of("other", "decode0.1", 7) is None


def test_the_newest_attempt_counts_whatever_the_order_of_the_news():
    memory = Tombstones()
    memory.close(KEY, 8, None, 10.0)
    memory.close(KEY, 7, "enough", 10.0)
    assert reason(memory, 7) == reason(memory, 8) == "landed"
    outcome = memory.of(*KEY, 8)
    assert outcome is not None


def test_what_is_over_for_long_is_forgotten():
    memory = Tombstones()
    memory.close(KEY, 7, "enough", 10.0)
    memory.end("request", "no room", 20.0)
    memory.expire(9.9)
    assert reason(memory, 7) == "enough"
    memory.expire(10.0)
    assert reason(memory, 7) is None
    assert memory.ending("request") == "no room"
    memory.expire(20.0)
    assert memory.ending("request") is None


def test_a_request_that_is_over_is_open_again_when_it_is_reopened():
    memory = Tombstones()
    memory.end("request", "no room", 10.0)
    memory.reopen("other")
    assert memory.ending("request") == "no room"
    memory.reopen("request")
    memory.reopen("request")
    assert memory.ending("request") is None


def test_only_so_many_are_remembered_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(closed, "MAX_TOMBSTONES", 3)
    memory = Tombstones()
    for n in range(5):
        memory.close((f"request-{n}", "decode0.1"), 1, "enough", 10.0)
        memory.end(f"request-{n}", "no room", 10.0)
    known = [n for n in range(5) if memory.of(f"request-{n}", "decode0.1", 1)]
    assert known == [n for n in range(5) if memory.ending(f"request-{n}")] == [2, 3, 4]


def test_news_of_what_is_remembered_push_out_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(closed, "MAX_TOMBSTONES", 2)
    memory = Tombstones()
    for generation in range(10):
        for name in ("one", "two"):
            memory.close((name, "decode0.1"), generation, "enough", 10.0)
            memory.end(name, "no room", 10.0)
    for name in ("one", "two"):
        assert memory.of(name, "decode0.1", 9)
        assert memory.ending(name)


def test_of_a_peer_that_says_too_much_nothing_more_is_remembered_and_of_others_everything(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(tombstones, "PEER_BYTES", 20_000)
    memory = Tombstones()
    for n in range(100):
        memory.close((f"request-{n}", "loud.1"), 1, "x" * 100, 10.0)
        memory.close((f"request-{n}", f"quiet.{n}"), 1, "enough", 10.0)
    loud = [n for n in range(100) if memory.of(f"request-{n}", "loud.1", 1)]
    assert loud == list(range(len(loud)))
    assert 5 < len(loud) < 20
    assert memory.budget.kept_bytes("loud.1") <= 10_000
    assert all(memory.of(f"request-{n}", f"quiet.{n}", 1) for n in range(100))
    memory.expire(10.0)
    assert memory.budget.kept_bytes("loud.1") == 0


def test_a_budget_is_filled_to_its_last_byte_and_what_is_given_back_is_no_entry():
    budget = Budget()
    assert not budget.take("a", tombstones.PEER_BYTES - ENTRY_BYTES + 1)
    assert budget.take("a", tombstones.PEER_BYTES // 2 - 2 * ENTRY_BYTES, HALF)
    assert budget.take("a", 0, HALF)
    assert not budget.take("a", 0, HALF)
    budget.give("a", 0)
    assert budget.kept_bytes("a") == tombstones.PEER_BYTES // 2 - ENTRY_BYTES
    budget.give("a", tombstones.PEER_BYTES // 2 - 2 * ENTRY_BYTES)
    assert not budget._kept, "a peer without an entry takes no place in the table"


def test_an_entry_that_is_kept_again_is_dropped_first_and_ends_by_its_own_time():
    dropped = list[tuple[str, int]]()
    table = TtlMap[str, int](3, lambda key, value: dropped.append((key, value)))
    table.keep("a", 1, until=2.0)
    table.keep("b", 2, until=4.0)
    table.keep("a", 3, until=5.0)
    assert dropped == [("a", 1)]
    table.expire(4.0)
    assert (table.get("a"), table.get("b")) == (3, None)
    assert dropped == [("a", 1), ("b", 2)]


def test_an_attempt_takes_four_bytes_a_character_of_its_request_and_reason_and_gives_them_back():
    memory = Tombstones()
    for reason, characters in [("enough", len("request") + 6), (None, len("request")), ("x" * 500, 507)]:
        memory.close(KEY, 7, reason, 10.0)
        assert memory.budget.kept_bytes(KEY[1]) == ENTRY_BYTES + 4 * characters
    memory.expire(10.0)
    assert not memory.budget._kept


def test_of_two_ends_of_one_attempt_the_later_counts_and_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tombstones, "PEER_BYTES", HALF * (ENTRY_BYTES + 4 * (len("request") + 6)))
    memory = Tombstones()
    memory.close(KEY, 7, "first!", 10.0)
    memory.close(KEY, 7, "second", 10.0)
    assert reason(memory, 7) == "second"


def test_a_mover_that_takes_over_knows_how_requests_of_the_one_before_ended():
    before, memory = Tombstones(), Tombstones()
    before.end("request", "no room", 10.0)
    before.close(KEY, 7, "enough", 10.0)
    memory.go_on_from(before)
    assert memory.ending("request") == "no room"
    assert reason(memory, 7) is None, "attempts are of its own peers"


def test_what_is_remembered_of_the_past_keeps_nobody_from_asking_for_more():
    """20,000 requests that a peer was served, as 160 a second within 125 s, and the next one that it asks for early."""
    memory = Tombstones()
    for n in range(20_000):
        memory.close((f"00000000-0000-0000-0000-{n:012}", "busy.1"), 1, None, 10.0)
    early = EarlyWants(memory.budget)
    peer: Any = SimpleNamespace(name="busy.1", card=SimpleNamespace(place=SimpleNamespace(engine="busy")))
    for n in range(1000):
        want = wire.Want(f"{n}", 1, 0, 64, Route.DIRECT, Replicas.STRIPE, 1 << 20, (bytes(4096),))
        assert early.wait(peer, want, 10.0)
    assert memory.budget.kept_bytes("busy.1") <= tombstones.PEER_BYTES


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "after it was sent"])
def test_a_want_that_its_abort_overtook_is_answered_by_the_abort_and_opens_nothing(is_sent: bool):
    """Its pages have been given back: they may be another request's by now."""
    pair = Pair.of()
    source, target = pair.src.movers[0], pair.dst.movers[0]
    if is_sent:
        pair.send()
    (asked,) = pair.receive()
    target.poll()
    target.abort(asked, "enough")
    target.poll()
    inbox, heard = source._transport.inbox, target._transport.inbox
    said = [wire.decode(each) for note in inbox for each in wire.split(note.payload)]
    (want,) = (each for each in said if isinstance(each, wire.Want))
    assert isinstance(said[-1], wire.Abort)
    inbox.reverse()
    heard.clear()
    source.poll()
    answers = [wire.decode(each) for note in heard for each in wire.split(note.payload)]
    id_ = want.request, want.generation
    assert answers[:2] == [wire.Drained(*id_), wire.Abort(*id_, "enough")]
    assert not source._source.early
    assert not source._source._asked
    assert source.meter.counts[Count.LATE_MESSAGES] == 0
    assert all(not request.attempts for request in source._source._requests.values())
