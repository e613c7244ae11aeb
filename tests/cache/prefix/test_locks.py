"""A handle keeps its prefix, and only that, whatever is split, inserted or evicted before it is given back."""

from __future__ import annotations

import pytest
from engine import Engine, ids, locked
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix import (
    POLICIES,
    ROOT,
    EvictionGranularity,
    PrefixError,
    PrefixTree,
    SlidingWindow,
    StaleHandle,
    State,
    Tier,
    WriteBack,
    WriteThrough,
)


def engine(**more) -> Engine:
    return Engine(PrefixTree(1, **more))


def test_a_locked_page_outlives_eviction_until_every_lock_is_gone() -> None:
    mine = engine()
    mine.insert([1, 2, 3])
    handles = [locked(mine.tree, [1, 2]) for _ in range(2)]
    assert mine.evict(3) == [2]
    mine.tree.unlock(handles[0])
    assert mine.evict(3) == []
    mine.tree.unlock(handles[1])
    assert mine.evict(3) == [0, 1]
    mine.conserved()


def test_a_receipt_is_good_once() -> None:
    mine = engine()
    mine.insert([1, 2, 3])
    handle = locked(mine.tree, [1, 2, 3])
    mine.tree.unlock(handle)
    with pytest.raises(StaleHandle, match=f"handle {handle.number} for node {handle.node} is not out"):
        mine.tree.unlock(handle)
    other = locked(mine.tree, [1, 2, 3])
    with pytest.raises(StaleHandle):
        mine.tree.unlock(handle)
    with pytest.raises(StaleHandle):
        mine.tree.unlock(type(other)(other.number, other.node + 1, other.tier))
    with pytest.raises(StaleHandle):
        mine.tree.unlock(type(other)(other.number, other.node, Tier.HOST))
    mine.tree.unlock(other)
    mine.conserved()


def test_a_locked_descendant_keeps_what_is_above_it() -> None:
    mine = engine()
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    handle = locked(mine.tree, [1, 2, 3, 4])
    assert mine.evict(100) == []
    assert (mine.tree.sizes().evictable, mine.tree.sizes().protected) == (0, 4)
    mine.tree.unlock(handle)
    mine.conserved()


def test_the_empty_prefix_can_be_locked_to_no_effect() -> None:
    mine = engine()
    handle = mine.tree.lock(ROOT)
    mine.insert([1, 2])
    mine.conserved()
    assert mine.evict(2) == [0, 1]
    mine.tree.unlock(handle)
    mine.conserved()


def test_a_lock_goes_with_the_end_of_a_node_that_is_split_over_and_over() -> None:
    mine = engine()
    node = mine.insert(range(16)).node
    early = mine.tree.lock(node)
    for cut in range(15, 0, -1):
        mine.tree.match([*range(cut), 99])
        mine.conserved()
    late = mine.tree.lock(node)
    assert (mine.tree.sizes().evictable, mine.tree.sizes().protected) == (0, 16)
    mine.tree.unlock(early)
    assert mine.evict(100) == []
    mine.tree.unlock(late)
    mine.conserved()
    assert sorted(mine.evict(100)) == list(range(16))


def test_a_lock_on_a_front_leaves_the_rest_free() -> None:
    mine = engine()
    mine.insert(range(10))
    handle = locked(mine.tree, range(4))
    assert sorted(mine.evict(100)) == [4, 5, 6, 7, 8, 9]
    mine.insert(range(10), first_page=4)
    mine.tree.unlock(handle)
    mine.conserved()


def test_a_host_lock_keeps_the_copy_and_lets_the_device_go() -> None:
    mine = engine(tiers=WriteThrough(), grain=EvictionGranularity.NODE)
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    handle = mine.tree.lock_host(node)
    mine.tree.match([1, 2, 9])
    assert len(mine.evict(100)) == 4
    assert mine.evict_host(100) == []
    mine.conserved()
    mine.tree.unlock(handle)
    assert sorted(mine.evict_host(100)) == [0, 1, 2, 3]
    mine.conserved()


def test_a_device_lock_on_the_host_keeps_the_copy_too() -> None:
    mine = engine(tiers=WriteThrough())
    node = mine.insert([1, 2]).node
    mine.backed(node)
    mine.evict(2)
    handle = mine.tree.lock(node)
    assert mine.evict_host(2) == []
    mine.conserved()
    mine.tree.unlock(handle)
    assert len(mine.evict_host(2)) == 2
    mine.conserved()


def test_a_copy_under_two_kinds_of_lock_stays_until_both_are_gone() -> None:
    for first in range(2):
        mine = engine(tiers=WriteThrough())
        node = mine.insert([1, 2]).node
        mine.backed(node)
        mine.evict(2)
        handles = [mine.tree.lock(node), mine.tree.lock_host(node)]
        mine.tree.unlock(handles.pop(first))
        assert mine.evict_host(2) == []
        mine.conserved()
        mine.tree.unlock(handles.pop())
        assert len(mine.evict_host(2)) == 2
        mine.conserved()


