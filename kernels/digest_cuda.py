"""The digest of `digest_reference` by cuda/digest.cu, through CuPy: the same value, where Triton is not wanted.

It reads only, one launch a region, and shares no code with the Triton kernel: each is a check of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import digest_reference as definition
from .digest_reference import End, Logical
from .region import Region, RegionError, Side
from .upload import Upload

SOURCE = Path(__file__).parent / "cuda" / "digest.cu"
KERNEL = "digest"
THREADS = 256

#: Items that a thread takes before its warp adds its sum to the result.
ITEMS_A_THREAD = 8

#: int64 words that describe a region to the kernel: `Field` of digest.cu.
FIELDS = 11

#: Rows of blocks of one launch: planes x heads.
MOST_ROWS = 65535

_uploads: dict[torch.device, Upload] = {}


@dataclass(frozen=True, slots=True)
class Shape:
    """What digest.cu is compiled for."""

    head_bytes: int
    heads: int
    tokens: int
    item_bytes: int

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the compiler."""
        row = f"-DHEAD_BYTES={self.head_bytes}", f"-DHEADS={self.heads}"
        return "-std=c++17", *row, f"-DTOKENS={self.tokens}", f"-DITEM_BYTES={self.item_bytes}"

    @property
    def items(self) -> int:
        """Of one unit and region head."""
        return -(-self.head_bytes // (16 if self.item_bytes == 16 else 4)) * self.heads * self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One call of the kernel, worked out on the host: the table to upload, and the grid."""

    table: npt.NDArray[np.int64]
    shape: Shape
    grid: tuple[int, int]


def describe(region: Region, logical: Logical, side: End) -> Launch:
    """Lay one side of a region and its coordinates out as digest.cu reads them."""
    at: Side = getattr(region, side)
    head_bytes = region.row_bytes // logical.heads_in_row
    alignment = int(np.gcd(replace(region, src=at, dst=at).alignment(), head_bytes))
    shape = Shape(head_bytes, logical.heads_in_row, region.tokens, {16: 16, 8: 4, 4: 4}.get(alignment, 1))
    items, rows = shape.items * region.units, region.planes * region.heads
    if items >= 1 << 31 or rows > MOST_ROWS:
        raise RegionError(f"{items} items of {rows} planes and heads; the kernel counts to {1 << 31} and {MOST_ROWS}")
    parts = at.addresses(), logical.plane_keys(), at.units, np.asarray(logical.positions, np.int64)
    places = np.cumsum([FIELDS, *map(len, parts[:-1])])
    strides = at.head_bytes, at.token_bytes, logical.position_step, logical.first_head, logical.head_step
    header = np.array([*places, items, region.planes, *strides], np.int64)
    blocks = -(-items // (THREADS * ITEMS_A_THREAD))
    return Launch(np.concatenate([header, *parts]), shape, (blocks, rows))


def digest(regions: Sequence[Region], logicals: Sequence[Logical], side: End, out: torch.Tensor) -> None:
    """Add the digest of the rows at one end of the regions, all on the current device, to `out` on the current stream.

    `out` int64 [1] on the device; its element modulo 2^64 is the definition's digest. Nothing is waited for, and the
    memory must stay allocated until the stream has passed. Raises RegionError before anything is launched.
    """
    import cupy  # pyright: ignore[reportMissingImports]

    definition.check(regions, logicals)
    device = torch.cuda.current_device()
    for region in regions:
        if region.src.memory[0].device != out.device or out.device != torch.device("cuda", device):
            raise RegionError(f"regions on {region.src.memory[0].device}, a result on {out.device}, device {device}")
    if out.dtype != torch.int64 or out.numel() != 1:
        raise RegionError(f"a result of {tuple(out.shape)} {out.dtype}, not int64 [1]")
    work = [pair for pair in zip(regions, logicals, strict=True) if pair[0].nbytes]
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream, device)
    for launch in [describe(region, logical, side) for region, logical in work]:
        table = _uploads.setdefault(out.device, Upload(out.device)).to_device(launch.table)
        with cupy.cuda.Device(device), stream:
            arguments = np.uint64(table.data_ptr()), np.uint64(out.data_ptr())
            kernel(device, launch.shape)(launch.grid, (THREADS,), arguments)


@cache
def kernel(device: int, shape: Shape) -> Any:
    """digest.cu, compiled for this device and shape by NVRTC on first use."""
    import cupy  # pyright: ignore[reportMissingImports]

    with cupy.cuda.Device(device):
        return cupy.RawModule(code=SOURCE.read_text(), options=shape.options).get_function(KERNEL)
