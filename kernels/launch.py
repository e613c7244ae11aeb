"""Launches get their configuration, measured on this GPU or by rule, their tables on the device, and their code."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from hashlib import sha256
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import triton

from . import cuda_driver
from .code_store import Code, find, source
from .cuda_driver import Arguments, Function
from .region import RegionError

if TYPE_CHECKING:
    from .table import Launch


log = logging.getLogger(__name__)

#: SMs when no budget is given: 4 reached the host link's ceiling, 192 GB/s, on a GB300 (sglang#40278).
DEFAULT_SMS = 4

#: Handles of the legacy default stream.
LEGACY = (0, 1)

#: One JSON file a GPU, written by perf/autotune.py.
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class RowConfig:
    """The configuration of a launch: `block_bytes` a tile and `warps` a program.

    Without a budget every tile is a program: 3 to 9 points of a clone's bandwidth faster than a persistent grid on an
    H200, because the hardware scheduler replaces finished programs at once. A budget of SMs is a grid of as many
    programs: they go to idle SMs first, so several small ones for each SM would run on several times as many SMs.
    """

    block_bytes: int = 4096
    warps: int = 4

    def programs(self, tiles: int, sms: int | None, device: torch.device) -> int:
        """Return the grid size for `tiles` under a budget of `sms` multiprocessors (None: no budget)."""
        if sms is None:
            return tiles
        if device.type != "cpu":
            sms = min(sms, torch.cuda.get_device_properties(device).multi_processor_count)
        return min(tiles, sms)


@dataclass(frozen=True, slots=True)
class RowKind:
    """The sizes that select a launch configuration: bytes of a row, and of a unit's rows that lie together."""

    row_bytes: int
    unit_bytes: int

    def distance(self, other: RowKind) -> float:
        """Return the doublings between two kinds; units count double, as below a tile's size they change its reads."""
        return abs(log2(self.row_bytes / other.row_bytes)) + 2 * abs(log2(self.unit_bytes / other.unit_bytes))


class Kernel(StrEnum):
    """A kernel with configured launches."""

    ROWS = "rows"
    DIGEST = "digest"
    CONVERT = "convert"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured best configuration; `budgeted`: under an SM budget."""

    kind: RowKind
    budgeted: bool
    config: RowConfig
    kernel: Kernel = Kernel.ROWS


def device_key(name: str) -> str:
    """Return a GPU's name as a file name: `NVIDIA H200` is nvidia-h200."""
    return "-".join(name.lower().split())


#: Boards with the GPU and the memory of another, by file name: a superchip is measured as its GPU is.
_SAME_GPU = {
    "nvidia-h200-nvl": "nvidia-h200",
    "nvidia-gh200-144g-hbm3e": "nvidia-h200",
    "nvidia-gh200-480gb": "nvidia-h100-80gb-hbm3",
}


def table_keys(name: str) -> tuple[str, ...]:
    """Returns the file names of the tables that hold for a GPU, its own first.

    >>> table_keys("NVIDIA GH200 144G HBM3e MIG 1g.18gb")
    ('nvidia-gh200-144g-hbm3e-mig-1g.18gb', 'nvidia-gh200-144g-hbm3e', 'nvidia-h200')
    """
    own = device_key(name)
    whole = own.partition("-mig-")[0]
    return tuple(dict.fromkeys((own, whole, _SAME_GPU.get(whole, whole))))


@cache
def tuned(key: str) -> tuple[Tuned, ...]:
    """Return the table of a GPU; empty if the GPU was never tuned."""
    path = TUNED / f"{key}.json"
    if not path.exists():
        return ()
    return tuple(map(_entry, json.loads(path.read_text())["entries"]))


def _entry(written: Mapping[str, Any]) -> Tuned:
    """Return an entry of a table. `kernel` is absent for the row mover."""
    kind, config = RowKind(*written["kind"]), RowConfig(*written["best"])
    return Tuned(kind, written["sms"] is not None, config, Kernel(written.get("kernel", "rows")))


#: Configurations of untuned GPUs: without a budget, and for a program that has an SM to itself. Rows: two 16-byte
#: accesses a thread were within 2 % of the best for every kind of row on an H200, and 32 KiB move most alone, 20 to 27
#: GB/s. A digest adds to its result once a tile, so its tiles are larger; 16 warps keep tiles of a budget in registers.
#: A conversion has two 16-byte accesses of the wider side a thread; under a budget a program fills an SM.
RULES: Mapping[Kernel, tuple[RowConfig, RowConfig]] = {
    Kernel.ROWS: (RowConfig(4096, 4), RowConfig(32768, 8)),
    Kernel.DIGEST: (RowConfig(8192, 4), RowConfig(32768, 16)),
    Kernel.CONVERT: (RowConfig(4096, 4), RowConfig(32768, 32)),
}


