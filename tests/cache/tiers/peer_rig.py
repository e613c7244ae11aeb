"""Engines of any shape that lend each other pages, in one process: every byte follows from the tokens up to its row."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rig import PLAIN, Rank, idle, until

from kvmover.cache.peers import PeerTerms, PeerTier
from kvmover.cache.prefix import FULL
from kvmover.cache.prefix.hashes import chain
from kvmover.layout import Fleet, Pool
from kvmover.transfer import MoverConfig, Place
from kvmover.transport import LoopbackNetwork, LoopbackTransport

#: Small arenas, and peers that nobody waits long for.
CONFIG = MoverConfig(arena_bytes=1 << 20, sandbox_bytes=0, silence_s=0.5, drain_s=0.2, ping_s=0.1, resend_s=0.2)


class SharedNetwork(LoopbackNetwork):
    """Members are polled by threads of their own; NIXL does its own locking, a loopback none."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def tell(self, sender, peer, note) -> None:
        with self.lock:
            super().tell(sender, peer, note)

    def carry(self, sender, flight) -> None:
        with self.lock:
            super().carry(sender, flight)

    def deliver(self) -> None:
        with self.lock:
            super().deliver()


class SharedTransport(LoopbackTransport):
    def poll(self):
        with self._network.lock:
            return super().poll()


class LendingRank(Rank):
    """Rows by position, so that pages of other sizes hold the same."""

    def rows_of(self, tokens: Sequence[int], number: int, spec) -> torch.Tensor:
        """[page, layer, kv, token, head, byte] of the whole pages of `tokens` that this rank holds."""
        component, shard = spec.component, self.fleet.shard(spec.component, self.rank, self.page)
        names = chain(b"", np.array(tokens, np.int32), 1)
        pages = len(tokens) // self.page
        assert shard.positions is not None
        where = [page * self.page + token for page in range(pages) for token in shard.positions]
        raw = b"".join(
            hashlib.shake_128(names[at] + bytes([number, layer, kv, head])).digest(component.row_bytes)
            for layer in shard.layers
            for kv in range(component.kv)
            for at in where
            for head in shard.heads
        )
        shape = (len(shard.layers), component.kv, pages, -1, len(shard.heads), component.row_bytes)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(shape).permute(2, 0, 1, 3, 4, 5)

    def look_at(self, tokens: Sequence[int], restore) -> None:
        ids = restore.page_ids.tolist()
        if not ids:
            return
        for number, tiered_pool in enumerate(self.tiered_pools):
            pool = tiered_pool.device
            expected = self.rows_of(tokens[: len(ids) * self.page], number, pool.spec)
            for layer in range(expected.shape[1]):
                for kv in range(expected.shape[2]):
                    got = pool.plane(layer, kv)[ids].contiguous().view(torch.uint8)
                    assert torch.equal(got, expected[:, layer, kv].reshape(got.shape)), (self.rank, layer, kv)

    def compute(self, tokens: Sequence[int], restore) -> bool:
        first, count = restore.tokens // self.page, len(tokens) // self.page
        fresh = self.controller.take(count - first)
        assert fresh is not None
        for number, tiered_pool in enumerate(self.tiered_pools):
            pool = tiered_pool.device
            rows = self.rows_of(tokens[: count * self.page], number, pool.spec)[first:]
            for layer in range(rows.shape[1]):
                for kv in range(rows.shape[2]):
                    plane = pool.plane(layer, kv).view(torch.uint8)
                    plane[fresh] = rows[:, layer, kv].reshape(len(fresh), *plane.shape[1:])
        self.controller.keep(tokens, fresh, first_page=first, held={})
        self.controller.release(restore)
        return True


class LendingEngine:
    """The ranks of one engine, each with a tier of peers."""

    def __init__(
        self,
        network: SharedNetwork,
        name: str,
        fleet: Fleet,
        asks: Sequence[str] = (),
        root: Path | None = None,
        terms: PeerTerms | None = None,
        config: MoverConfig = CONFIG,
        **more,
    ) -> None:
        self.name, self.fleet = name, fleet
        terms = terms or PeerTerms(tuple(asks), ask_s=5.0)

        def lends(rank: int, pools: Sequence[Pool]) -> PeerTier:
            wire = SharedTransport(network, f"{name}-{rank}")
            return PeerTier(wire, "model rev-1", Place(name, fleet, rank), pools, terms, config)

        more = {"model": PLAIN, "pages": (32, 64), **more}
        self.ranks = [
            LendingRank(root, fleet=fleet, rank=rank, peers=partial(lends, rank), **more) for rank in range(fleet.size)
        ]
        for rank in self.ranks:
            rank.poison_free()

    def connect(self, other: LendingEngine) -> None:
        for rank in self.ranks:
            for peer in other.ranks:
                rank.peers.connect(peer.peers.card)

    def serve(self, prompt: Sequence[int]) -> list:
        """The restores, of which every byte was looked at."""
        restores = [rank.controller.restore(prompt) for rank in self.ranks]
        until(self.ranks, lambda: all(restore.done for restore in restores))
        for rank, restore in zip(self.ranks, restores, strict=True):
            rank.look_at(prompt, restore)
            rank.compute(prompt, restore)
        self.settle()
        assert len({restore.tokens for restore in restores}) == 1
        return restores

    def settle(self) -> None:
        idle(self.ranks)
        for rank in self.ranks:
            rank.conserved()
            rank.controller.check({})

    def forget(self) -> None:
        for rank in self.ranks:
            rank.forget()
            rank.poison_free()

    def lent(self) -> list[int]:
        return [rank.peers.counts().pages for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


__all__ = ["FULL", "LendingEngine", "SharedNetwork"]
