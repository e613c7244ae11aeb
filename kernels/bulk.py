"""Bulk moves copy long runs between pinned host memory and a device, or within a device.

The row mover copies them, or the copy engine, which takes a list of runs in one call; `choose` picks one for a region.
Engines that no GPU has measured yet are in `experimental`, and run only if named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from . import cpu, cuda_driver, experimental
from .copy_engine import EXPERIMENTAL, CopyEngine, EngineUnavailable, engine_of
from .crossover import Crossover, HostEnd, known
from .launch import DEFAULT_SMS, Program, off_legacy
from .region import Region, RegionError, check_apart, copies, mean_copy, merged

#: A part of a prepared move, carried out when called.
Call = Callable[[], None]

log = logging.getLogger(__name__)

#: SMs of the row mover between host and device when no budget is given: vLLM's kernel takes as many.
HOST_SMS = 12


def host_end(region: Region) -> HostEnd | None:
    """Returns the end of a region that lies on the host, opposite a device; None if there is none."""
    src, dst = (side.device.type == "cpu" for side in (region.src, region.dst))
    return None if src == dst else "src" if src else "dst"


def choose(region: Region, crossover: Crossover | None = None) -> CopyEngine:
    """Returns ROWS within a device; between host and device ROWS or COPY, as `crossover` says of the region's copies.

    Adjacent pages count as one copy. None: what is known of this device, see `copy_times`.
    """
    host = host_end(region)
    if host is None or not region.nbytes:
        return CopyEngine.ROWS
    device = (region.dst if host == "src" else region.src).device
    nbytes, mean_bytes = region.nbytes, mean_copy(merged(region))
    return (crossover or known(device)).engine(host, round(nbytes / mean_bytes), mean_bytes)


@cache
def unavailable(engine: CopyEngine, device: torch.device) -> str | None:
    """Returns why `engine` cannot run on `device`, or None."""
    if device.type == "cpu" and engine is not CopyEngine.AUTO:
        return "what lies on the CPU is copied by the host"
    if engine is CopyEngine.COPY and not cuda_driver.can_batch():
        return "the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8"
    return experimental.unavailable(engine, device) if engine in EXPERIMENTAL else None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBulk:
    """A move with its tables on the device, ready to be launched any number of times."""

    device: torch.device
    calls: tuple[Call, ...]

    def run(self, after: torch.cuda.Event | None = None) -> None:
        """Launch on the current stream, which must be that of `prepare`; the stream first waits for `after`.

        With both ends on the host, the host waits for `after` and copies at once.
        """
        if self.device.type == "cpu":
            if after is not None:
                after.synchronize()
            for call in self.calls:
                call()
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            # Either call gives this thread a CUDA context, which the driver's own calls require.
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

    All GPU memory must be on one device, host memory opposite a GPU pinned, and no region may touch memory that another
    writes. Reads start after `after`. `sms`: SM budget (None: DEFAULT_SMS, or HOST_SMS beside the host). `using`: see
    `rows.move`; beside the host None is one program for all rows, whose speed the host's link bounds. The memory must
    stay allocated until the stream has passed the move. With both ends on the host, the host waits for `after` and
    copies. Raises RegionError before anything is moved, and EngineUnavailable if a named `engine` cannot run or move a
    region.
    """
    prepare(regions, sms, engine, using).run(after)


def prepare(
    regions: Sequence[Region],
    sms: int | None = None,
    engine: CopyEngine = CopyEngine.AUTO,
    using: Program | None = None,
) -> PreparedBulk:
    """Do all of `move` but the launch. Tables are uploaded on the current stream, before any wait for a producer."""
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
    parts: dict[CopyEngine, list[Region]] = {}
    for region in work:
        chosen = _here(choose(region), device) if engine is CopyEngine.AUTO else engine
        parts.setdefault(chosen, []).append(region)
    with torch.cuda.device(device):
        calls = (_prepared(each, part, device, sms, using) for each, part in parts.items())
        return PreparedBulk(device, tuple(calls))


def check_engine(engine: CopyEngine, device: torch.device, regions: Sequence[Region] = ()) -> None:
    """Raise EngineUnavailable if `engine` cannot run on `device`, or cannot move one of the regions."""
    for reason in (unavailable(engine, device), *(experimental.cannot_move(engine, region) for region in regions)):
        if reason is not None:
            kind = ", which is experimental" if engine in EXPERIMENTAL else ""
            raise EngineUnavailable(f"{engine.value}{kind}: {reason}")


def _checked(region: Region) -> torch.device:
    """Return the region's device: its GPU, or the CPU if both ends are there.

    Raises RegionError as Region.check does, and for host memory opposite a GPU that is not pinned.
    """
    sides = {"source": region.src, "destination": region.dst}
    devices = {tensor.device for side in sides.values() for tensor in side.memory[:1]}
    if sorted(device.type for device in devices) != ["cpu", "cuda"]:
        region.check()
        return devices.pop()
    # Region.check requires both ends on one device.
    shape = region.planes, region.units
    if shape != (len(region.dst.planes), len(region.dst.units)):
        raise RegionError(f"no region of {shape[0]} planes and {shape[1]} units at both ends")
    for name, side in sides.items():
        side.check(name, region.reach(side))
        if side.memory[0].device.type == "cpu" and not all(tensor.is_pinned() for tensor in side.memory):
            raise RegionError(f"{name} memory on the host is not pinned")
    return next(device for device in devices if device.type == "cuda")


@cache
def _here(chosen: CopyEngine, device: torch.device) -> CopyEngine:
    """Returns `chosen`, or LOOP, which is logged once, if the driver takes no batches."""
    reason = unavailable(chosen, device)
    if reason is None:
        return chosen
    log.info("%s in place of %s: %s", CopyEngine.LOOP.value, chosen.value, reason)
    return CopyEngine.LOOP


def _prepared(
    engine: CopyEngine, regions: Sequence[Region], device: torch.device, sms: int | None, using: Program | None
) -> Call:
    if engine in EXPERIMENTAL:
        return experimental.prepared(engine, regions, device, sms or DEFAULT_SMS, using)
    if engine is CopyEngine.ROWS:
        from . import rows

        if any(map(host_end, regions)):
            using = using or rows.general_program()
            return rows.prepared(regions, device, sms=sms or HOST_SMS, using=using).run
        return rows.prepared(regions, device, sms=sms or DEFAULT_SMS, using=using).run
    src, dst, sizes = map(np.concatenate, zip(*map(copies, regions), strict=True))
    if engine is CopyEngine.COPY:
        return partial(off_legacy, partial(cuda_driver.copy_batch, src, dst, sizes))
    return lambda: cuda_driver.copy_each(src, dst, sizes, torch.cuda.current_stream().cuda_stream)
