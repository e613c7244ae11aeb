"""A Calibration is a link's costs, fitted to samples of writes, kept in a file, and used to choose routes.

Beside the links the file keeps which copies between a GPU and its host go by which engine.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import PlanError
from kvmover.plan.cost import Costs, Posting
from kvmover.prepared import prepared

_FORMAT = "kvmover.calibration/1"
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link's measured numbers, in the units of Costs; None: not measured.

    `writes`, `chunks`: numbers of samples. `latency_us`: fixed time of writes under way together, whatever their size.
    `noise`: typical error of one write's predicted time, as a share of it.
    """

    host: str
    transport: str
    posting: Posting
    writes: int
    chunks: int
    noise: float | None = None
    latency_us: _Positive | None = None
    descriptor_us: _Positive | None = None
    wire_rate: _Positive | None = None
    gather_rate: _Positive | None = None
    scatter_rate: _Positive | None = None
    chunk_us: _Positive | None = None

    def costs(self, base: Costs) -> Costs:
        """Returns `base` with each measured number in place of its own."""
        names = ("descriptor_us", "wire_rate", "gather_rate", "scatter_rate", "chunk_us", "latency_us")
        measured = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(base, posting=self.posting, **measured)

    def why(self, base: Costs) -> str:
        """Returns `decode-3 over UCX, 412 writes and 0 chunks: 7.1 us a descriptor, gather 160 GB/s (assumed)`."""
        costs = self.costs(base)
        words = (
            (self.descriptor_us, f"{costs.descriptor_us:.3g} us a descriptor"),
            (self.wire_rate, f"{costs.wire_rate / 1e3:.3g} GB/s on the wire"),
            (self.gather_rate, f"gather {costs.gather_rate / 1e3:.3g} GB/s"),
            (self.scatter_rate, f"scatter {costs.scatter_rate / 1e3:.3g} GB/s"),
            (self.chunk_us, f"{costs.chunk_us:.3g} us a chunk"),
            (self.latency_us, f"{costs.latency_us:.3g} us there and back"),
        )
        numbers = ", ".join(text if value is not None else f"{text} (assumed)" for value, text in words)
        return f"{self.host} over {self.transport}, {self.writes} writes and {self.chunks} chunks: {numbers}"


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class HostCopies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copies between a GPU and its host that a kernel makes faster than the copy engine, as timed on a machine.

    Of each pair (copies, bytes), copies rising: from so many copies on, those of fewer bytes on average. `from_host`,
    `to_host`: by direction.
    """

    gpu: str
    from_host: tuple[tuple[_Natural, _Natural], ...]
    to_host: tuple[tuple[_Natural, _Natural], ...]


@prepared
class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    format: Literal["kvmover.calibration/1"]
    links: tuple[Calibration, ...]
    host_copies: tuple[HostCopies, ...] = ()


def save(path: Path, links: Sequence[Calibration], host_copies: Sequence[HostCopies] = ()) -> None:
    """Write links and GPUs as JSON, atomically. Raises PlanError if the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(_File(_FORMAT, tuple(links), tuple(host_copies))))
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(text + b"\n")
        beside.replace(path)
    except OSError as error:
        raise PlanError(f"cannot write the calibration {path}: {error.strerror}") from error


def load(path: Path) -> tuple[Calibration, ...]:
    """Read the links of a calibration file. Raises PlanError if it cannot be read or is invalid."""
    return _read(path).links


