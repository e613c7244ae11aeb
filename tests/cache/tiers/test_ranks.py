"""Ranks of one fleet, and fleets of different shape over one store: they agree, and lose nothing to disagreement."""

from __future__ import annotations

import numpy as np
import pytest
from rig import HYBRID, LATENT, PLAIN, SPARSE, Rank, idle, together, until

from kvmover.cache.ledger import Loss
from kvmover.cache.prefix import FULL, Tier
from kvmover.cache.tiers import ConsensusBroken, ControllerConfig, TierError, TierPolicy, Wait, unlink
from kvmover.cache.tiers.restore_driver import Restores
from kvmover.layout import Fleet
from kvmover.layout.fleet import CpOrder
from kvmover.store import Got, GotResult
from tests.store.segments import condemn, segments_of

PROMPT = list(range(33))


def fleet_of(root, fleet, **more):
    return [Rank(root, fleet=fleet, rank=rank, **more) for rank in range(fleet.size)]


def serve(ranks, prompt=PROMPT):
    restores = [rank.controller.restore(prompt) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    for rank, restore in zip(ranks, restores, strict=True):
        rank.look_at(prompt, restore)
        rank.compute(prompt, restore)
    idle(ranks)
    for rank in ranks:
        rank.conserved()
    assert len({restore.tokens for restore in restores}) == 1
    return restores


def close(ranks):
    for rank in ranks:
        rank.close()


TP4, TP2 = Fleet(tp=4, page_tokens=8), Fleet(tp=2, page_tokens=8)
PP2TP2 = Fleet(tp=2, pp=2, page_tokens=8)
CP2 = Fleet(cp=2, page_tokens=4)
CP2TP2 = Fleet(tp=2, cp=2, page_tokens=4, cp_order=CpOrder.TOKEN)
ALL_MODELS = pytest.mark.parametrize(
    "model", [PLAIN, LATENT, SPARSE, HYBRID], ids=["plain", "latent", "sparse", "hybrid"]
)


@ALL_MODELS
@pytest.mark.parametrize(("first", "second"), [(TP4, TP2), (TP2, PP2TP2), (CP2, TP4), (CP2TP2, CP2), (PP2TP2, CP2TP2)])
def test_a_fleet_of_another_shape_reads_what_one_that_is_gone_has_written(tmp_path, model, first, second):
    """sglang#22782: one path of a hybrid stack forgot the context-parallel rank. Here all ask the fleet."""
    ranks = fleet_of(tmp_path, first, model=model)
    serve(ranks)
    close(ranks)
    ranks = fleet_of(tmp_path, second, model=model)
    for restore in serve(ranks):
        assert (restore.tokens, restore.credit.storage_tokens, restore.lost) == (32, 32, {})
    close(ranks)


@pytest.mark.parametrize("model", [PLAIN, LATENT, SPARSE, HYBRID], ids=["plain", "latent", "sparse", "hybrid"])
def test_the_parts_of_all_ranks_are_the_model_under_every_parallelism(model):
    from kvmover.cache.tiers import part_of

    for fleet in (TP4, PP2TP2, CP2, CP2TP2):
        for components in model.values():
            for component in components:
                cells = set()
                for rank in range(fleet.size):
                    box = part_of(component, fleet, rank).box
                    cells |= {(h, n, t) for h in box.heads for n in box.layers for t in box.tokens}
                assert len(cells) == component.heads * component.layers * component.extent(8)


def test_pages_in_blocks_are_refused():
    with pytest.raises(TierError, match="in blocks hold other tokens of a page"):
        Rank(None, fleet=Fleet(cp=2, page_tokens=4, cp_order=CpOrder.BLOCK))


def test_a_latent_is_held_once_a_node_and_every_rank_copies_its_share(tmp_path):
    (tmp_path / "store").mkdir()
    fleet = Fleet(tp=4, page_tokens=8)
    ranks = fleet_of(tmp_path / "store", fleet, model=LATENT, shared=tmp_path, pages=(16, 32))
    (name,) = {rank.tiered_pools[0].share.path for rank in ranks}
    assert name is not None
    assert name.stat().st_size == 32 * ranks[0].tiered_pools[0].part.nbytes
    for rank in ranks:
        unlink(rank.tiered_pools[0].share)
    serve(ranks)
    backed = [rank.controller.meter.counts["backed_pages"] for rank in ranks]
    assert backed == [1, 1, 1, 1], "four pages, once in all"
    for rank in ranks:
        rank.evict(100)
    for restore in serve(ranks):
        assert restore.credit.host_tokens == 32
    for rank in ranks:
        rank.forget()
        rank.poison_free()
    for restore in serve(ranks):
        assert restore.credit.storage_tokens == 32
    assert [rank.controller.meter.counts["fetched_pages"] for rank in ranks] == [1, 1, 1, 1]
    close(ranks)


def test_ranks_that_share_memory_under_other_ids_are_found_out(tmp_path):
    ranks = fleet_of(None, Fleet(tp=2, page_tokens=8), model=LATENT, shared=tmp_path)
    ranks[1].allocator.free[FULL, Tier.HOST].take(1)
    for rank in ranks:
        rank.compute(PROMPT, rank.controller.restore(PROMPT))
    with pytest.raises(ConsensusBroken, match="not with the same page ids"):
        idle(ranks)
    close(ranks)


def test_ranks_that_do_different_things_are_found_out():
    ranks = fleet_of(None, TP2)
    ranks[0].compute(PROMPT, ranks[0].controller.restore(PROMPT))
    with pytest.raises(ConsensusBroken, match="began 0 to 1 operations"):
        together(ranks)
    close(ranks)


def lose_page(rank, page_hash):
    """One object of a page is found to be bad, and deleted."""
    found = segments_of(rank.store).catalog.index.get(page_hash)
    assert found is not None
    condemn(rank.store, found.objects[0])


def test_a_page_that_one_rank_lacks_is_lost_to_all_and_the_ledger_says_so(tmp_path):
    ranks = fleet_of(tmp_path, TP2)
    serve(ranks)
    for rank in ranks:
        rank.forget()
    lose_page(ranks[0], ranks[0].hashes(PROMPT)[2])
    restores = serve(ranks)
    assert [restore.tokens for restore in restores] == [16, 16]
    lost = [restore.lost for restore in restores]
    assert {Loss.RANK_MINIMUM: 16} in lost, lost
    close(ranks)


def test_a_state_that_one_rank_lacks_makes_its_prefix_illegal_for_all(tmp_path, monkeypatch):
    """The longest of one rank is 24 and of another 32: their minimum, 24, is no prefix that the second can restore."""
    ranks = fleet_of(tmp_path, TP2, model=HYBRID)
    for length in (9, 17, 33):  # states after 8, 16 and 32
        serve(ranks, PROMPT[:length])
    for rank in ranks:
        rank.forget()
    votes = {ranks[0].store: {8, 16, 24}, ranks[1].store: {8, 16, 32}}

    def legal(self, storage, look, first, anchor):
        return np.array([page == 0 or page * 8 in votes[storage.store] for page in range(5)])

    monkeypatch.setattr(Restores, "_legal", legal)
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    assert [restore.tokens for restore in restores] == [16, 16]
    assert [restore.lost for restore in restores] == [{Loss.RANK_MINIMUM: 8}, {Loss.RANK_MINIMUM: 16}]
    close(ranks)


@pytest.mark.parametrize("broken", ["look", "read", "write"])
def test_a_rank_whose_storage_fails_answers_as_often_as_the_others(tmp_path, broken):
    ranks = fleet_of(tmp_path, TP2)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    storage = ranks[1].controller._backups.parts.storage
    assert storage is not None
    view = storage.stored_pools[0].view
    if broken == "write":
        view.put = fail
    serve(ranks)
    for rank in ranks:
        rank.forget()
    if broken == "look":
        view.exists = fail
    if broken == "read":
        view.get = fail
    restores = serve(ranks)
    assert [restore.tokens for restore in restores] == [0, 0]
    assert ranks[0].controller.collectives.serial == ranks[1].controller.collectives.serial
    reasons = {reason for restore in restores for reason in restore.lost}
    assert (
        reasons
        == {"look": {Loss.RANK_MINIMUM}, "read": {Loss.RANK_MINIMUM, Loss.READ_FAILED}, "write": {Loss.RANK_MINIMUM}}[
            broken
        ]
    )
    close(ranks)


@pytest.mark.parametrize(("model", "kept_pages"), [(PLAIN, 2), (HYBRID, 0)], ids=["plain", "hybrid"])
def test_a_read_that_one_rank_did_in_part_is_kept_in_part_only_where_parts_are_of_use(tmp_path, model, kept_pages):
    """Pages of attention KV without the window and the state at their end would only take room on the host."""
    policy = TierPolicy(prefetch=Wait(), least_tokens=1, least_load_tokens=1000, reading_share=1.0)  # leave it there
    ranks = fleet_of(tmp_path, TP2, model=model, setup=ControllerConfig(policy))
    serve(ranks)
    for rank in ranks:
        rank.forget()
    storage = ranks[1].controller._backups.parts.storage
    assert storage is not None
    (view,) = [each.view for each in storage.stored_pools if each.tiered_pool.name == FULL]
    bad, get = ranks[1].hashes(PROMPT)[2], view.get

    def third_is_bad(hashes, addresses):
        results = get(hashes, addresses)
        return [GotResult(Got.POISONED) if name == bad else got for name, got in zip(hashes, results, strict=True)]

    view.get = third_is_bad
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    for rank in ranks:
        assert rank.tree.match(PROMPT).best_tokens == kept_pages * 8
        assert rank.tree.sizes(FULL, Tier.HOST).evictable + rank.tree.sizes(FULL, Tier.HOST).protected == kept_pages
        rank.controller.release(restores[ranks.index(rank)])
        rank.conserved()
    close(ranks)


def test_a_rank_with_less_room_than_the_others_ends_as_they_do(tmp_path):
    ranks = fleet_of(tmp_path, TP2)
    serve(ranks)
    for rank in ranks:
        rank.evict(100)
    held = ranks[1].controller.take(14)
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    until(ranks, lambda: all(restore.done for restore in restores))
    assert [restore.tokens for restore in restores] == [16, 16]
    assert [restore.lost for restore in restores] == [{Loss.RANK_MINIMUM: 16}, {Loss.DEVICE_CAPACITY: 16}]
    for rank, restore in zip(ranks, restores, strict=True):
        rank.look_at(PROMPT, restore)
        rank.controller.release(restore)
    ranks[1].controller.give(held)
    for rank in ranks:
        rank.conserved()
    close(ranks)
