"""A link is measured by samples: which writes to time, what is kept of them in bounded memory, and what they show."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvmover.errors import PlanError
from kvmover.plan.calibration import Calibration
from kvmover.plan.cost import Costs, Posting
from kvmover.plan.fit import Array, fit

#: A number from fewer samples than this is no measurement.
FEWEST = 8

#: Samples kept for each octave pair of run lengths. Eight of these hold what was learnt of short runs while a link
#: carries long ones only; a single window would have forgotten it.
_KEPT, _CLASSES = 64, 8

#: What a sample weighs next to the one after it in its class: half as much after 69.
_FORGETTING = 0.99

#: A coefficient is measured only where its term was this much larger than the other, in so many samples.
_CLEARLY, _CLEAR_SAMPLES = 1.5, 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One write that completed: `nbytes` in `runs` descriptors, `total_us` from before the post to its end."""

    nbytes: int
    runs: int
    total_us: float

    def __post_init__(self) -> None:
        if not 0 < self.runs <= self.nbytes:
            raise PlanError(f"a sample of {self.nbytes} bytes in {self.runs} runs; each run has at least a byte")


def _window() -> deque[tuple[float, float]]:
    return deque(maxlen=_KEPT)


@dataclass(slots=True)
class Measurements:
    """What was seen of one link, the newest of each class: at most 512 writes, 64 gathers, scatters and chunks.

    Times that are not positive, from a clock too coarse for what it timed, are left out.
    """

    _writes: tuple[deque[Sample], ...] = field(
        default_factory=lambda: tuple(deque[Sample](maxlen=_KEPT) for _ in range(_CLASSES))
    )
    _gathers: deque[tuple[float, float]] = field(default_factory=_window)
    _scatters: deque[tuple[float, float]] = field(default_factory=_window)
    _chunks: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))

    def wrote(self, sample: Sample) -> None:
        """Take in a write that was timed."""
        if _timed(sample.total_us):
            run_bytes = sample.nbytes // sample.runs
            self._writes[min(_CLASSES - 1, max(0, run_bytes.bit_length() - 9) // 2)].append(sample)

    def gathered(self, nbytes: int, us: float) -> None:
        """Take in a gather of `nbytes` bytes that took `us` microseconds."""
        if _timed(us):
            self._gathers.append((nbytes, us))

    def scattered(self, nbytes: int, us: float) -> None:
        """Take in a scatter of `nbytes` bytes that took `us` microseconds."""
        if _timed(us):
            self._scatters.append((nbytes, us))

    def waited(self, us: float) -> None:
        """What a packed chunk took beyond its gather, its write and its scatter: notes, grants, launches."""
        if _timed(us):
            self._chunks.append(us)

    @property
    def writes(self) -> int:
        """How many samples of writes are kept: at most 64 for each class of run length."""
        return sum(map(len, self._writes))

    def calibrate(self, host: str, transport: str, base: Costs) -> Calibration:
        """The link's numbers by now; None for each that the samples do not tell. Takes 1-5 ms."""
        chunks = max(len(self._gathers), len(self._scatters), len(self._chunks))
        copies = Calibration(
            host,
            transport,
            base.posting,
            self.writes,
            chunks,
            gather_rate=_median([nbytes / us for nbytes, us in self._gathers]),
            scatter_rate=_median([nbytes / us for nbytes, us in self._scatters]),
            chunk_us=_median(list(self._chunks)),
        )
        return copies if self.writes < FEWEST else _with_wire(copies, self._writes, base)


@dataclass(frozen=True, slots=True, eq=False)
class _Design:
    """A write's time as `operation_us + runs * descriptor_us + nbytes / wire_rate`, or with the slower term alone.

    Measured on cma, 182 writes of 1-8192 runs of 64 B to 32 MiB: the time in the post is typically off by 10 % of
    itself as a sum and by 21 % as the slower of the two.
    """

    runs: Array
    nbytes: Array
    posting: Posting

    def rows(self, values: Array) -> Array:
        """[n, 3]: what each coefficient is multiplied by, given which term counts for a write at these `values`."""
        _, descriptor_us, byte_us = values
        both = self.posting is Posting.INLINE
        posted = self.runs * descriptor_us > self.nbytes * byte_us
        return np.stack([np.ones_like(self.runs), self.runs * (both | posted), self.nbytes * (both | ~posted)], axis=1)


def _with_wire(copies: Calibration, writes: Sequence[deque[Sample]], base: Costs) -> Calibration:
    """`copies` and the numbers that the samples in `writes` tell, one deque a class of run lengths."""
    kept = [sample for window in writes for sample in reversed(window)]
    ages = np.array([age for window in writes for age in range(len(window))])
    nbytes, runs, times = (
        np.array([getattr(sample, name) for sample in kept], np.float64) for name in ("nbytes", "runs", "total_us")
    )
    guess = np.array([base.chunk_us, base.descriptor_us, 1 / base.wire_rate])
    fitted = fit(_Design(runs, nbytes, base.posting).rows, times, _FORGETTING**ages, guess)
    operation_us, descriptor_us, byte_us = (float(value) for value in fitted.values)
    posting, wire = runs * descriptor_us, nbytes * byte_us
    return msgspec.structs.replace(
        copies,
        noise=fitted.scatter,
        operation_us=operation_us if fitted.measured[0] else None,
        descriptor_us=descriptor_us if fitted.measured[1] and _clear(posting, wire) else None,
        wire_rate=1 / byte_us if fitted.measured[2] and _clear(wire, posting) else None,
    )


def _clear(term: Array, other: Array) -> bool:
    return int((term > _CLEARLY * other).sum()) >= _CLEAR_SAMPLES


def _timed(us: float) -> bool:
    return 0 < us < math.inf


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) >= FEWEST else None


@dataclass(frozen=True, slots=True)
class Probe:
    """A write worth timing: `runs` runs of `run_bytes`, every other one left out so that NIXL does not merge them."""

    runs: int
    run_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Distance in bytes between the starts of two runs."""
        return 2 * self.run_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes of the sandbox that the probe needs, gaps included."""
        return (self.runs - 1) * self.stride_bytes + self.run_bytes


#: Room for the probe of 256 runs.
LEAST_REGION_BYTES = 1 << 17

#: Rounds of probes, which alternate so that a link that slows down meanwhile slows all of them.
_ROUNDS = 4


def probes(region_bytes: int) -> tuple[Probe, ...]:
    """Writes into a region of the peer that tell every number of a link apart; post them one after the other.

    One tiny write for what any write takes, 256 runs of 256 B for the descriptors, and one run of 4 MiB for the wire:
    12 writes, 1.5 ms at 400 Gb/s and 1 us a descriptor. The first also waits for UCX to connect; the fit leaves it out.
    Raises PlanError for a region that is too small to tell runs from bytes.
    """
    if region_bytes < LEAST_REGION_BYTES:
        raise PlanError(f"a region of {region_bytes} bytes is too small to probe; {LEAST_REGION_BYTES} are needed")
    return (Probe(1, 64), Probe(256, 256), Probe(1, min(region_bytes, 4 << 20))) * _ROUNDS
