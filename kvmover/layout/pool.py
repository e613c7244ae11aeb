"""A PoolSpec locates a rank's pages of a component, as a serialisable value; a Pool has the tensors too."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from kvmover.errors import LayoutError, need
from kvmover.fields import whole
from kvmover.layout.component import Component
from kvmover.layout.fleet import Shard
from kvmover.layout.layout import Layout
from kvmover.shared_memory import allocate
from kvmover.vocabulary import PACKED_AXES, PACKED_ORDER

if TYPE_CHECKING:
    import torch

#: Axes that a pool may spread over allocations of their own: one tensor a layer, or one a layer and K/V.
TABLE_AXES: tuple[str, ...] = ("layer", "kv")

#: Float32's smallest normal number.
SMALLEST_SCALE = 2.0**-126

#: Allocations of a shared pool start at multiples of this in their file.
_ALIGN_BYTES = 4096


def _checked_scales(given: tuple[float, ...], component: Component, layout: Layout) -> tuple[float, ...]:
    """Returns scales rounded to float32; empty if all are 1. Raises LayoutError."""
    each = component.codec.scales if component.codec else 0
    planes = layout.extent_of("layer") * layout.extent_of("kv")
    if given and len(given) != planes * each:
        raise LayoutError(f"pool of {component.name} has {len(given)} scales; {planes} planes have {each} each")
    try:
        rounded: tuple[float, ...] = struct.unpack(f"<{len(given)}f", struct.pack(f"<{len(given)}f", *given))
    except (struct.error, OverflowError, TypeError) as error:
        raise LayoutError(f"pool of {component.name} has scales that are no float32: {error}") from None
    if odd := [scale for scale in rounded if not SMALLEST_SCALE <= scale < math.inf]:
        raise LayoutError(f"pool of {component.name} has a scale of {odd[0]}; it must be positive and finite")
    return () if all(scale == 1 for scale in rounded) else rounded


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The serialisable half of a pool: strides of the six axes as the rank holds them, in elements.

    `separate` names the axes with one allocation an index; their stride is 0. Local extents: the layers and heads of
    the rank's Shard, all pages of the pool. Raises LayoutError for a layout unlike the component, and for rows
    misaligned to their codec's widest element.

    `scales`: the factors by which the engine multiplies elements: for each plane, layer by layer and K before V, one
    for each part of a row that its codec `is_scaled`. Empty: 1 for all. Rounded to float32.

    Components may share an allocation: their strides are the allocation's, and each pool's tensors start where its own
    elements do (`flat[offset_bytes:]`). A convolution state of 3 steps for 2 heads of 4 channels each of q, k and v,
    channels outermost, is 24 x 3 elements a state; q starts at element 0, k at 24, v at 48, all with one layout:

    >>> layout = Layout(("layer", "page", "kv", "head", "token", "dim"), (2, 8, 1, 2, 1, 12), (8 * 72, 72, 0, 12, 0, 1))
    >>> PoolSpec(Component.state("conv.k", 2, 2, 4 * 3, "bfloat16"), layout).planes()
    [(0, 0), (0, 1152)]
    """

    component: Component
    layout: Layout
    separate: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", _checked_scales(self.scales, self.component, self.layout))
        if self.layout.stride_of("dim") != 1 and self.layout.extent_of("dim") != 1:
            raise LayoutError(f"axis dim has stride {self.layout.stride_of('dim')}; rows must be contiguous")
        if self.layout.extent_of("kv") != self.component.kv or self.layout.extent_of("dim") != self.component.dim:
            kv, dim = self.layout.extent_of("kv"), self.layout.extent_of("dim")
            raise LayoutError(
                f"pool layout has kv = {kv}, dim = {dim}; component {self.component.name} has kv = {self.component.kv},"
                f" dim = {self.component.dim}"
            )
        if self.component.states and self.page_tokens != 1:
            raise LayoutError(
                f"pool of {self.component.name} has page_tokens = {self.page_tokens}; a page of states has 1"
            )
        width = 1 if self.component.codec is None else self.component.codec.width_bytes
        for axis in ("layer", "kv", "page", "token", "head"):
            if self.layout.extent_of(axis) > 1 and self.stride_bytes(axis) % width:
                raise LayoutError(
                    f"pool of {self.component.name} has {axis} stride {self.stride_bytes(axis)} bytes; rows of"
                    f" {self.component.codec and self.component.codec.text()} lie at multiples of {width}"
                )
        for axis in self.separate:
            if axis not in TABLE_AXES or self.separate.count(axis) > 1:
                raise LayoutError(f"pool has separate = {self.separate}; only {TABLE_AXES} may stand there, each once")
            if self.layout.stride_of(axis):
                raise LayoutError(
                    f"axis {axis} has separate allocations and stride {self.layout.stride_of(axis)}; it must be 0"
                )

    def __hash__(self) -> int:
        """Hash the strides only, as a Component does."""
        return hash(self.layout.stride)

    @classmethod
    def dense(
        cls,
        component: Component,
        shard: Shard,
        pages: int,
        page_tokens: int,
        order: str,
        separate: tuple[str, ...] = (),
        scales: tuple[float, ...] = (),
    ) -> PoolSpec:
        """Returns the pool without gaps for the layers and heads of `shard`, its axes nested in `order`.

        `page_tokens` is `fleet.page_rows(component)`.
        """
        whole = Layout.dense(
            order,
            layer=shard.layers.count,
            kv=component.kv,
            page=pages,
            token=page_tokens,
            head=shard.heads.count,
            dim=component.dim,
        )
        within = [1 if axis in separate else extent for axis, extent in zip(whole.axes, whole.shape, strict=True)]
        stride = tuple(0 if axis in separate else prod(within[i + 1 :]) for i, axis in enumerate(whole.axes))
        return cls(component, Layout(whole.axes, whole.shape, stride), separate, tuple(scales))

    @property
    def page_tokens(self) -> int:
        """The positions of a page: tokens, rows of several tokens, or 1 state."""
        return self.layout.shape[self.layout.axes.index("token")]

    @property
    def pages(self) -> int:
        """The number of pages; page ids are below it."""
        return self.layout.shape[self.layout.axes.index("page")]

    @property
    def allocations(self) -> int:
        """The number of tensors of a Pool of this spec: the product of the extents of `separate`."""
        return prod(self.layout.extent_of(axis) for axis in self.separate)

    @property
    def allocation_bytes(self) -> int:
        """The least bytes of each allocation, gaps included."""
        return self.layout.elements * self.component.element_bytes

    def stride_bytes(self, axis: str) -> int:
        """Returns the distance in bytes between neighbours on an axis."""
        return self.layout.stride_of(axis) * self.component.element_bytes

    def packed(self, pages: int) -> PoolSpec:
        """Returns the same layers, heads and tokens in `pages` dense pages of the packed order, as in the store."""
        extents = dict(zip(self.layout.axes, self.layout.shape, strict=True)) | {"page": pages}
        return PoolSpec(self.component, Layout.dense(PACKED_ORDER, **extents), scales=self.scales)

    @property
    def is_packed(self) -> bool:
        """True if each page is one run in the packed order, like an object of the store, which then needs no gather.

        MLA whose layers lie inside a page is; attention with K and V in separate allocations never is.
        """
        run = 1
        for axis in reversed(PACKED_AXES[1:]):
            if self.layout.extent_of(axis) > 1 and self.layout.stride_of(axis) != run:
                return False
            run *= self.layout.extent_of(axis)
        return not self.separate

    def planes(self) -> list[tuple[int, int]]:
        """Returns (allocation, byte offset) of page 0, head 0, token 0 of each (layer, kv), layer-major."""
        extents = {axis: self.layout.extent_of(axis) for axis in TABLE_AXES}
        planes: list[tuple[int, int]] = []
        for index in product(*(range(extents[axis]) for axis in TABLE_AXES)):
            at = dict(zip(TABLE_AXES, index, strict=True))
            allocation = 0
            for axis in self.separate:
                allocation = allocation * extents[axis] + at[axis]
            offset = sum(at[axis] * self.stride_bytes(axis) for axis in TABLE_AXES if axis not in self.separate)
            planes.append((allocation, offset))
        return planes


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A pool's tensors: `spec.allocations` flat uint8 tensors, owned by the engine, alive as long as the Pool.

    All on one device. An engine's own tensors are given as `tensor.view(torch.uint8).flatten()` when they are dense, or
    from an offset on, `[offset_bytes:]`, where components share an allocation. Raises LayoutError for tensors that are
    too few, too small, or misaligned.
    """

    spec: PoolSpec
    tensors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) != self.spec.allocations:
            raise LayoutError(f"pool has {len(self.tensors)} tensors; its spec has {self.spec.allocations} allocations")
        for tensor in self.tensors:
            if tensor.element_size() != 1 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise LayoutError(f"pool tensors are flat uint8, got {tensor.dtype} {list(tensor.shape)}")
            if tensor.numel() < self.spec.allocation_bytes:
                raise LayoutError(
                    f"pool tensor has {tensor.numel()} bytes; its spec needs {self.spec.allocation_bytes}"
                )
            width = 1 if self.spec.component.codec is None else self.spec.component.codec.width_bytes
            if tensor.data_ptr() % width:
                raise LayoutError(
                    f"pool tensor of {self.spec.component.name} begins at address {tensor.data_ptr()}; its rows lie at"
                    f" multiples of {width} bytes"
                )
            if tensor.device != self.tensors[0].device:
                raise LayoutError(
                    f"pool has tensors on {self.tensors[0].device} and {tensor.device}; all must be on one device"
                )

    @classmethod
    def zeros(cls, spec: PoolSpec, device: str = "cpu") -> Pool:
        """Allocate a zeroed pool. Raises MissingLibrary without torch."""
        need("torch", "a pool", "torch")
        import torch

        size = spec.allocation_bytes
        return cls(spec, tuple(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(spec.allocations)))

    @classmethod
    def shared(cls, spec: PoolSpec) -> Pool:
        """Allocate a zeroed pool in memory that other processes of this host and user may map: for the mapped route.

        The memory is freed with the last process that has it. Raises MissingLibrary without torch, and LayoutError
        without shared memory: it takes Linux.
        """
        need("torch", "a pool", "torch")
        import torch

        size = -(-spec.allocation_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        every = torch.frombuffer(allocate(size * spec.allocations), dtype=torch.uint8)
        starts = range(0, size * spec.allocations, size)
        return cls(spec, tuple(every[start : start + spec.allocation_bytes] for start in starts))

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        """Returns a view [page, token, head, dim] of one plane in the component's dtype, strided as the pool is.

        `layer` and `kv` count from 0 among this rank's. Raises LayoutError outside them.
        """
        import torch

        layout = self.spec.layout
        for axis, given in (("layer", layer), ("kv", kv)):
            if whole(given, f"{axis} of a pool of {self.spec.component.name}", LayoutError) >= layout.extent_of(axis):
                held = f"of {self.spec.component.name} with {layout.extent_of(axis)}"
                raise LayoutError(f"{axis} {given} is outside a pool {held}, which are counted from 0")
        allocation, offset = self.spec.planes()[layer * layout.extent_of("kv") + kv]
        flat = self.tensors[allocation].view(getattr(torch, self.spec.component.dtype))
        axes = ("page", "token", "head", "dim")
        return flat.as_strided(
            [layout.extent_of(axis) for axis in axes],
            [layout.stride_of(axis) for axis in axes],
            flat.storage_offset() + offset // self.spec.component.element_bytes,
        )
