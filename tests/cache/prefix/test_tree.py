"""The prefix tree keeps pages by tokens, gives back every page exactly once, and never one that somebody uses."""

from __future__ import annotations

import gc
import random
import sys
from array import array

import numpy as np
import pytest
from engine import Engine, hits, ids, locked

from kvmover.cache.prefix import (
    ROOT,
    EvictionGranularity,
    KeyUnits,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    StaleHandle,
    Tier,
    WriteThrough,
)


def engine(page_tokens: int = 1, pages: int = 64, **more) -> Engine:
    return Engine(PrefixTree(page_tokens, **more), pages)


def test_a_prompt_that_leaves_half_way_splits_and_both_halves_stay() -> None:
    mine = engine()
    mine.insert([1, 2, 3, 4, 5])
    assert ids(mine.tree.match([1, 2, 3, 9])) == [0, 1, 2]
    assert ids(mine.tree.match([1, 2, 3, 4, 5])) == [0, 1, 2, 3, 4]
    assert len(mine.tree) == 1, "who only asks splits nothing"
    mine.tree.unlock(locked(mine.tree, [1, 2, 3, 9]))
    assert len(mine.tree) == 2
    assert mine.tree.sizes().evictable == 5
    mine.conserved()


def test_only_whole_pages_are_kept_and_matched() -> None:
    mine = engine(4)
    assert mine.insert(range(10)).tokens == 8
    assert [mine.tree.match(range(n)).tokens for n in (3, 4, 7, 8, 10)] == [0, 4, 4, 8, 8]
    mine.conserved()


def test_a_difference_inside_a_page_costs_the_page() -> None:
    mine = engine(4)
    mine.insert([1, 2, 3, 4, 5, 6, 7, 8])
    assert mine.tree.match([1, 2, 3, 9, 5, 6, 7, 8]).tokens == 0
    assert mine.tree.match([1, 2, 3, 4, 5, 6, 9, 8]).tokens == 4


def test_less_than_a_page_and_nothing_at_all_are_no_errors() -> None:
    mine = engine(4)
    kept = mine.insert([1, 2, 3])
    assert (kept.tokens, kept.node, len(kept.actions)) == (0, ROOT, 0)
    for tokens in ([], [1, 2, 3]):
        match = mine.tree.match(tokens)
        assert (match.tokens, ids(match), match.device_node, match.best_node) == (0, [], ROOT, ROOT)
    assert mine.insert([]).tokens == 0
    assert len(mine.tree) == 0
    mine.conserved()


def test_namespaces_share_nothing() -> None:
    mine = engine()
    spaces = [
        PrefixNamespace(),
        PrefixNamespace(adapter="a"),
        PrefixNamespace(adapter="a", salt="s"),
        PrefixNamespace(salt="as"),
        PrefixNamespace(extra=("a",)),
        PrefixNamespace(extra=("", "a")),
    ]
    mine.insert([1, 2, 3], namespace=spaces[1])
    assert [mine.tree.match([1, 2, 3], namespace=space).tokens for space in spaces] == [0, 3, 0, 0, 0, 0]
    for space in spaces:
        mine.insert([1, 2, 3], namespace=space)
    assert {tuple(ids(mine.tree.match([1, 2, 3], namespace=space))) for space in spaces}.__len__() == len(spaces)
    hashes = {mine.tree.page_hashes(mine.tree.match([1, 2, 3], namespace=space).device_node)[-1] for space in spaces}
    assert len(hashes) == len(spaces)
    mine.conserved()


def test_a_namespace_that_holds_nothing_any_more_costs_nothing() -> None:
    mine = engine()
    for number in range(50):
        mine.insert([1, 2], namespace=PrefixNamespace(salt=str(number)))
        mine.evict(2)
    assert not mine.tree._forest.roots  # no public sight of it
    mine.conserved()


