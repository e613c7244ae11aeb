"""Door: the pages of one strand of a device pool, whole for writing and by runs of layers for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvmover.engines.common.pages import Bounce, Packed
from kvmover.engines.common.repack import Relay
from kvmover.engines.sglang.devicepool import Strand
from kvmover.engines.sglang.store_adapter import Shelves
from kvmover.layout import Layout, PoolSpec, Span
from kvmover.store import Part

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.region import Region


@dataclass(frozen=True, slots=True)
class Door:
    """`part`: what the rank holds of a page. `memory`: a flat tensor a layer and K/V, the engine's own.

    Objects lie `head layer kv token dim`, so a run of layers is one read for a latent, and one a head for attention.
    """

    strand: Strand
    part: Part
    memory: tuple[torch.Tensor, ...]
    shelves: Shelves
    bounce: Bounce
    move: Callable[[Sequence[Region]], None]

    def whole(self) -> Packed:
        return self.layers(range(self.strand.rows.layers))

    def layers(self, run: range) -> Packed:
        """The pages' layers `run`, by the strand's own numbers: as if the pool had no others."""
        box, kv = self.part.box, self.strand.rows.kv
        part = Part(self.part.component, replace(box, layers=Span(box.layers.start + run.start, len(run))))
        writes = self.shelves.election(part.component)
        return Packed(
            view=self.shelves.view(part, writes),
            relay=Relay.of(_of_layers(self.strand.spec(part.component), len(run))),
            memory=self.memory[run.start * kv : run.stop * kv],
            page_tokens=self.strand.index_tokens,
            out=self.bounce,
            into=self.bounce,
            move=self.move,
            writes=writes,
        )


def _of_layers(spec: PoolSpec, layers: int) -> PoolSpec:
    axes, shape, stride = spec.layout.axes, spec.layout.shape, spec.layout.stride
    extents = tuple(layers if axis == "layer" else extent for axis, extent in zip(axes, shape, strict=True))
    return PoolSpec(spec.component, Layout(axes, extents, stride), spec.separate)