def test_a_window_is_locked_as_far_as_it_reaches() -> None:
    mine = engine(components=(SlidingWindow(4),))
    for end in (4, 8, 12):
        mine.insert(range(end), {"swa": 4}, first_page=end - 4)
    handle = locked(mine.tree, range(12))
    assert mine.tree.sizes("swa").protected == 4
    assert len(mine.evict(100, "swa")) == 8
    assert mine.tree.match(range(12)).tokens == 12
    mine.conserved()
    mine.tree.unlock_component(handle, "swa")
    assert mine.tree.sizes("swa") == mine.tree.sizes("swa").__class__(4, 0)
    with pytest.raises(PrefixError, match="does not cover swa"):
        mine.tree.unlock_component(handle, "swa")
    mine.conserved()
    mine.tree.unlock(handle)
    assert mine.tree.sizes().protected == 0
    mine.conserved()


def test_of_two_components_the_one_that_is_unlocked_may_go_and_the_other_stays() -> None:
    mine = engine(components=(SlidingWindow(2), State()))
    mine.insert([1, 2, 3], {"swa": 3, "state": 1})
    handle = mine.tree.lock(mine.tree.match([1, 2, 3]).best_node)
    mine.tree.unlock_component(handle, "swa")
    assert [mine.tree.sizes(name).protected for name in ("swa", "state")] == [0, 1]
    mine.tree.unlock(handle)
    assert [mine.tree.sizes(name).protected for name in ("full", "swa", "state")] == [0, 0, 0]
    mine.conserved()


def test_a_copy_of_pages_that_are_on_the_device_too_stays_while_it_is_locked() -> None:
    mine = engine(tiers=WriteBack())
    node = mine.insert([1, 2]).node
    mine.apply(mine.tree.evict(2, room=[0, 1]))
    mine.end(mine.load(node).op)
    handle = mine.tree.lock_host(node)
    assert mine.evict_host(2) == []
    mine.conserved()
    mine.tree.unlock(handle)
    assert len(mine.evict_host(2)) == 2
    mine.conserved()


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_copy_that_was_locked_counts_as_used_when_it_is_unlocked(policy: str) -> None:
    mine = engine(tiers=WriteThrough(), grain=EvictionGranularity.NODE, policy=POLICIES[policy])
    old, new = (mine.insert([token]).node for token in (1, 2))
    for node in (old, new):
        mine.backed(node)
    mine.evict(2)
    pages = {node: mine.tree.match([token]).loads[0].host_page_ids.tolist() for token, node in ((1, old), (2, new))}
    mine.tree.match([2])
    mine.tree.unlock(mine.tree.lock_host(old))
    assert mine.evict_host(1) == pages[new]
    mine.conserved()


def test_a_skipped_component_is_not_locked() -> None:
    mine = engine(components=(SlidingWindow(2), State()))
    mine.insert([1, 2, 3], {"swa": 3, "state": 1})
    handle = mine.tree.lock(mine.tree.match([1, 2, 3]).best_node, skip=("state",))
    assert mine.tree.sizes("state").protected == 0
    assert mine.tree.sizes("swa").protected == 2
    with pytest.raises(PrefixError, match="does not cover state"):
        mine.tree.unlock_component(handle, "state")
    mine.tree.unlock(handle)
    mine.conserved()


@given(st.lists(st.tuples(st.sampled_from(["lock", "unlock", "split", "grow"]), st.integers(0, 23)), max_size=40))
def test_after_all_receipts_are_back_nothing_is_locked(steps: list[tuple[str, int]]) -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3), State())), 400)
    handles = []
    mine.insert(range(6), {"swa": 6, "state": 1})
    for verb, number in steps:
        if verb == "lock":
            handles.append(mine.tree.lock(mine.tree.match(range(number)).best_node))
        elif verb == "unlock" and handles:
            mine.tree.unlock(handles.pop(number % len(handles)))
        elif verb == "split":
            mine.tree.match([*range(number), 99])
        else:
            mine.insert(range(number), {"swa": number, "state": min(1, number)})
        mine.conserved()
    for handle in handles:
        mine.tree.unlock(handle)
    mine.conserved()
    assert [mine.tree.sizes(name).protected for name in ("full", "swa", "state")] == [0, 0, 0]


def test_a_lock_costs_what_it_newly_locks() -> None:
    mine = engine()
    for end in range(1, 40):
        mine.insert(range(end), first_page=end - 1)
    first = locked(mine.tree, range(39))
    counted = [node.locks for node in mine.tree._forest]  # no public sight of it
    second = locked(mine.tree, range(39))
    assert sum(node.locks for node in mine.tree._forest) == sum(counted) + 1
    mine.tree.unlock(first)
    mine.tree.unlock(second)
    mine.conserved()
    assert ids(mine.tree.match(range(39))) == list(range(39))
    assert mine.free["full", Tier.DEVICE] == list(range(39, 64))


def test_a_handle_of_another_tree_opens_nothing() -> None:
    trees = [PrefixTree(1), PrefixTree(1)]
    nodes = [tree.insert([1], [0]).node for tree in trees]
    handles = [tree.lock(node) for tree, node in zip(trees, nodes, strict=True)]
    with pytest.raises(StaleHandle, match="is not out"):
        trees[1].unlock(handles[0])
    assert [tree.sizes().protected for tree in trees] == [1, 1]
    for tree, handle in zip(trees, handles, strict=True):
        tree.unlock(handle)
