"""Copies between a GPU and its host go by the engine that was the faster one when both were timed, at start.

What was timed is saved beside the links' calibrations: `plan.calibration.save(path, links, host_copies)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.plan.calibration import HostCopies
from kvmover.regions import CopyStream

if TYPE_CHECKING:
    import torch


def timed(device: torch.device) -> HostCopies | None:
    """Time copies between a GPU and its host, in under a second, unless this process has, or took kept ones.

    Waits for the GPU meanwhile. Returns what holds from now on; None on a CPU, where nothing is timed.
    """
    if device.type == "cpu":
        return None
    import torch

    from kvmover.kernels import copy_times

    found = copy_times.calibrate(device)
    return HostCopies(torch.cuda.get_device_name(device), found.from_host, found.to_host)


def host_stream(device: torch.device) -> CopyStream:
    """Returns a stream for copies between a device and its host, which are timed first; see `timed`."""
    timed(device)
    return CopyStream(device)


def take(device: torch.device, kept: HostCopies) -> None:
    """Use kept numbers for a GPU of this process, which is then not timed."""
    from kvmover.kernels import copy_times
    from kvmover.kernels.crossover import Crossover

    copy_times.take(device, Crossover(kept.from_host, kept.to_host))
