"""A tree by HAZARD learns which conversations go on, by the same numbers in both cores."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
import pytest

from kvmover.cache.prefix import HAZARD, LRU, EvictionPolicy, PrefixTree, forest
from kvmover.cache.prefix.hazard import (
    BUCKETS,
    KINDS,
    LEARN_EVERY,
    ONE,
    USES,
    HazardOrder,
    ReuseHistory,
    begin_of,
    bucket_of,
    mark_after,
    ranks_of,
)
from kvmover.cache.prefix.node import Node

#: Pages of a turn.
TURN = 12
DEVICE_PAGES = 1200


def conversations(seed: int, count: int) -> Iterator[list[int]]:
    """Prompts behind a shared page, alternately new and going on: half end with their first turn, others have six."""
    chance, fresh, waiting = random.Random(seed), 1, list[tuple[list[int], int]]()
    for number in range(count):
        prompt, turns = waiting.pop(0) if number % 2 and len(waiting) > 40 else ([0], chance.choice((1, 6)))
        prompt = [*prompt, *range(fresh, fresh + TURN)]
        fresh += TURN
        if turns > 1:
            waiting.append((prompt, turns - 1))
        yield prompt


def served(policy: EvictionPolicy, prompts: Iterable[list[int]]) -> tuple[int, PrefixTree]:
    """Hit tokens on a device of `DEVICE_PAGES`, and the tree."""
    tree, hits, free = PrefixTree(1, policy=policy), 0, list(range(DEVICE_PAGES))
    for prompt in prompts:
        match = tree.match(prompt, limit_tokens=len(prompt) - 1)
        handle, need = tree.lock(match.device_node), len(prompt) - match.tokens
        if len(free) < need:
            free += tree.evict(need - len(free)).page_ids().tolist()
        ids, free = free[:need], free[need:]
        tree.insert(prompt, np.array(ids, np.int32), first_page=match.tokens)
        tree.unlock(handle)
        hits += match.tokens
    tree.check()
    return hits, tree


def test_conversations_that_go_on_stay_and_others_go() -> None:
    prompts = list(conversations(1, 2000))
    by_recency, by_hazard = (served(policy, prompts)[0] for policy in (LRU, HAZARD))
    assert by_hazard > 1.2 * by_recency


def test_where_all_fits_the_order_is_by_recency() -> None:
    prompts = [[chat, *range(1000 * chat, 1000 * chat + turn)] for turn in range(1, 16) for chat in range(1, 21)]
    _, tree = served(HAZARD, prompts * 3)
    history = cast("HazardOrder", tree._forest.device.order).history
    assert history.births >= LEARN_EVERY, "it has learnt"
    assert history.by_recency


@pytest.mark.skipif(forest.C_CORE is None, reason="the C core was not built")
def test_both_cores_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, found = list(conversations(2, 1200)), list[tuple]()
    for core in (forest.C_CORE, None):
        monkeypatch.setattr(forest, "C_CORE", core)
        hits, tree = served(HAZARD, prompts)
        order = cast("HazardOrder", tree._forest.device.order)
        past = order.history
        judged = past.resident, past.reach, past.won, past.lost, past.rest
        numbers = past.now, past.count, past.births, past.reused, past.missed, *judged, bool(past.by_recency)
        found.append((hits, numbers, past.ranks, [(node.id, node.use) for node in order]))
    assert found[0] == found[1]
    assert not found[0][1][-1], "the histories were ranked by what was learnt"


def test_an_order_that_loses_to_recency_rests_twice_as_long_each_time() -> None:
    history = ReuseHistory(4)
    history.by_recency, history.resident, history.reused, history.missed = 0, 1, 50, 50

    def judged(now: int, lost: int) -> tuple[int, int, int]:
        history.now, history.lost = now, lost
        history._judge()
        return history.by_recency, history.rest, history.rested

    history.now = 100
    history._open(2, 1, 0)
    assert judged(150, lost=0) == (0, 1, 0)
    assert judged(150, lost=1) == (1, 2, 150 + 4 * 2 * 50), "Recency evicts at the age of 50"
    assert judged(549, lost=1) == (1, 2, 550)
    assert judged(550, lost=1) == (0, 2, 550)
    assert (history.won, history.lost, history.trial) == (0, 0, 550)
    history.now = 600
    history._open(2, 1, 0)
    assert judged(620, lost=1) == (1, 4, 620 + 4 * 4 * 20)


def test_an_age_lies_in_its_bucket() -> None:
    begins = [begin_of(bucket) for bucket in range(BUCKETS)]
    assert begins == sorted(set(begins))
    for age in [*range(200), 4095, 4096, 5000, 1 << 16, (1 << 17) - 1, 1 << 40]:
        bucket = bucket_of(age)
        assert begins[bucket] <= age
        assert bucket == BUCKETS - 1 or age < begins[bucket + 1]


def test_a_rank_is_the_most_uses_for_each_tick() -> None:
    chance = [0] * BUCKETS
    chance[1] = ONE // 2
    ranks = ranks_of(chance)
    assert ranks[1] == (ONE // 2 << 32) // (ONE // 4 * 3 * 4)
    assert 0 < ranks[0] < ranks[1], "whoever is to wait is worth less"
    assert not any(ranks[2:])


def test_marks_are_pages_and_grow_sparse() -> None:
    marks, page = list[int](), 0
    while page < 10_000:
        page = mark_after(page)
        marks.append(page)
    assert marks[:16] == list(range(1, 17))
    assert len(marks) < 16 + 8 * 10
    assert all(mark_after(page - 1) == page for page in marks), "from wherever a leaf begins"


def test_a_history_is_bounded() -> None:
    history, root = ReuseHistory(4), Node(0, None, b"", 0, 0)
    for number in range(1, USES + 600):
        node = Node(number, root, number.to_bytes(4, "little") * 8, 0, 8)
        node.used = 3 * number
        history.be_born(node)
    assert history.use(history.count - USES) is None
    assert history.use(history.count - USES + 1) is not None
    assert len(history.ranks) == KINDS
