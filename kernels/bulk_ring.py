"""The ring moves bytes through shared memory by `cp.async.bulk` (cuda/bulk.cu), on as few SMs as it has blocks: runs,
and boxes of rows at a pitch, which are one tensor copy each.

What the host uploads for a launch is its table: a few words a region, one address or tensor map a plane, and one offset
a unit and side. bulk.cu is compiled with the words' names as they are here.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import cuda_driver, tensor_maps
from .launch import on
from .region import Region, RegionError, Side, merged
from .tensor_maps import Boxes, MappedSide

if TYPE_CHECKING:
    from .table import Launch, Table

SOURCE = Path(__file__).parent / "cuda" / "bulk.cu"
KERNEL = "bulk_move"
THREADS = 64

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
        given = {"STAGES": self.stages, "STAGE_BYTES": self.stage_bytes, "LAG": self.lag, **words()}
        return "-std=c++17", *(f"-D{name}={value}" for name, value in given.items())


RING = Ring()

#: Of the table's words, those that bulk.cu reads; after the sides, what it has beyond: the first item that is not the
#: region's, its pieces, how many are an item, what each has of a stage, and the run that they are cut from, or the box
#: that they are; then which sides have maps, `SRC_MAPPED` and `DST_MAPPED`.
_COMMON = "FIRST_TILE", "PLANES", "HEADS", "TOKENS", "PIECES"
_OF_SIDES = "ADDRESSES", "LIST", "HEAD_STRIDE", "TOKEN_STRIDE"
_FURTHER = "END", "COUNT", "PER_ITEM", "PIECE_BYTES", "RUN_BYTES", "MAPPED", "WORDS"

#: Of the word MAPPED.
SRC_MAPPED, DST_MAPPED = 1, 2


@cache
def words() -> dict[str, int]:
    """Places of a region's words by name, for both sides of the launch. `SRC`, `DST`: where its sides begin."""
    from . import table  # needs Triton, which copies on the host do without

    src, each = table.SIDES.value, table.SIDE_WORDS.value
    found = {name: getattr(table, name).value for name in (*_COMMON, *_OF_SIDES)}
    further = {name: src + 2 * each + at for at, name in enumerate(_FURTHER)}
    return {**found, "SRC": src, "DST": src + each, **further}


class Pieces(StrEnum):
    """What a launch moves: runs alone, or boxes where there are some and runs of the rest."""

    RUNS = "runs"
    BOXES = "boxes"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A merged region as pieces: `nbytes` of a stage each, `pieces` a run of `run_bytes`, `tokens` runs a head."""

    nbytes: int
    pieces: int
    tokens: int
    run_bytes: int
    mapped: int
    sides: list[int]


def describe(regions: Sequence[Region], ring: Ring = RING, of: Pieces = Pieces.RUNS) -> Launch:
    """Lay the regions out as bulk.cu reads them, in bytes. A tile is an item: what one stage of the ring holds.

    Raises RegionError where an address or a run is not a multiple of 16 bytes.
    """
    from .table import Counts, Table

    laid = Table(len(regions), words()["WORDS"])
    for region in map(merged, regions):
        if region.alignment() != ALIGNMENT:
            raise RegionError(f"rows aligned to {region.alignment()} bytes; bulk copies take multiples of 16")
        found = tensor_maps.boxes(region, ring.stage_bytes) if of is Pieces.BOXES else None
        cut = _boxes(laid, region, found) if isinstance(found, Boxes) else _runs(laid, region, ring)
        per_item = min(LANES, ring.stage_bytes // cut.nbytes)
        count = region.planes * region.units * region.heads * cut.tokens * cut.pieces
        if count >= 1 << 31:
            raise RegionError(f"{count} pieces in one launch; the kernel counts them in 32 bits")
        items = -(-count // per_item)
        further = *cut.sides, laid.tiles + items, count, per_item, cut.nbytes, cut.run_bytes, cut.mapped
        laid.add(items, 0, Counts(region.units, region.planes, region.heads, cut.tokens), cut.pieces, 1, further)
    return laid.launch((ring,))


def _runs(laid: Table, region: Region, ring: Ring) -> _Cut:
    from .table import LISTED

    run = region.row_bytes
    piece = _whole_lines(-(-run // -(-run // ring.stage_bytes)))  # of one size: no short one leaves a stage empty
    sides = [word for side in (region.src, region.dst) for word in laid.side(side, 1, LISTED.value)]
    return _Cut(piece, -(-run // piece), region.tokens, run, 0, sides)


def _boxes(laid: Table, region: Region, found: Boxes) -> _Cut:
    sides = [*_side(laid, region.src, found, found.src), *_side(laid, region.dst, found, found.dst)]
    mapped = SRC_MAPPED * (found.src is not None) | DST_MAPPED * (found.dst is not None)
    return _Cut(_whole_lines(found.nbytes), 1, found.count, found.nbytes, mapped, sides)


def _side(laid: Table, side: Side, found: Boxes, mapped: MappedSide | None) -> list[int]:
    """The words of a side of boxes. With maps, they lie where addresses would, and offsets are coordinates."""
    from .table import LISTED

    if mapped is None:
        return laid.side(tensor_maps.run_side(side, found), 1, LISTED.value)
    place = laid.append_at(tensor_maps.maps(side, found), cuda_driver.MAP_WORDS)
    units = laid.append(mapped.starts)
    return [place, units, len(mapped.starts), 0, 0, mapped.head_step, mapped.box_step]


def _whole_lines(nbytes: int) -> int:
    """In shared memory a tensor copy begins at a multiple of 128 bytes."""
    return -(-nbytes // 128) * 128


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


def run(launch: Launch, uploaded: torch.Tensor, sms: int) -> None:
    """Launch on the current stream of the device that the launch's table was uploaded to, one block an SM."""
    device, (ring,) = uploaded.device, launch.shapes
    blocks = min(sms, launch.tiles, torch.cuda.get_device_properties(device).multi_processor_count)
    arguments = ctypes.c_uint64(uploaded.data_ptr()), ctypes.c_uint32(launch.tiles)
    shape = blocks, THREADS, ring.nbytes
    with on(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        cuda_driver.launch(kernel(device, ring).kernel.ptr, shape, stream, arguments)
