"""What an insertion keeps is the tree's, everything else comes back, and after a refusal the next one works."""

from __future__ import annotations

import pytest
from engine import Engine, ids
from hypothesis import given
from hypothesis import strategies as st

from kvmover.cache.prefix import PrefixError, PrefixTree, SlidingWindow, State, WriteThrough


def prepared() -> Engine:
    """A path of three nodes, the last of them on the host alone."""
    mine = Engine(PrefixTree(1, tiers=WriteThrough()))
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    node = mine.insert([1, 2, 3, 4, 5, 6], first_page=4).node
    mine.backed(node)
    mine.evict(2)
    return mine


def test_an_insertion_refused_for_its_arguments_is_none() -> None:
    prefixes = PrefixTree(1, components=(State(),))
    for more in ({"held": {"state": [1, 2]}}, {"held": {"conv": [1]}}, {"held": {"full": [1]}}, {"first_page": 4}):
        with pytest.raises(PrefixError):
            prefixes.insert([1, 2, 3], [0, 1, 2], **more)
    prefixes.insert([1, 2, 3], [0, 1, 2])
    prefixes.check()


def test_an_insertion_that_fails_half_way_lets_the_next_one_begin() -> None:
    mine = prepared()
    with pytest.raises(PrefixError, match="pages below 6 are the tree's, but 4 to 6 are not on the device"):
        mine.tree.insert(range(1, 9), [60, 61], first_page=6)
    mine.conserved()
    mine.insert(range(1, 9))
    mine.conserved()


@given(st.integers(0, 9), st.integers(1, 4))
def test_held_ids_are_kept_or_come_back_exactly_once(window: int, cut: int) -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3), State()), tiers=WriteThrough()))
    mine.insert(range(8), {"swa": cut, "state": 1})
    mine.insert([*range(cut), 50, 51], {"swa": 2})
    taken = {name: mine.take(count, name) for name, count in (("full", 10), ("swa", window), ("state", 1))}
    held = {"swa": taken["swa"], "state": taken["state"]}
    kept = mine.tree.insert(range(10), taken["full"], held=held)
    for name, given_ids in taken.items():
        mine.give(given_ids, name)
    mine.applied(kept)
    mine.conserved()
    mine.insert(range(10), {"swa": 10, "state": 1})
    assert mine.tree.match(range(10)).tokens == 10
    mine.conserved()


def test_un_evicted_pages_are_adopted_and_not_freed() -> None:
    mine = prepared()
    taken = mine.take(6)
    kept = mine.tree.insert([1, 2, 3, 4, 5, 6], taken)
    mine.give(taken)
    mine.applied(kept)
    assert (kept.known_tokens, kept.page_ids().tolist()) == (6, taken[:4])
    assert ids(mine.tree.match([1, 2, 3, 4, 5, 6])) == [0, 1, 2, 3, *taken[4:]]
    mine.conserved()
