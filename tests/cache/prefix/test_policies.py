"""What goes first is what the policy says, and the answer costs no look at all leaves."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmover.cache.prefix import (
    FIFO,
    LFU,
    LRU,
    POLICIES,
    PRIORITY,
    SLRU,
    EvictionGranularity,
    EvictionPolicy,
    PrefixTree,
)
from kvmover.cache.prefix.eviction_policy import Ranked
from kvmover.cache.prefix.node import Node
from tests.proofs import tries


def engine(policy: EvictionPolicy, **more) -> Engine:
    return Engine(PrefixTree(1, policy=policy, grain=EvictionGranularity.NODE, **more))


def order(mine: Engine) -> list[int]:
    """First page of each victim, evicting one by one."""
    found = []
    while victims := mine.evict(1):
        found.append(victims[0])
        mine.conserved()
    return found


def three(policy: EvictionPolicy) -> Engine:
    mine = engine(policy)
    for token in (1, 2, 3):
        mine.insert([token])
    return mine


def test_the_least_recently_used_goes_first() -> None:
    mine = three(LRU)
    mine.tree.match([1])
    assert order(mine) == [1, 2, 0]


def test_what_is_unlocked_was_used_until_now() -> None:
    mine = three(LRU)
    handle = mine.tree.lock(mine.tree.match([1]).best_node)
    mine.tree.match([2])
    mine.tree.unlock(handle)
    assert order(mine) == [2, 1, 0]


def test_the_least_often_inserted_goes_first() -> None:
    mine = three(LFU)
    mine.insert([1])
    mine.insert([1])
    mine.insert([2])
    mine.tree.match([3])
    assert order(mine) == [2, 1, 0]


def test_what_was_inserted_twice_outlives_what_was_once() -> None:
    mine = three(SLRU)
    mine.insert([1])
    mine.tree.match([2])
    assert order(mine) == [2, 1, 0]


def test_the_oldest_goes_first_however_often_it_is_used() -> None:
    mine = three(FIFO)
    mine.insert([1])
    mine.tree.match([2])
    assert order(mine) == [0, 1, 2]


def test_the_lowest_priority_goes_first_and_a_path_has_at_least_that_of_its_end() -> None:
    mine = engine(PRIORITY)
    mine.insert([1, 2])
    for token, priority in ((5, 5), (6, 0), (7, 1)):
        mine.insert([token], priority=priority)
    mine.insert([1, 2, 3], priority=9)
    assert order(mine) == [3, 4, 2, 7, 0]
    assert not len(mine.tree)


def test_a_match_is_no_use_that_counts() -> None:
    mine = three(LFU)
    for _ in range(5):
        mine.tree.match([1])
    mine.insert([2])
    assert order(mine)[-1] == 1


def test_one_request_that_inserts_in_chunks_counts_once() -> None:
    mine = engine(LFU)
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], counted_tokens=2)
    mine.insert([8, 9])
    mine.insert([8, 9])
    assert order(mine)[0] == 4, "[3, 4] once, [1, 2] once, [8, 9] twice"


def test_leaves_go_before_what_is_above_them() -> None:
    for policy in POLICIES.values():
        mine = engine(policy)
        mine.insert([1, 2])
        mine.insert([1, 2, 3], first_page=2)
        mine.insert([1, 2, 4], first_page=2)
        assert order(mine) == [2, 3, 0], policy.name
        mine.conserved()


def test_a_whole_node_goes_or_just_its_tail() -> None:
    whole = engine(LRU)
    whole.insert(range(60))
    assert len(whole.evict(1)) == 60
    tail = Engine(PrefixTree(1))
    tail.insert(range(60))
    assert tail.evict(1) == [59]
    assert tail.evict(3) == [56, 57, 58]
    assert tail.tree.match(range(60)).tokens == 56
    tail.conserved()


def test_what_is_left_of_a_victim_goes_next() -> None:
    for policy in POLICIES.values():
        mine = Engine(PrefixTree(1, policy=policy))
        mine.insert([1, 2, 3])
        mine.insert([4, 5, 6])
        assert [mine.evict(1) for _ in range(6)] == [[2], [1], [0], [5], [4], [3]], policy.name
        mine.conserved()


Steps = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "evict", "lock", "unlock"]), st.integers(0, 6)), max_size=40
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(set(POLICIES))), Steps)
def test_the_order_kept_across_calls_names_the_victim_that_a_search_would(name: str, steps) -> None:
    mine, handles = Engine(PrefixTree(1, policy=POLICIES[name], grain=EvictionGranularity.NODE), 400), []
    for verb, number in steps:
        tokens = [number % 3, number, number % 2]
        if verb == "insert":
            mine.insert(tokens)
        elif verb == "match":
            mine.tree.match(tokens)
        elif verb == "lock":
            handles.append(mine.tree.lock(mine.tree.match(tokens).best_node))
        elif verb == "unlock" and handles:
            mine.tree.unlock(handles.pop())
        elif verb == "evict":
            victim = searched(mine, POLICIES[name])
            assert mine.evict(1)[:1] == victim
        mine.conserved()


def searched(mine: Engine, policy: EvictionPolicy) -> list[int]:
    """The first page of the leaf that goes next, found by looking at all of them."""
    leaves = [node for node in mine.tree._forest if not node.children and not node.locks]
    rank = policy.order()
    by_rank = rank._rank if isinstance(rank, Ranked) else lambda node, _age: (node.used,)
    first = min(leaves, key=lambda node: (*by_rank(node, 0), node.id), default=None)
    return [] if first is None else np.frombuffer(first.pages or b"", np.int32)[:1].tolist()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "touch", "front"]), st.integers(0, 40)), max_size=1500))
def test_a_ranked_order_is_sorted_whatever_is_used_or_taken_out(steps) -> None:
    """Against a sort of everything, over several blocks."""
    order, nodes, front = Ranked(lambda node, _age: (node.used // 7,)), {}, list[Node]()
    for clock, (verb, number) in enumerate(steps * 3, start=1):
        node = nodes.setdefault(number if verb == "front" else clock % 1999, Node(clock, None, b"", 0, 1))
        node.used = clock
        getattr(order, verb)([node] if verb == "touch" else node)
        if verb == "front":
            front = [node, *(each for each in front if each is not node)]
        elif verb != "add":
            front = [each for each in front if each is not node]
    due = [node for node in nodes.values() if node in order]
    assert len(order) == len(due)
    for expected in front:
        if expected in order:
            assert order.first() is expected
            order.discard(expected)
    ranks = []
    while (node := order.first()) is not None:
        ranks.append(order._entries[node][:2])
        order.discard(node)
    assert ranks == sorted(ranks)


@pytest.mark.searched
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_evicting_one_of_many_leaves_looks_at_few(policy: EvictionPolicy) -> None:
    leaves = tries(plain=2000, prove=20_000, night=20_000)
    mine = Engine(PrefixTree(1, policy=policy), leaves + 1)
    for token in range(leaves):
        mine.insert([token])
    looked = 0
    seen = mine.tree._forest.device.order
    if isinstance(seen, Ranked):
        rank = seen._rank

        def counted(node, age):
            nonlocal looked
            looked += 1
            return rank(node, age)

        seen._rank = counted
    assert mine.evict(1) == [0]
    assert looked <= 4
    for token in range(1, leaves):
        mine.tree.match([token])
    looked = 0
    assert mine.evict(1) == [1], "the first of those that were all used meanwhile"
    assert looked <= 4
