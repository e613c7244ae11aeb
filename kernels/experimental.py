"""Experimental copy engines move regions only if named: no GPU has measured them yet, and AUTO takes no such engine.

The ring moves bytes through shared memory by `cp.async.bulk` (cuda/bulk.cu), on as few SMs as it has blocks: runs
(BULK), and boxes of rows at a pitch, one tensor copy each (TENSOR). The copy engine takes boxes too, and no SM (BOXES).
A green context sets SMs aside for the row mover (GREEN). Within the package `bulk` alone imports this module.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from . import cuda_driver
from .copy_engine import CopyEngine
from .cuda_driver import ORDER_STREAM, OVERLAP_BYTES, Arguments, Function, check
from .launch import DEFAULT_SMS, Program, Upload, off_legacy, on
from .region import Offsets, Region, RegionError, Side, even_distance, merged

if TYPE_CHECKING:
    from .table import Launch, Table

#: Engines of the ring; their rows need this alignment in bytes, their GPU this compute capability.
RINGS = {CopyEngine.BULK, CopyEngine.TENSOR}
ALIGNMENT = 16
CAPABILITY = (9, 0)

#: Least bytes of a run for the ring: operations have a fixed cost, so never one a row of 256 B (sglang#40278).
RUN_BYTES = 2 << 10


def unavailable(engine: CopyEngine, device: torch.device) -> str | None:
    """Returns why `engine` cannot run on a GPU, or None."""
    if engine in RINGS:
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            return f"{device} is sm_{capability[0]}{capability[1]}, bulk copies came with sm_90"
        if engine is CopyEngine.TENSOR and not hasattr(cuda_driver.library(), "cuTensorMapEncodeTiled"):
            return "the driver has no cuTensorMapEncodeTiled, which came with CUDA 12"
        return cannot_compile(device)
    if engine is CopyEngine.BOXES and not hasattr(cuda_driver.library(), "cuMemcpy3DBatchAsync"):
        return "the driver has no cuMemcpy3DBatchAsync, which came with CUDA 12.8"
    if engine is CopyEngine.GREEN:
        try:
            _green_context(device, DEFAULT_SMS)
        except RuntimeError as error:  # from torch or the driver: refuse the engine with its words
            return f"no green context on {device}: {error}"
    return None


def cannot_move(engine: CopyEngine, region: Region) -> str | None:
    """Returns why `engine` cannot move the region on any machine, or None."""
    if engine in RINGS and merged(region).alignment() != ALIGNMENT:
        return f"rows aligned to {merged(region).alignment()} bytes; bulk copies take multiples of {ALIGNMENT}"
    return None


def without_boxes(engine: CopyEngine, regions: Sequence[Region]) -> str | None:
    """Returns why TENSOR would move the largest region as short runs, slower than other engines, or None."""
    if engine is not CopyEngine.TENSOR:
        return None
    most = merged(max(regions, key=lambda region: region.nbytes))
    found = tensor_boxes(most, RING.stage_bytes)
    if isinstance(found, NoBox) and most.row_bytes < RUN_BYTES:
        return f"{most.row_bytes} B a run: {found.value}"
    return None


def prepared(
    engine: CopyEngine, regions: Sequence[Region], device: torch.device, sms: int, using: Program | None
) -> Callable[[], None]:
    """Return a move by `engine`, to be launched on the current stream; its tables are being uploaded."""
    if engine is CopyEngine.BOXES:
        return partial(off_legacy, partial(copy_boxes, np.concatenate([*map(boxes, regions)])))
    if engine is CopyEngine.GREEN:
        return _green(regions, device, sms, using)
    launch = describe(regions, of=Pieces.BOXES if engine is CopyEngine.TENSOR else Pieces.RUNS)
    return partial(run, launch, Upload.here(device).to_device(launch.table), sms)


# The ring. The host uploads a table for a launch: a few words a region, one address or tensor map a plane, and one
# offset a unit and side. bulk.cu is compiled with the names of these words.

SOURCE = Path(__file__).parent / "cuda" / "bulk.cu"
KERNEL = "bulk_move"
THREADS = 64

#: Lanes that issue copies: most pieces of an item.
LANES = 32


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of one block: `stages` of `stage_bytes` in shared memory, of which `lag` may wait to be stored.

    The default has 192 KiB in flight an SM; a block of an H100 may have 227 KiB.
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
        """Compiler options of bulk.cu for this ring."""
        given = {"STAGES": self.stages, "STAGE_BYTES": self.stage_bytes, "LAG": self.lag, **words()}
        return "-std=c++17", *(f"-D{name}={value}" for name, value in given.items())


RING = Ring()

#: Table words that bulk.cu reads. After the sides: the first item past the region, its pieces, pieces of an item, stage
#: bytes of a piece, bytes of the run that pieces are cut from or of the box that a piece is; which sides have maps.
_COMMON = "FIRST_TILE", "PLANES", "HEADS", "TOKENS", "PIECES"
_OF_SIDES = "ADDRESSES", "LIST", "HEAD_STRIDE", "TOKEN_STRIDE"
_FURTHER = "END", "COUNT", "PER_ITEM", "PIECE_BYTES", "RUN_BYTES", "MAPPED", "WORDS"

#: Bits of the word MAPPED.
SRC_MAPPED, DST_MAPPED = 1, 2


@cache
def words() -> dict[str, int]:
    """Return the index of each word of a region by name, for host and kernel. `SRC`, `DST`: where its sides begin."""
    from . import table  # needs Triton, which host copies do without

    src, each = table.SIDES.value, table.SIDE_WORDS.value
    found = {name: getattr(table, name).value for name in (*_COMMON, *_OF_SIDES)}
    further = {name: src + 2 * each + at for at, name in enumerate(_FURTHER)}
    return {**found, "SRC": src, "DST": src + each, **further}


class Pieces(StrEnum):
    """The pieces of a launch: runs alone, or boxes where rows form boxes and runs of the rest."""

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
    """Lay the regions out as bulk.cu reads them, in bytes. A tile is an item: the pieces in one stage of the ring.

    Raises RegionError if an address or a run is not a multiple of 16 bytes, or a region has 2^31 pieces.
    """
    from .table import Counts, Table

    laid = Table(len(regions), words()["WORDS"])
    for region in map(merged, regions):
        if region.alignment() != ALIGNMENT:
            raise RegionError(f"rows aligned to {region.alignment()} bytes; bulk copies take multiples of 16")
        found = tensor_boxes(region, ring.stage_bytes) if of is Pieces.BOXES else None
        cut = _boxes(laid, region, found) if isinstance(found, TensorBoxes) else _runs(laid, region, ring)
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
    piece = _whole_lines(-(-run // -(-run // ring.stage_bytes)))  # of one size: a short one would waste a stage
    sides = [word for side in (region.src, region.dst) for word in laid.side(side, 1, LISTED.value)]
    return _Cut(piece, -(-run // piece), region.tokens, run, 0, sides)


def _boxes(laid: Table, region: Region, found: TensorBoxes) -> _Cut:
    sides = [*_side(laid, region.src, found, found.src), *_side(laid, region.dst, found, found.dst)]
    mapped = SRC_MAPPED * (found.src is not None) | DST_MAPPED * (found.dst is not None)
    return _Cut(_whole_lines(found.nbytes), 1, found.count, found.nbytes, mapped, sides)


def _side(laid: Table, side: Side, found: TensorBoxes, mapped: MappedSide | None) -> list[int]:
    """Return the words of a side of boxes.

    Maps take the place of addresses, and coordinates of offsets. Without maps, rows follow each other: a box is a run,
    and counts as a token does.
    """
    from .table import LISTED

    if mapped is None:
        return laid.side(replace(side, token_bytes=found.nbytes), 1, LISTED.value)
    place = laid.append_at(maps(side, found), MAP_WORDS)
    units = laid.append(mapped.starts)
    return [place, units, len(mapped.starts), 0, 0, mapped.head_step, mapped.box_step]


def _whole_lines(nbytes: int) -> int:
    """Round up to a multiple of 128 bytes, at which a tensor copy begins in shared memory."""
    return -(-nbytes // 128) * 128


def cannot_compile(device: torch.device) -> str | None:
    """Returns why bulk.cu cannot be compiled for this device, or None. CuPy may be of another CUDA, or lack NVRTC."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        kernel(device, RING)
    except Exception as error:  # from CuPy, NVRTC or the driver: refuse the engine with its words
        return f"CuPy cannot compile bulk.cu: {type(error).__name__}: {error}"
    return None


