"""Trees that write back: exclusive tiers, and storage of what is evicted from the device."""

from __future__ import annotations

import pytest
from rig import Rank, idle, until

from kvmover.cache.prefix import FULL, Tier, WriteBack
from kvmover.cache.tiers import ControllerConfig, Inclusion, Store, TierError, TierPolicy, Wait
from kvmover.layout import Fleet

PROMPT = list(range(33))
BACK = WriteBack()


def policy(store: Store = Store.NEVER, inclusion: Inclusion = Inclusion.INCLUSIVE) -> TierPolicy:
    return TierPolicy(store, Wait(), 1, 1, 1.0, inclusion=inclusion)


def crowd(rank: Rank, prompts: int) -> None:
    """Other requests, which take the device."""
    for number in range(prompts):
        rank.serve([1000 + number] * 33)
        rank.controller.wait()


def on_both(rank: Rank) -> int:
    """Pages of idle tiers that are on the device and on the host."""
    return rank.tree.sizes(FULL, Tier.HOST).protected


@pytest.mark.parametrize("inclusion", Inclusion)
def test_a_page_that_is_loaded_leaves_the_host_if_tiers_are_exclusive(inclusion):
    rank = Rank(None, tiers=BACK, setup=ControllerConfig(policy(inclusion=inclusion)))
    rank.serve(PROMPT)
    crowd(rank, 2)
    assert on_both(rank) == 0
    held = rank.tree.sizes(FULL, Tier.HOST).evictable
    assert held >= 8
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.host_tokens) == (32, 32)
    rank.controller.wait()
    assert on_both(rank) == (8 if inclusion is Inclusion.INCLUSIVE else 0)
    rank.conserved()
    rank.close()


@pytest.mark.parametrize("inclusion", Inclusion)
def test_tiers_that_write_back_hold_as_much_as_both_together(inclusion):
    """16 pages on the device and 32 on the host: five prompts of eight pages, and eight to move them by."""
    rank = Rank(None, tiers=BACK, setup=ControllerConfig(policy(inclusion=inclusion)))
    prompts = [[number] * 33 for number in range(5)]
    for prompt in prompts:
        rank.serve(prompt)
        rank.controller.wait()
    for _ in range(3):
        for prompt in prompts:
            rank.poison_free()
            assert rank.serve(prompt).tokens == 32
            rank.controller.wait()
            rank.conserved()
    rank.close()


def test_exclusive_tiers_take_a_tree_that_writes_back():
    with pytest.raises(TierError, match="exclusive tiers take a tree that writes back"):
        Rank(None, setup=ControllerConfig(policy(inclusion=Inclusion.EXCLUSIVE)))


@pytest.mark.parametrize("inclusion", Inclusion)
def test_what_is_evicted_to_the_host_is_stored_and_comes_back(tmp_path, inclusion):
    rank = Rank(tmp_path, tiers=BACK, setup=ControllerConfig(policy(Store.BACKED, inclusion)))
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 0, "it is on the device still"
    crowd(rank, 2)
    assert rank.controller.meter.counts["stored_pages"] == 8
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.storage_tokens, restore.lost) == (32, 32, {})
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_pages_that_are_evicted_bit_by_bit_are_each_stored_once(tmp_path):
    rank = Rank(tmp_path, tiers=BACK, setup=ControllerConfig(policy(Store.BACKED)))
    rank.serve(PROMPT)
    rank.serve([*PROMPT[:16], *[7] * 17])  # shares four pages
    taken: list[int] = []
    for _ in range(16):
        taken += rank.taken(1)
        rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 12
    assert not rank.controller.meter.dropped
    rank.controller.give(taken)
    rank.forget()
    rank.poison_free()
    assert rank.serve(PROMPT).credit.storage_tokens == 32
    assert rank.serve([*PROMPT[:16], *[7] * 17]).tokens == 32
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_a_page_that_leaves_the_host_before_it_is_stored_is_counted(tmp_path):
    rank = Rank(tmp_path, tiers=BACK, pages=(16, 8), setup=ControllerConfig(policy(Store.BACKED)))
    rank.serve(PROMPT)
    rank.controller.wait()
    given = rank.taken(8)
    more = rank.taken(8)  # the whole prompt is on the host now, and due
    rank.evict(8, Tier.HOST)
    rank.controller.give(given + more)
    rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 0
    assert rank.controller.meter.dropped["store", "evicted before it was stored"] == 1
    rank.conserved()
    rank.close()


def test_what_is_loaded_from_the_host_is_stored_where_reuse_is_asked_for(tmp_path):
    rank = Rank(tmp_path, tiers=BACK, setup=ControllerConfig(policy(Store.REUSED)))
    rank.serve(PROMPT)
    crowd(rank, 2)
    assert rank.controller.meter.counts["stored_pages"] == 0
    assert rank.serve(PROMPT).credit.host_tokens == 32
    rank.controller.wait()
    assert rank.controller.meter.counts["stored_pages"] == 8
    rank.close()


def test_ranks_that_write_back_store_alike(tmp_path):
    fleet = Fleet(tp=2, page_tokens=4)
    ranks = [
        Rank(tmp_path, fleet=fleet, rank=rank, tiers=BACK, setup=ControllerConfig(policy(Store.BACKED)))
        for rank in range(2)
    ]
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    for rank, restore in zip(ranks, restores, strict=True):
        rank.compute(PROMPT, restore)
    idle(ranks)
    taken = [rank.taken(16) for rank in ranks]
    idle(ranks)
    assert [rank.controller.meter.counts["stored_pages"] for rank in ranks] == [8, 8]
    for rank, ids in zip(ranks, taken, strict=True):
        rank.controller.give(ids)
        rank.conserved()
        rank.close()


def test_pages_of_the_host_whose_front_is_on_the_device_alone_stay_while_room_is_made_for_them():
    """To load them, 4 pages of another prompt leave the device, and would take their place on the host."""
    rank = Rank(None, tiers=BACK, pages=(8, 4), setup=ControllerConfig(policy()))
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.allocator.evict(FULL, Tier.DEVICE, 4)
    rank.controller.wait()
    rank.serve([1000] * 17)
    assert [rank.tree.match(PROMPT).tokens, rank.tree.match(PROMPT).best_tokens] == [16, 32]
    assert len(rank.allocator.free[FULL, Tier.DEVICE]) == len(rank.allocator.free[FULL, Tier.HOST]) == 0
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.host_tokens) == (32, 16)
    rank.controller.wait()
    rank.conserved()
    rank.close()
