"""A bad object is deleted on two looks and a permit; otherwise only this process forgets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmover.errors import StoreError
from kvmover.store.deletion import DELETIONS, DeletionDoor, Permit, TwoLooks
from kvmover.store.fetch import BLANK, MISSING
from kvmover.store.judgement import NOT_WHOLE, JudgedObjects, judge_object, judged, verified
from kvmover.store.objects import Failure, Fault, ObjectRead, Verdict
from kvmover.store.store_results import Counters
from kvmover.store.tenure import NoObjects


class Engine(JudgedObjects[Any], NoObjects):
    """A storage engine whose second look finds as told, and which notes what is done to its objects."""

    def __init__(self, verdict: Verdict, reason: str = "digest") -> None:
        super().__init__("")
        self.found: tuple[Verdict, str] | Exception = verdict, reason
        self.door = DeletionDoor(0.0)
        self.dropped: list[tuple[str, Verdict]] = []
        self.condemned: list[tuple[str, Permit]] = []

    def look_again(self, each: str) -> tuple[Verdict, str]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def permit(self, looks: TwoLooks) -> Permit | None:
        return self.door.ask(looks, 1, 0.0)

    def drop(self, each: str, verdict: Verdict) -> None:
        self.dropped.append((each, verdict))

    def condemn(self, each: str, permit: Permit) -> None:
        self.condemned.append((each, permit))


def failure(each: str) -> Failure[str]:
    read: ObjectRead[str] = ObjectRead(0, 0, each, None)  # pyright: ignore[reportArgumentType]
    return Failure(read, Fault.SUSPECT, "digest")


def test_a_whole_object_stays_and_is_not_counted():
    engine = Engine(Verdict.WELL, "")
    assert engine.judge(failure("a")) == (Verdict.WELL, "")
    assert not engine.dropped
    assert not engine.condemned
    assert engine.counters == Counters()


@pytest.mark.parametrize(("verdict", "spared"), [(Verdict.GONE, 0), (Verdict.SPARED, 1)])
def test_an_object_that_is_gone_or_unreadable_is_forgotten_here_alone(verdict: Verdict, spared: int):
    engine = Engine(verdict, "evicted")
    assert engine.judge(failure("a")) == (verdict, "evicted")
    assert engine.dropped == [("a", verdict)]
    assert not engine.condemned
    assert engine.counters == Counters(spared=spared)
    assert not engine.door.deleted


def test_a_bad_object_is_deleted_on_two_looks_until_the_budget_is_spent():
    engine = Engine(Verdict.BAD)
    names = [str(number) for number in range(DELETIONS + 2)]
    assert [engine.judge(failure(name))[0] for name in names] == [*[Verdict.BAD] * DELETIONS, *[Verdict.SPARED] * 2]
    assert [each for each, _ in engine.condemned] == names[:DELETIONS]
    assert {permit.grounds.reason for _, permit in engine.condemned} == {"digest"}
    assert engine.dropped == [(name, Verdict.SPARED) for name in names[DELETIONS:]]
    assert engine.counters.poisoned == {"digest": DELETIONS}
    assert engine.counters.spared == 2


@pytest.mark.parametrize("reason", [BLANK, MISSING])
def test_an_object_whose_blocks_were_freed_is_deleted_and_counts_as_gone(reason: str):
    engine = Engine(Verdict.BAD, reason)
    assert engine.judge(failure("a")) == (Verdict.GONE, reason)
    assert len(engine.condemned) == 1
    assert not engine.counters.poisoned


def test_an_object_whose_blocks_were_freed_is_spared_beyond_the_budget():
    engine = Engine(Verdict.BAD, BLANK)
    found = [engine.judge(failure(str(number)))[0] for number in range(DELETIONS + 1)]
    assert found == [*[Verdict.GONE] * DELETIONS, Verdict.SPARED]


def test_suspects_alone_are_looked_at_again():
    each = cast(Any, SimpleNamespace(nbytes=7))
    engine = Engine(Verdict.BAD)
    assert list(judged(engine, [(each, False), (each, True)])) == [(7, Verdict.WELL, ""), (7, Verdict.BAD, "digest")]
    assert len(engine.condemned) == 1


@pytest.mark.parametrize("error", [OSError(5, "no answer"), StoreError("no answer")])
def test_a_failing_system_is_no_evidence(error: Exception):
    engine = Engine(Verdict.BAD)
    engine.found = error
    assert engine.judge(failure("a")) == (Verdict.UNKNOWN, "no answer")
    with pytest.raises(type(error)):
        judge_object(engine, "a", NOT_WHOLE)
    assert not engine.dropped
    assert not engine.condemned
    assert engine.counters == Counters()


def test_a_verification_sums_what_it_finds_and_tells_of_every_object():
    heard: list[int] = []
    found = [(8, Verdict.WELL, ""), (4, Verdict.BAD, "digest"), (2, Verdict.SPARED, "EIO"), (1, Verdict.GONE, "x")]
    report = verified(found, heard.append)
    assert (report.objects, report.nbytes) == (4, 15)
    assert (report.bad, report.spared) == ({"digest": 1}, {"EIO": 1})
    assert heard == [8, 4, 2, 1]
    assert verified(found, None) == report
