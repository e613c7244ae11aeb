"""Three tiers: an engine keeps a prompt's pages on device, host and disk, and its next life finds them on the disk."""

import tempfile
import time
from pathlib import Path

import torch

from kvmover import Component, Fleet, Pool, PoolSpec
from kvmover.cache.ledger import Ledger
from kvmover.cache.prefix import PrefixTree, WriteThrough
from kvmover.cache.tiers import Controller, ControllerConfig, HostTier, Storage, TieredPool, TierPolicy, Wait
from kvmover.store import Namespace, PageStore

kv, fleet = Component.attention(layers=2, kv_heads=4, head_dim=64, dtype="bfloat16"), Fleet(page_tokens=16)
space, prompt = Namespace("tiny", "revision-1", page_tokens=16), list(range(100))
truth = torch.randint(-(2**15), 2**15, (6, 16, 4, 64), dtype=torch.int16)  # of one plane: [page, token, head, dim]


def serve(root: str) -> str:
    """One process's life: restore what any tier has, compute the rest, keep it. Says where the prompt came from."""
    pool = Pool.zeros(PoolSpec.dense(kv, fleet.shard(kv, 0, 16), pages=8, page_tokens=16, order="NHD"))
    plane = pool.plane(layer=0, kv=0).view(torch.int16)
    tiered_pool, ledger = TieredPool.of(kv, fleet, 0, pool, HostTier(pages=16)), Ledger()
    with PageStore.open(Path(root), space) as store:
        storage = Storage(store, space, [tiered_pool], fleet, 0)
        policy = TierPolicy(prefetch=Wait(), least_tokens=1)
        config = ControllerConfig(policy)  # ranks of a fleet: ControllerConfig(policy, Grouped(process_group))
        controller = Controller(PrefixTree(16, tiers=WriteThrough()), [tiered_pool], storage, config)
        restore = controller.restore(prompt)
        controller.wait(restore)  # an engine calls poll() once a scheduler step instead, and looks at restore.done
        ledger.matched("request-1", len(prompt), restore.reusable_tokens, time.monotonic())
        ledger.admitted("request-1", restore.credit, restore.lost)
        found = restore.page_ids.tolist()
        fresh = controller.take(len(prompt) // 16 - len(found))
        assert fresh is not None  # None: there is no room, even after eviction
        plane[fresh] = truth[len(found) :]  # in the place of a forward pass over prompt[restore.tokens:]
        assert torch.equal(plane[[*found, *fresh]], truth)
        controller.keep(prompt, fresh, first_page=len(found))
        ledger.computed("request-1", len(prompt) - restore.tokens)
        account = ledger.finished("request-1", time.monotonic())
        controller.release(restore)
        controller.wait()  # until everything is written
        controller.close()
    assert account is not None
    return f"{account.device_tokens} device, {account.host_tokens} host, {account.storage_tokens} storage"


with tempfile.TemporaryDirectory() as root:
    assert [serve(root), serve(root)] == ["0 device, 0 host, 0 storage", "0 device, 0 host, 96 storage"]
