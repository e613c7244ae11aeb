"""Tiers that are wrong in one place: the tests' rig, which looks at every byte that comes back, finds each out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rig import HYBRID, PLAIN, Rank, idle, together

from kvmover.cache.prefix import Tier
from kvmover.cache.tiers.agreement import CollectiveOp, CollectiveOps, PartialWork, agreed_count, counted
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.layerwise_copier import LayerwiseCopier
from kvmover.cache.tiers.tier_storage import StoredPool
from kvmover.errors import KvmoverError
from kvmover.layout import Fleet

PROMPT = list(range(33))


def round_trip(rank: Rank) -> None:
    """Device to host and back, then to storage and back."""
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    assert rank.serve(PROMPT).credit.host_tokens == 32
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    assert rank.serve(PROMPT).credit.storage_tokens == 32
    rank.controller.wait()
    rank.conserved()


def stores_under_the_neighbours_hash(patch: pytest.MonkeyPatch) -> None:
    """The digest is right, and the bytes are another page's."""
    put = StoredPool.put

    def wrong(self, pages):
        hashes = [page.page_hash for page in pages]
        return put(self, [replace(p, page_hash=h) for p, h in zip(pages, [*hashes[1:], hashes[0]], strict=True)])

    patch.setattr(StoredPool, "put", wrong)


def reads_to_the_neighbours_place(patch: pytest.MonkeyPatch) -> None:
    get = StoredPool.get

    def wrong(self, pages):
        ids = [page.host_id for page in pages]
        return get(self, [replace(p, host_id=i) for p, i in zip(pages, [*ids[1:], ids[0]], strict=True)])

    patch.setattr(StoredPool, "get", wrong)


def loads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    batches = PageAllocator.batches

    def wrong(self, legs, dst):
        found = batches(self, legs, dst)
        return [replace(b, host_ids=b.host_ids[::-1]) for b in found] if dst is Tier.DEVICE else found

    patch.setattr(PageAllocator, "batches", wrong)


def forgets_the_last_layers(patch: pytest.MonkeyPatch) -> None:
    begin = LayerwiseCopier.begin

    def wrong(self, batches, dst, done):
        gate = begin(self, batches, dst, done)
        if gate.copy.groups and len(gate.copy.groups) > 1:
            gate.copy.groups[-1].clear()
        return gate

    patch.setattr(LayerwiseCopier, "begin", wrong)


def says_done_before_it_is(patch: pytest.MonkeyPatch) -> None:
    """The copy is reported, and never carried out."""

    def wrong(self, batches, dst, done):
        return BEGIN(self, [], dst, done)

    patch.setattr(LayerwiseCopier, "begin", wrong)


def frees_what_it_has_just_loaded(patch: pytest.MonkeyPatch) -> None:
    """A page that is used comes back to the free list."""
    take = PageAllocator.take

    def wrong(self, name, tier, count):
        ids = take(self, name, tier, count)
        if ids and tier is Tier.DEVICE:
            self.free[name, tier].give(ids[:1])
        return ids

    patch.setattr(PageAllocator, "take", wrong)


BEGIN = LayerwiseCopier.begin
Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Mutant] = [
    stores_under_the_neighbours_hash,
    reads_to_the_neighbours_place,
    loads_in_another_order,
    forgets_the_last_layers,
    says_done_before_it_is,
    frees_what_it_has_just_loaded,
]


@pytest.mark.parametrize("model", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_wrong_tiers_are_found_out(tmp_path, monkeypatch, mutant: Mutant, model):
    mutant(monkeypatch)
    rank = Rank(tmp_path, model=model)
    rank.controller.copies.group_layers = 1
    with pytest.raises((AssertionError, KvmoverError)):
        round_trip(rank)
    rank.close()


@pytest.mark.parametrize("model", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_right_tiers_pass(tmp_path, model):
    rank = Rank(tmp_path, model=model)
    rank.controller.copies.group_layers = 1
    round_trip(rank)
    rank.close()


def test_a_rank_that_never_answers_ends_nothing_for_the_others(monkeypatch):
    """sglang's controllers must emit equal numbers of acknowledgements: one that keeps its own is waited for."""
    ranks = [Rank(None, fleet=Fleet(tp=2, page_tokens=8), rank=rank) for rank in range(2)]
    restores = [rank.controller.restore(PROMPT) for rank in ranks]
    with monkeypatch.context() as patch:
        silent = ranks[1].controller.collectives
        done = CollectiveOp.done
        patch.setattr(
            CollectiveOp, "done", lambda collective, *answer: collective in silent.open or done(collective, *answer)
        )
        for rank, restore in zip(ranks, restores, strict=True):
            rank.compute(PROMPT, restore)
        for _ in range(50):
            together(ranks)
        assert [len(rank.controller.collectives.open) for rank in ranks] == [1, 1]
        (collective,) = silent.open
    collective.done(4, 4, -4)
    idle(ranks)
    for rank in ranks:
        rank.conserved()
        rank.close()


def test_answers_are_no_more_than_all_ranks_gave():
    """Taking the first rank's answer, or the most, names pages that another one lacks."""
    ranks = [CollectiveOps(), CollectiveOps(), CollectiveOps()]
    collectives = [each.begin(lambda agreed: None, 3) for each in ranks]
    for collective, answer in zip(collectives, [(8, 3, 0), (5, 9, 1), (7, 4, 1)], strict=True):
        collective.done(*answer)
    import numpy as np

    agreed = np.min([each.votes() for each in ranks], axis=0)
    assert [row.tolist() for each in ranks for _, row in each.settle(agreed)] == [[5, 3, 0]] * 3


def test_a_part_that_one_rank_lacks_is_kept_of_attention_alone():
    """A hybrid model has no use for the first five of eight pages: their end lacks its window and its state."""
    import numpy as np

    for answers, kept, dropped in (([(5, 8), (8, 8)], 5, 0), ([(8, 8), (8, 8)], 8, 8), ([(0, 8), (8, 8)], 0, 0)):
        agreed = np.min([counted(*answer) for answer in answers], axis=0)
        assert agreed_count(agreed, PartialWork.KEPT) == kept
        assert agreed_count(agreed, PartialWork.DROPPED) == dropped
