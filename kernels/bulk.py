"""Bulk moves copy long runs between pinned host memory and a device, or within a device, on a few SMs or on none.

Engines beside the row mover: a ring of bulk or tensor copies through shared memory, the copy engine, which takes a
whole list of runs or boxes in one call, and the row mover on SMs set aside for it. `choose` says which one serves a
region best, `measured` which one was fastest for its kind on this GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from . import bulk_ring, copy_boxes, cpu, cuda_driver, launch, tensor_maps
from .bulk_ring import ALIGNMENT, CAPABILITY, RING, Pieces
from .copy_engine import CopyEngine, EngineUnavailable, engine_of
from .launch import Program, Upload
from .region import Offsets, Region, RegionError, check_apart, copies, mean_copy, merged

#: What is left of a prepared move.
Call = Callable[[], None]

log = logging.getLogger(__name__)

#: The shortest run for the bulk kernel: an operation has a fixed cost, so never one a row of 256 B (sglang#40278).
BULK_BYTES = 2 << 10

#: The shortest copy for the copy engine, which takes no SM. vLLM puts the crossover with its own kernel at 28 KiB, on
#: an H100 with PCIe Gen5; SGLang batches from 128 KiB on.
COPY_BYTES = 28 << 10

#: Handles of the legacy default stream.
LEGACY = (0, 1)

#: SMs when no budget is given: 4 reached the host link's ceiling, 192 GB/s, on a GB300 (sglang#40278).
DEFAULT_SMS = 4


#: What bulk.cu moves.
RINGS = {CopyEngine.BULK: Pieces.RUNS, CopyEngine.TENSOR: Pieces.BOXES}

#: What takes the place of an engine that a machine lacks.
FALLBACK = {
    CopyEngine.BULK: CopyEngine.ROWS,
    CopyEngine.TENSOR: CopyEngine.ROWS,
    CopyEngine.COPY: CopyEngine.LOOP,
    CopyEngine.BOXES: CopyEngine.ROWS,
    CopyEngine.GREEN: CopyEngine.ROWS,
}


def choose(region: Region, capability: tuple[int, int] = CAPABILITY) -> CopyEngine:
    """The engine for `region` on a device of this compute capability.

    Between host and device: COPY from `COPY_BYTES` contiguous bytes on, of pages that follow each other too. Else BULK
    for aligned runs from `BULK_BYTES` on, ROWS for the rest.
    """
    region = merged(region)
    host = "cpu" in (region.src.device.type, region.dst.device.type)
    if host and mean_copy(region) >= COPY_BYTES:
        return CopyEngine.COPY
    bulk = capability >= CAPABILITY and region.row_bytes >= BULK_BYTES
    return CopyEngine.BULK if bulk and region.alignment() == ALIGNMENT else CopyEngine.ROWS


@cache
def unavailable(engine: CopyEngine, device: torch.device) -> str | None:
    """Why `engine` cannot run on `device`, or None."""
    if device.type == "cpu" and engine is not CopyEngine.AUTO:
        return "what lies on the CPU is copied by the host"
    if engine in RINGS:
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            return f"{device} is sm_{capability[0]}{capability[1]}, bulk copies came with sm_90"
        if engine is CopyEngine.TENSOR and not cuda_driver.can_encode_maps():
            return "the driver has no cuTensorMapEncodeTiled, which came with CUDA 12"
        return bulk_ring.cannot_compile(device)
    if engine is CopyEngine.COPY and not cuda_driver.can_batch():
        return "the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8"
    if engine is CopyEngine.BOXES and not cuda_driver.can_batch_boxes():
        return "the driver has no cuMemcpy3DBatchAsync, which came with CUDA 12.8"
    if engine is CopyEngine.GREEN:
        try:
            _green_stream(device, DEFAULT_SMS)
        except RuntimeError as error:  # of torch, or of the driver: the row mover serves without, and this is said
            return f"no green context on {device}: {error}"
    return None


def cannot_move(engine: CopyEngine, region: Region) -> str | None:
    """Why `engine` moves no such region on any machine, or None."""
    if engine in RINGS and merged(region).alignment() != ALIGNMENT:
        return f"rows aligned to {merged(region).alignment()} bytes; bulk copies take multiples of {ALIGNMENT}"
    return None


def without_boxes(engine: CopyEngine, regions: Sequence[Region]) -> str | None:
    """Why an engine of boxes would move most of these as runs, one a row, or None: then others move them faster."""
    if engine is not CopyEngine.TENSOR:
        return None
    most = merged(max(regions, key=lambda region: region.nbytes))
    found = tensor_maps.boxes(most, RING.stage_bytes)
    if isinstance(found, tensor_maps.NoBox) and most.row_bytes < BULK_BYTES:
        return f"{most.row_bytes} B a run: {found.value}"
    return None


def measured(regions: Sequence[Region], sms: int | None, device: torch.device) -> CopyEngine:
    """What moved regions like these fastest on this GPU under a budget, if it can here; else the row mover."""
    from . import rows

    work = [region for region in regions if region.nbytes]
    if not work or not launch.names_engines(device):
        return CopyEngine.ROWS
    engine = launch.choose(rows.kind_of_most(work), sms, device).engine
    reasons = (without_boxes(engine, work), *(cannot_move(engine, region) for region in work))
    able = not any(reasons) and _runnable(engine, device) is engine
    return engine if able else CopyEngine.ROWS


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBulk:
    """A move whose tables are on the device: what is left is to launch it, any number of times."""

    device: torch.device
    calls: tuple[Call, ...]

    def run(self, after: torch.cuda.Event | None = None) -> None:
        """On the current stream, the one of `prepare`, once `after` is reached. With both ends on the host: now."""
        if self.device.type == "cpu":
            if after is not None:
                after.synchronize()
            for call in self.calls:
                call()
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            # Either gives this thread a context, which the driver's own calls take for granted.
            stream.record_event() if after is None else stream.wait_event(after)
            for call in self.calls:
                call()


def move(
    regions: Sequence[Region],
    after: torch.cuda.Event | None = None,
    sms: int | None = None,
    engine: CopyEngine = CopyEngine.AUTO,
    using: Program | None = None,
) -> None:
    """Copy every row of every region on the current stream, each by the engine that suits it, without a synchronise.

    All GPU memory on one device and all host memory pinned; no region touches what another writes. Nothing is read
    before `after`. `sms` is the SM budget (None: DEFAULT_SMS). `using`: as `rows.move`, for what it moves. The memory
    must stay allocated until the stream has passed the move. Raises RegionError before anything is moved,
    EngineUnavailable where the `engine` asked for cannot run, or cannot move a region. With both ends on the host, the
    host waits for `after` and copies.
    """
    prepare(regions, sms, engine, using).run(after)


def prepare(
    regions: Sequence[Region],
    sms: int | None = None,
    engine: CopyEngine = CopyEngine.AUTO,
    using: Program | None = None,
) -> PreparedBulk:
    """All of `move` but the launch. Tables are uploaded on the current stream, before any producer is waited for."""
    engine = engine_of(engine)
    devices = {_checked(region) for region in regions}
    if len(devices) > 1:
        raise RegionError(f"regions on {' and '.join(sorted(map(str, devices)))} cannot share a move")
    if sms is not None and sms < 1:
        raise RegionError(f"a budget of {sms} SMs; it must be at least 1")
    work = [region for region in regions if region.nbytes]
    if not work:
        return PreparedBulk(torch.device("cpu"), ())
    device = devices.pop()
    check_engine(engine, device, work)
    if device.type == "cpu":
        return PreparedBulk(device, (partial(cpu.move, work),))
    check_apart(work)
    capability = torch.cuda.get_device_capability(device)
    parts: dict[CopyEngine, list[Region]] = {}
    for region in work:
        chosen = _runnable(choose(region, capability), device) if engine is CopyEngine.AUTO else engine
        parts.setdefault(chosen, []).append(region)
    with torch.cuda.device(device):
        calls = (_PREPARE[each](part, device, sms or DEFAULT_SMS, using) for each, part in parts.items())
        return PreparedBulk(device, tuple(calls))


def check_engine(engine: CopyEngine, device: torch.device, regions: Sequence[Region] = ()) -> None:
    """Raise EngineUnavailable where an engine that was asked for cannot run on `device`, or cannot move a region."""
    for reason in (unavailable(engine, device), *(cannot_move(engine, region) for region in regions)):
        if reason is not None:
            raise EngineUnavailable(f"{engine.value}: {reason}")


def _checked(region: Region) -> torch.device:
    """Where the region is moved: its GPU, or the CPU when both ends are there. Raises RegionError as Region.check."""
    sides = {"source": region.src, "destination": region.dst}
    devices = {tensor.device for side in sides.values() for tensor in side.memory[:1]}
    if sorted(device.type for device in devices) != ["cpu", "cuda"]:
        region.check()
        return devices.pop()
    # Region.check wants both ends on one device.
    shape = region.planes, region.units
    if shape != (len(region.dst.planes), len(region.dst.units)):
        raise RegionError(f"no region of {shape[0]} planes and {shape[1]} units at both ends")
    for name, side in sides.items():
        side.check(name, region.reach(side))
        if side.memory[0].device.type == "cpu" and not all(tensor.is_pinned() for tensor in side.memory):
            raise RegionError(f"{name} memory on the host is not pinned")
    return next(device for device in devices if device.type == "cuda")


@cache
def _runnable(engine: CopyEngine, device: torch.device) -> CopyEngine:
    """`engine`, or what takes its place on `device`; said once."""
    reason = unavailable(engine, device)
    if reason is None:
        return engine
    log.info("%s in place of %s: %s", FALLBACK[engine].value, engine.value, reason)
    return FALLBACK[engine]


def _ring(of: Pieces, regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    ring = bulk_ring.describe(regions, of=of)
    return partial(bulk_ring.run, ring, Upload.here(device).to_device(ring.table), sms)


def _rows(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    from . import rows

    return rows.prepared(regions, device, sms=sms, using=using).run


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _off_legacy(queue: Callable[[int], None]) -> None:
    """Queue on the current stream, or where that is the legacy default stream, which batches refuse, on one of our own
    that keeps its order."""
    current = torch.cuda.current_stream()
    if current.cuda_stream not in LEGACY:
        queue(current.cuda_stream)
        return
    stream = _own_stream(current.device)
    stream.wait_event(current.record_event())
    queue(stream.cuda_stream)
    current.wait_event(stream.record_event())


def _copy(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    return partial(_off_legacy, partial(cuda_driver.copy_batch, *_lists(regions)))


def _boxes(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    return partial(_off_legacy, partial(cuda_driver.copy_boxes, np.concatenate([*map(copy_boxes.boxes, regions)])))


@cache
def _green_context(device: torch.device, sms: int) -> tuple[object, torch.cuda.Stream]:
    """SMs set aside for what runs on the stream, and kept: as many as were asked for, or what a GPU deals at least."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=sms, device_id=device.index or 0)
    return context, context.Stream()


def _green_stream(device: torch.device, sms: int) -> torch.cuda.Stream:
    return _green_context(device, sms)[1]


def _green(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    """The row mover without a budget, as many small programs an SM as fit: its SMs are the budget."""
    from . import rows

    stream, ready = _green_stream(device, sms), rows.prepared(regions, device, using=using)

    def call() -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            ready.run()
        current.wait_stream(stream)

    return call


def _loop(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Call:
    lists = _lists(regions)
    return lambda: cuda_driver.copy_each(*lists, torch.cuda.current_stream().cuda_stream)


def _lists(regions: Sequence[Region]) -> tuple[Offsets, Offsets, Offsets]:
    src, dst, sizes = zip(*map(copies, regions), strict=True)
    return np.concatenate(src), np.concatenate(dst), np.concatenate(sizes)


_PREPARE = {
    **{engine: partial(_ring, of) for engine, of in RINGS.items()},
    CopyEngine.COPY: _copy,
    CopyEngine.LOOP: _loop,
    CopyEngine.ROWS: _rows,
    CopyEngine.BOXES: _boxes,
    CopyEngine.GREEN: _green,
}
