"""A match that ends inside a node names that end by an id, and nothing is split or used before somebody needs it."""

from __future__ import annotations

import random

import pytest
from engine import Engine, ids

from kvmover.cache.prefix import (
    DeviceOnly,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    SlidingWindow,
    StaleHandle,
    State,
    Tier,
    WriteThrough,
)
from kvmover.cache.prefix.forest import MOST_PLACES
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.prefix.match import SHORTEST_RUN


def test_probing_a_cached_prompt_leaves_one_node() -> None:
    mine = Engine(PrefixTree(1), 1000)
    mine.insert(range(1000))
    for cut in range(1, 1000):
        assert mine.tree.match([*range(cut), 5000]).tokens == cut
    assert len(mine.tree) == 1
    mine.conserved()


@pytest.mark.parametrize("tiers", [DeviceOnly(), WriteThrough()])
def test_a_hot_prefix_does_not_age_into_a_chain_of_nodes(tiers) -> None:
    """Prompts leave it everywhere, and their own ends are evicted: what they split is joined when it is next used."""
    mine, rng = Engine(PrefixTree(1, tiers=tiers), 900), random.Random(1)
    node = mine.insert(range(400)).node
    handle = mine.tree.lock(node)
    for text in range(1000, 1400):
        left = mine.tree.match([*range(rng.randrange(1, 400)), text, text])
        mine.insert([*range(left.tokens), text, text])
        mine.evict(2)
        whole = mine.tree.match(range(400))
        assert ids(whole) == list(range(400))
    assert len(mine.tree) < 20
    assert mine.tree.page_hashes(node) == chain(b"", range(400), 1)
    mine.conserved()
    mine.tree.unlock(handle)
    assert mine.evict(3) == [397, 398, 399] or tiers != DeviceOnly()
    mine.conserved()


@pytest.mark.parametrize("window", [8, 1000])
def test_a_hot_prefix_of_windows_ages_into_nodes_no_longer_than_a_window(window: int) -> None:
    """Of a longer one an eviction would give up, and a lock keep, what is far before the window that is meant."""
    mine, rng = Engine(PrefixTree(1, components=(SlidingWindow(window),)), 900), random.Random(1)
    handle, most = mine.tree.lock(mine.insert(range(400), held={"swa": 400}).node), 0
    for text in range(1000, 1400):
        left = mine.tree.match([*range(rng.randrange(1, 400)), text, text])
        mine.insert([*range(left.tokens), text, text], held={"swa": 2}, first_page=left.tokens)
        mine.evict(2)
        whole = mine.tree.match(range(400))
        assert (whole.tokens, ids(whole)) == (400, list(range(400)))
        most = max(most, len(mine.tree))
    assert most < (2 * 400 // 8 + 20 if window == 8 else 20)
    mine.conserved()
    mine.tree.unlock(handle)
    handle = mine.tree.lock(mine.tree.match(range(400)).device_node)
    assert mine.tree.sizes("swa").protected < 2 * window
    mine.tree.unlock(handle)
    mine.conserved()


def test_a_chain_keeps_every_state_and_joins_what_lies_between() -> None:
    mine = Engine(PrefixTree(1, components=(State(),)), 400)
    for end in range(1, 101):
        mine.insert(range(end), held={"state": int(end % 25 == 0)}, first_page=end - 1)
    assert mine.tree.match(range(100)).tokens == 100
    assert len(mine.tree) == 4
    assert [mine.tree.match(range(end)).tokens for end in (24, 25, 60, 99, 100)] == [0, 25, 50, 75, 100]
    mine.conserved()


def test_what_a_lock_or_a_lost_window_tells_apart_is_not_joined() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3),)), 400)
    for end in range(1, 31):
        mine.insert(range(end), held={"swa": 1}, first_page=end - 1)
    handle = mine.tree.lock(mine.tree.match(range(17)).device_node)
    mine.evict(30, "swa")
    mine.tree.match(range(30))
    mine.conserved()
    # Windows are left where the lock keeps them: at its last three tokens, and what is in one node with the first.
    assert [mine.tree.match(range(end)).tokens for end in (12, 17, 18, 30)] == [0, 17, 17, 17]
    mine.tree.unlock(handle)
    mine.tree.match(range(30))
    assert mine.tree.match(range(17)).tokens == 17
    assert len(mine.tree) < SHORTEST_RUN
    mine.conserved()


