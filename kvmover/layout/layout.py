"""A Layout is the strides of named axes over one allocation, whose axes merge into contiguous runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from kvmover.errors import LayoutError
from kvmover.layout.span import Span
from kvmover.vocabulary import AXES, ORDERS


def axes_of(order: str) -> tuple[str, ...]:
    """Returns the axes of an order string, outermost first: `NHD`, `HND`, or the six words joined by spaces or dashes.
    Raises LayoutError for another string.

    >>> axes_of("page-layer-kv-token-head-dim")
    ('page', 'layer', 'kv', 'token', 'head', 'dim')
    """
    axes = tuple(ORDERS.get(order, order).replace("-", " ").split())
    if sorted(axes) != sorted(AXES):
        raise LayoutError(f"unknown order {order!r}: use {', '.join(ORDERS)} or an arrangement of {' '.join(AXES)}")
    return axes


@dataclass(frozen=True, slots=True)
class Layout:
    """The strides of named axes, in elements. A value: no memory, no dtype.

    A pool of separate allocations, say one a layer, has stride 0 on that axis; its table of base addresses takes over.
    Raises LayoutError for other axes, extents below 1 and negative strides.

    >>> Layout.dense("NHD", layer=2, kv=2, page=8, token=16, head=4, dim=64).stride_of("token")
    256
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.axes) == len(self.shape) == len(self.stride):
            raise LayoutError(
                f"layout has {len(self.axes)} axes, {len(self.shape)} extents and {len(self.stride)} strides"
            )
        if sorted(self.axes) != sorted(AXES):
            raise LayoutError(f"axes {self.axes} are not an arrangement of {' '.join(AXES)}")
        for axis, extent, stride in zip(self.axes, self.shape, self.stride, strict=True):
            if extent < 1 or stride < 0:
                raise LayoutError(f"axis {axis} has extent {extent} and stride {stride}; at least 1 and 0 are needed")

    def __hash__(self) -> int:
        """Hash the strides only, as a Component does: few layouts share them."""
        return hash(self.stride)

    @classmethod
    def dense(cls, order: str, **extents: int) -> Layout:
        """Returns the layout without gaps whose axes nest in `order`, outermost first."""
        axes = axes_of(order)
        shape = tuple(extents[axis] for axis in axes)
        return cls(axes, shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))))

    def extent_of(self, axis: str) -> int:
        """Returns an axis's extent: `extent_of("token")` is the page size. Raises ValueError for an unknown axis."""
        return self.shape[self.axes.index(axis)]

    def stride_of(self, axis: str) -> int:
        """Returns the distance in elements between neighbours on an axis; 0 where the axis has separate allocations."""
        return self.stride[self.axes.index(axis)]

    @property
    def elements(self) -> int:
        """The elements from the first to the last, gaps included: the size of an allocation."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))

    def permute(self, order: str) -> Layout:
        """Returns the same memory with its axes listed in another order."""
        places = [self.axes.index(axis) for axis in axes_of(order)]
        return Layout(
            tuple(self.axes[i] for i in places),
            tuple(self.shape[i] for i in places),
            tuple(self.stride[i] for i in places),
        )

    def slice(self, axis: str, span: Span) -> Layout:
        """Returns the part `span` of `axis`; its first element becomes the origin. Raises
        LayoutError outside the axis.
        """
        if not span or span.stop > self.extent_of(axis):
            raise LayoutError(f"{axis} span {span.triple()} is outside 0..{self.extent_of(axis)}")
        i = self.axes.index(axis)
        shape = (*self.shape[:i], span.count, *self.shape[i + 1 :])
        return Layout(self.axes, shape, (*self.stride[:i], self.stride[i] * span.step, *self.stride[i + 1 :]))

    def runs(self) -> tuple[int, int]:
        """Returns the length in elements and the number of contiguous runs. Separate allocations (stride 0) never join.

        Two of eight heads of a 32-layer NHD pool of one 64-token page: 4,096 runs of 256 elements.

        >>> Layout.dense("NHD", layer=32, kv=2, page=1, token=64, head=8, dim=128).slice("head", Span(2, 2)).runs()
        (256, 4096)
        """
        loops = sorted(zip(self.stride, self.shape, strict=True), key=lambda loop: (loop[0] == 0, loop))
        run, *outer = coalesce([Dim(1, (1,)), *(Dim(extent, (stride,)) for stride, extent in loops)])
        return run.extent, prod(dim.extent for dim in outer)


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop of a strided nest: its count, and each side's step, in any unit common to the nest."""

    extent: int
    strides: tuple[int, ...]


def coalesce(loops: Iterable[Dim]) -> list[Dim]:
    """Merge neighbouring loops, innermost first, wherever every side is contiguous. The first loop stays first.

    >>> coalesce([Dim(128, (1, 1)), Dim(16, (128, 128)), Dim(2, (4096, 2048))])
    [Dim(extent=2048, strides=(1, 1)), Dim(extent=2, strides=(4096, 2048))]
    """
    first, *rest = loops
    merged = [first]
    for loop in rest:
        last = merged[-1]
        if loop.extent == 1:
            continue
        if all(outer == inner * last.extent for outer, inner in zip(loop.strides, last.strides, strict=True)):
            merged[-1] = Dim(last.extent * loop.extent, last.strides)
        else:
            merged.append(loop)
    return merged
