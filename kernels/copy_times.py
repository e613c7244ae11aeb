"""Copies between host and device are timed at start by both engines, once a process and device, in under a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from .copy_engine import CopyEngine
from .crossover import Crossover, HostEnd, Timed, fitted, keep, known
from .region import Region, Side

log = logging.getLogger(__name__)

#: Microseconds that an engine takes for `copies` copies of `nbytes` each.
Timer = Callable[[CopyEngine, HostEnd, int, int], float]

#: Numbers of copies, and bytes of each: as the pages of a layer are.
COPIES, COPY_BYTES = (4, 16, 128, 1024, 4096), tuple(1 << bits for bits in range(10, 17))

#: Most bytes of a launch, pinned and on the device meanwhile.
MOST_BYTES = 32 << 20

#: Seconds after which no further size is timed.
LIMIT_S = 0.6

#: Launches of which the fastest counts, after one that is not timed.
ROUNDS = 3


def sizes() -> Iterator[tuple[HostEnd, int, int]]:
    """Yield direction, copies and bytes of each, the smallest launches first."""
    each = [(copies, nbytes) for copies in COPIES for nbytes in COPY_BYTES if copies * nbytes <= MOST_BYTES]
    for copies, nbytes in sorted(each, key=lambda pair: pair[0] * pair[1]):
        yield "src", copies, nbytes
        yield "dst", copies, nbytes


def times(timer: Timer, clock: Callable[[], float] = time.monotonic) -> list[Timed]:
    """Returns the times of both engines by size, as many as there is time for."""
    found, stop = list[Timed](), clock() + LIMIT_S
    for host, copies, nbytes in sizes():
        if clock() >= stop:
            break
        engines = (CopyEngine.ROWS, CopyEngine.COPY)
        found.append(Timed(host, copies, nbytes, *(timer(engine, host, copies, nbytes) for engine in engines)))
    return found


_lock = threading.Lock()

_timed = set[torch.device]()


def calibrate(device: torch.device) -> Crossover:
    """Time both engines between the host and a GPU, unless it was done, and keep what follows. Returns it.

    Waits for the device meanwhile; a process of its own compiles the row mover if it has to be. A GPU that cannot be
    timed, as for want of memory, is logged and left as it is. On a CPU nothing is timed.
    """
    with _lock:
        if device.type != "cpu" and device not in _timed:
            _timed.add(device)
            try:
                keep(device, fitted(times(_Bench(device))))
            except (RuntimeError, OSError) as error:  # of the driver, the allocator or the compiler
                log.warning("copies between the host and %s were not timed: %s", device, error)
            else:
                log.info("copies between the host and %s: %s", device, known(device))
    return known(device)


def take(device: torch.device, kept: Crossover) -> None:
    """Use an earlier calibration's crossover for a device, which is then not timed."""
    with _lock:
        _timed.add(device)
        keep(device, kept)


class _Bench:
    """Memory at both ends, in which pages are copied in opposite orders, so that no two are one copy."""

    def __init__(self, device: torch.device) -> None:
        from . import bulk, cuda_driver, rows
        from .ahead_of_time import Worker
        from .pinned import pinned

        self._bulk, self._program = bulk, rows.general_program()
        worker = Worker()
        try:
            self._program.function(device, worker.compile)
        finally:
            worker.rest()
        self._batches = CopyEngine.COPY if cuda_driver.can_batch() else CopyEngine.LOOP
        with torch.cuda.device(device):
            self._host, self._stream = pinned(MOST_BYTES), torch.cuda.Stream()
            self._device = torch.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, engine: CopyEngine, host: HostEnd, copies: int, nbytes: int) -> float:
        chosen = self._batches if engine is CopyEngine.COPY else engine
        with torch.cuda.stream(self._stream):
            launch = self._bulk.prepare([self._region(host, copies, nbytes)], engine=chosen, using=self._program)
            launch.run()
            return min(self._us(launch.run) for _ in range(ROUNDS))

    def _us(self, run: Callable[[], None]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return 1e3 * before.elapsed_time(after)

    def _region(self, host: HostEnd, copies: int, nbytes: int) -> Region:
        ends = self._host, self._device
        src, dst = ends if host == "src" else ends[::-1]
        places = np.arange(copies) * nbytes
        return Region(_side(src, places), _side(dst, places[::-1]), 1, 1, nbytes)


def _side(memory: torch.Tensor, places: np.ndarray) -> Side:
    zero = np.zeros(1, np.int64)
    return Side.of((memory,), zero, zero, places, 0, 0)
