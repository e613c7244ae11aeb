"""Copies between tiers lose nothing and free nothing twice, whatever is split, evicted or inserted meanwhile."""

from __future__ import annotations

import pytest
from engine import Engine, hits, ids, locked, needs

from kvmover.cache.prefix import (
    POLICIES,
    ROOT,
    CopyOut,
    DeviceOnly,
    EvictionGranularity,
    FreePages,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    Sidecar,
    SlidingWindow,
    StaleHandle,
    Tier,
    WriteBack,
    WriteThrough,
)
from kvmover.cache.prefix.copies import land
from kvmover.cache.prefix.keys import words

THROUGH = WriteThrough()


def engine(page_tokens: int = 1, tiers=THROUGH, **more) -> Engine:
    return Engine(PrefixTree(page_tokens, tiers=tiers, grain=EvictionGranularity.NODE, **more))


def test_what_was_not_backed_is_gone_with_its_eviction() -> None:
    mine = engine()
    mine.insert([1, 2, 3])
    mine.evict(3)
    assert hits(mine.tree, [1, 2, 3]) == (0, 0)
    mine.conserved()


def test_what_was_backed_stays_on_the_host() -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    assert len(mine.evict(4)) == 4
    match = mine.tree.match([1, 2, 3, 4])
    assert (match.tokens, match.device_node, match.best_tokens) == (0, ROOT, 4)
    assert match.best_node == match.host_node == node
    assert needs(match) == {"full": [0, 1, 2, 3]}
    assert match.loads[0].host_page_ids.tolist() == [0, 1, 2, 3]
    mine.conserved()


def test_a_match_has_two_anchors() -> None:
    mine = engine()
    mine.insert([1, 2])
    mine.backed(mine.insert([1, 2, 3, 4], first_page=2).node)
    assert mine.evict(2) == [2, 3]
    match = mine.tree.match([1, 2, 3, 4, 5])
    assert (match.tokens, match.best_tokens, match.full_tokens) == (2, 4, 4)
    assert match.device_node != match.best_node == match.host_node
    assert (ids(match), needs(match)) == ([0, 1], {"full": [2, 3]})
    mine.conserved()


def test_an_insert_gives_fresh_pages_to_what_was_on_the_host_alone() -> None:
    mine = engine()
    mine.backed(mine.insert([1, 2, 3, 4]).node)
    mine.evict(4)
    kept = mine.insert([1, 2, 3, 4, 5])
    assert (kept.known_tokens, len(kept.actions)) == (4, 0)
    assert ids(mine.tree.match([1, 2, 3, 4, 5])) == [4, 5, 6, 7, 8]
    mine.conserved()


@pytest.mark.parametrize("cuts", [[374], [1], [100, 50, 25], [25, 50, 100], [374, 373, 1]])
def test_a_node_that_is_split_while_it_is_written_through_is_backed_and_stored_whole(cuts: list[int]) -> None:
    """sglang#16946: the front inherited the mark of a backup that only the rest got, and was never stored."""
    mine = Engine(PrefixTree(1, tiers=WriteThrough()), 800)
    node = mine.insert(range(375)).node
    hashes = mine.tree.page_hashes(node)
    transfer = mine.backup(node)
    for cut in cuts:
        mine.tree.match([*range(cut), 999])
        mine.conserved()
    assert mine.evict(375) == [], "what a copy reads stays"
    mine.end(transfer.op)
    mine.conserved()
    store = mine.tree.begin_store(node)
    (leg,) = store.legs
    assert leg.src_page_ids.tolist() == transfer.legs[0].dst_page_ids.tolist()
    assert list(store.hashes) == hashes
    assert leg.positions.tolist() == list(range(375))
    mine.end(store.op)
    assert len(mine.evict(375)) == 375
    assert hits(mine.tree, range(375)) == (0, 375)
    mine.conserved()


