"""Ranks of a fleet with real pools and a real store, in one process: every byte follows from its page's hash."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmover.cache.prefix import FULL, FreePages, PrefixTree, SlidingWindow, State, Tier, WriteThrough
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.tiers import (
    SOLE,
    Controller,
    ControllerConfig,
    FreeList,
    HostTier,
    Share,
    Storage,
    TieredPool,
    TierPolicy,
    Wait,
    page_tokens,
)
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.store import Namespace, PageStore, PlainFiles
from kvmover.store import Policy as StorePolicy
from kvmover.tools.conformance import part_content
from kvmover.vocabulary import PACKED_ORDER

GQA = Component.attention(4, 8, 16, "bfloat16")
MLA = Component.mla(6, 32, "bfloat16")
INDEX = Component("index", 6, 1, 1, 16, "float8_e4m3fn")
SWA = Component.sliding(2, 4, 16, 8, "bfloat16")
TEMPORAL = Component.state("temporal", 2, 4, 64, "float32")
CONV = Component.state("conv", 2, 4, 12, "bfloat16")
#: Names of the tree's components, and what goes by them.
PLAIN = {FULL: (GQA,)}
LATENT = {FULL: (MLA,)}
SPARSE = {FULL: (MLA, INDEX)}
HYBRID = {FULL: (GQA,), "swa": (SWA,), "state": (TEMPORAL, CONV)}
KINDS = {"swa": SlidingWindow(8), "state": State()}
POISON = 0xA5
SINGLE = Fleet(page_tokens=4)
THROUGH = WriteThrough()
EAGER = TierPolicy(prefetch=Wait(), least_tokens=1, least_load_tokens=1, reading_share=1.0)


class Rank:
    """One rank. `fill` computes pages, `check` looks at every byte of them."""

    def __init__(
        self,
        root: Path | None,
        *,
        fleet: Fleet = SINGLE,
        rank: int = 0,
        model: dict[str, tuple[Component, ...]] = PLAIN,
        pages: tuple[int, int] = (16, 32),
        order: str = PACKED_ORDER,
        shared: Path | None = None,
        tiers=THROUGH,
        setup: ControllerConfig | None = None,
        files=None,
        sink=None,
        keeps: StorePolicy | None = None,
        place: str = "cpu",
        peers=None,
    ) -> None:
        """`peers`: makes a tier of peers over pools of the host."""
        self.fleet, self.rank, self.model = fleet, rank, model
        self.page = page_tokens(fleet)
        self.tree = PrefixTree(self.page, components=[KINDS[name] for name in model if name != FULL], tiers=tiers)
        self.tiered_pools: list[TieredPool] = []
        for name, components in model.items():
            for component in components:
                shard = fleet.shard(component, rank, self.page)
                spec = PoolSpec.dense(
                    component, shard, pages[0], fleet.page_rows(component), "layer kv page token head dim"
                )
                device = Pool.zeros(spec, place)
                share = Share.of(component, fleet, rank, shared) if shared else SOLE
                self.tiered_pools.append(
                    TieredPool.of(component, fleet, rank, device, HostTier(pages[1], order, share), name)
                )
        self.space = Namespace("model", "rev-1", self.page)
        self.store: Any = PageStore.open(root, self.space, keeps, files or PlainFiles()) if root else None
        storage = Storage(self.store, self.space, self.tiered_pools, fleet, rank) if self.store else None
        self.peers: Any = peers([each.host for each in self.tiered_pools]) if peers else None
        setup = setup or ControllerConfig(EAGER, sink=sink)
        self.controller = Controller(self.tree, self.tiered_pools, storage, setup, peers=self.peers)
        self.allocator = self.controller.allocator

    # Content

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return chain(b"", np.array(tokens, np.int32), self.page)

    def rows(self, tiered_pool: TieredPool, pool: Pool, page: int) -> bytes:
        """A page of a pool, packed `head layer kv token dim`."""
        layers, kv = pool.spec.layout.extent_of("layer"), pool.spec.layout.extent_of("kv")
        planes = [[pool.plane(layer, plane)[page] for plane in range(kv)] for layer in range(layers)]
        stacked = torch.stack([torch.stack(row) for row in planes])  # [layer, kv, token, head, dim]
        return stacked.permute(3, 0, 1, 2, 4).contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def fill(self, name: str, page: int, page_hash: bytes) -> None:
        """Compute a page of every pool that goes by `name`."""
        for tiered_pool in self.tiered_pools:
            if tiered_pool.name != name:
                continue
            spec, part = tiered_pool.device.spec, tiered_pool.part
            raw = torch.frombuffer(bytearray(part_content(page_hash, part, self.page)), dtype=torch.uint8)
            axes = [spec.layout.extent_of(axis) for axis in ("head", "layer", "kv", "token")]
            content = raw.view(getattr(torch, spec.component.dtype)).view(*axes, spec.component.dim)
            for layer, kv in itertools.product(range(axes[1]), range(axes[2])):
                tiered_pool.device.plane(layer, kv)[page].copy_(content[:, layer, kv].permute(1, 0, 2))

    def check(self, name: str, page: int, page_hash: bytes, tier: Tier = Tier.DEVICE) -> None:
        for tiered_pool in self.tiered_pools:
            if tiered_pool.name == name:
                pool = tiered_pool.device if tier is Tier.DEVICE else tiered_pool.host
                expected = part_content(page_hash, tiered_pool.part, self.page)
                assert self.rows(tiered_pool, pool, page) == expected, (tiered_pool.part.component.name, tier, page)

    def poison_free(self) -> None:
        """Garbage in every page that nobody uses: who reads one is found out."""
        for tiered_pool in self.tiered_pools:
            for tier, pool in ((Tier.DEVICE, tiered_pool.device), (Tier.HOST, tiered_pool.host)):
                if tiered_pool.share.count > 1 and tier is Tier.HOST:
                    continue
                free = self.allocator.free[tiered_pool.name, tier]
                assert isinstance(free, FreeList)
                for page in range(pool.spec.pages):
                    if page in free:
                        for layer in range(pool.spec.layout.extent_of("layer")):
                            for kv in range(pool.spec.layout.extent_of("kv")):
                                pool.plane(layer, kv)[page].view(torch.uint8).fill_(POISON)

    # Requests

    def serve(self, tokens: Sequence[int], restore=None) -> object:
        """Restore, compute the rest, keep, release. The restore, and every byte it brought was looked at."""
        restore = restore or self.controller.restore(tokens)
        self.controller.wait(restore)
        self.look_at(tokens, restore)
        self.compute(tokens, restore)
        return restore

    def look_at(self, tokens: Sequence[int], restore) -> None:
        hashes = self.hashes(tokens)
        self.controller.loads.wait(max(tiered_pool.part.component.layers for tiered_pool in self.tiered_pools) - 1)
        for page, page_hash in zip(restore.page_ids.tolist(), hashes, strict=False):
            self.check(FULL, page, page_hash)
        count = restore.tokens // self.page
        for name, ids in restore.held:
            row = ids.tolist()
            for page, page_hash in zip(row[::-1], hashes[:count][::-1], strict=False):
                self.check(name, page, page_hash)
        if restore.tokens and "swa" in self.model:
            held = dict(restore.held)
            assert len(held["swa"]) >= min(count, -(-8 // self.page))
            assert len(held["state"]) == 1

    def compute(self, tokens: Sequence[int], restore) -> bool:
        """False where there is no room for it."""
        hashes, first = self.hashes(tokens), restore.tokens // self.page
        fresh = self.controller.take(len(hashes) - first)
        if fresh is None:
            self.controller.release(restore)
            return False
        for page, page_hash in zip(fresh, hashes[first:], strict=True):
            self.fill(FULL, page, page_hash)
        held = {}
        for name in self.model:
            if name == FULL or not hashes[first:]:
                continue
            count = 1 if name == "state" else len(hashes) - first
            ids = self.controller.take(count, name)
            if ids is not None:
                for page, page_hash in zip(ids, hashes[-count:], strict=True):
                    self.fill(name, page, page_hash)
                held[name] = ids
        self.controller.keep(tokens, fresh, first_page=first, held=held)
        self.controller.release(restore)
        return True

    def taken(self, pages: int) -> list[int]:
        """Device pages, of which there are enough."""
        ids = self.controller.take(pages)
        assert ids is not None
        return ids

    def evict(self, pages: int, tier: Tier = Tier.DEVICE, name: str = FULL) -> None:
        outcome = self.tree.evict(pages, name) if tier is Tier.DEVICE else self.tree.evict_host(pages, name)
        assert all(isinstance(action, FreePages) for action in outcome.actions)
        self.allocator.apply(outcome)

    def forget(self) -> None:
        """Nothing stays on device and host."""
        self.evict(10**6)
        self.evict(10**6, Tier.HOST)
        assert len(self.tree) == 0

    def conserved(self) -> None:
        """Nothing is out but what the tree has, and every page is in one place."""
        self.tree.check()
        for (name, tier), free in self.allocator.free.items():
            sizes = self.tree.sizes(name, tier)
            assert len(free) + sizes.evictable + sizes.protected == free.pages, (name, tier, sizes, len(free))

    def close(self) -> None:
        self.controller.close()
        if self.peers:
            self.peers.close()
        if self.store:
            self.store.close()


def together(ranks: Sequence[Rank]) -> None:
    """One round of all ranks."""
    rows = [rank.controller.votes() for rank in ranks]
    agreed = np.min(rows, axis=0)
    for rank in ranks:
        rank.controller.settle(agreed)


def until(ranks: Sequence[Rank], over) -> None:
    """Rounds until `over()`."""
    for _ in range(20000):
        if over():
            return
        together(ranks)
        ranks[0].controller.worker.wait(0.0005)
    raise AssertionError("never over")


def idle(ranks: Sequence[Rank]) -> None:
    until(ranks, lambda: all(rank.controller.idle for rank in ranks))
