"""Tiers whose device is one: page-locked host pools, a stream for each direction, events for the first layers."""

from __future__ import annotations

import pytest
import torch
from rig import HYBRID, PLAIN, SPARSE, Rank

from kvmover.cache.prefix import WriteBack
from kvmover.cache.tiers import ControllerConfig, Inclusion, Store, TierPolicy, Wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPT = list(range(33))
EAGER = TierPolicy(prefetch=Wait(), least_tokens=1, least_load_tokens=1, reading_share=1.0)


@pytest.mark.parametrize("model", [PLAIN, SPARSE, HYBRID], ids=["plain", "sparse", "hybrid"])
@pytest.mark.parametrize("order", ["page head layer kv token dim", "layer kv page token head dim"])
def test_pages_come_back_from_both_tiers_byte_for_byte(tmp_path, model, order):
    rank = Rank(tmp_path, model=model, order=order, place="cuda", setup=ControllerConfig(EAGER, group_layers=1))
    assert all(tensor.is_pinned() for tiered_pool in rank.tiered_pools for tensor in tiered_pool.host.tensors)
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    assert rank.serve(PROMPT).credit.host_tokens == 32
    rank.controller.wait()
    rank.forget()
    rank.poison_free()
    restore = rank.serve(PROMPT)
    assert (restore.credit.storage_tokens, restore.lost) == (32, {})
    rank.controller.wait()
    rank.conserved()
    rank.close()


def test_a_forward_pass_may_read_the_first_layer_before_the_last_has_landed(tmp_path):
    """Work that waits at the gate reads right bytes, layer by layer, with no wait of the host."""
    rank = Rank(tmp_path, place="cuda", setup=ControllerConfig(EAGER, group_layers=1))
    rank.serve(PROMPT)
    rank.controller.wait()
    rank.evict(100)
    rank.poison_free()
    restore = rank.controller.restore(PROMPT)
    gate, match = restore.gate, restore.found
    assert gate is not None
    (tiered_pool,) = rank.tiered_pools
    seen = []
    for layer in range(4):
        gate.wait(layer)
        seen.append(tiered_pool.device.plane(layer, 0).clone())
    rank.controller.wait(restore)
    for layer, plane in enumerate(seen):
        pages = restore.page_ids.tolist()
        there = tiered_pool.device.plane(layer, 0)[pages]
        assert torch.equal(plane[pages].view(torch.uint8), there.view(torch.uint8)), layer
    assert restore.tokens == match.best_tokens == 32
    rank.look_at(PROMPT, restore)
    rank.controller.release(restore)
    rank.close()


@pytest.mark.parametrize("inclusion", Inclusion)
def test_what_is_evicted_is_copied_out_before_its_page_is_used_again(tmp_path, inclusion):
    policy = TierPolicy(Store.BACKED, Wait(), 1, 1, 1.0, inclusion=inclusion)
    rank = Rank(tmp_path, place="cuda", tiers=WriteBack(), setup=ControllerConfig(policy))
    for number in range(5):
        rank.serve([number] * 33)
        rank.controller.wait()
    for number in range(5):
        rank.poison_free()
        assert rank.serve([number] * 33).tokens == 32
        rank.controller.wait()
    rank.conserved()
    rank.close()