def test_ids_of_nodes_that_were_joined_stand_for_their_ends_still() -> None:
    mine = Engine(PrefixTree(1))
    nodes = []
    for end in range(1, 21):
        nodes.append(mine.insert(range(end), first_page=end - 1).node)
    inside = mine.tree.match([0, 1, 2, 3, 99]).device_node
    mine.tree.match(range(20))
    assert len(mine.tree) == 1
    for end, node in enumerate(nodes, 1):
        assert mine.tree.page_ids(node).tolist() == list(range(end))
    handle = mine.tree.lock(nodes[6])
    assert (mine.tree.sizes().protected, mine.tree.page_ids(inside).tolist()) == (7, [0, 1, 2, 3])
    assert sorted(mine.evict(99)) == list(range(7, 20))
    with pytest.raises(StaleHandle):
        mine.tree.lock(nodes[7])
    mine.tree.unlock(handle)
    mine.conserved()


def test_an_end_inside_a_node_can_be_asked_about_and_locked() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteThrough()))
    mine.insert(range(8))
    match = mine.tree.match([0, 1, 2, 9])
    node = match.device_node
    assert mine.tree.page_ids(node).tolist() == ids(match) == [0, 1, 2]
    assert mine.tree.page_hashes(node) == chain(b"", [0, 1, 2], 1)
    assert mine.tree.lock_needs(node) == {"full": 3}
    assert not mine.tree.is_backed(node)
    assert len(mine.tree) == 1
    handle = mine.tree.lock(node)
    assert (len(mine.tree), mine.tree.sizes().protected, mine.tree.lock_needs(node)) == (2, 3, {"full": 0})
    assert mine.evict(9) == [3, 4, 5, 6, 7]
    mine.tree.unlock(handle)
    mine.conserved()


def test_the_end_holds_through_splits_above_and_below_it_until_its_page_goes() -> None:
    mine = Engine(PrefixTree(1))
    mine.insert(range(9))
    node = mine.tree.match([*range(5), 99]).device_node
    for cut in (7, 3, 5):
        mine.tree.unlock(mine.tree.lock(mine.tree.match([*range(cut), 99]).device_node))
    assert mine.tree.page_ids(node).tolist() == [0, 1, 2, 3, 4]
    assert mine.evict(4) == [7, 8, 5, 6]
    assert mine.tree.page_ids(node).tolist() == [0, 1, 2, 3, 4]
    assert mine.evict(1) == [4]
    with pytest.raises(StaleHandle):
        mine.tree.lock(node)
    mine.conserved()


def test_an_answer_that_ended_inside_a_node_is_stale_after_so_many_others() -> None:
    mine = Engine(PrefixTree(1))
    mine.insert(range(4))
    old = mine.tree.match([0, 1, 9]).device_node
    for _ in range(MOST_PLACES - 1):
        mine.tree.match([0, 1, 9])
    assert mine.tree.page_ids(old).tolist() == [0, 1]
    mine.tree.match([0, 1, 9])
    with pytest.raises(StaleHandle):
        mine.tree.lock(old)
    mine.conserved()


