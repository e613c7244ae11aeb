"""The engines beside the row mover, ready to be measured: those that can move a case on this machine, bytes checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvmover.kernels import bulk, experimental
from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.region import Region, mean_copy, merged

#: What may move within a GPU beside the row mover.
BESIDE_ROWS = (CopyEngine.GREEN, CopyEngine.BULK, CopyEngine.TENSOR, CopyEngine.BOXES, CopyEngine.COPY)

#: More copies than this take a tenth of a second to hand over.
MOST_COPIES = 1 << 18


def copies_of(engine: CopyEngine, region: Region) -> int:
    """At most so many copies are handed to the copy engine; 0 for a kernel."""
    if engine is CopyEngine.BOXES:
        return region.planes * region.units * region.heads
    return round(region.nbytes / mean_copy(merged(region))) if engine is CopyEngine.COPY else 0


def left_out(engine: CopyEngine, regions: Sequence[Region], device: torch.device) -> str | None:
    """Why an engine is not measured on these, or None."""
    copies = sum(copies_of(engine, region) for region in regions)
    if copies > MOST_COPIES:
        return f"{copies} copies"
    reasons = (
        experimental.without_boxes(engine, regions),
        *(experimental.cannot_move(engine, region) for region in regions),
    )
    return next(filter(None, reasons), bulk.unavailable(engine, device))


def launchers(regions: Sequence[Region], sms: int) -> dict[CopyEngine, Callable[[], object]]:
    """What moves the regions under a budget, by engine, tables uploaded. What is left out is said."""
    device, found = regions[0].src.device, dict[CopyEngine, Callable[[], object]]()
    for engine in BESIDE_ROWS:
        reason = left_out(engine, regions, device)
        if reason is None:
            found[engine] = bulk.prepare(regions, sms, engine).run
        else:
            print(f"{engine.value}: left out, {reason}")
    return found


def same_bytes(
    regions: Sequence[Region | Conversion], truth: Callable[[], object], calls: Sequence[Callable[[], object]]
) -> None:
    """Raise unless every call leaves the bytes that `truth` leaves, in poisoned memory."""
    expected: list[torch.Tensor] = []
    for call in (truth, *calls):
        for tensor in regions[0].dst.memory:
            tensor.fill_(0xEE)
        call()
        if not expected:
            expected = [tensor.clone() for tensor in regions[0].dst.memory]
        for tensor, wanted in zip(regions[0].dst.memory, expected, strict=True):
            assert torch.equal(tensor, wanted), "a candidate moves other bytes than the default"
