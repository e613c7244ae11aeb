"""A prefix is of use where every component is: windows, states, their tombstones and their branching points."""

from __future__ import annotations

import pytest
from engine import Engine, hits, ids, needs

from kvmover.cache.prefix import PrefixError, PrefixTree, SlidingWindow, State, Tier, WriteThrough


def window(tokens: int = 4, pages: int = 64, **more) -> Engine:
    return Engine(PrefixTree(1, components=(SlidingWindow(tokens),), **more), pages)


def states(**more) -> Engine:
    return Engine(PrefixTree(1, components=(State(),), **more))


def usable(mine: Engine, tokens) -> int:
    return mine.tree.match(tokens).tokens


def test_a_long_leaf_ends_in_one_window() -> None:
    mine = window()
    mine.insert(range(10), {"swa": 10})
    match = mine.tree.match(range(10))
    assert (match.tokens, match.full_tokens, len(mine.tree)) == (10, 10, 2)
    assert mine.tree.sizes("swa").evictable == 10
    assert dict(match.held)["swa"].tolist() == [6, 7, 8, 9]
    handle = mine.tree.lock(match.device_node)
    assert mine.tree.sizes("swa").protected == 4
    mine.tree.unlock(handle)
    mine.conserved()


def test_what_slid_out_before_the_insert_is_a_tombstone() -> None:
    mine = window()
    mine.insert(range(10), {"swa": 4})
    assert mine.tree.sizes("swa").evictable == 4
    assert usable(mine, range(10)) == 10
    for cut in (6, 8):
        match = mine.tree.match(range(cut))
        assert (match.tokens, match.full_tokens, dict(match.branches)) == (0, cut, {"swa": cut})
    mine.conserved()


def test_giving_up_old_windows_leaves_attention_and_the_later_prefixes() -> None:
    mine = window()
    for end in (4, 8, 12):
        mine.insert(range(end), {"swa": 4}, first_page=end - 4)
    assert len(mine.evict(4, "swa")) == 4
    assert [usable(mine, range(end)) for end in (4, 8, 12)] == [0, 8, 12]
    assert mine.tree.sizes().evictable == 12
    mine.conserved()


def test_a_leaf_takes_its_window_along() -> None:
    mine = window()
    mine.insert(range(4), {"swa": 4})
    mine.insert(range(8), {"swa": 4}, first_page=4)
    outcome = mine.apply(mine.tree.evict(4))
    assert (outcome.page_ids().tolist(), outcome.page_ids("swa").tolist()) == ([4, 5, 6, 7], [4, 5, 6, 7])
    mine.conserved()


def test_a_leaf_whose_window_goes_keeps_its_attention_for_who_brings_the_window_again() -> None:
    mine = window()
    mine.insert(range(4), {"swa": 4})
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (len(outcome.page_ids()), len(outcome.page_ids("swa"))) == (0, 4)
    assert (usable(mine, range(4)), mine.tree.match(list(range(4))).full_tokens) == (0, 4)
    mine.insert(range(4), {"swa": 4})
    assert usable(mine, range(4)) == 4
    assert len(mine.apply(mine.tree.evict(4)).page_ids()) == 4
    mine.conserved()


def test_a_locked_leaf_loses_its_window_alone() -> None:
    mine = window()
    node = mine.insert(range(4), {"swa": 4}).node
    handle = mine.tree.lock(node, skip=("swa",))
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (len(outcome.page_ids()), len(outcome.page_ids("swa"))) == (0, 4)
    mine.conserved()
    mine.tree.unlock(handle)
    mine.conserved()


def test_a_prefix_shorter_than_the_window_is_of_use() -> None:
    mine = window()
    mine.insert([1, 2, 3], {"swa": 3})
    assert usable(mine, [1, 2, 3]) == 3
    assert usable(mine, [1, 2]) == 2


def test_an_insert_fills_a_tombstone_and_gives_attention_back() -> None:
    mine = window()
    for end in (4, 8, 12):
        mine.insert(range(end), {"swa": 4}, first_page=end - 4)
    mine.evict(4, "swa")
    kept = mine.insert(range(12), {"swa": 12})
    assert len(kept.page_ids()) == 12
    assert len(kept.page_ids("swa")) == 8
    assert [usable(mine, range(end)) for end in (4, 8, 12)] == [4, 8, 12]
    mine.conserved()


