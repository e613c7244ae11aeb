"""The engine for copies between host and device follows from times of both, which a GPU is asked for once."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvmover import host_copies
from kvmover.cache.tiers.layerwise_copier import LayerwiseCopier
from kvmover.kernels import bulk, copy_times, crossover, rows
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.crossover import RULE, Crossover, HostEnd, Timed, fitted
from kvmover.kernels.region import Region, Side
from kvmover.plan.calibration import HostCopies

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@dataclass
class Machine:
    """Microseconds of a launch, of a copy of the copy engine, and bytes a microsecond of each engine."""

    launch_us: float = 12.0
    copy_us: float = 1.0
    rows_rate: float = 30e3
    copy_rate: float = 50e3
    noise: np.random.Generator | None = None
    asked: list[tuple[CopyEngine, HostEnd, int, int]] = field(default_factory=list)

    def __call__(self, engine: CopyEngine, host: HostEnd, copies: int, nbytes: int) -> float:
        self.asked.append((engine, host, copies, nbytes))
        by_rows = self.launch_us + copies * nbytes / self.rows_rate
        by_copy = 8.0 + copies * max(self.copy_us, nbytes / self.copy_rate)
        spread = 1.0 if self.noise is None else self.noise.uniform(0.95, 1.05)
        return (by_rows if engine is CopyEngine.ROWS else by_copy) * spread


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_known", {})
    monkeypatch.setattr(copy_times, "_timed", set())


def lost(found: Crossover, machine: Machine) -> float:
    """The share by which what is chosen takes longer than the faster engine, over the sizes that were timed."""
    chosen = best = 0.0
    for host, copies, nbytes in copy_times.sizes():
        each = {engine: machine(engine, host, copies, nbytes) for engine in (CopyEngine.ROWS, CopyEngine.COPY)}
        chosen += each[found.engine(host, copies, nbytes)]
        best += min(each.values())
    return chosen / best - 1


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    "machine", [Machine(), Machine(copy_us=0.2), Machine(launch_us=40), Machine(rows_rate=60e3), Machine(copy_us=4)]
)
def test_what_is_fitted_loses_hardly_any_time(machine: Machine, seed: int | None) -> None:
    machine.noise = None if seed is None else np.random.default_rng(seed)
    found = fitted(copy_times.times(machine))
    machine.noise = None
    assert lost(found, machine) < 0.05


def test_a_copy_engine_that_costs_nothing_by_the_copy_makes_all_copies() -> None:
    assert fitted(copy_times.times(Machine(copy_us=0.0))) == Crossover((), ())


def test_a_border_moves_with_the_number_of_copies() -> None:
    """Few copies cost less than a launch; of many, short ones are the row mover's."""
    found = fitted(copy_times.times(Machine()))
    borders = dict(found.from_host)
    assert min(borders) >= 16
    assert 16 << 10 < borders[max(borders)] < 64 << 10
    assert found.engine("src", 4, 1024) is CopyEngine.COPY
    assert found.engine("src", 4096, 1024) is CopyEngine.ROWS
    assert found.engine("src", 4096, 1 << 20) is CopyEngine.COPY


def test_sms_are_taken_for_a_tenth_of_the_time_and_more() -> None:
    def times(rows_us: float) -> list[Timed]:
        return [Timed("src", 64, nbytes, rows_us, 100.0) for nbytes in (1024, 4096)]

    assert fitted(times(95.0)).from_host == ()
    assert fitted(times(85.0)).from_host == ((64, 5793),)


def test_directions_are_told_apart_and_one_without_times_is_as_before() -> None:
    to_host = [Timed("dst", copies, 4096, 10.0, 100.0) for copies in (16, 64)]
    assert fitted(to_host) == Crossover(RULE.from_host, ((16, 5793),))
    assert fitted(()) == RULE


def test_fewer_copies_may_be_the_row_movers_where_more_are_not() -> None:
    found = fitted([Timed("src", 16, 4096, 10.0, 100.0), Timed("src", 64, 4096, 100.0, 10.0)])
    assert found.from_host == ((16, 5793), (64, 0))
    engines = [found.engine("src", copies, 4096) for copies in (15, 16, 63, 64)]
    assert engines == [CopyEngine.COPY, CopyEngine.ROWS, CopyEngine.ROWS, CopyEngine.COPY]


