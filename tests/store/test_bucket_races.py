"""Writers, readers and collectors of one bucket at once: no byte is wrong, and what a reader finds it reads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import obstore
import pytest
from bucket_stores import learn, names, open_over
from obstore.store import MemoryStore
from store_rank import GQA, PAGE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import Got, PagePart, Policy

WHOLE = PagePart.whole(GQA, PAGE)
POLICY = Policy(quota_bytes=40 * WHOLE.nbytes, segment_bytes=4 * WHOLE.nbytes, stamp_s=0)
PAGES = pages_of(60)
SHAPES = [(Fleet(page_tokens=PAGE), 0), (Fleet(tp=2, page_tokens=PAGE), 1), (Fleet(pp=2, page_tokens=PAGE), 0)]


def writer(service: MemoryStore, chance: random.Random, over: threading.Event) -> None:
    fleet, number = chance.choice(SHAPES)
    with open_over(service, policy=POLICY) as store:
        rank = Rank.of(store, GQA, fleet, number)
        while not over.is_set():
            assert all(answer.ok for answer in rank.put(chance.sample(PAGES, 8)))
            store.flush()
            if chance.random() < 0.02:
                store.clear()


def reader(service: MemoryStore, chance: random.Random, over: threading.Event) -> None:
    fleet, number = chance.choice(SHAPES)
    with open_over(service) as store:
        rank = Rank.of(store, GQA, fleet, number)
        while not over.is_set():
            learn(store)
            answers = rank.get(chance.sample(PAGES, 12))
            assert {answer.outcome for answer in answers} <= {Got.READ, Got.ABSENT, Got.EVICTED}
        assert not store.counters.poisoned


def collector(service: MemoryStore, chance: random.Random, over: threading.Event) -> None:
    while not over.is_set():
        with open_over(service, policy=POLICY) as store:
            Rank(store, WHOLE).get(chance.sample(PAGES, 5))
            store.evict(chance.choice((1, 4, 9)) * WHOLE.nbytes)
            store.collect()


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4))
def test_any_number_at_once_harm_nothing(seed: int) -> None:
    service, over = MemoryStore(), threading.Event()
    failures: list[BaseException] = []

    def run(role: Callable[[MemoryStore, random.Random, threading.Event], None], number: int) -> None:
        try:
            role(service, random.Random(f"{seed} {number}"), over)
        except StoreError as error:
            if "cannot clear" not in str(error):
                failures.append(error)
        except BaseException as error:
            failures.append(error)
            over.set()

    roles = [writer, writer, reader, reader, collector, collector]
    threads = [threading.Thread(target=run, args=(role, number)) for number, role in enumerate(roles)]
    for thread in threads:
        thread.start()
    over.wait(4)
    over.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    with open_over(service) as store:
        rank = Rank(store, WHOLE, slots=60)
        there = rank.exists(PAGES)
        assert [answer.ok for answer in rank.get(PAGES)] == there
        assert store.verify().bad == {}
    assert sum(obstore.head(service, name)["size"] for name in names(service, ".data")) < 3 * 40 * WHOLE.nbytes
