"""The prefix tree gives back every page exactly once, and never one that somebody uses."""

from __future__ import annotations

import doctest
import random

import pytest

from kvmover.errors import LayoutError
from kvmover.prefix import PrefixTree, tree


def test_the_example_in_the_class_holds() -> None:
    assert doctest.testmod(tree).failed == 0
    assert doctest.testmod(tree).attempted > 0


def test_only_whole_pages_match() -> None:
    prefixes = PrefixTree(page_tokens=4)
    prefixes.insert(range(10), [7, 8])
    assert prefixes.match(range(10)).page_ids == (7, 8)
    assert prefixes.match(range(7)).tokens == 4
    assert prefixes.match([0, 1, 2]).tokens == 0
    assert prefixes.match([9, *range(1, 10)]).page_ids == ()


def test_equal_pages_after_different_ones_are_different_pages() -> None:
    prefixes = PrefixTree(page_tokens=1)
    assert prefixes.insert([1, 5], [0, 1]) == ()
    assert prefixes.insert([2, 5], [2, 3]) == ()
    assert prefixes.match([2, 5]).page_ids == (2, 3)


def test_a_page_computed_twice_is_returned_to_be_freed() -> None:
    prefixes = PrefixTree(page_tokens=2)
    prefixes.insert([1, 1, 2, 2], [0, 1])
    assert prefixes.insert([1, 1, 2, 2, 3, 3], [5, 6, 7]) == (5, 6)
    assert prefixes.match([1, 1, 2, 2, 3, 3]).page_ids == (0, 1, 7)


def test_pages_reused_from_a_match_are_no_duplicates() -> None:
    prefixes = PrefixTree(page_tokens=2)
    prefixes.insert([1, 1, 2, 2], [0, 1])
    assert prefixes.insert([1, 1, 2, 2, 3, 3], [0, 1, 2]) == ()


def test_ids_that_do_not_cover_the_tokens_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match="9 tokens fill 4 pages of 2, got 5 ids"):
        PrefixTree(page_tokens=2).insert(range(9), range(5))


def test_eviction_takes_the_least_recently_used_leaf_first_and_parents_after_their_children() -> None:
    prefixes = PrefixTree(page_tokens=1)
    prefixes.insert([1, 2], [10, 11])
    prefixes.insert([1, 3], [10, 12])
    prefixes.match([1, 2])
    assert prefixes.evict(1) == (12,)
    assert prefixes.evict(5) == (11, 10)
    assert prefixes.evict(1) == ()
    assert prefixes.pages == 0


def test_a_locked_prefix_outlives_eviction_until_every_lock_is_gone() -> None:
    prefixes = PrefixTree(page_tokens=1)
    prefixes.insert([1, 2, 3], [10, 11, 12])
    match = prefixes.match([1, 2])
    prefixes.lock(match)
    prefixes.lock(match)
    assert prefixes.evict(3) == (12,)
    prefixes.unlock(match)
    assert prefixes.evict(3) == ()
    prefixes.unlock(match)
    assert prefixes.evict(3) == (11, 10)
    with pytest.raises(LayoutError, match="not locked"):
        prefixes.unlock(match)


def test_random_use_neither_loses_nor_doubles_a_page() -> None:
    rng, prefixes, free = random.Random(5), PrefixTree(page_tokens=2), set(range(64))
    held: dict[int, list[int]] = {}  # page to all tokens up to its end
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
        match = prefixes.match(tokens)
        assert match.tokens == max((len(text) for text in held.values() if tokens[: len(text)] == text), default=0)
        prefixes.lock(match)
        needed = len(tokens) // 2 - len(match.page_ids)
        if needed > len(free):
            evicted = prefixes.evict(needed)
            assert not set(evicted) & set(match.page_ids)
            free |= set(evicted)
            held = {page: text for page, text in held.items() if page not in evicted}
        fresh = [free.pop() for _ in range(needed)]
        page_ids = [*match.page_ids, *fresh]
        assert prefixes.insert(tokens, page_ids) == ()
        held |= {page: tokens[: 2 * place + 2] for place, page in enumerate(page_ids)}
        prefixes.unlock(match)
        assert prefixes.pages == len(held) == 64 - len(free)