@cache
def kernel(device: torch.device, ring: Ring) -> Any:
    """Return bulk.cu as CuPy's RawKernel, compiled for this device and ring by NVRTC on first use."""
    import cupy  # pyright: ignore[reportMissingImports]

    with cupy.cuda.Device(device.index or 0):
        found = cupy.RawModule(code=SOURCE.read_text(), options=ring.options).get_function(KERNEL)
        found.max_dynamic_shared_size_bytes = ring.nbytes
    return found


def run(launch: Launch, uploaded: torch.Tensor, sms: int) -> None:
    """Launch on the current stream of the device that holds the uploaded table, on at most `sms` blocks, one an SM."""
    device, (ring,) = uploaded.device, launch.shapes
    blocks = min(sms, launch.tiles, torch.cuda.get_device_properties(device).multi_processor_count)
    arguments = Arguments((ctypes.c_uint64(uploaded.data_ptr()), ctypes.c_uint32(launch.tiles)))
    with on(device):
        # CuPy itself takes a stream of torch's by a class that warns since CuPy 14, or by a method new in 14.
        function = Function(kernel(device, ring).kernel.ptr, THREADS, ring.nbytes)
        cuda_driver.launch(function, blocks, torch.cuda.current_stream(device).cuda_stream, arguments)


# Rows at a pitch as boxes, each one tensor copy (`UTMALDG`, `UTMASTG`): a head's rows of a page. A tensor map is a
# plane as rows of its token pitch, by words of 8 bytes: two axes and one pitch, so CUDA's rules for further pitches
# never matter. A box begins at a coordinate, its row in the upper 32 bits of a number and its word in the lower: steps
# of units, heads and boxes add to it as to an address.

