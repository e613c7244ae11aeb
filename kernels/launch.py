"""Launches get their configuration, measured on this GPU or by rule, and their tables on the device."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from .region import RegionError

if TYPE_CHECKING:
    from .table import Launch


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
        table = tuned(device_key(torch.cuda.get_device_name(device)))
        alike = [entry for entry in table if entry.kernel is kernel and entry.budgeted == (sms is not None)]
        if alike:
            return min(alike, key=lambda entry: entry.kind.distance(kind)).config
    return RULES[kernel][sms is not None]


RING_BUFFERS = 8


@dataclass(slots=True)
class _Buffer:
    pinned: torch.Tensor
    copied: torch.cuda.Event


@dataclass(slots=True)
class Upload:
    """A ring of pinned buffers, of one thread and device: no other thread fills its buffers.

    `to_device` copies on the device's current stream; the returned tensor lives on that stream.
    """

    device: torch.device
    _ring: list[_Buffer] = field(default_factory=list[_Buffer])
    _next: int = 0

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
        if len(self._ring) < RING_BUFFERS:
            self._ring.append(self._new(words))
            return self._ring[-1]
        at = self._next
        self._next = (at + 1) % RING_BUFFERS
        self._ring[at].copied.synchronize()
        if self._ring[at].pinned.numel() < words:
            self._ring[at] = self._new(words)
        return self._ring[at]

    def _new(self, words: int) -> _Buffer:
        size = 1 << max(12, (words - 1).bit_length())
        return _Buffer(torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event())


class _Rings(threading.local):
    def __init__(self) -> None:
        self.of_device = dict[torch.device, Upload]()


_rings = _Rings()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current: launches and records inside go to its current stream. Does no work for the CPU."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


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

    def compile(self, device: torch.device) -> None:
        """Compile now the code of a first launch on `device`, for most of a second. Callable from any thread."""
        with on(device):
            self.kernel.warmup(*[torch.int64] * (1 + self.outputs), 1, 1, grid=(1,), **self.options)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch with its table on the device, which may be run again and captured in a CUDA graph.

    The regions' memory must stay allocated. `outputs` follow the table.
    """

    program: Program
    launch: Launch
    table: torch.Tensor
    blocks: int
    outputs: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(
        cls, program: Program, launch: Launch, device: torch.device, sms: int | None, *outputs: torch.Tensor
    ) -> Self:
        """Upload the table on the device's current stream, without a synchronise. `sms`: None for no budget."""
        table = Upload.here(device).to_device(launch.table)
        return cls(program, launch, table, program.config.programs(launch.tiles, sms, device), outputs)

    def run(self, **constants: object) -> None:
        """Launch on the current stream of the regions' device. `constants` join those that are compiled in."""
        counts = self.launch.regions, self.launch.tiles
        with on(self.table.device):
            self.program.kernel[(self.blocks,)](self.table, *self.outputs, *counts, **self.program.options, **constants)
