"""A rank's pools with a ledger of their pages: rows that follow from where they belong, and poison wherever none do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.layout.fleet import Shard

POISON = 0xEE

_ODD = [np.uint64((0x9E3779B97F4A7C15 * (n + 1) | 1) % (1 << 64)) for n in range(7)]

#: One page table a component.
Tables = list[np.ndarray]


def rows(seed: int, component: Component, shard: Shard, positions: Sequence[int]) -> np.ndarray:
    """[layer, kv, position, head, byte] of what any rank of any fleet must hold there."""
    axes = (shard.layers, range(component.kv), positions, shard.heads, range(component.row_bytes // 8))
    mixed = np.full([1] * len(axes), sum(component.name.encode()) * 1_000_003 + seed, np.uint64) * _ODD[0]
    for axis, index in enumerate(axes):
        place = np.array(list(index), np.uint64) * _ODD[axis + 1]
        mixed = mixed + place.reshape([-1 if other == axis else 1 for other in range(len(axes))])
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _ODD[6]
    return (mixed ^ (mixed >> np.uint64(29))).view(np.uint8)


class Shelf:
    """The pools of one rank. A page is free and full of poison, or belongs to one request."""

    def __init__(self, components: Sequence[Component], fleet: Fleet, rank: int, order: str, pages: int) -> None:
        self._fleet, self._rank, self._pages = fleet, rank, pages
        self.pools = [
            Pool.shared(PoolSpec.dense(c, fleet.shard(c, rank, 1), pages, fleet.page_rows(c), order))
            for c in components
        ]
        self._planes = [_planes(pool) for pool in self.pools]
        self._free = [np.random.default_rng(rank).permutation(pages).tolist() for _ in components]
        for pool in self.pools:
            pool.tensors[0].fill_(POISON)

    def take(self, tokens: int) -> Tables | None:
        """Page tables of a request, or None where the pools are full. What was given back last is taken last."""
        need = [len(range(0, len(self._held(pool, tokens)), pool.spec.page_tokens)) for pool in self.pools]
        if any(len(free) < n for free, n in zip(self._free, need, strict=True)):
            return None
        return [np.array([free.pop(0) for _ in range(n)], np.int64) for free, n in zip(self._free, need, strict=True)]

    def give_back(self, tables: Tables) -> None:
        for planes, free, table in zip(self._planes, self._free, tables, strict=True):
            for plane in planes:
                plane[table] = POISON
            free += table.tolist()

    def fill(self, tables: Tables, seed: int, tokens: int) -> None:
        for pool, planes, table in zip(self.pools, self._planes, tables, strict=True):
            page, token, want = self._rows(pool, table, seed, tokens)
            for plane, content in zip(planes, want, strict=True):
                plane[page, token] = content

    def wrong(self, tables: Tables, seed: int, tokens: int) -> int:
        """Bytes of a request's pages that are not what they must be: its rows, and poison after the last."""
        wrong = 0
        for pool, planes, table in zip(self.pools, self._planes, tables, strict=True):
            page, token, want = self._rows(pool, table, seed, tokens)
            for plane, content in zip(planes, want, strict=True):
                must = np.full_like(plane[table], POISON)
                must[np.arange(len(page)) // pool.spec.page_tokens, token] = content
                wrong += int((plane[table] != must).sum())
        return wrong

    def dirty(self) -> int:
        """Bytes of free pages that somebody wrote."""
        return sum(
            int((plane[sorted(free)] != POISON).sum())
            for planes, free in zip(self._planes, self._free, strict=True)
            for plane in planes
        )

    @property
    def taken(self) -> int:
        """Pages that belong to requests."""
        return sum(self._pages - len(free) for free in self._free)

    def _held(self, pool: Pool, tokens: int) -> list[int]:
        """Positions of a request that this rank holds, in the order in which its pages have them."""
        held = self._fleet.shard(pool.spec.component, self._rank, tokens).positions
        return [p for p in held if p < pool.spec.component.extent(tokens)] if held else []

    def _rows(self, pool: Pool, table: np.ndarray, seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(page [row], token [row], content [plane, row, head, byte])."""
        component = pool.spec.component
        held = self._held(pool, tokens)
        shard = self._fleet.shard(component, self._rank, tokens)
        page, token = np.divmod(np.arange(len(held)), pool.spec.page_tokens)
        content = rows(seed, component, shard, held)
        return table[page], token, content.reshape(len(shard.layers) * component.kv, *content.shape[2:])


def _planes(pool: Pool) -> list[np.ndarray]:
    """Views [page, token, head, byte] by layer and kv."""
    layout = pool.spec.layout
    return [
        pool.plane(layer, kv).view(torch.uint8).numpy()
        for layer in range(layout.extent_of("layer"))
        for kv in range(layout.extent_of("kv"))
    ]