def test_timing_ends_in_time_and_both_directions_are_timed_alike() -> None:
    now = iter(np.arange(0, 100, 0.05))
    found = copy_times.times(Machine(), lambda: float(next(now)))
    assert len(found) == round(copy_times.LIMIT_S / 0.05) - 1
    hosts = [each.host for each in found]
    assert abs(hosts.count("src") - hosts.count("dst")) <= 1


def test_all_sizes_fit_the_memory_and_take_well_under_a_second_on_a_slow_link() -> None:
    """By a link of 10 GB/s and 2 us a copy, each launch made four times."""
    machine = Machine(copy_us=2.0, rows_rate=10e3, copy_rate=10e3)
    assert all(copies * nbytes <= copy_times.MOST_BYTES for _, copies, nbytes in copy_times.sizes())
    found = copy_times.times(machine)
    assert len(found) == len(list(copy_times.sizes()))
    assert (1 + copy_times.ROUNDS) * sum(each.rows_us + each.copy_us for each in found) < 0.8e6


def test_a_gpu_is_timed_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(copy_times, "_Bench", lambda device: machine)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    first = host_copies.timed(GPU)
    asked = len(machine.asked)
    assert first == HostCopies("NVIDIA H200", *_pairs(fitted(copy_times.times(Machine()))))
    assert asked > 0
    assert host_copies.timed(GPU) == first
    host_copies.host_stream(GPU)
    LayerwiseCopier(GPU)
    assert len(machine.asked) == asked
    assert crossover.known(GPU) == fitted(copy_times.times(Machine()))


def test_kept_numbers_are_used_and_the_gpu_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_times, "_Bench", _never)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    kept = HostCopies("NVIDIA H200", ((16, 4096),), ((1024, 2048),))
    host_copies.take(GPU, kept)
    assert host_copies.timed(GPU) == kept
    assert crossover.known(GPU) == Crossover(kept.from_host, kept.to_host)


def test_on_a_cpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_times, "_Bench", _never)
    assert host_copies.timed(CPU) is None
    assert copy_times.calibrate(CPU) == RULE
    LayerwiseCopier(CPU)


def test_a_gpu_that_cannot_be_timed_is_logged_and_has_the_rule(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(device: torch.device) -> Machine:
        raise torch.OutOfMemoryError("no 32 MiB")

    monkeypatch.setattr(copy_times, "_Bench", full)
    with caplog.at_level(logging.WARNING):
        assert copy_times.calibrate(GPU) == RULE
        assert copy_times.calibrate(GPU) == RULE
    assert [record.getMessage() for record in caplog.records] == [
        "copies between the host and cuda:0 were not timed: no 32 MiB"
    ]


def test_beside_the_host_rows_are_moved_by_the_one_program_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows: which is compiled before, or shipped."""
    called: list[tuple[int, object]] = []

    def prepared(regions: object, device: object, sms: int, using: object) -> object:
        called.append((sms, using))
        return type("Ready", (), {"run": None})

    monkeypatch.setattr(rows, "prepared", prepared)
    for host, sms in ((True, None), (True, 3), (False, None)):
        bulk._prepared(CopyEngine.ROWS, [_region(host)], GPU, sms, None)
    assert called == [(bulk.HOST_SMS, rows.general_program()), (3, rows.general_program()), (4, None)]


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 24, 132, 656, 4096])
def test_the_one_program_serves_every_region(row_bytes: int) -> None:
    program, region = rows.general_program(), _region(True, row_bytes)
    laid = rows.describe([region], program.config.block_bytes, program.shapes)
    assert laid.shapes == program.shapes


def test_a_choice_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from kvmover.kernels.crossover import RULE, fitted; fitted(())"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def _pairs(found: Crossover) -> Iterator[tuple[tuple[int, int], ...]]:
    yield from (found.from_host, found.to_host)


def _never(device: torch.device) -> Machine:
    raise AssertionError("a GPU was timed")


def _region(host: bool, row_bytes: int = 256) -> Region:
    zero, memory = np.zeros(1, np.int64), torch.zeros(1 << 13, dtype=torch.uint8)
    ends = memory, memory.to("meta") if host else memory
    src, dst = (Side.of((each,), zero, zero, zero, 0, row_bytes) for each in ends)
    return Region(src, dst, 1, 1, row_bytes)