#: 64-bit words of a `CUtensorMap`; its elements, `CU_TENSOR_MAP_DATA_TYPE_UINT64`, are as wide.
MAP_WORDS = 16
UINT64, ELEMENT_BYTES = 4, 8

#: `CUtensorMapL2promotion` by the bytes that L2 then fetches at once; rows must be multiples of them.
L2_FETCHES = {64: 1, 128: 2, 256: 3}

#: Most elements of a box along an axis.
MOST_ELEMENTS = 256

#: Most rows that a coordinate counts, signed; most words of a row that a map counts.
MOST_ROWS, MOST_WORDS = 1 << 31, 1 << 32

#: A row's addend to a coordinate.
ROW = 1 << 32

#: Most sets of maps kept: a set is one side's planes, and pools never move.
KEPT_SETS = 64


class NoBox(StrEnum):
    """The reason that a region's rows form no boxes and move as runs."""

    ONE_ROW = "rows follow each other at both ends, or a unit has one"
    ALIGNMENT = "rows are not aligned to 16 bytes"
    WIDE = "a row has more than 2048 bytes"
    OVERLAP = "rows lie closer to each other than they are long"
    FAR = "rows lie 32 GiB or more apart"
    SPLIT = "a row crosses the end of a row of the map"
    OUTSIDE = "rows lie before the plane's first, or more than 2^31 after it"
    ALONE = "no number of rows but one divides a unit and fits a box"


