"""The ring moves runs of bytes through shared memory by `cp.async.bulk` (cuda/bulk.cu), on as few SMs as it has blocks.

What the host uploads for a launch is a few words a region, one address a plane, and one offset a unit and side.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import cuda_driver
from .launch import on
from .region import Offsets, Region, RegionError, merged

SOURCE = Path(__file__).parent / "cuda" / "bulk.cu"
KERNEL = "bulk_move"
THREADS = 64

#: int64 words that describe a region to the kernel: `Field` of bulk.cu.
FIELDS = 18

#: Lanes that issue copies: pieces of an item.
LANES = 32

#: Addresses and sizes of `cp.async.bulk` are multiples of this, which came with this compute capability.
ALIGNMENT = 16
CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of one block: `stages` of `stage_bytes` in shared memory, of which `lag` may wait to be stored.

    192 KiB in flight an SM; a block of an H100 may have 227 KiB.
    """

    stages: int = 6
    stage_bytes: int = 32 << 10
    lag: int = 2

    @property
    def nbytes(self) -> int:
        """Shared memory of one block, in bytes."""
        return self.stages * self.stage_bytes

    @property
    def options(self) -> tuple[str, ...]:
        """How bulk.cu is compiled for this ring."""
        return "-std=c++17", f"-DSTAGES={self.stages}", f"-DSTAGE_BYTES={self.stage_bytes}", f"-DLAG={self.lag}"


RING = Ring()


@dataclass(frozen=True, slots=True, eq=False)
class RingLaunch:
    """One call of the bulk kernel, worked out on the host: the table to upload, and the items to share among blocks."""

    table: npt.NDArray[np.int64]
    items: int


def describe(regions: Sequence[Region], ring: Ring = RING) -> RingLaunch:
    """Lay the regions out as bulk.cu reads them: FIELDS words a region, plane addresses, unit offsets in bytes.

    Raises RegionError where an address or a run is not a multiple of 16 bytes.
    """
    parts: list[Offsets] = []
    used, items = len(regions) * FIELDS, 0
    header = np.zeros((len(regions), FIELDS), np.int64)
    for number, region in enumerate(map(merged, regions)):
        if region.alignment() != ALIGNMENT:
            raise RegionError(f"rows aligned to {region.alignment()} bytes; bulk copies take multiples of 16")
        run = region.row_bytes
        piece = -(-run // -(-run // ring.stage_bytes))  # pieces of one size: no short one that leaves a stage empty
        piece = -(-piece // 128) * 128
        pieces = -(-run // piece)
        per_item = min(LANES, ring.stage_bytes // piece)
        count = region.planes * region.units * region.heads * region.tokens * pieces
        first, items = items, items - -count // per_item
        if max(items, count) >= 1 << 31:
            raise RegionError(f"{max(items, count)} pieces in one launch; the kernel counts them in 32 bits")
        loops = items, first, count, per_item, pieces, piece, run, region.tokens, region.planes, region.heads
        places: list[int] = []
        for side in (region.src, region.dst):
            places += [used, used + region.planes, side.head_bytes, side.token_bytes]
            parts += [side.addresses(), side.units]
            used += region.planes + region.units
        header[number] = *loops, *places
    return RingLaunch(np.concatenate([header.reshape(-1), *parts]), items)


def cannot_compile(device: torch.device) -> str | None:
    """Why bulk.cu cannot be compiled for this device, or None. Tried: CuPy may be of another CUDA, or lack NVRTC."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        kernel(device, RING)
    except Exception as error:  # whatever CuPy, NVRTC and the driver raise: the row mover serves then, and this is said
        return f"CuPy cannot compile bulk.cu: {type(error).__name__}: {error}"
    return None


@cache
def kernel(device: torch.device, ring: Ring) -> Any:
    """bulk.cu, compiled for this device and ring by NVRTC on first use: CuPy's RawKernel."""
    import cupy  # pyright: ignore[reportMissingImports]

    with cupy.cuda.Device(device.index or 0):
        found = cupy.RawModule(code=SOURCE.read_text(), options=ring.options).get_function(KERNEL)
        found.max_dynamic_shared_size_bytes = ring.nbytes
    return found


def run(launch: RingLaunch, table: torch.Tensor, sms: int, ring: Ring = RING) -> None:
    """Launch on the current stream of the table's device, one block an SM. `table` is the launch's, uploaded."""
    device = table.device
    blocks = min(sms, launch.items, torch.cuda.get_device_properties(device).multi_processor_count)
    arguments = ctypes.c_uint64(table.data_ptr()), ctypes.c_uint32(launch.items)
    shape = blocks, THREADS, ring.nbytes
    with on(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        cuda_driver.launch(kernel(device, ring).kernel.ptr, shape, stream, arguments)