def test_a_backup_goes_root_first_and_covers_what_is_above() -> None:
    mine = engine()
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    node = mine.insert([1, 2, 3, 4, 5, 6], first_page=4).node
    assert mine.tree.backup_needs(node) == {"full": 6}
    transfer = mine.backup(node)
    assert transfer.legs[0].positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert transfer.legs[0].src_page_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert mine.tree.backup_needs(node) == {}
    mine.end(transfer.op)
    mine.conserved()


@pytest.mark.parametrize("done", range(7))
def test_a_backup_that_fails_half_way_backs_the_front_and_gives_the_rest_back(done: int) -> None:
    mine = engine()
    mine.insert([1, 2])
    node = mine.insert([1, 2, 3, 4, 5, 6], first_page=2).node
    outcome = mine.end(mine.backup(node).op, done)
    assert outcome.page_ids(tier=Tier.HOST).tolist() == list(range(done, 6))
    mine.conserved()
    assert mine.tree.backup_needs(node) == ({"full": 6 - done} if done < 6 else {})
    mine.evict(6)
    assert hits(mine.tree, [1, 2, 3, 4, 5, 6]) == (0, done)
    mine.conserved()


@pytest.mark.parametrize("first_done", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_child_is_not_backed_where_the_backup_of_its_parent_failed(first_done: int, order: tuple[int, int]) -> None:
    """sglang#22062: a child was backed under a parent that was not, and was lost with it."""
    mine = engine()
    front = mine.backup(mine.insert([1, 2]).node)
    rest = mine.backup(mine.insert([1, 2, 3, 4], first_page=2).node)
    assert rest.legs[0].positions.tolist() == [2, 3]
    ends = [(front.op, first_done), (rest.op, None)]
    for which in order:
        mine.end(*ends[which])
        mine.tree.check()
    mine.conserved()
    mine.evict(4)
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 4 if first_done == 2 else first_done)
    mine.conserved()


def test_a_backup_of_a_branch_waits_for_the_front_that_a_split_left_to_another() -> None:
    mine = engine()
    whole = mine.backup(mine.insert([1, 2, 3, 4]).node)
    branch = mine.backup(mine.insert([1, 2, 8, 9]).node)
    assert branch.legs[0].positions.tolist() == [2, 3]
    assert len(mine.end(branch.op).actions) == 0
    outcome = mine.end(whole.op, 0)
    assert sorted(outcome.page_ids(tier=Tier.HOST).tolist()) == [0, 1, 2, 3, 4, 5]
    mine.conserved()


def test_an_operation_ends_once() -> None:
    mine = engine()
    op = mine.backup(mine.insert([1, 2]).node).op
    mine.end(op)
    for gone in (op, op + 1):
        with pytest.raises(StaleHandle, match=f"operation {gone} is not under way"):
            mine.tree.end(gone)


def test_host_copies_in_use_outlive_eviction_and_splits() -> None:
    """sglang#38480: the front of a split node was unprotected, and storage got other bytes."""
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    store = mine.tree.begin_store(node)
    mine.tree.match([1, 2, 9])
    assert mine.evict_host(100) == []
    mine.conserved()
    mine.tree.end(store.op)
    assert sorted(mine.evict_host(100)) == [0, 1, 2, 3]
    assert len(mine.tree) == 0
    mine.conserved()


def test_pages_from_storage_fill_what_is_missing_and_the_rest_comes_back() -> None:
    mine = engine()
    known = []
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2]):
        outcome = mine.end(mine.fetch(tokens, 0))
        known.append(len(outcome.page_ids(tier=Tier.HOST)))
        mine.conserved()
    assert known == [0, 3, 2]
    assert hits(mine.tree, [1, 2, 3, 4, 5]) == (0, 5)


def test_the_host_gives_up_the_deepest_first() -> None:
    mine = engine()
    mine.insert([1, 2])
    mine.backed(mine.insert([1, 2, 3, 4], first_page=2).node)
    mine.evict(4)
    assert mine.evict_host(1) == [2, 3]
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 2)
    mine.conserved()


def test_the_host_keeps_what_the_device_has_too() -> None:
    mine = engine()
    mine.backed(mine.insert([1, 2]).node)
    assert mine.evict_host(2) == []
    mine.conserved()


