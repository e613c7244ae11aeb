"""One rank: device, host and storage, and what is done to them while pages are on their way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import HYBRID, LATENT, PLAIN, SPARSE, Rank

from kvmover.cache.ledger import Loss
from kvmover.cache.prefix import FULL, Tier
from kvmover.cache.tiers.tier_storage import PageRef, StorageRead, StorageWrite

PROMPT = list(range(33))


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.close()


def test_what_was_computed_comes_back_from_the_host(rank):
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.host_tokens, restore.credit.storage_tokens) == (32, 32, 0)
    rank.controller.wait()
    rank.conserved()


def test_what_was_computed_comes_back_from_storage(rank):
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.storage_tokens, restore.lost) == (32, 32, {})
    rank.controller.wait()
    rank.conserved()


def test_a_store_that_becomes_another_namespace_has_nothing_of_the_one_before_and_jobs_under_way_write_nothing(rank):
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.forget()
    storage = rank.controller._backups.parts.storage
    refs = [(pool, PageRef(0, rank.hashes(PROMPT)[0], 0)) for pool in storage.stored_pools]
    read, write = StorageRead(storage, refs, 1, lambda: False), StorageWrite(storage, refs)
    other = replace(rank.space, weights="rev-2")
    rank.store.become(other)
    storage.moved(other)
    while not (read.step() and write.step()):
        pass
    assert (read.good, read.pages, write.stored) == (0, 0, 0)
    assert sum(write.failed.values()) == len(refs)
    assert rank.store.stat().pages == 0
    rank.poison_free()
    assert rank.serve(PROMPT).tokens == 0
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    assert rank.serve(PROMPT).credit.storage_tokens == 32
    rank.controller.wait()
    rank.conserved()


def test_a_prefix_comes_from_three_tiers_and_each_has_its_credit(rank):
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(4)  # the last four pages are on the host alone
    rank.evict(2, Tier.HOST)  # and the last two of these in storage alone
    rank.poison_free()
    restore = rank.serve(PROMPT)
    credit = restore.credit
    assert (credit.device_tokens, credit.host_tokens, credit.storage_tokens) == (16, 8, 8)
    rank.controller.wait()
    rank.conserved()


@pytest.mark.parametrize("model", [PLAIN, LATENT, SPARSE, HYBRID], ids=["plain", "latent", "sparse", "hybrid"])
@pytest.mark.parametrize("order", ["page head layer kv token dim", "layer kv page token head dim"])
def test_every_component_comes_back_from_storage_whatever_the_order_on_the_host(tmp_path, model, order):
    rank = Rank(tmp_path, model=model, order=order)
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.conserved()
    rank.forget()
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.tokens, restore.credit.storage_tokens, restore.lost) == (32, 32, {})
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_a_load_without_room_brings_what_fits(tmp_path):
    rank = Rank(tmp_path, pages=(8, 32))
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    taken = rank.controller.take(5)
    restore = rank.controller.restore(PROMPT)
    rank.controller.wait(restore)
    rank.look_at(PROMPT, restore)
    assert (restore.tokens, restore.lost) == (12, {Loss.DEVICE_CAPACITY: 20})
    rank.controller.release(restore)
    rank.controller.give(taken)
    rank.conserved()
    rank.close()


def test_a_window_and_a_state_that_come_later_follow_what_is_backed_to_every_tier(tmp_path):
    """As where a prompt branches off within another: its attention KV is known, and nothing stands beside it yet."""
    rank = Rank(tmp_path, model=HYBRID)
    hashes = rank.hashes(PROMPT)
    pages = rank.taken(8)
    for page, page_hash in zip(pages, hashes, strict=True):
        rank.fill(FULL, page, page_hash)
    rank.controller.keep(PROMPT[:32], pages)
    rank.controller.wait()
    assert rank.tree.look(PROMPT).best_tokens == 0
    held = {"swa": rank.controller.take(2, "swa"), "state": rank.controller.take(1, "state")}
    for name, ids in held.items():
        assert ids is not None
        for page, page_hash in zip(ids, hashes[3 - len(ids) : 3], strict=True):
            rank.fill(name, page, page_hash)
    rank.controller.keep(PROMPT[:12], rank.taken(3), held=held)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    restore = rank.serve(PROMPT[:13])
    assert (restore.tokens, restore.credit.host_tokens) == (12, 12)
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    restore = rank.serve(PROMPT[:13])
    assert (restore.tokens, restore.credit.storage_tokens) == (12, 12)
    rank.controller.wait()
    rank.conserved()
    rank.close()
