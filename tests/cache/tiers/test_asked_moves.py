"""What hints ask of tiers, down to the host, up from storage, or stored: on all ranks alike, and every byte right."""

from __future__ import annotations

import pytest
from rig import EAGER, HYBRID, PLAIN, Rank, idle

from kvmover.cache.hints import (
    DemoteHint,
    HintAction,
    HintDesk,
    HintMet,
    HintRefusal,
    HintRefused,
    PinHint,
    PinLimits,
    Pins,
)
from kvmover.cache.prefix import FULL, Tier, WriteBack
from kvmover.cache.tiers import ControllerConfig, Store, TierCount, TierPolicy, Wait
from kvmover.layout import Fleet

PROMPT = list(range(33))
#: Nothing is stored unless somebody asks for it.
NEVER = ControllerConfig(TierPolicy(Store.NEVER, Wait(), 1, 1, 1.0))


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.close()


def free_of(rank: Rank, tier: Tier = Tier.DEVICE) -> int:
    return len(rank.allocator.free[FULL, tier])


@pytest.mark.parametrize("model", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_what_is_demoted_leaves_the_device_and_comes_back_from_the_host(tmp_path, model):
    rank = Rank(tmp_path, model=model)
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.demote(rank.tree.look(PROMPT).device_node)
    assert free_of(rank) == 16
    assert rank.controller.meter.counts[TierCount.DEMOTED_PAGES] == 8
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.host_tokens) == (32, 32)
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_what_has_no_copy_yet_is_demoted_once_it_has(rank):
    rank.serve(PROMPT)  # its copy to the host is on its way, and locked
    assert rank.controller.demote(rank.tree.look(PROMPT).device_node)
    assert free_of(rank) == 8
    rank.controller.wait()
    assert free_of(rank) == 16
    rank.conserved()


def test_a_tree_that_writes_back_copies_what_is_demoted():
    rank = Rank(None, tiers=WriteBack())
    rank.serve(PROMPT)
    assert rank.controller.demote(rank.tree.look(PROMPT).device_node)
    assert (free_of(rank), free_of(rank, Tier.HOST)) == (16, 24)
    rank.poison_free()
    assert rank.serve(PROMPT).credit.host_tokens == 32
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_what_others_use_or_have_pinned_is_not_demoted(rank):
    rank.serve(PROMPT)
    rank.serve([*PROMPT[:16], *range(100, 117)])
    rank.controller.wait()
    desk = HintDesk(rank.tree, Pins(rank.tree, {FULL: 16}, PinLimits(share=1.0)), rank.controller)
    key = rank.tree.key(PROMPT)
    assert desk.carry_out(HintAction("pin", PinHint(9.0)), key, 0.0) == HintMet(32)
    refused = desk.carry_out(HintAction("demote", DemoteHint()), key, 0.0)
    assert isinstance(refused, HintRefused)
    assert refused.why is HintRefusal.IN_USE
    desk.pins.unpin("pin")
    assert desk.carry_out(HintAction("demote", DemoteHint()), key, 0.0) == HintMet(32)
    # The half that the other prompt stands on stays.
    assert (rank.tree.look(PROMPT).tokens, rank.tree.look(PROMPT).best_tokens) == (16, 32)
    rank.controller.wait()
    rank.conserved()


def test_what_is_published_is_stored_whatever_the_policy_says(tmp_path):
    rank = Rank(tmp_path, setup=NEVER)
    rank.serve(PROMPT)
    rank.controller.wait()
    assert rank.controller.meter.counts[TierCount.STORED_PAGES] == 0
    assert rank.controller.stores
    assert rank.controller.publish(rank.tree.look(PROMPT).best_node)
    rank.controller.wait()
    assert rank.controller.meter.counts[TierCount.STORED_PAGES] == 8
    rank.forget()
    rank.poison_free()
    assert rank.serve(PROMPT).credit.storage_tokens == 32
    rank.controller.wait()
    rank.conserved()
    rank.close()


@pytest.mark.parametrize("model", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_what_is_brought_up_is_on_the_device_before_a_request_asks_for_it(tmp_path, model):
    rank = Rank(tmp_path, model=model)
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    assert rank.controller.bring(rank.tree.key(PROMPT))
    rank.controller.wait()
    assert rank.tree.look(PROMPT).tokens == 32
    assert rank.tree.sizes().protected == 0
    assert rank.serve(PROMPT).credit.device_tokens == 32
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_what_is_brought_up_evicts_nothing(rank):
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    others = [list(range(first, first + 33)) for first in (100, 200)]
    for other in others:
        rank.serve(other)
    rank.controller.wait()
    assert free_of(rank) == 0
    rank.controller.bring(rank.tree.key(PROMPT))
    rank.controller.wait()
    assert (rank.tree.look(PROMPT).tokens, rank.tree.look(PROMPT).best_tokens) == (0, 32)
    assert [rank.tree.look(other).tokens for other in others] == [32, 32]
    rank.conserved()


def test_as_many_as_may_be_are_brought_up_at_a_time(rank):
    keys = [rank.tree.key(list(range(first, first + 33))) for first in range(100, 1000, 100)]
    assert [rank.controller.bring(key) for key in keys] == [True] * 8 + [False]
    rank.controller.wait()
    assert rank.controller.bring(keys[-1])
    rank.controller.wait()
    rank.conserved()


def test_ranks_do_all_of_it_together(tmp_path):
    fleet = Fleet(tp=2, page_tokens=4)
    ranks = [Rank(tmp_path, fleet=fleet, rank=number, setup=ControllerConfig(EAGER, rank=number)) for number in (0, 1)]
    hashes = ranks[0].hashes(PROMPT)
    for rank in ranks:
        pages = rank.taken(8)
        for page, page_hash in zip(pages, hashes, strict=True):
            rank.fill(FULL, page, page_hash)
        rank.controller.keep(PROMPT[:32], pages)
        rank.controller.demote(rank.tree.look(PROMPT).device_node)
    idle(ranks)
    assert [free_of(rank) for rank in ranks] == [16, 16]
    for rank in ranks:
        rank.forget()
        rank.poison_free()
        rank.controller.bring(rank.tree.key(PROMPT))
    idle(ranks)
    for rank in ranks:
        match = rank.tree.look(PROMPT)
        assert match.tokens == 32
        rank.controller.loads.wait(3)
        for page, page_hash in zip(match.page_ids.tolist(), hashes, strict=True):
            rank.check(FULL, page, page_hash)
        rank.conserved()
        rank.close()