def test_a_load_back_brings_a_chain_root_first() -> None:
    mine = engine()
    mine.insert([1, 2])
    node = mine.insert([1, 2, 3, 4], first_page=2).node
    mine.backed(node)
    mine.evict(4)
    transfer = mine.load(node)
    assert transfer.legs[0].positions.tolist() == [0, 1, 2, 3]
    assert transfer.legs[0].src_page_ids.tolist() == [0, 1, 2, 3]
    assert mine.tree.match([1, 2, 3, 4]).waits == (transfer.op,)
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 4), "not before it is there"
    mine.end(transfer.op)
    assert hits(mine.tree, [1, 2, 3, 4]) == (4, 0)
    assert mine.tree.match([1, 2, 3, 4]).waits == ()
    assert ids(mine.tree.match([1, 2, 3, 4])) == transfer.legs[0].dst_page_ids.tolist()
    mine.conserved()


@pytest.mark.parametrize("done", range(5))
def test_a_load_back_that_fails_half_way_keeps_the_front(done: int) -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    outcome = mine.end(mine.load(node).op, done)
    assert len(outcome.page_ids()) == 4 - done
    assert hits(mine.tree, [1, 2, 3, 4]) == (done, 4 - done)
    assert mine.tree.sizes().protected == 0
    mine.conserved()


def test_after_a_load_back_only_leaves_are_in_order() -> None:
    """Both SGLang cores leave the parent of a loaded node among the leaves until somebody locks it."""
    mine = engine()
    mine.insert([1, 2])
    node = mine.insert([1, 2, 3, 4], first_page=2).node
    mine.backed(node)
    mine.evict(4)
    mine.end(mine.load(node).op)
    assert mine.tree._forest.device.order.first() is mine.tree._forest.node(node)
    assert len(mine.evict(1)) == 2
    mine.conserved()


def test_host_pages_are_not_reused_while_they_are_loaded() -> None:
    """sglang#27444: a host page was recycled under the copy."""
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    transfer = mine.load(node)
    mine.tree.match([1, 2, 9])
    assert mine.evict_host(10) == []
    mine.conserved()
    mine.end(transfer.op)
    mine.conserved()


def test_a_path_is_loaded_by_one_operation() -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    first = mine.load(node)
    with pytest.raises(PrefixError, match=f"pages 0 to 4 are on their way: end operation {first.op} first"):
        mine.tree.load_needs(node)
    mine.end(first.op)
    mine.conserved()


@pytest.mark.parametrize("own", ["the record's", "others"])
def test_an_insert_that_comes_before_the_load_back_ends(own: str) -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    transfer = mine.load(node)
    theirs = transfer.legs[0].dst_page_ids.tolist()
    if own == "others":
        mine.insert([1, 2, 3, 4])
        outcome = mine.end(transfer.op)
        assert outcome.page_ids().tolist() == theirs
    else:
        assert len(mine.tree.insert([1, 2, 3, 4], theirs).actions) == 0
        assert len(mine.end(transfer.op).actions) == 0
        assert ids(mine.tree.match([1, 2, 3, 4])) == theirs
    mine.conserved()


def test_a_load_back_without_room_changes_nothing() -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    mine.evict(4)
    with pytest.raises(PrefixError, match=r"takes {'full': 4} ids, got {'full': 3}"):
        mine.tree.begin_load(node, {"full": [60, 61, 62]})
    assert mine.tree.sizes() == mine.tree.sizes().__class__(0, 0)
    mine.conserved()
    assert len(mine.evict_host(4)) == 4


def test_the_second_request_triggers_a_backup_and_one_in_chunks_does_not() -> None:
    mine = engine(tiers=WriteThrough(after_hits=2))
    assert mine.insert([1, 2]).backups == ()
    assert mine.insert([1, 2, 3, 4], first_page=2, counted_tokens=2).backups == ()
    due = mine.insert([1, 2, 3, 4])
    assert due.backups == (due.node,)
    transfer = mine.backup(due.node)
    assert transfer.legs[0].positions.tolist() == [0, 1, 2, 3]
    assert mine.insert([1, 2, 3, 4]).backups == (), "it is on its way"
    mine.end(transfer.op)
    assert mine.insert([1, 2, 3, 4]).backups == ()
    mine.conserved()