def test_a_tombstone_is_filled_as_far_as_the_request_brings_it() -> None:
    mine = window(pages=80)
    mine.insert(range(20), {"swa": 4})
    mine.insert(range(14), {"swa": 5})
    assert (usable(mine, range(14)), usable(mine, range(20))) == (14, 20)
    assert usable(mine, range(11)) == 0
    mine.conserved()


def test_windows_deep_in_the_tree_go_before_those_in_use() -> None:
    mine = window()
    for end in (4, 8, 12):
        mine.insert(range(end), {"swa": 4}, first_page=end - 4)
    mine.tree.match(range(12))
    mine.evict(8, "swa")
    assert usable(mine, range(12)) == 12
    mine.conserved()


def test_a_state_stands_at_the_end_of_its_node() -> None:
    mine = states()
    mine.insert([1, 2, 3, 4], {"state": 1})
    match = mine.tree.match([1, 2, 9])
    assert (match.tokens, match.full_tokens, dict(match.branches)) == (0, 2, {"state": 2})
    match = mine.tree.match([1, 2, 3, 4])
    assert (match.tokens, dict(match.held)["state"].tolist(), match.branches) == (4, [0], ())
    mine.conserved()


def test_a_state_at_the_branching_point_makes_the_branch_of_use() -> None:
    mine = states()
    mine.insert([1, 2, 3, 4], {"state": 1})
    mine.tree.match([1, 2, 9])
    first = mine.insert([1, 2], {"state": 1})
    assert len(first.page_ids("state")) == 0
    again = mine.insert([1, 2], {"state": 1})
    assert again.page_ids("state").tolist() == [2]
    assert usable(mine, [1, 2, 9]) == 2
    mine.conserved()


def test_branching_points_lie_on_the_grid_of_the_recurrence() -> None:
    mine = Engine(PrefixTree(1, components=(State(grid_tokens=4),)))
    mine.insert(range(10), {"state": 1})
    assert dict(mine.tree.match(range(9)).branches) == {"state": 8}
    assert mine.tree.match(range(3)).branches == ()
    with pytest.raises(PrefixError, match="at least one token, got 0"):
        State(grid_tokens=0)
    with pytest.raises(PrefixError, match="at least one token, got 0"):
        SlidingWindow(0)


def test_a_branching_point_exists_with_a_host_tier_too() -> None:
    mine = states(tiers=WriteThrough())
    mine.insert([1, 2], {"state": 1})
    mine.insert([1, 2, 3], first_page=2)
    match = mine.tree.match([1, 2, 3])
    assert (match.tokens, dict(match.branches)) == (2, {"state": 3})


def test_a_component_on_the_host_alone_is_what_a_load_back_brings() -> None:
    """sglang#25277: best and device anchor differ though attention is on the device as far as the best."""
    mine = states(tiers=WriteThrough())
    mine.insert([1, 2], {"state": 1})
    deep = mine.insert([1, 2, 3, 4], {"state": 1}, first_page=2).node
    mine.backed(deep)
    handle = mine.tree.lock(deep, skip=("state",))
    mine.tree.match([1, 2])
    assert mine.evict(1, "state") == [1]
    match = mine.tree.match([1, 2, 3, 4])
    assert (match.tokens, match.best_tokens, match.best_node, match.full_tokens) == (2, 4, deep, 4)
    assert needs(match) == {"state": [3]}
    assert ids(match) == [0, 1]
    mine.conserved()
    transfer = mine.load(deep)
    assert [(leg.component, leg.positions.tolist()) for leg in transfer.legs] == [("state", [3])]
    mine.end(transfer.op)
    mine.tree.unlock(handle)
    assert mine.tree.match([1, 2, 3, 4]).tokens == 4
    mine.conserved()


def test_a_window_goes_to_the_host_and_back_with_its_prefix() -> None:
    mine = window(tiers=WriteThrough())
    mine.insert(range(4), {"swa": 4})
    node = mine.insert(range(8), {"swa": 4}, first_page=4).node
    mine.backed(node)
    mine.evict(100)
    assert (hits(mine.tree, range(8)), mine.tree.sizes("swa").evictable) == ((0, 8), 0)
    assert needs(mine.tree.match(range(8))) == {"full": list(range(8)), "swa": [4, 5, 6, 7]}
    mine.conserved()
    transfer = mine.load(node)
    mine.tree.match([0, 1, 2, 3, 4, 5, 99])
    mine.conserved()
    mine.end(transfer.op)
    assert hits(mine.tree, range(8)) == (8, 0)
    mine.conserved()


