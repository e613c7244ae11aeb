"""Repack: copies between pages of an engine's pool and pages in the order of objects, either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover.kernels.region import Region, Side
from kvmover.layout import PACKED_ORDER, Layout, PoolSpec

if TYPE_CHECKING:
    import torch

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repack:
    """`pool`: an engine's. `packed`: the same pages in the order of objects; one is enough to know the strides."""

    pool: PoolSpec
    packed: PoolSpec

    @classmethod
    def of(cls, pool: PoolSpec) -> Repack:
        """Between `pool` and dense pages `head layer kv token dim` of the same heads, layers and tokens."""
        extents = dict(zip(pool.layout.axes, pool.layout.shape, strict=True)) | {"page": 1}
        return cls(pool, PoolSpec(pool.component, Layout.dense(PACKED_ORDER, **extents)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one packed page."""
        return self.packed.stride_bytes("page")

    def alone(self) -> Repack:
        """The same for one page of the pool by itself, dense: how SGLang takes a page out of it and puts it back."""
        layout = self.pool.layout
        nested = sorted(layout.axes, key=lambda axis: (axis == "page", layout.stride_of(axis)), reverse=True)
        extents = dict(zip(layout.axes, layout.shape, strict=True)) | {"page": 1}
        return Repack(PoolSpec(self.pool.component, Layout.dense(" ".join(nested), **extents)), self.packed)

    def pack(self, memory: Sequence[torch.Tensor], pages: Numbers, packed: torch.Tensor) -> Region:
        """From the pool's pages `pages` to the beginning of `packed`. `memory`: flat uint8, an allocation each."""
        return self._region(_side(self.pool, memory, pages), _side(self.packed, [packed], np.arange(len(pages))))

    def unpack(self, packed: torch.Tensor, numbers: Numbers, memory: Sequence[torch.Tensor], pages: Numbers) -> Region:
        """From the packed pages `numbers` to the pool's pages `pages`."""
        return self._region(_side(self.packed, [packed], numbers), _side(self.pool, memory, pages))

    def _region(self, src: Side, dst: Side) -> Region:
        layout = self.pool.layout
        return Region(src, dst, layout.extent_of("head"), layout.extent_of("token"), self.pool.component.row_bytes)


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies between a device and pinned memory from one thread, which waits for them; between hosts, plain copies."""

    stream: torch.cuda.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> Copies:
        """For pools on `device`: with a stream of its own on a GPU."""
        import torch

        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    def __call__(self, regions: Sequence[Region]) -> None:
        import torch

        from kvmover.kernels import bulk

        if self.stream is None:
            bulk.move(regions)
            return
        with torch.cuda.stream(self.stream):
            bulk.move(regions)
        self.stream.synchronize()


def _side(spec: PoolSpec, memory: Sequence[torch.Tensor], pages: Numbers) -> Side:
    planes = np.array(spec.planes(), np.int64)
    units = np.asarray(pages, np.int64) * spec.stride_bytes("page")
    return Side(tuple(memory), planes[:, 0], planes[:, 1], units, spec.stride_bytes("head"), spec.stride_bytes("token"))