def test_a_unit_of_a_bigram_tree_is_two_neighbours() -> None:
    mine = engine(units=KeyUnits.BIGRAM)
    assert mine.insert([1, 2, 3, 4, 5]).tokens == 4
    assert [mine.tree.match(tokens).tokens for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [1], [])] == [4, 2, 0, 0]
    assert mine.tree.match([1, 9, 3]).tokens == 0
    mine.conserved()


def test_hashes_of_bigrams_are_those_of_the_pairs() -> None:
    from kvmover.cache.prefix.hashes import chain_bigrams

    mine = engine(2, units=KeyUnits.BIGRAM)
    node = mine.insert([1, 2, 3, 4, 5]).node
    assert mine.tree.page_hashes(node) == chain_bigrams(b"", [1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4],
        range(1, 5),
        (1, 2, 3, 4),
        array("i", [1, 2, 3, 4]),
        array("q", [1, 2, 3, 4]),
        memoryview(array("I", [1, 2, 3, 4])),
        np.array([1, 2, 3, 4], np.int32),
        np.array([1, 2, 3, 4], np.int64),
        np.array([1, 2, 3, 4], np.uint16),
        np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_any_row_of_integers_is_a_prompt_and_a_row_of_page_ids(tokens) -> None:
    prefixes = PrefixTree(2)
    prefixes.insert([1, 2, 3, 4], [7, 8])
    assert prefixes.match(tokens).tokens == 4
    assert prefixes.insert(list(range(9, 17)), tokens).tokens == 8
    assert ids(prefixes.match(range(9, 17))) == [1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [[1, -1], [1 << 32, 2], [1.5, 2.0], [[1, 2]], np.zeros((2, 2), np.int32)])
def test_what_is_no_row_of_tokens_is_refused_and_nothing_is_kept(tokens) -> None:
    prefixes = PrefixTree(1)
    with pytest.raises(PrefixError, match="tokens and page ids"):
        prefixes.match(tokens)
    with pytest.raises(PrefixError, match="tokens and page ids"):
        prefixes.insert(tokens, [0, 1])
    with pytest.raises(PrefixError, match="tokens and page ids"):
        prefixes.insert([1, 2], tokens)
    assert len(prefixes) == 0


def test_a_key_is_converted_once_and_is_of_one_kind_of_unit() -> None:
    prefixes = PrefixTree(2)
    key = prefixes.key(range(8))
    prefixes.insert(key, range(4))
    assert prefixes.match(key).tokens == key.tokens == 8
    with pytest.raises(PrefixError, match="PLAIN units is none of this tree's BIGRAM"):
        PrefixTree(2, units=KeyUnits.BIGRAM).match(key)


def test_a_limit_cuts_a_match_without_a_copy() -> None:
    mine = engine(2)
    mine.insert(range(8))
    assert [mine.tree.match(range(8), limit_tokens=limit).tokens for limit in (-1, 0, 1, 2, 7, 8, 99)] == [
        0, 0, 0, 2, 6, 8, 8,
    ]  # fmt: skip


def test_a_page_of_no_tokens_is_refused() -> None:
    with pytest.raises(PrefixError, match="at least one token.*, got 0"):
        PrefixTree(0)


def test_equal_pages_after_different_ones_are_different_pages() -> None:
    mine = engine()
    mine.insert([1, 5])
    assert len(mine.insert([2, 5]).page_ids()) == 0
    assert ids(mine.tree.match([2, 5])) == [2, 3]


def test_siblings_that_share_a_token_but_no_page_are_told_apart() -> None:
    mine = engine(2)
    mine.insert([1, 1, 7, 7])
    mine.insert([1, 2, 7, 7])
    assert ids(mine.tree.match([1, 1, 7, 7])) == [0, 1]
    assert ids(mine.tree.match([1, 2, 7, 7])) == [2, 3]
    mine.conserved()


def test_a_page_computed_twice_comes_back_and_the_first_one_stays() -> None:
    prefixes = PrefixTree(2)
    prefixes.insert([1, 1, 2, 2], [0, 1])
    kept = prefixes.insert([1, 1, 2, 2, 3, 3], [5, 6, 7])
    assert (kept.page_ids().tolist(), kept.known_tokens, kept.tokens) == ([5, 6], 4, 6)
    assert ids(prefixes.match([1, 1, 2, 2, 3, 3])) == [0, 1, 7]


def test_pages_reused_from_a_match_are_no_duplicates() -> None:
    prefixes = PrefixTree(2)
    prefixes.insert([1, 1, 2, 2], [0, 1])
    assert len(prefixes.insert([1, 1, 2, 2, 3, 3], [0, 1, 2]).actions) == 0
    assert len(prefixes.insert([1, 1, 2, 2, 3, 3, 4, 4], [2, 3], first_page=2).actions) == 0


def test_of_pages_partly_reused_only_the_others_come_back() -> None:
    prefixes = PrefixTree(1)
    prefixes.insert([1, 2, 3, 4], [0, 1, 2, 3])
    kept = prefixes.insert([1, 2, 3, 4, 5, 6], [10, 11, 12, 13], first_page=2)
    assert (kept.known_tokens, kept.page_ids().tolist()) == (4, [10, 11])
    assert prefixes.insert([1, 2, 3, 4], [0, 21, 2, 23]).page_ids().tolist() == [21, 23]


def test_ids_that_do_not_cover_the_tokens_are_refused_with_the_numbers() -> None:
    prefixes = PrefixTree(2)
    with pytest.raises(PrefixError, match="9 tokens fill 4 pages of 2; for those from 0 on 4 ids are due, got 5"):
        prefixes.insert(range(9), range(5))
    with pytest.raises(PrefixError, match="from 3 on 1 ids are due, got 4"):
        prefixes.insert(range(8), range(4), first_page=3)
    assert len(prefixes) == 0


def test_pages_said_to_be_the_trees_must_be_there() -> None:
    prefixes = PrefixTree(1)
    prefixes.insert([1, 2, 3], range(3))
    with pytest.raises(PrefixError, match="pages below 3 are the tree's, but it knows 2"):
        prefixes.insert([1, 2, 9, 9], [7], first_page=3)
    prefixes.check()
    assert ids(prefixes.match([1, 2, 3])) == [0, 1, 2]
    with pytest.raises(PrefixError, match="it knows 0 in this namespace"):
        prefixes.insert([1, 2], [7], first_page=1, namespace=PrefixNamespace(salt="x"))
    assert len(prefixes._forest.roots) == 1


def test_sizes_tell_what_is_locked() -> None:
    mine = engine(grain=EvictionGranularity.NODE)
    mine.insert([1, 2, 3, 4])
    mine.insert([1, 2, 5, 6])
    handle = locked(mine.tree, [1, 2, 3, 4])
    assert mine.tree.sizes() == mine.tree.sizes().__class__(evictable=2, protected=4)
    assert mine.evict(100) == [6, 7]
    mine.tree.unlock(handle)
    assert (mine.tree.sizes().evictable, mine.tree.sizes().protected) == (4, 0)
    assert len(mine.evict(100)) == 4
    assert len(mine.tree) == 0
    mine.conserved()


def test_a_stale_node_is_refused_and_never_another_one() -> None:
    mine = engine()
    gone = mine.insert([1, 2]).node
    mine.evict(2)
    again = mine.insert([1, 2]).node
    assert again != gone
    for call in (mine.tree.lock, mine.tree.lock_host, mine.tree.page_hashes, mine.tree.backup_needs):
        with pytest.raises(StaleHandle, match=f"node {gone} is gone"):
            call(gone)


def test_a_leaf_that_lost_its_tail_is_another_node() -> None:
    mine = engine()
    whole = mine.insert([1, 2, 3, 4]).node
    assert mine.evict(1) == [3]
    with pytest.raises(StaleHandle):
        mine.tree.lock(whole)
    assert ids(mine.tree.match([1, 2, 3, 4])) == [0, 1, 2]
    mine.conserved()


def test_reset_gives_everything_back_and_forgets() -> None:
    mine = engine()
    old = mine.insert([1, 2, 3]).node
    mine.insert([1, 5], namespace=PrefixNamespace(salt="x"))
    assert sorted(mine.apply(mine.tree.reset()).page_ids().tolist()) == [0, 1, 2, 3, 4]
    assert hits(mine.tree, [1, 2, 3]) == (0, 0)
    mine.conserved()
    with pytest.raises(StaleHandle):
        mine.tree.lock(old)
    assert mine.insert([1, 2, 3]).node > old


def test_reset_is_refused_while_anything_is_in_use() -> None:
    mine = engine()
    mine.insert([1, 2, 3])
    handle = locked(mine.tree, [1, 2])
    with pytest.raises(PrefixError, match="1 locks and operations are out"):
        mine.tree.reset()
    mine.tree.unlock(handle)
    mine.apply(mine.tree.reset())
    mine.conserved()


def test_split_keeps_tokens_ids_hashes_sizes_and_matches() -> None:
    mine = engine(2)
    node = mine.insert(range(40)).node
    hashes, sizes, pages = mine.tree.page_hashes(node), mine.tree.sizes(), ids(mine.tree.match(range(40)))
    handle = mine.tree.lock(node)
    locked_sizes = mine.tree.sizes()
    for cut in (20, 2, 38, 14, 6):
        mine.tree.unlock(locked(mine.tree, [*range(cut), 999, 999]))
        mine.conserved()
    assert len(mine.tree) == 6
    assert mine.tree.page_hashes(node) == hashes
    assert mine.tree.sizes() == locked_sizes
    assert ids(mine.tree.match(range(40))) == pages
    mine.tree.unlock(handle)
    assert mine.tree.sizes() == sizes


def test_a_node_keeps_no_more_memory_than_its_tokens_and_ids() -> None:
    prefixes = PrefixTree(1)
    prefixes.insert(np.arange(100_000), np.arange(100_000))
    prefixes.lock(prefixes.match([0, 1, 9]).device_node)
    nodes = sorted(prefixes._forest, key=lambda node: node.start)  # no public sight of it
    assert [(len(node.tokens), len(node.pages or b"")) for node in nodes] == [(8, 8), (399_992, 399_992)]


def test_nodes_are_no_burden_for_the_cyclic_collector_and_go_with_their_tree() -> None:
    prefixes = PrefixTree(1, tiers=WriteThrough(), sink=lambda event: None)
    prefixes.insert([0, 0], [0, 1])
    gc.collect()
    before = len(gc.get_objects())
    for text in range(1, 2000):
        prefixes.insert([0, text, text], [0, 2 * text, 2 * text + 1])
    gc.collect()
    assert len(prefixes) == 2001
    assert len(gc.get_objects()) - before < 200
    node = prefixes._forest.node(prefixes.match([0, 7, 7]).device_node)  # no public sight of it
    prefixes.evict(1)
    del prefixes
    assert sys.getrefcount(node) == 2, "its tree is gone, and nothing else knows it"


def test_random_use_neither_loses_nor_doubles_a_page() -> None:
    rng, mine = random.Random(5), engine(2)
    held: dict[int, list[int]] = {}  # page to all tokens up to its end
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
        match = mine.tree.match(tokens)
        assert match.tokens == max((len(text) for text in held.values() if tokens[: len(text)] == text), default=0)
        handle = mine.tree.lock(match.device_node)
        needed = len(tokens) // 2 - len(match.page_ids)
        if needed > len(mine.free["full", Tier.DEVICE]):
            evicted = mine.evict(needed)
            assert not set(evicted) & set(ids(match))
            held = {page: text for page, text in held.items() if page not in evicted}
        assert len(mine.insert(tokens, first_page=len(match.page_ids)).actions) == 0
        pages = ids(mine.tree.match(tokens))
        held |= {page: tokens[: 2 * place + 2] for place, page in enumerate(pages)}
        mine.tree.unlock(handle)
        mine.conserved()
        assert mine.tree.sizes().evictable == len(held)