@pytest.mark.parametrize("done", range(9))
def test_of_a_backup_that_fails_half_way_components_go_with_the_pages_they_belong_to(done: int) -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(2), State()), tiers=WriteThrough()))
    mine.insert(range(4), {"swa": 4, "state": 1})
    node = mine.insert(range(8), {"swa": 4, "state": 1}, first_page=4).node
    mine.end(mine.backup(node).op, done)
    mine.conserved()
    mine.evict(100)
    mine.conserved()
    best = mine.tree.match(range(8)).best_tokens
    assert best == (8 if done == 8 else 4 if done >= 4 else 0)
    for name in ("full", "swa", "state"):
        mine.evict_host(100, name)
    mine.conserved()


def test_host_copies_of_a_component_go_on_their_own() -> None:
    mine = states(tiers=WriteThrough())
    mine.backed(mine.insert([1, 2], {"state": 1}).node)
    mine.evict(2)
    assert mine.evict_host(1, "state") == [0]
    assert hits(mine.tree, [1, 2]) == (0, 0)
    assert mine.tree.match([1, 2]).full_tokens == 2
    mine.conserved()


def test_what_nothing_can_end_at_any_more_goes_with_its_last_child() -> None:
    mine = states()
    mine.insert([1, 2, 3, 4], {"state": 1})
    mine.tree.match([1, 2, 9])
    outcome = mine.apply(mine.tree.evict(1))
    assert len(outcome.page_ids()) == 4, "the front has no state, and no child any more"
    mine.conserved()


def test_what_nothing_can_end_at_stays_while_it_is_locked() -> None:
    """sglang#23696: a clean-up looked at one kind of lock only."""
    for kind in ("device", "host"):
        mine = states(tiers=WriteThrough())
        mine.backed(mine.insert([1, 2, 3, 4], {"state": 1}).node)
        node = mine.insert([1, 2]).node
        assert mine.tree.match([1, 2, 9]).full_tokens == 2
        handle = mine.tree.lock(node) if kind == "device" else mine.tree.lock_host(node)
        mine.evict(100)
        mine.evict_host(100)
        assert mine.tree.match([1, 2]).full_tokens == 2
        mine.conserved()
        mine.tree.unlock(handle)
        mine.evict(100)
        mine.evict_host(100)
        mine.conserved()


def test_every_judge_sees_every_node() -> None:
    """A window counts as it goes: one that is not asked where a state is missing would be wrong further down."""
    mine = Engine(PrefixTree(1, components=(State(), SlidingWindow(6))))
    mine.insert(range(4), {"swa": 4})
    mine.insert(range(8), {"swa": 4, "state": 1}, first_page=4)
    mine.insert(range(12), {"swa": 4, "state": 1}, first_page=8)
    order = mine.tree._forest
    for node in list(order):
        if node.end <= 4:
            mine.tree._forest.take(node, Tier.DEVICE, 1)
    assert mine.tree.match(range(8)).tokens == 0, "four of six tokens"
    assert mine.tree.match(range(12)).tokens == 12


def test_several_components_are_of_use_together() -> None:
    mine = Engine(PrefixTree(2, components=(SlidingWindow(4), State())))
    mine.insert(range(8), {"swa": 4, "state": 1})
    assert usable(mine, range(8)) == 8
    mine.evict(1, "state")
    assert usable(mine, range(8)) == 0
    mine.conserved()


def of_two_turns(*components: SlidingWindow | State) -> tuple[Engine, int]:
    """Two turns of a chat with all components at the end of each, and the node of the first."""
    mine = Engine(PrefixTree(1, components=components))
    counts = {each.name: 2 if each.per_page else 1 for each in components}
    first = mine.insert(range(4), counts).node
    mine.insert(range(8), counts, first_page=4)
    return mine, first


def test_a_window_that_goes_from_inside_the_tree_takes_the_state_along_and_a_state_no_window() -> None:
    for given_up, gone in (("swa", {"swa": 2, "state": 1}), ("state", {"swa": 0, "state": 1})):
        mine, _ = of_two_turns(SlidingWindow(2), State())
        outcome = mine.apply(mine.tree.evict(1, given_up))
        assert {name: len(outcome.page_ids(name)) for name in gone} == gone
        assert len(outcome.page_ids()) == 0
        mine.conserved()