@dataclass(frozen=True, slots=True)
class MappedSide:
    """A side in coordinates: where each unit begins [unit], and the steps to the next head and box."""

    starts: Offsets
    head_step: int
    box_step: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorBoxes:
    """A region as boxes of `rows` rows of `row_bytes`, `count` a unit and head.

    `src`, `dst`: None if rows follow each other on that side, where a box is a run.
    """

    row_bytes: int
    rows: int
    count: int
    src: MappedSide | None
    dst: MappedSide | None

    @property
    def nbytes(self) -> int:
        """Bytes of a box."""
        return self.row_bytes * self.rows


def tensor_boxes(region: Region, most_bytes: int) -> TensorBoxes | NoBox:
    """Return a merged region as boxes of at most `most_bytes`, or the reason that it has no boxes."""
    row, sides = region.row_bytes, (region.src, region.dst)
    strided = [side for side in sides if side.token_bytes != row]
    if region.tokens == 1 or not strided:
        return NoBox.ONE_ROW
    if region.alignment() != ALIGNMENT:
        return NoBox.ALIGNMENT
    if row > MOST_ELEMENTS * ELEMENT_BYTES:
        return NoBox.WIDE
    most = min(MOST_ELEMENTS, most_bytes // row, region.tokens)
    rows = max((each for each in range(1, most + 1) if region.tokens % each == 0), default=1)
    if rows == 1:
        return NoBox.ALONE
    found: list[MappedSide | None] = []
    for side in sides:
        mapped = None if side.token_bytes == row else _mapped(region, side, rows)
        if isinstance(mapped, NoBox):
            return mapped
        found.append(mapped)
    return TensorBoxes(row, rows, region.tokens // rows, *found)


def _mapped(region: Region, side: Side, rows: int) -> MappedSide | NoBox:
    pitch, row = side.token_bytes, region.row_bytes
    if pitch < row:
        return NoBox.OVERLAP
    if pitch >= MOST_WORDS * ELEMENT_BYTES:
        return NoBox.FAR
    first, inside = np.divmod(side.units, pitch)
    head_rows, head_inside = divmod(side.head_bytes, pitch)
    heads = region.heads - 1
    if int(inside.max()) + heads * head_inside + row > pitch:
        return NoBox.SPLIT
    if int(first.min()) < 0 or int(first.max()) + heads * head_rows + region.tokens > MOST_ROWS:
        return NoBox.OUTSIDE
    starts = first * ROW + inside // ELEMENT_BYTES
    return MappedSide(starts, head_rows * ROW + head_inside // ELEMENT_BYTES, rows * ROW)


def maps(side: Side, found: TensorBoxes) -> Offsets:
    """Return the maps of a side's planes, one after the other, each encoded once."""
    pitch, planes = side.token_bytes, side.planes
    heights = np.minimum((planes.sizes - planes.offset - 1) // pitch + 1, MOST_ROWS)
    return _maps(planes.addresses.tobytes(), heights.tobytes(), pitch, found.row_bytes, found.rows)


@lru_cache(KEPT_SETS)
def _maps(addresses: bytes, heights: bytes, pitch: int, row_bytes: int, rows: int) -> Offsets:
    each = zip(np.frombuffer(addresses, np.int64).tolist(), np.frombuffer(heights, np.int64).tolist(), strict=True)
    width, box = pitch // ELEMENT_BYTES, (row_bytes // ELEMENT_BYTES, rows)
    encoded = [encode_map(address, (width, height), (pitch,), box) for address, height in each]
    return np.concatenate([np.zeros(0, np.int64), *encoded])


def encode_map(address: int, dims: Sequence[int], pitches: Sequence[int], box: Sequence[int]) -> Offsets:
    """Encode a tensor map [MAP_WORDS] of memory from `address` on, in 64-bit elements.

    `dims`: elements an axis, the innermost first. `pitches`: bytes, of the other axes. `box`: elements an axis of the
    box that one copy takes. The map's words are for the device alone. Raises CudaError if the driver cannot encode
    them.
    """
    raw = np.zeros(2 * MAP_WORDS, np.int64)
    found = raw[-raw.ctypes.data // 8 % 8 :][:MAP_WORDS]  # the driver writes to multiples of 64 bytes
    rank, row_bytes = len(dims), box[0] * ELEMENT_BYTES
    fetched = max((each for each in L2_FETCHES if row_bytes % each == 0), default=0)
    lists = (ctypes.c_uint64 * rank)(*dims), (ctypes.c_uint64 * max(1, rank - 1))(*pitches)
    extents = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
    result = cuda_driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_int(UINT64),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        *lists,
        *extents,
        *map(ctypes.c_int, (0, 0, L2_FETCHES.get(fetched, 0), 0)),  # no interleave, no swizzle; zeros outside
    )
    check(result, f"cuTensorMapEncodeTiled of {tuple(dims)} elements in boxes of {tuple(box)}")
    return found


# A region as boxes of the copy engine: rows of a pitch in layers of rows. The engine takes thousands in a call and no
# SM. A head slice of an NHD page is one box, where it is a run a token. `cuMemcpy3DBatchAsync` came with CUDA 12.8.

#: `CUmemcpy3DOperand` of a pointer: its type, start address, bytes from a row to the next, and rows from a layer to the
#: next; then a location, of managed memory only.
OPERAND = np.dtype(
    [("type", "i4"), ("unused", "i4"), ("address", "i8"), ("pitch", "u8"), ("layer_rows", "u8"), ("location", "i4", 2)]
)

#: `CUDA_MEMCPY3D_BATCH_OP`. Its extent is bytes, rows and layers.
BOX = np.dtype([("src", OPERAND), ("dst", OPERAND), ("extent", "u8", 3), ("order", "i4"), ("flags", "u4")])

#: `CU_MEMCPY_OPERAND_TYPE_POINTER`.
POINTER = 1

#: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every GPU so far.
MOST_PITCH = (1 << 31) - 1

#: Bytes from a step of a loop to the next: at the source, at the destination.
Steps = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """A loop of a region: where its steps begin at both ends [step]. `steps`: their one distance, or None."""

    src: Offsets
    dst: Offsets
    steps: Steps | None

    @classmethod
    def of(cls, src: Offsets, dst: Offsets) -> _Axis:
        """Build a loop of listed steps."""
        distances = even_distance(src), even_distance(dst)
        return cls(src, dst, None if None in distances else distances)  # pyright: ignore

    @classmethod
    def once(cls, src_step: int, dst_step: int) -> _Axis:
        """Build a loop of one step."""
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, (src_step, dst_step))

    @property
    def first(self) -> _Axis:
        """The loop's first step alone."""
        return _Axis(self.src[:1], self.dst[:1], self.steps)


def boxes(region: Region) -> npt.NDArray[np.void]:
    """Return a region's boxes, BOX [box]: rows are the longest loop that fits, layers the longest other that fits."""
    region = merged(region)
    run, axes = region.row_bytes, _axes(region)
    rows = _longest(axes, lambda steps: run <= min(steps) and max(steps) <= MOST_PITCH) or _Axis.once(run, run)
    assert rows.steps is not None
    height, pitches = len(rows.src), rows.steps
    others = [axis for axis in axes if axis is not rows]

    def hold(steps: Steps) -> bool:
        pairs = zip(steps, pitches, strict=True)
        return all(step % pitch == 0 and step // pitch >= height for step, pitch in pairs)

    layers = _longest(others, hold) or _Axis.once(*(pitch * height for pitch in pitches))
    assert layers.steps is not None
    outside = [axis.first if axis in (rows, layers) else axis for axis in axes]
    found = np.zeros(int(np.prod([len(axis.src) for axis in outside])), BOX)
    for name, starts, pitch, step in zip(("src", "dst"), _starts(outside), pitches, layers.steps, strict=True):
        side = found[name]
        side["type"], side["address"], side["pitch"], side["layer_rows"] = POINTER, starts, pitch, step // pitch
    found["extent"] = run, height, len(layers.src)
    found["order"], found["flags"] = ORDER_STREAM, run * height * len(layers.src) <= OVERLAP_BYTES
    return found


def _axes(region: Region) -> list[_Axis]:
    """Return the loops of planes, units, heads and tokens. Planes of several allocations never have one distance."""
    planes = _Axis.of(region.src.addresses(), region.dst.addresses())
    if any(np.ptp(side.allocation) for side in (region.src, region.dst) if len(side.allocation)):
        planes = _Axis(planes.src, planes.dst, None)
    units = _Axis.of(region.src.units, region.dst.units)
    heads, tokens = np.arange(region.heads), np.arange(region.tokens)
    return [
        planes,
        units,
        _Axis.of(heads * region.src.head_bytes, heads * region.dst.head_bytes),
        _Axis.of(tokens * region.src.token_bytes, tokens * region.dst.token_bytes),
    ]


def _longest(axes: Sequence[_Axis], fits: Callable[[Steps], bool]) -> _Axis | None:
    """Return the longest loop of several steps at one distance that fits, or None."""
    found = [axis for axis in axes if len(axis.src) > 1 and axis.steps is not None and fits(axis.steps)]
    return max(found, key=lambda axis: len(axis.src), default=None)


def _starts(axes: Sequence[_Axis]) -> tuple[Offsets, Offsets]:
    """Return the addresses where boxes begin at source and destination, in one order."""
    src = dst = np.zeros(1, np.int64)
    for axis in axes:
        src = (src[:, None] + axis.src).reshape(-1)
        dst = (dst[:, None] + axis.dst).reshape(-1)
    return src, dst


def copy_boxes(found: npt.NDArray[np.void], stream: int) -> None:
    """Queue copies of boxes, BOX [box], in any order among themselves. `stream`: see `cuda_driver.copy_batch`."""
    driver = cuda_driver.library()
    for begin in range(0, len(found), cuda_driver.BATCH_COPIES):
        part = np.ascontiguousarray(found[begin : begin + cuda_driver.BATCH_COPIES])
        arguments = ctypes.c_size_t(len(part)), ctypes.c_void_p(part.ctypes.data)
        flags, queue = ctypes.c_ulonglong(0), ctypes.c_void_p(stream)
        if hasattr(driver, "cuMemcpy3DBatchAsync_v2"):
            result = driver.cuMemcpy3DBatchAsync_v2(*arguments, flags, queue)
        else:  # before CUDA 13, as for cuMemcpyBatchAsync
            failed = ctypes.c_size_t()
            result = driver.cuMemcpy3DBatchAsync(*arguments, ctypes.byref(failed), flags, queue)
        check(result, "cuMemcpy3DBatchAsync")


# A green context: SMs set aside for the row mover.


@cache
def _green_context(device: torch.device, sms: int) -> tuple[object, torch.cuda.Stream]:
    """Set SMs aside, `sms` or the least a GPU deals, for work on the returned stream. The context is kept."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=sms, device_id=device.index or 0)
    return context, context.Stream()


def _green(regions: Sequence[Region], device: torch.device, sms: int, using: Program | None) -> Callable[[], None]:
    """Return a launch of the row mover on its own SMs, which are the budget: as many small programs an SM as fit."""
    from . import rows

    (_, stream), ready = _green_context(device, sms), rows.prepared(regions, device, using=using)

    def call() -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            ready.run()
        current.wait_stream(stream)

    return call
