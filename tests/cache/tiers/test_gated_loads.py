"""Loads that an engine waits for layer by layer: the tree has the pages at once, a reader each layer in time."""

from __future__ import annotations

import pytest
from rig import EAGER, HYBRID, LATENT, PLAIN, SINGLE, Rank, idle

from kvmover.cache.prefix import FULL, PrefixError, Tier
from kvmover.cache.tiers import ControllerConfig, TierCount, TierStage
from kvmover.cache.tiers.allocator import FreeList
from kvmover.layout import Fleet

PROMPT = list(range(33))
#: Two groups of layers, so that a part of a load can be there.
HALVES = ControllerConfig(EAGER, group_layers=2)


def on_the_host(rank: Rank) -> int:
    """The prompt's pages, on the host alone; the node to load."""
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    match = rank.tree.match(PROMPT)
    assert (match.tokens, match.best_tokens) == (0, 32)
    return match.best_node


@pytest.fixture
def rank():
    made = Rank(None, setup=HALVES)
    yield made
    made.close()


def test_the_tree_has_a_load_at_once_and_a_reader_its_first_layer_before_the_last(rank):
    assert rank.controller.load(on_the_host(rank)) == 8
    match = rank.tree.match(PROMPT)
    assert match.tokens == 32
    loads = rank.controller.loads
    (load,) = loads.open
    assert loads.closed
    loads.wait(0)
    assert (load.gate.open(1), load.gate.open(2)) == (True, False)
    loads.wait(3)
    for page, page_hash in zip(match.page_ids.tolist(), rank.hashes(PROMPT), strict=False):
        rank.check(FULL, page, page_hash)
    rank.controller.wait()
    rank.controller.check({})
    assert not loads.closed
    assert not loads.open
    meter, (pool,) = rank.controller.meter, rank.allocator.tiered_pools
    assert meter.counts[TierCount.LOADED_PAGES] == 8
    assert meter.counts[TierCount.LOADED_BYTES] == 8 * pool.part.nbytes
    assert meter.stages[TierStage.LOAD].count == 1
    rank.conserved()


def test_nothing_under_a_load_leaves_either_tier_before_all_ranks_have_copied(rank):
    rank.controller.load(on_the_host(rank))
    rank.controller.loads.wait(3)
    for tier in Tier.DEVICE, Tier.HOST:
        assert rank.tree.sizes(FULL, tier).evictable == 0
    rank.controller.wait()
    assert rank.tree.sizes(FULL, Tier.DEVICE).evictable == 8


def test_a_load_that_finds_no_room_changes_nothing(rank):
    node, taken = on_the_host(rank), rank.taken(10)
    assert rank.controller.load(node) is None
    assert rank.controller.idle
    assert rank.tree.sizes(FULL, Tier.HOST).evictable == 8, "nothing stays locked"
    assert rank.tree.match(PROMPT).tokens == 0
    rank.controller.give(taken)
    rank.conserved()


def test_what_is_not_on_the_host_is_no_load(rank):
    with pytest.raises(PrefixError, match="no copy on the host"):
        rank.controller.load(rank.controller.keep(PROMPT, rank.taken(8)).node)


def test_a_load_brings_windows_and_states_too():
    rank = Rank(None, model=HYBRID, setup=HALVES)
    node = on_the_host(rank)
    rank.controller.load(node)
    rank.controller.loads.wait(3)
    match = rank.tree.match(PROMPT)
    assert match.tokens == 32
    held = dict(match.held)
    rank.check("state", held["state"].tolist()[0], rank.hashes(PROMPT)[7])
    rank.check("swa", held["swa"].tolist()[-1], rank.hashes(PROMPT)[7])
    for name in rank.model:
        assert rank.tree.sizes(name).evictable == 0 or name == "swa"
    rank.controller.wait()
    rank.controller.check({})
    rank.conserved()
    rank.close()


def test_further_pages_are_loaded_beside_attention_pages_and_the_load_counts_as_a_use(monkeypatch):
    rank, told, used = Rank(None, model=HYBRID, setup=HALVES), {}, []
    monkeypatch.setattr(FreeList, "loaded", lambda own, ids, beside: told.update({own._name: (ids, beside)}))
    node = on_the_host(rank)
    rank.controller.loads.reused = lambda *use: used.append(use)
    rank.controller.load(node)
    match = rank.tree.match(PROMPT)
    attention, held = match.page_ids.tolist(), dict(match.held)
    assert told == {
        "swa on the device": (held["swa"].tolist()[-2:], attention[-2:]),
        "state on the device": (held["state"].tolist(), attention[-1:]),
    }
    assert used == [(node, 0)]
    rank.controller.wait()
    rank.close()


def test_a_load_of_a_window_alone_brings_no_attention_page():
    rank = Rank(None, model=HYBRID, setup=HALVES)
    rank.serve(PROMPT)
    rank.controller.wait()
    node = rank.tree.match(PROMPT).best_node
    handle = rank.tree.lock(node, skip=("swa",))
    rank.evict(100, name="swa")
    rank.tree.unlock(handle)
    assert rank.tree.match(PROMPT).tokens == 0
    assert rank.controller.load(node) == 0
    assert rank.tree.match(PROMPT).tokens == 32
    rank.controller.wait()
    rank.conserved()
    rank.close()


@pytest.mark.parametrize("model", [PLAIN, LATENT], ids=["plain", "latent"])
def test_ranks_give_up_their_locks_in_the_same_round(model):
    fleet = Fleet(tp=2, page_tokens=SINGLE.page_tokens)
    ranks = [Rank(None, fleet=fleet, rank=number, model=model, setup=HALVES) for number in range(2)]
    nodes = []
    for rank in ranks:
        rank.controller.keep(PROMPT, rank.taken(8))
    idle(ranks)
    for rank in ranks:
        rank.evict(100)
        nodes.append(rank.tree.match(PROMPT).best_node)
    for rank, node in zip(ranks, nodes, strict=True):
        rank.controller.load(node)
    # One has copied, and the other has not.
    ranks[0].controller.loads.wait(5)
    while ranks[0].controller.loads.closed:
        ranks[0].controller.copies.poll()
    assert [len(rank.controller.loads.open) for rank in ranks] == [1, 1]
    assert ranks[0].tree.sizes().evictable == 0
    idle(ranks)
    assert [rank.tree.sizes().evictable for rank in ranks] == [8, 8]
    for rank in ranks:
        rank.conserved()
        rank.close()


def test_a_prefetch_stops_at_the_host(tmp_path):
    rank = Rank(tmp_path, setup=HALVES)
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    restore = rank.controller.prefetch(rank.tree.key(PROMPT), 32)
    rank.controller.wait(restore)
    rank.controller.release(restore)
    match = rank.tree.match(PROMPT)
    assert (match.tokens, match.best_tokens) == (0, 32)
    rank.controller.load(match.best_node)
    rank.controller.loads.wait(3)
    for page, page_hash in zip(rank.tree.match(PROMPT).page_ids.tolist(), rank.hashes(PROMPT), strict=False):
        rank.check(FULL, page, page_hash)
    rank.controller.wait()
    rank.close()


def test_a_reset_gives_every_page_of_both_tiers_back(rank):
    rank.serve(PROMPT)
    with pytest.raises(PrefixError):
        rank.controller.reset()
    rank.controller.wait()
    rank.controller.reset()
    assert len(rank.tree) == 0
    rank.conserved()