def test_matches_trigger_no_backup() -> None:
    mine = engine(tiers=WriteThrough(after_hits=2))
    mine.insert([1, 2])
    for _ in range(5):
        mine.tree.match([1, 2])
    assert mine.insert([3, 4]).backups == ()
    due = mine.insert([1, 2])
    assert due.backups == (due.node,)


def test_a_new_leaf_is_due_at_once_where_one_hit_is_enough() -> None:
    mine = engine()
    kept = mine.insert([1, 2])
    assert kept.backups == (kept.node,)
    assert engine(tiers=DeviceOnly()).insert([1, 2]).backups == ()
    assert engine(tiers=WriteBack()).insert([1, 2]).backups == ()


def test_a_fetch_lands_below_its_path_although_that_was_split_and_evicted() -> None:
    mine = engine()
    node = mine.insert([1, 2, 3, 4]).node
    mine.backed(node)
    op = mine.fetch([1, 2, 3, 4, 5, 6, 7], first_page=4)
    mine.tree.match([1, 2, 9])
    mine.evict(4)
    assert mine.evict_host(10) == [], "the path of a fetch stays"
    mine.conserved()
    assert len(mine.end(op).actions) == 0
    assert hits(mine.tree, [1, 2, 3, 4, 5, 6, 7]) == (0, 7)
    mine.conserved()


@pytest.mark.parametrize("done", [0, 1, 3, None])
def test_of_a_fetch_that_fails_half_way_the_front_lands(done: int | None) -> None:
    mine = engine()
    op = mine.fetch([1, 2, 3], first_page=0)
    outcome = mine.end(op, done)
    kept = 3 if done is None else done
    assert len(outcome.page_ids(tier=Tier.HOST)) == 3 - kept
    assert hits(mine.tree, [1, 2, 3]) == (0, kept)
    mine.conserved()


def test_what_was_computed_while_it_was_fetched_is_backed_by_the_fetch() -> None:
    mine = engine()
    op = mine.fetch([1, 2, 3], first_page=0)
    mine.insert([1, 2, 3, 4])
    assert len(mine.end(op).actions) == 0
    mine.conserved()
    mine.evict(4)
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 3)
    mine.conserved()


def test_a_fetch_and_a_backup_of_the_same_pages_free_one_of_the_two() -> None:
    for order in ((0, 1), (1, 0)):
        mine = engine()
        ops = [mine.fetch([1, 2, 3], first_page=0), mine.backup(mine.insert([1, 2, 3]).node).op]
        freed = [mine.end(ops[which]).page_ids(tier=Tier.HOST).tolist() for which in order]
        assert [len(each) for each in freed] == [0, 3]
        mine.conserved()


def test_a_fetch_needs_its_path_on_the_host() -> None:
    mine = engine()
    mine.insert([1, 2])
    for tokens, first in (([1, 2, 3], 2), ([1, 2, 3], 3), ([8, 9], 1)):
        with pytest.raises(PrefixError, match=f"a fetch from page {first} on needs the path up to there on the host"):
            mine.tree.begin_fetch(tokens, first, range(len(tokens) - first))
    mine.conserved()


def test_pages_without_a_way_to_the_root_are_dropped() -> None:
    """sglang#30106: a child was backed under a parent that was not."""
    mine = engine()
    mine.insert([1, 2])
    taken = mine.take(2, tier=Tier.HOST)
    mine.give(taken, tier=Tier.HOST)
    outcome = mine.applied(land(mine.tree._forest, mine.tree.key([1, 2, 3, 4]), 2, words(taken)))
    assert outcome.page_ids(tier=Tier.HOST).tolist() == taken
    mine.conserved()


