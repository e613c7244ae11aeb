"""How a rank's pools lie in one flat array of bytes, so that all of a rank's memory is compared at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvmover.layout import Component, Fleet, PoolSpec

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]

#: Of each pool.
PAGES = 24


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows that a rank holds of a request: `layers`, `heads` and `positions` of the whole model and request, and
    where its page table has each position."""

    layers: Index
    heads: Index
    positions: Index
    pages: Index
    tokens: Index

    def of(self, truth: Bytes, chosen: npt.NDArray[np.bool_]) -> Bytes:
        """Its rows [layer, kv, head, position, byte] of a request's, at the positions chosen."""
        return truth[self.layers][:, :, self.heads][:, :, :, self.positions[chosen]]


@lru_cache(maxsize=4096)
def part_of(fleet: Fleet, rank: int, component: Component, tokens: int) -> Part:
    """What a rank holds of a component of a request of `tokens` tokens."""
    shard, extent = fleet.shard(component, rank, tokens), component.extent(tokens)
    held = [p for p in shard.positions if p < extent] if shard.positions else []
    local = [shard.positions.index(p) for p in held] if shard.positions else []
    page, token = np.divmod(np.array(local, np.int64), fleet.page_rows(component))
    return Part(np.array(list(shard.layers)), np.array(list(shard.heads)), np.array(held, np.int64), page, token)


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """`starts` [component][allocation] in bytes. `page_of` [byte]: number of the page, those of component c from
    c * PAGES on. `page_bytes` [page]: the bytes of each."""

    specs: tuple[PoolSpec, ...]
    starts: tuple[tuple[int, ...], ...]
    planes: tuple[Index, ...]
    page_of: Bytes
    page_bytes: tuple[Index, ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls, components: tuple[Component, ...], fleet: Fleet, rank: int, order: str, separate: tuple[str, ...]
    ) -> Geometry:
        specs, starts, planes = list[PoolSpec](), list[tuple[int, ...]](), list[Index]()
        end = 0
        for component in components:
            page_tokens = fleet.page_rows(component)
            spec = PoolSpec.dense(component, fleet.shard(component, rank, 1), PAGES, page_tokens, order, separate)
            first = tuple(end + i * spec.allocation_bytes for i in range(spec.allocations))
            end += spec.allocations * spec.allocation_bytes
            specs.append(spec)
            starts.append(first)
            planes.append(np.array([first[at] + offset for at, offset in spec.planes()]).reshape(-1, component.kv))
        self = cls(tuple(specs), tuple(starts), tuple(planes), np.zeros(end, np.uint8), ())
        every = np.arange(PAGES)
        for number, spec in enumerate(specs):
            for token in range(spec.page_tokens):
                rows = self.rows(number, every, np.full(PAGES, token))
                self.page_of[rows] = (number * PAGES + every)[:, None]
        pages = tuple(np.flatnonzero(self.page_of == page) for page in range(len(specs) * PAGES))
        return cls(self.specs, self.starts, self.planes, self.page_of, pages)

    def rows(self, component: int, pages: Index, tokens: Index) -> Index:
        """Bytes [layer, kv, head, row, byte] of the rows at (page, token) of a component's pool."""
        spec = self.specs[component]
        heads = np.arange(spec.layout.extent_of("head")) * spec.stride_bytes("head")
        at = pages * spec.stride_bytes("page") + tokens * spec.stride_bytes("token")
        inner = (heads[:, None] + at)[..., None] + np.arange(spec.component.row_bytes)
        return self.planes[component][:, :, None, None, None] + inner

    def slices(self, flat: Bytes) -> list[list[Bytes]]:
        """Views of a flat array [component][allocation]."""
        return [
            [flat[first : first + spec.allocation_bytes] for first in starts]
            for spec, starts in zip(self.specs, self.starts, strict=True)
        ]

    def bytes_of(self, pages: list[int]) -> Index:
        return np.concatenate([self.page_bytes[page] for page in pages]) if pages else np.zeros(0, np.int64)