def test_a_look_says_what_a_match_does_and_uses_nothing() -> None:
    rng = random.Random(3)
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3), State()), tiers=WriteThrough()), 400)
    for _ in range(30):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        mine.backed(mine.insert(tokens, {"swa": min(3, len(tokens)), "state": 1}).node)
        mine.evict(rng.randrange(4))
        mine.conserved()
    forest = mine.tree._forest  # no public sight of what was used when
    for _ in range(100):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(12))]
        before = [(node.id, node.used) for node in forest], list(forest.device.order)
        looked = mine.tree.look(tokens)
        assert ([(node.id, node.used) for node in forest], list(forest.device.order)) == before
        matched = mine.tree.match(tokens)
        assert (looked.tokens, looked.best_tokens, looked.full_tokens) == (
            matched.tokens,
            matched.best_tokens,
            matched.full_tokens,
        )
        assert ids(looked) == ids(matched) == mine.tree.page_ids(matched.device_node).tolist()
        assert (looked.branches, looked.waits) == (matched.branches, matched.waits)


def test_page_ids_of_what_is_on_the_host_alone_are_refused() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteThrough()))
    mine.backed(mine.insert(range(4)).node)
    mine.evict(2)
    match = mine.tree.match(range(4))
    with pytest.raises(PrefixError, match=f"the path to node {match.best_node} is not on the device from page 1 on"):
        mine.tree.page_ids(match.best_node, 1)
    assert mine.tree.page_ids(match.device_node, 1).tolist() == [1]
    assert mine.tree.page_ids(match.device_node, 9).tolist() == []


def test_what_a_lock_needs_is_what_it_then_protects() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3), State())))
    mine.insert(range(4), {"swa": 4, "state": 1})
    mine.insert(range(9), {"swa": 5, "state": 1}, first_page=4)
    first = mine.tree.lock(mine.tree.match(range(4)).device_node)
    node = mine.tree.match(range(9)).device_node
    needs = mine.tree.lock_needs(node)
    before = {name: mine.tree.sizes(name).protected for name in needs}
    assert mine.tree.lock_needs(node, skip=("swa",)).keys() == {"full", "state"}
    second = mine.tree.lock(node)
    assert needs == {name: mine.tree.sizes(name).protected - pages for name, pages in before.items()}
    assert needs == {"full": 5, "swa": 3, "state": 1}
    for handle in (first, second):
        mine.tree.unlock(handle)
    mine.conserved()


def test_one_walk_frees_enough_of_several_pools_and_no_leaf_more() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(4),)))
    for text in range(4):
        mine.insert(range(10 * text, 10 * text + 4), {"swa": 4})
    freed = mine.apply(mine.tree.evict_pools({"swa": 5, "full": 3}))
    # The first leaf has enough of attention KV; of the second the window alone goes.
    assert freed.page_ids().tolist() == [0, 1, 2, 3]
    assert freed.page_ids("swa").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    mine.conserved()
    assert mine.tree.evict_pools({}).actions == ()


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_large_eviction_taken_in_steps_has_the_same_victims(step: int) -> None:
    """So a caller that must not stall asks for a few thousand pages at a time."""
    whole, stepped = (Engine(PrefixTree(1), 2000) for _ in range(2))
    for mine in (whole, stepped):
        rng = random.Random(1)
        for _ in range(200):
            mine.insert([rng.randrange(3) for _ in range(9)])
    due, got = whole.evict(300), list[int]()
    while len(got) < 300:
        got += stepped.evict(min(step, 300 - len(got)))
    assert sorted(got) == sorted(due)
    for mine in (whole, stepped):
        mine.conserved()


def test_an_extension_below_a_lock_takes_the_place_of_the_lock() -> None:
    mine = Engine(PrefixTree(2))
    mine.insert(range(8))
    match = mine.tree.match(range(8))
    handle = mine.tree.lock(match.device_node)
    taken = mine.take(2)
    step = mine.tree.extend(handle, [8, 9, 10, 11, 12], taken)
    mine.give(taken)
    assert (step.tokens, step.kept_page_ids.tolist(), step.actions) == (12, taken, ())
    assert mine.tree.page_ids(step.node).tolist() == [*ids(match), *taken]
    assert mine.tree.sizes().protected == 6
    with pytest.raises(StaleHandle):
        mine.tree.unlock(handle)
    mine.tree.unlock(step.handle)
    mine.conserved()