def test_a_store_names_pages_by_hash_in_their_namespace() -> None:
    mine = engine(page_tokens=2)
    space = PrefixNamespace(salt="tenant")
    key = mine.tree.key(range(8), space)
    taken = mine.take(4)
    mine.give(taken)
    node = mine.tree.insert(key, taken).node
    mine.backed(node)
    with pytest.raises(PrefixError, match="a fetch"):
        mine.tree.begin_fetch(range(10), 4, [60])
    store = mine.tree.begin_store(node, first_page=2)
    assert store.first_page == 0, "whole nodes"
    assert list(store.hashes) == mine.tree.page_hashes(node)
    mine.tree.end(store.op)
    mine.conserved()


def test_only_what_is_backed_is_stored() -> None:
    mine = engine()
    node = mine.insert([1, 2]).node
    with pytest.raises(PrefixError, match=f"node {node} is not backed from page 0 on"):
        mine.tree.begin_store(node)


def test_a_tree_of_one_tier_refuses_the_other() -> None:
    prefixes = PrefixTree(1)
    node = prefixes.insert([1], [0]).node
    for call in (
        lambda: prefixes.begin_backup(node, {"full": [0]}),
        lambda: prefixes.begin_load(node, {}),
        lambda: prefixes.begin_store(node),
        lambda: prefixes.begin_fetch([1], 0, [0]),
    ):
        with pytest.raises(PrefixError, match="no host tier"):
            call()
    with pytest.raises(PrefixError, match="only a tree that writes back"):
        prefixes.evict(1, room=[1])
    with pytest.raises(PrefixError, match="at least one hit, got 0"):
        WriteThrough(0)


def test_a_sidecar_moves_with_the_ids_it_shares_and_is_freed_with_them() -> None:
    mine = engine(components=(Sidecar("indexer"),))
    node = mine.insert([1, 2]).node
    transfer = mine.backup(node)
    assert [leg.component for leg in transfer.legs] == ["full", "indexer"]
    assert transfer.legs[0].dst_page_ids.tolist() == transfer.legs[1].dst_page_ids.tolist()
    mine.end(transfer.op)
    outcome = mine.apply(mine.tree.evict(2))
    assert [action.component for action in outcome.actions] == ["full"]
    assert needs(mine.tree.match([1, 2])) == {"full": [0, 1], "indexer": [0, 1]}
    mine.conserved()
    with pytest.raises(PrefixError, match="shares the ids of swa, which is none of"):
        PrefixTree(1, components=(Sidecar("indexer", of="swa"),))
    with pytest.raises(PrefixError, match="components need names of their own"):
        PrefixTree(1, components=(Sidecar("full"),))


# Write-back


def write_back() -> Engine:
    return engine(tiers=WriteBack())


def evict(mine: Engine, pages: int, room: int) -> list:
    outcome = mine.tree.evict(pages, room=mine.free["full", Tier.HOST][:room])
    mine.apply(outcome)
    return list(outcome.actions)


def test_a_victim_is_copied_out_before_it_is_freed() -> None:
    mine = write_back()
    mine.insert([1, 2, 3])
    copy, free = evict(mine, 3, room=10)
    assert isinstance(copy, CopyOut)
    assert copy.legs[0].src_page_ids.tolist() == free.page_ids.tolist() == [0, 1, 2]
    assert copy.legs[0].dst_page_ids.tolist() == [0, 1, 2]
    assert hits(mine.tree, [1, 2, 3]) == (0, 3)
    mine.conserved()


def test_leaves_are_backed_before_what_is_above_them() -> None:
    mine = write_back()
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    evict(mine, 2, room=2)
    assert hits(mine.tree, [1, 2, 3, 4]) == (2, 2)
    mine.conserved()
    evict(mine, 2, room=2)
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 4)
    mine.conserved()


def test_without_room_a_victim_goes_with_what_hangs_below_it() -> None:
    mine = write_back()
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    evict(mine, 2, room=2)
    outcome = mine.apply(mine.tree.evict(2))
    assert outcome.page_ids().tolist() == [0, 1]
    assert outcome.page_ids(tier=Tier.HOST).tolist() == [0, 1]
    assert len(mine.tree) == 0
    mine.conserved()