def load_host_copies(path: Path) -> tuple[HostCopies, ...]:
    """Read the GPUs of a calibration file. Raises PlanError as `load`."""
    return _read(path).host_copies


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise PlanError(f"cannot read the calibration {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise PlanError(f"{path} is not a calibration: {error}") from error


def link_to(links: Sequence[Calibration], name: str | None) -> Calibration:
    """Returns the link to `host` or `host/transport`; None: the only link. Raises PlanError unless one matches."""
    found = [link for link in links if name in (None, link.host, f"{link.host}/{link.transport}")]
    if len(found) != 1:
        known = ", ".join(f"{link.host}/{link.transport}" for link in links) or "none"
        raise PlanError(
            f"{len(found)} links are named {name or 'anything'}; the calibration has {known}, and one is needed"
        )
    return found[0]


Array = npt.NDArray[np.float64]

#: Weight of the guess against one sample that a coefficient explains wholly: it decides where samples are too few.
_GUESS_WEIGHT = 0.01

#: Lower bound of a coefficient, as a share of its guess: a time lost in noise still costs something.
_LEAST = 1e-3

#: A coefficient counts as measured when its standard error is below this share of it.
_MEASURED = 0.25

#: Lower bound of the scatter: equal samples are repetition, not proof.
_LEAST_SCATTER = 0.05

#: Tukey's biweight: 95 % of least squares' efficiency on normal noise, and weight 0 beyond 4.7 deviations.
_TUKEY = 4.685

_FIT_ROUNDS = 25


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Fitted `values` [k]; `measured` [k]: samples decided it, not the guess. `scatter`: typical relative error."""

    values: Array
    measured: npt.NDArray[np.bool_]
    scatter: float


def fit(design: Callable[[Array], Array], times: Array, weights: Array, guess: Array) -> Fit:
    """Returns coefficients c such that `design(c) @ c` is about `times` [n], minimising errors relative to the time.

    `design(c)` [n, k] may depend on the coefficients, as where only the slower of two terms counts. `weights` [n] weigh
    the samples; `guess` [k], positive, decides where samples are too few. Interference only makes a transfer slower, so
    the first rounds minimise absolute errors as shares of the measured time, in which a sample ten times too slow
    weighs like one that is wrong by its own size; later rounds leave it out.
    """
    shares, pull = np.ones(len(guess)), np.full(len(guess), _GUESS_WEIGHT)
    rows, scatter, influence = design(guess) * guess, _LEAST_SCATTER, weights
    for number in range(2 * _FIT_ROUNDS):
        expected = np.maximum(rows @ shares, np.finfo(np.float64).tiny)
        if number < _FIT_ROUNDS:
            errors = np.abs(times - expected) / times
            influence = weights / np.maximum(errors, 1e-3) / times**2
        else:
            errors = (times - expected) / expected
            scatter = max(_LEAST_SCATTER, 1.4826 * _weighted_median(np.abs(errors), weights))
            near = np.clip(1 - (errors / (_TUKEY * scatter)) ** 2, 0, None) ** 2
            influence = weights * near / expected**2
        pull = _GUESS_WEIGHT / np.maximum(shares, 1) ** 2
        shares = _least_squares(rows, times, influence, pull)
        rows = design(shares * guess) * guess
    curvature = (rows * influence[:, None]).T @ rows + np.diag(pull)
    errors = scatter * np.sqrt(np.diag(np.linalg.inv(curvature)))
    return Fit(shares * guess, errors < _MEASURED * shares, scatter)


def _least_squares(rows: Array, times: Array, influence: Array, pull: Array) -> Array:
    """Returns shares of the guess, each at least `_LEAST`, drawn to 1 with the weight `pull` [k]."""
    shares, free = np.ones(rows.shape[1]), np.ones(rows.shape[1], np.bool_)
    while free.any():
        left = times - rows[:, ~free] @ shares[~free]
        part = rows[:, free]
        curvature = (part * influence[:, None]).T @ part + np.diag(pull[free])
        shares[free] = np.linalg.solve(curvature, part.T @ (influence * left) + pull[free])
        worst = np.flatnonzero(free)[np.argmin(shares[free])]
        if shares[worst] >= _LEAST:
            break
        shares[worst], free[worst] = _LEAST, False
    return shares


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


#: A number from fewer samples than this is no measurement.
FEWEST = 8

#: Samples kept of each class, two octaves of run length wide. A single window would forget short runs while a link
#: carries only long ones.
_KEPT, _CLASSES = 64, 8

#: Weight of a sample relative to the next newer one of its class: half after 69.
_FORGETTING = 0.99

#: A coefficient is measured only where its term was this much larger than the other, in so many samples.
_CLEARLY, _CLEAR_SAMPLES = 1.5, 4


class Sample(msgspec.Struct, frozen=True):
    """Completed writes under way together, `nbytes` in `runs` descriptors: `total_us` from before the first post to the
    last completion.
    """

    nbytes: int
    runs: int
    total_us: float

    def __post_init__(self) -> None:
        if not 0 < self.runs <= self.nbytes:
            raise PlanError(f"a sample of {self.nbytes} bytes in {self.runs} runs; each run has at least a byte")


@dataclass(slots=True)
class Bursts:
    """Joins writes that were under way together into one sample: they share the wire, and each by itself would look
    slower than it. Four of 2 MiB, posted at 0 and done at 17, 34, 51 and 68 ms, are 8 MiB in 68 ms.
    """

    _began_us: float = 0.0
    _ended_us: float = -math.inf
    _open: Sample | None = None

    def wrote(self, began_us: float, sample: Sample) -> Sample | None:
        """Add a completed write. Returns the burst that was over before it began, or None."""
        ended_us = began_us + sample.total_us
        if self._open is not None and began_us < self._ended_us:
            self._began_us, self._ended_us = min(self._began_us, began_us), max(self._ended_us, ended_us)
            nbytes, runs = self._open.nbytes + sample.nbytes, self._open.runs + sample.runs
            self._open = Sample(nbytes, runs, self._ended_us - self._began_us)
            return None
        before, self._open = self._open, sample
        self._began_us, self._ended_us = began_us, ended_us
        return before

    def over(self, now_us: float) -> Sample | None:
        """Returns the last burst once it is over, once."""
        if now_us <= self._ended_us:
            return None
        before, self._open = self._open, None
        return before


def _window() -> deque[tuple[float, float]]:
    return deque(maxlen=_KEPT)


@dataclass(slots=True)
class Measurements:
    """The newest samples of one link: at most 512 writes, 64 gathers, 64 scatters and 64 chunks.

    Times that are not positive, from a clock too coarse for them, are ignored.
    """

    _writes: tuple[deque[Sample], ...] = field(
        default_factory=lambda: tuple(deque[Sample](maxlen=_KEPT) for _ in range(_CLASSES))
    )
    _gathers: deque[tuple[float, float]] = field(default_factory=_window)
    _scatters: deque[tuple[float, float]] = field(default_factory=_window)
    _chunks: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT))
    _fitted: tuple[Costs, dict[str, float | None]] | None = None

    def wrote(self, sample: Sample) -> None:
        """Add a timed write."""
        if _timed(sample.total_us):
            run_bytes = sample.nbytes // sample.runs
            self._writes[min(_CLASSES - 1, max(0, run_bytes.bit_length() - 9) // 2)].append(sample)
            self._fitted = None

    def gathered(self, nbytes: int, us: float) -> None:
        """Add a gather of `nbytes` that took `us` microseconds."""
        if _timed(us):
            self._gathers.append((nbytes, us))

    def scattered(self, nbytes: int, us: float) -> None:
        """Add a scatter of `nbytes` that took `us` microseconds."""
        if _timed(us):
            self._scatters.append((nbytes, us))

    def waited(self, us: float) -> None:
        """Add a packed chunk's overhead in microseconds: notes, grants and launches, without copy and write."""
        if _timed(us):
            self._chunks.append(us)

    @property
    def writes(self) -> int:
        """The number of writes kept: at most 64 for each class of run length."""
        return sum(map(len, self._writes))

    def calibrate(self, host: str, transport: str, base: Costs) -> Calibration:
        """Fit the link's numbers; None for each that the samples leave open. Takes 1-5 ms after new writes."""
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
        if self.writes < FEWEST:
            return copies
        if self._fitted is None or self._fitted[0] != base:
            self._fitted = base, _wire(self._writes, base)
        return msgspec.structs.replace(copies, **self._fitted[1])


@dataclass(frozen=True, slots=True, eq=False)
class _Design:
    """A sample's time as `latency_us + runs * descriptor_us + nbytes / wire_rate`, or with the slower of the last two
    alone. Writes under way together wait for the latency once: by a write, it would be confounded with their bytes.

    Measured on cma, 182 writes of 1-8192 runs of 64 B to 32 MiB: the time in the post is typically off by 10 % of
    itself as a sum and by 21 % as the slower of the two.
    """

    runs: Array
    nbytes: Array
    posting: Posting

    def rows(self, values: Array) -> Array:
        """Returns [n, 3]: the factor of each coefficient, given which term counts for a write at these `values`."""
        _, descriptor_us, byte_us = values
        both = self.posting is Posting.INLINE
        posted = self.runs * descriptor_us > self.nbytes * byte_us
        return np.stack([np.ones(len(self.runs)), self.runs * (both | posted), self.nbytes * (both | ~posted)], axis=1)


def _wire(writes: Sequence[deque[Sample]], base: Costs) -> dict[str, float | None]:
    """Returns the fields of a Calibration fitted to `writes`, one deque a class of run lengths."""
    kept = [sample for window in writes for sample in reversed(window)]
    ages = np.array([age for window in writes for age in range(len(window))])
    nbytes, runs, times = (
        np.array([getattr(sample, name) for sample in kept], np.float64) for name in ("nbytes", "runs", "total_us")
    )
    guess = np.array([base.chunk_us, base.descriptor_us, 1 / base.wire_rate])
    fitted = fit(_Design(runs, nbytes, base.posting).rows, times, _FORGETTING**ages, guess)
    latency_us, descriptor_us, byte_us = (float(value) for value in fitted.values)
    posting, wire = runs * descriptor_us, nbytes * byte_us
    return {
        "noise": fitted.scatter,
        "latency_us": latency_us if fitted.measured[0] else None,
        "descriptor_us": descriptor_us if fitted.measured[1] and _clear(posting, wire) else None,
        "wire_rate": 1 / byte_us if fitted.measured[2] and _clear(wire, posting) else None,
    }


def _clear(term: Array, other: Array) -> bool:
    return int((term > _CLEARLY * other).sum()) >= _CLEAR_SAMPLES


def _timed(us: float) -> bool:
    return 0 < us < math.inf


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) >= FEWEST else None


@dataclass(frozen=True, slots=True)
class Probe:
    """A write to time: `runs` runs of `run_bytes`, with gaps as long between them so that NIXL does not merge them."""

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
_PROBE_ROUNDS = 4


def probes(region_bytes: int) -> tuple[Probe, ...]:
    """Writes into a region of the peer that tell every number of a link apart; post them one after the other.

    One tiny write for what any write takes, 256 runs of 256 B for the descriptors, and one run of 4 MiB for the wire:
    12 writes, 1.5 ms at 400 Gb/s and 1 us a descriptor. The first also waits for UCX to connect; the fit leaves it out.
    Raises PlanError for a region that is too small to tell runs from bytes.
    """
    if region_bytes < LEAST_REGION_BYTES:
        raise PlanError(f"a region of {region_bytes} bytes is too small to probe; {LEAST_REGION_BYTES} are needed")
    return (Probe(1, 64), Probe(256, 256), Probe(1, min(region_bytes, 4 << 20))) * _PROBE_ROUNDS