def test_who_extends_second_hears_whose_pages_to_use() -> None:
    mine = Engine(PrefixTree(1))
    first, second = (mine.tree.lock(mine.insert([1, 2]).node) for _ in range(2))
    pages = mine.take(5)
    one = mine.tree.extend(first, [3, 4], pages[:2])
    two = mine.tree.extend(second, [3, 9, 9], pages[2:])
    mine.give(pages)
    mine.apply(two)
    assert one.kept_page_ids.tolist() == pages[:2]
    assert two.kept_page_ids.tolist() == [pages[0], *pages[3:]]
    assert (two.page_ids().tolist(), two.known_tokens) == ([pages[2]], 3)
    for each in (one, two):
        mine.tree.unlock(each.handle)
    mine.conserved()


def test_below_the_root_an_extension_is_an_insert_that_locks() -> None:
    tree, tenant = PrefixTree(1), PrefixNamespace(salt="a")
    kept = tree.extend(tree.lock(0), [1, 2, 3], [10, 11, 12], namespace=tenant)
    assert (kept.tokens, kept.kept_page_ids.tolist(), tree.sizes().protected) == (3, [10, 11, 12], 3)
    assert (tree.match([1, 2, 3]).tokens, tree.match([1, 2, 3], namespace=tenant).tokens) == (0, 3)
    longer = tree.extend(kept.handle, [4], [13])
    assert tree.match([1, 2, 3, 4], namespace=tenant).tokens == 4
    with pytest.raises(PrefixError, match="the path is of another namespace than the call"):
        tree.extend(longer.handle, [5], [14], namespace=PrefixNamespace(salt="b"))
    empty = tree.extend(longer.handle, [], [])
    assert (empty.tokens, empty.kept_page_ids.tolist(), empty.node) == (4, [], longer.node)
    tree.unlock(empty.handle)
    tree.check()


def test_an_extension_that_is_refused_leaves_the_handle_out() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteThrough()))
    mine.backed(mine.insert([1, 2]).node)
    handle = mine.tree.lock(mine.tree.match([1, 2]).device_node)
    with pytest.raises(PrefixError, match="2 ids are due, got 1"):
        mine.tree.extend(handle, [3, 4], [9])
    mine.tree.unlock(handle)
    mine.evict(2)
    best = mine.tree.match([1, 2]).best_node
    for gone in (mine.tree.lock(best), mine.tree.lock_host(best)):
        with pytest.raises(PrefixError, match="keeps no prefix on the device"):
            mine.tree.extend(gone, [3], [9])
        mine.tree.unlock(gone)
    mine.conserved()
    assert mine.tree.sizes(tier=Tier.HOST).protected == 0


def test_decoding_page_by_page_keeps_the_window_and_the_state_of_the_end_alone() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(3), State())))
    handle = mine.tree.lock(mine.insert(range(5), {"swa": 3, "state": 1}).node)
    for token in range(5, 12):
        taken = {name: mine.take(1, name) for name in ("full", "swa", "state")}
        held = {name: row for name, row in taken.items() if name != "full"}
        step = mine.tree.extend(handle, [token], taken["full"], held=held)
        for name, row in taken.items():
            mine.give(row, name)
        handle = step.handle
        assert step.actions == ()
        protected = {name: mine.tree.sizes(name).protected for name in taken}
        assert (protected["full"], protected["state"]) == (token + 1, 1)
        assert 3 <= protected["swa"] <= 5, "whole nodes, the oldest of which the window has not left yet"
        mine.conserved()
    assert protected["swa"] == 3
    assert mine.tree.match(range(12)).tokens == 12
    mine.tree.unlock(handle)
    mine.conserved()