def test_the_tail_of_a_leaf_is_copied_out_where_there_is_no_room_for_all_of_it() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteBack(), grain=EvictionGranularity.PAGE))
    mine.insert([1, 2, 3, 4])
    for left in (3, 2, 1):
        evict(mine, 1, room=1)
        assert hits(mine.tree, [1, 2, 3, 4]) == (left, 4 - left)
        mine.conserved()


@pytest.mark.parametrize("granularity", EvictionGranularity)
@pytest.mark.parametrize("pages", [1, 2])
def test_a_leaf_that_a_read_from_storage_stands_on_is_spared(granularity: EvictionGranularity, pages: int) -> None:
    """It is on the device alone and has no child yet: only the lock of the read says that a prefix needs it."""
    mine = Engine(PrefixTree(1, tiers=WriteBack(), grain=granularity))
    mine.insert([1, 2])
    op = mine.fetch([1, 2, 3, 4], 2)
    assert mine.evict(pages) == []
    mine.conserved()
    mine.end(op)
    assert hits(mine.tree, [1, 2, 3, 4]) == (2, 2)
    mine.conserved()
    assert sorted(mine.evict(2)) == [0, 1], "when the read has ended it may go"
    mine.conserved()


def test_a_victim_that_finds_no_room_takes_along_all_that_hangs_below_it() -> None:
    mine = write_back()
    for end in (2, 4, 6):
        mine.insert(range(end), first_page=end - 2)
    evict(mine, 4, room=4)
    assert hits(mine.tree, range(6)) == (2, 4)
    assert evict(mine, 2, room=0)
    assert hits(mine.tree, range(6)) == (0, 0)
    assert mine.tree.sizes("full", Tier.HOST).evictable == 0
    mine.conserved()


def test_what_hangs_below_and_is_in_use_spares_a_victim() -> None:
    mine = write_back()
    mine.insert([1, 2])
    deep = mine.insert([1, 2, 3, 4], first_page=2).node
    evict(mine, 2, room=2)
    handle = mine.tree.lock_host(deep)
    mine.insert([7, 8, 9])
    assert mine.evict(100) == [4, 5, 6]
    mine.conserved()
    mine.tree.unlock(handle)
    assert mine.evict(100) == [0, 1]
    mine.conserved()


def test_second_copies_are_the_first_to_go_from_the_host() -> None:
    mine = write_back()
    mine.insert([1, 2])
    mine.insert([3, 4])
    evict(mine, 4, room=4)
    mine.insert([3, 4])
    assert sorted(mine.evict_host(1)) == [2, 3]
    assert (hits(mine.tree, [3, 4]), hits(mine.tree, [1, 2])) == ((2, 0), (0, 2))
    mine.conserved()


def test_a_tree_that_writes_back_writes_nothing_through() -> None:
    mine = write_back()
    node = mine.insert([1, 2]).node
    with pytest.raises(PrefixError, match="copies on eviction only"):
        mine.tree.begin_backup(node, {"full": [0, 1]})


def test_locked_pages_are_not_demoted() -> None:
    mine = engine()
    mine.backed(mine.insert([1, 2, 3]).node)
    handle = locked(mine.tree, [1, 2])
    assert mine.evict(3) == [2]
    mine.tree.unlock(handle)
    assert hits(mine.tree, [1, 2, 3]) == (2, 1)
    mine.conserved()


def test_a_path_is_demoted_as_far_as_there_is_room_and_once() -> None:
    mine = write_back()
    mine.insert([1])
    mine.insert([1, 2], first_page=1)
    node = mine.insert([1, 2, 3, 4], first_page=2).node
    freed = mine.apply(mine.tree.demote(node, room=[0, 1, 2]))
    assert freed.page_ids().tolist() == [2, 3, 1]
    assert hits(mine.tree, [1, 2, 3, 4]) == (1, 3)
    mine.conserved()
    assert mine.tree.demote(node, room=[]).actions == ()
    assert mine.tree.demote(ROOT).actions == ()
    mine.conserved()


