"""Every call of obstore fails once, in every way: nothing escapes, no byte is wrong, and no page is deleted for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bucket_stores import ERRORS, Faulty, names, open_over
from obstore.store import MemoryStore
from store_rank import GQA, PAGE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.store import PagePart, PageStore, Policy, Put
from tests.proofs import family

WHOLE = PagePart.whole(GQA, PAGE)
POLICY = Policy(segment_bytes=4 * WHOLE.nbytes)
THEIRS, MINE = pages_of(12, "theirs"), pages_of(10, "mine")


def safe(call: Callable[[], object]) -> bool:
    """Whether a call that may say StoreError did not."""
    try:
        call()
    except StoreError:
        return False
    return True


def life(service: MemoryStore, client: Faulty) -> list[bytes]:
    """One process's day in a bucket; which of its pages a flush called safe."""
    try:
        store = open_over(service, client, POLICY)
    except StoreError:
        return []
    rank = Rank(store, WHOLE)
    assert len(rank.exists(THEIRS)) == 12
    rank.get(THEIRS)
    written = [page for page, answer in zip(MINE, rank.put(MINE), strict=True) if answer.outcome is Put.WRITTEN]
    assert all(rank.exists(written)), "a page that was written is not found by who wrote it"
    flushed = written if safe(store.flush) else []
    rank.get(MINE)
    store.collect()
    store.objects.catalog.look()
    rank.get(THEIRS[:3])
    safe(store.verify)
    more = pages_of(3, "more")
    rank.put(more)
    flushed += more if all(rank.exists(more)) and safe(store.flush) else []
    store.close()
    return flushed


CASES = [(error, when) for error in ERRORS for when in ("before", "after")]
FEW = [CASES[0], CASES[1]]


@pytest.mark.parametrize(("error", "when"), family(CASES, FEW))
def test_one_call_that_fails_costs_nobody_a_page(error: Exception, when: str) -> None:
    number, is_over = 0, False
    while not is_over:
        service = MemoryStore()
        with open_over(service, policy=POLICY) as writer:
            Rank(writer, WHOLE).put(THEIRS)
        client = Faulty()
        client.error, client.fails = error, lambda call, _name, number=number: when if call == number else ""
        flushed = life(service, client)
        is_over = len(client.calls) <= number
        assert names(service, ".dead") == [], (number, client.calls[number])
        with open_over(service) as other:
            kept = Rank(other, WHOLE, slots=32)
            assert all(answer.ok for answer in kept.get(THEIRS + flushed)), (number, client.calls[number])
        number += 1
    assert number > 20


@pytest.mark.parametrize("error", family(ERRORS, ERRORS[:1]))
def test_a_service_that_goes_away_is_a_miss_until_it_is_back(error: Exception) -> None:
    """At any call, for good; then it is back, and all is there."""
    for number in range(0, 40, 3):
        service, client = MemoryStore(), Faulty()
        with open_over(service, policy=POLICY) as writer:
            Rank(writer, WHOLE).put(THEIRS)
        client.error, client.fails = error, lambda call, _name, number=number: "before" if call >= number else ""
        flushed = life(service, client)
        with open_over(service) as other:
            assert all(answer.ok for answer in Rank(other, WHOLE, slots=32).get(THEIRS + flushed)), number


def test_what_could_not_be_sent_is_found_here_and_sent_later() -> None:
    service, client = MemoryStore(), Faulty()
    store = open_over(service, client, POLICY)
    rank = Rank(store, WHOLE)
    client.fails = lambda _call, name: "before" if name == "put" else ""
    answers = rank.put(MINE)
    assert [answer.outcome for answer in answers] == [Put.WRITTEN] * 10
    with pytest.raises(StoreError, match="does not answer"):
        store.flush()
    assert all(answer.ok for answer in rank.get(MINE))
    client.fails = lambda _call, _name: ""
    store.flush()
    with open_over(service) as other:
        assert all(answer.ok for answer in Rank(other, WHOLE).get(MINE))
    store.close()


def test_memory_is_bounded_while_nothing_can_be_sent() -> None:
    service, client = MemoryStore(), Faulty()
    store = open_over(service, client, POLICY)
    rank = Rank(store, WHOLE, slots=40)
    client.fails = lambda _call, name: "before" if name == "put" else ""
    answers = rank.put(pages_of(40, "many"))
    assert sum(answer.ok for answer in answers) == 16
    assert {answer.reason for answer in answers if not answer.ok} == {"too much waits to be sent to the object store"}
    assert len([call for call in client.calls if call[0] == "put"]) <= 2, "each page asks a service that is away"
    store.close()


def test_a_head_that_came_through_after_all_is_a_commit() -> None:
    """The answer was lost, and the second attempt is refused, since it is there."""
    service, client = MemoryStore(), Faulty()
    store = open_over(service, client)
    rank = Rank(store, WHOLE)
    rank.put(MINE)
    heads = iter([True])
    client.fails = lambda _call, name: (
        "after" if name == "put" and len(names(service, ".data")) and next(heads, 0) else ""
    )
    with pytest.raises(StoreError):
        store.flush()
    store.flush()
    with open_over(service) as other:
        assert all(answer.ok for answer in Rank(other, WHOLE).get(MINE))
    store.close()


def test_a_store_that_cannot_be_listed_does_not_open() -> None:
    client = Faulty()
    client.fails = lambda _call, _name: "before"
    with pytest.raises(StoreError, match="cannot open the page store in memory://.*does not answer"):
        open_over(MemoryStore(), client)


def test_every_head_that_is_asked_for_names_its_store() -> None:
    """The type that engines hold is the one they always held."""
    assert isinstance(open_over(MemoryStore()), PageStore)