def test_a_window_goes_from_a_node_that_has_no_state() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(2), State())))
    mine.insert(range(4), {"swa": 2})
    mine.insert(range(8), {"swa": 2, "state": 1}, first_page=4)
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (len(outcome.page_ids("swa")), len(outcome.page_ids("state"))) == (2, 0)
    mine.conserved()


def test_a_locked_state_stays_where_its_window_goes() -> None:
    mine, first = of_two_turns(SlidingWindow(2), State())
    handle = mine.tree.lock(first, skip=("swa",))
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (len(outcome.page_ids("swa")), len(outcome.page_ids("state"))) == (2, 0)
    mine.conserved()
    mine.tree.unlock(handle)
    mine.conserved()


def test_a_window_goes_alone_from_among_its_like() -> None:
    mine, _ = of_two_turns(SlidingWindow(2, name="short"), SlidingWindow(2, name="long"))
    outcome = mine.apply(mine.tree.evict(1, "long"))
    assert (len(outcome.page_ids("short")), len(outcome.page_ids("long"))) == (0, 2)
    mine.conserved()


def test_a_window_takes_a_backed_leaf_off_the_device_and_leaves_one_that_has_a_child_on_the_host() -> None:
    mine = window(tiers=WriteThrough())
    mine.insert(range(4), {"swa": 4})
    mine.backed(mine.insert(range(8), {"swa": 4}, first_page=4).node)
    mine.tree.match(range(4))
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (outcome.page_ids().tolist(), outcome.page_ids("swa").tolist()) == ([4, 5, 6, 7], [4, 5, 6, 7])
    mine.conserved()
    outcome = mine.apply(mine.tree.evict(1, "swa"))
    assert (outcome.page_ids().tolist(), outcome.page_ids("swa").tolist()) == ([], [0, 1, 2, 3])
    mine.conserved()


def test_a_component_of_ones_own_needs_no_change_of_the_tree() -> None:
    class Compressed:
        """Wants its last page of 4 tokens and nothing else."""

        name, per_page, rank, reach_tokens, grid_tokens = "c4", True, 1, 4, 4

        def match_validator(self):
            return lambda _tokens, present: present

    mine = Engine(PrefixTree(4, components=(Compressed(),)))
    mine.insert(range(12), {"c4": 1})
    assert (usable(mine, range(12)), usable(mine, range(8))) == (12, 0)
    assert dict(mine.tree.match(range(8)).branches) == {"c4": 8}
    mine.conserved()


@pytest.mark.parametrize("order", [("state", "swa"), ("swa", "state")])
@pytest.mark.parametrize("components", [(State(), SlidingWindow(4)), (SlidingWindow(4), State())])
def test_the_order_of_components_and_of_held_ids_changes_no_answer(components, order) -> None:
    """The second request brings three pages of a window of four, and its state: eight tokens are not yet of use."""
    mine = Engine(PrefixTree(1, components=components))
    mine.insert(range(8))
    counts = {"state": 1, "swa": 3}
    mine.insert(range(8), {name: counts[name] for name in order})
    assert mine.tree.sizes("swa").evictable == 3
    assert usable(mine, range(8)) == 0
    mine.conserved()
    mine.insert(range(8), {name: counts[name] + (name == "swa") for name in order})
    match = mine.tree.match(range(8))
    assert (match.tokens, len(dict(match.held)["swa"]), mine.tree.sizes("swa").evictable) == (8, 4, 4)
    mine.conserved()


def test_a_state_at_each_turn_of_a_chat_makes_one_node_a_turn() -> None:
    mine = Engine(PrefixTree(1, components=(State(),)), 100)
    for turn in range(1, 11):
        mine.insert(range(10 * turn), {"state": 1}, first_page=10 * turn - 10)
    assert len(mine.tree) == 10
    assert [usable(mine, range(n)) for n in (9, 10, 99, 100)] == [0, 10, 90, 100]
    mine.conserved()


def test_windows_of_two_lengths_that_begin_inside_one_node_are_each_kept_whole() -> None:
    """The node is cut at the first beginning, and then at the other: each part has as many ids as pages."""
    mine = Engine(PrefixTree(1, components=(SlidingWindow(2, name="short"), SlidingWindow(4, name="long"))))
    mine.insert(range(8))
    mine.insert(range(8), held={"short": 5, "long": 7})
    mine.conserved()
    assert mine.tree.match(range(8)).tokens == 8
    assert [mine.tree.match(range(end)).tokens for end in (4, 5, 7)] == [0, 5, 7]
    mine.conserved()