@cache
def choose(kind: RowKind, sms: int | None, device: torch.device, kernel: Kernel = Kernel.ROWS) -> RowConfig:
    """Returns the configuration of `kernel` measured on this GPU for the nearest kind, or that of `RULES`."""
    if device.type != "cpu":
        for key in table_keys(torch.cuda.get_device_name(device)):
            alike = [entry for entry in tuned(key) if entry.kernel is kernel and entry.budgeted == (sms is not None)]
            if alike:
                return min(alike, key=lambda entry: entry.kind.distance(kind)).config
    return RULES[kernel][sms is not None]


#: Pinned buffers of a ring, and the words of each at first.
RING_BUFFERS, RING_WORDS = 8, 1 << 12


@dataclass(slots=True)
class _Buffer:
    pinned: torch.Tensor
    copied: torch.cuda.Event


@dataclass(slots=True)
class Upload:
    """A ring of pinned buffers, of one thread and device: no other thread fills its buffers.

    `to_device` copies on the device's current stream; the returned tensor lives on that stream. All buffers are pinned
    at first, in one piece, as pinning may wait for the device.
    """

    device: torch.device
    _ring: list[_Buffer] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._ring = []
        if self.device.type != "cpu":
            with on(self.device):
                block = torch.empty(RING_BUFFERS * RING_WORDS, dtype=torch.int64, pin_memory=True)
                self._ring += [_Buffer(part, torch.cuda.Event()) for part in block.chunk(RING_BUFFERS)]

    @classmethod
    def here(cls, device: torch.device) -> Upload:
        """Return the calling thread's ring for `device`."""
        found = _rings.of_device.get(device)
        if found is None:
            found = _rings.of_device[device] = cls(device)
        return found

    def to_device(self, table: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copy `table` [n] int64 to the device. Returns the tensor; on a CPU device it shares the table's memory."""
        host = torch.from_numpy(table)
        if self.device.type == "cpu":
            return host
        with on(self.device):
            buffer = self._take(len(table))
            buffer.pinned[: len(table)].copy_(host)
            out = torch.empty(len(table), dtype=torch.int64, device=self.device)
            out.copy_(buffer.pinned[: len(table)], non_blocking=True)
            buffer.copied.record()
        return out

    def _take(self, words: int) -> _Buffer:
        """Return the ring's oldest buffer once its last copy is done, grown to a power of two if too small."""
        found = self._ring[self._next]
        self._next = (self._next + 1) % RING_BUFFERS
        found.copied.synchronize()
        if found.pinned.numel() < words:
            found.pinned = torch.empty(1 << (words - 1).bit_length(), dtype=torch.int64, pin_memory=True)
        return found


class _Rings(threading.local):
    def __init__(self) -> None:
        self.of_device = dict[torch.device, Upload]()


_rings = _Rings()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current: launches and records inside go to its current stream. Does no work for the CPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def architecture(device: torch.device) -> int:
    """Returns 90 for a GPU of sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def off_legacy(queue: Callable[[int], None]) -> None:
    """Call `queue` with the handle of the current stream, or of our own if that is the legacy default stream.

    Batches refuse the legacy default stream. Our stream keeps its order.
    """
    current = torch.cuda.current_stream()
    if current.cuda_stream not in LEGACY:
        queue(current.cuda_stream)
        return
    stream = _own_stream(current.device)
    stream.wait_event(current.record_event())
    queue(stream.cuda_stream)
    current.wait_event(stream.record_event())


def one_device(devices: Iterable[torch.device]) -> torch.device:
    """Return the one device of a launch. Raises RegionError for several."""
    first, *others = dict.fromkeys(devices)
    if others:
        raise RegionError(f"regions on {first} and {others[0]} cannot share a launch")
    return first


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled kernel: the shapes of rows that it has code for, the tile, and further compiled-in constants.

    The code of the first shape that serves a region moves it. `outputs`: tensors of int64 that follow the table.
    """

    kernel: Any
    shapes: tuple[Any, ...]
    config: RowConfig
    constants: tuple[tuple[str, object], ...] = ()
    outputs: int = 0

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments of the kernel, with each shape as its fields in order, plain numbers.

        vLLM writes everything that Triton compiles as JSON; a launch fails if that fails.
        """
        return {"SHAPES": tuple(map(tuple, self.shapes)), "num_warps": self.config.warps, **dict(self.constants)}

    @property
    def arguments(self) -> tuple[object, ...]:
        """Arguments of the types that it is compiled for: pointers, then 32 bits each, then 64 for bytes."""
        return *[torch.int64] * (1 + self.outputs), 1, 1, 1, 1 << 40, 1 << 40

    def code_name(self, architecture: int) -> str:
        """Returns the name of the code for sm_`architecture` in this machine's code store: `shipped_name`, and Triton's
        version.
        """
        return f"{self.shipped_name(architecture)}-{triton.__version__}"

    def shipped_name(self, architecture: int) -> str:
        """Returns the name of the code for sm_`architecture` in a wheel, whose compiler may be another than this
        process's: a hash of the source of all device code and of the constants.

        Triton's own `cache_key` of a kernel differs by the kernels that were hashed before it (3.6).
        """
        options = sorted(self.options.items())
        told = source(), self.kernel.__module__, self.kernel.__name__, options, self.outputs
        return f"sm_{architecture}-{sha256(repr(told).encode()).hexdigest()}"

    def compiled(self, architecture: int) -> Code:
        """Compile in this process, for most of a second, for the GPU that Triton has, of sm_`architecture`.

        Raises RegionError if the code would write a profile.
        """
        found = self.kernel.warmup(*self.arguments, grid=(1,), **self.options)
        metadata = found.metadata
        assert metadata.target.arch == architecture
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise RegionError(f"{found.name} was compiled to write a profile, which no launch here reads")
        return Code(found.asm["cubin"], found.name, 32 * metadata.num_warps, metadata.shared)

    def function(self, device: torch.device, compile: Callable[[Program, int], Code] | None = None) -> Function:
        """Returns the code loaded on `device`: by an earlier call, or now from the code store, or as compiled by
        `compile` (None: `compiled`). Callable from any thread. Raises CudaError if the driver refuses the code.
        """
        found = self.kept_function(device)
        if found is None:
            with on(device):
                found = _loaded((compile or Program.compiled)(self, architecture(device)))
            _functions[self, device] = found
        return found

    def kept_function(self, device: torch.device) -> Function | None:
        """Returns the code loaded on `device` as `function` does, or None if it would have to be compiled: there is
        none, or the driver refuses a wheel's, which another compiler made. Raises CudaError as `function` does.
        """
        found = _functions.get((self, device))
        if found is not None:
            return found
        with on(device):
            target = architecture(device)
            if (code := find(self.code_name(target))) is not None:
                found = _loaded(code)
            elif (code := find(self.shipped_name(target))) is not None:
                try:
                    found = _loaded(code)
                except cuda_driver.CudaError as error:
                    log.warning("%s: the wheel's code, of %s, is compiled again", error, code.compiler)
                    return None
            else:
                return None
        _functions[self, device] = found
        return found


def _loaded(code: Code) -> Function:
    return cuda_driver.load(code.cubin, code.name, code.threads, code.shared_bytes)


@dataclass(frozen=True, slots=True)
class Shift:
    """The part of its table that a launch takes: from unit `units` of every list on, and the memory of each end so many
    bytes further than the table says.

    A table with a request's whole lists serves each of its chunks: of 8 units from the 16th on, packed 4 MiB into a
    staging buffer whose table begins at 0, `Shift(16, 0, (4 << 20) - 16 * unit_bytes)` gathers the chunk, as its first
    unit is the 16th of the packed list too.
    """

    units: int = 0
    src_bytes: int = 0
    dst_bytes: int = 0


#: The launch of the regions as they were given.
UNSHIFTED = Shift()

#: The loaded code by program and device.
_functions: dict[tuple[Program, torch.device], Function] = {}

#: A compiled kernel's last parameters: Triton's two addresses of scratch memory, of which ours need none.
_SCRATCH = ctypes.c_uint64(0), ctypes.c_uint64(0)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch with its table on the device, which may be run again and captured in a CUDA graph.

    The regions' memory must stay allocated. `outputs` follow the table. `function` is None on a CPU, where Triton
    interprets the kernel. One thread at a time runs it.
    """

    program: Program
    launch: Launch
    table: torch.Tensor
    blocks: int
    outputs: tuple[torch.Tensor, ...]
    function: Function | None
    arguments: Arguments

    @classmethod
    def of(cls, program: Program, laid: Launch, device: torch.device, sms: int | None, *outputs: torch.Tensor) -> Self:
        """Upload the table on the device's current stream, without a synchronise. `sms`: None for no budget."""
        table = Upload.here(device).to_device(laid.table)
        function = None if device.type == "cpu" else program.function(device)
        addresses = (ctypes.c_uint64(each.data_ptr()) for each in (table, *outputs))
        counts = ctypes.c_uint32(laid.regions), ctypes.c_uint32(laid.tiles)
        shift = ctypes.c_uint32(), ctypes.c_int64(), ctypes.c_int64()
        arguments = Arguments((*addresses, *counts, *shift, *_SCRATCH))
        blocks = program.config.programs(laid.tiles, sms, device)
        return cls(program, laid, table, blocks, outputs, function, arguments)

    def run(self, shift: Shift = UNSHIFTED, *outputs: torch.Tensor) -> None:
        """Launch on the current stream of the regions' device. `shift`: for a part of the lists, of as many units as
        the regions have. `outputs`: in place of those it was prepared with.
        """
        device, laid, outputs = self.table.device, self.launch, outputs or self.outputs
        moved = shift.units, shift.src_bytes, shift.dst_bytes
        if self.function is None:
            interpreted = self.program.kernel[(self.blocks,)]
            interpreted(self.table, *outputs, laid.regions, laid.tiles, *moved, **self.program.options)
            return
        values = self.arguments.values
        for value, output in zip(values[1:], outputs, strict=False):
            value.value = output.data_ptr()
        for value, given in zip(values[len(outputs) + 3 :], moved, strict=False):
            value.value = given
        with on(device):
            cuda_driver.launch(
                self.function, self.blocks, torch.cuda.current_stream(device).cuda_stream, self.arguments
            )