def test_a_path_is_demoted_up_to_a_lock_or_a_branch_and_needs_no_room_for_what_is_backed() -> None:
    mine = engine()
    front = mine.insert([1]).node
    mine.insert([1, 2], first_page=1)
    node = mine.insert([1, 2, 3], first_page=2).node
    mine.backed(node)
    handle = mine.tree.lock(front)
    assert mine.apply(mine.tree.demote(node)).page_ids().tolist() == [2, 1]
    assert mine.tree.demote(front).actions == ()
    mine.tree.unlock(handle)
    mine.insert([1, 9], first_page=1)
    assert mine.tree.demote(front).actions == (), "[1, 9] is on the device"
    mine.conserved()


def test_a_whole_leaf_that_finds_room_for_a_part_of_it_goes_with_what_hangs_below_it() -> None:
    mine = write_back()
    mine.insert([1, 2])
    mine.insert([1, 2, 3, 4], first_page=2)
    evict(mine, 2, room=2)
    evict(mine, 1, room=1)
    assert hits(mine.tree, [1, 2, 3, 4]) == (0, 0)
    mine.conserved()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_a_node_that_lost_its_last_child_and_went_does_not_come_back_into_the_order(policy) -> None:
    mine = Engine(PrefixTree(1, tiers=WriteBack(), policy=policy))
    mine.insert([9])
    op = mine.fetch([9, 8], 1)
    mine.insert([1])
    mine.insert([1, 2], first_page=1)
    assert sorted(mine.evict(2)) == [1, 2], "[9] stays: storage is read below it"
    mine.conserved()
    assert mine.evict(1) == []
    mine.end(op)
    assert mine.evict(9) == [0]
    mine.conserved()


def test_no_component_takes_a_leaf_along_below_which_storage_is_read() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(2),), tiers=WriteBack()))
    mine.insert([1, 2], {"swa": 2})
    op = mine.fetch([1, 2, 3, 4], 2)
    assert mine.evict(2) == []
    assert mine.evict(2, "swa") == [0, 1], "the window alone"
    mine.conserved()
    landed = mine.end(op)
    assert landed.page_ids(tier=Tier.HOST).tolist() == []
    assert mine.tree.match([1, 2, 3, 4]).full_tokens == 4
    mine.conserved()


def test_host_locks_keep_a_leaf_that_no_host_page_is_free_for() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteBack()))
    mine.insert([1, 2])
    op = mine.fetch([1, 2, 3, 4], 2)
    assert mine.evict(9) == []
    mine.conserved()
    assert mine.end(op).page_ids(tier=Tier.HOST).tolist() == []
    assert mine.tree.match([1, 2, 3, 4]).full_tokens == 4
    mine.conserved()


def test_a_fetched_window_that_begins_inside_a_node_leaves_the_order_of_use() -> None:
    mine = Engine(PrefixTree(1, components=(SlidingWindow(6),), tiers=WriteThrough()))
    mine.insert([1, 2], {"swa": 2})
    mine.backed(mine.insert([1, 2, 3, 4, 5, 6], {"swa": 4}, first_page=2).node)
    op = mine.tree.begin_fetch([1, 2, 3, 4, 5, 6, 7, 8], 6, [10, 11], {"swa": [10, 11, 12, 13, 14]})
    mine.tree.end(op)
    mine.tree.check()
    assert mine.tree.evict(1).page_ids().tolist()[-1] == 5, "the end of the path goes first"


def test_a_leaf_that_was_cut_and_goes_to_the_host_takes_as_many_pages_there_as_it_has_left() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteBack()))
    mine.insert([1, 2, 3, 4])
    assert mine.evict(1) == [3]
    (copy, freed) = mine.apply(mine.tree.evict(3, room=[0, 1, 2, 3])).actions
    assert isinstance(copy, CopyOut)
    assert isinstance(freed, FreePages)
    assert copy.legs[0].src_page_ids.tolist() == freed.page_ids.tolist() == [0, 1, 2]
    assert copy.legs[0].dst_page_ids.tolist() == [0, 1, 2]
    mine.conserved()
