"""What an operation took comes with its end: from NIXL's telemetry where that is on, else by the transport's clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from kvmover.plan import HOST, Measurements, Probe, Sample, probes
from kvmover.transport import Completed, Descriptors, Memory, MemoryKind, NixlTransport, Timing

NBYTES = 8 << 20


class Pair:
    """Two transports of this process, and an array of each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ends = [NixlTransport("timed", clock=clock), NixlTransport("target")]
        self.arrays = [np.zeros(NBYTES, np.uint8) for _ in self.ends]
        for end, array in zip(self.ends, self.arrays, strict=True):
            end.register(Memory(MemoryKind.HOST, array.ctypes.data, NBYTES))
        self.peer = self.ends[0].connect(self.ends[1].metadata())

    def write(self, probe: Probe) -> Completed:
        local, remote = (
            Descriptors(
                MemoryKind.HOST,
                np.array([[array.ctypes.data, probe.run_bytes, 0, probe.stride_bytes, probe.runs]], np.int64),
            )
            for array in self.arrays
        )
        self.ends[0].write(self.peer, local, remote, b"", 1e9)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            self.ends[1].poll()
            for event in self.ends[0].poll():
                assert isinstance(event, Completed)
                return event
        raise AssertionError("the write does not end")

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def seconds() -> Callable[[], float]:
    """A clock on which every look takes a second."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_every_probe_is_timed_and_the_post_is_a_part_of_the_whole(pairs: list[Pair]) -> None:
    pairs.append(Pair())
    seen = Measurements()
    for probe in probes(NBYTES):
        timing = pairs[0].write(probe).timing
        assert timing is not None
        assert 0 < timing.post_us <= timing.total_us
        seen.wrote(Sample(probe.runs * probe.run_bytes, probe.runs, timing.total_us))
    assert seen.calibrate("target", "UCX", HOST).writes == len(probes(NBYTES))


def test_without_telemetry_the_time_is_the_clocks(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "n")
    pairs.append(Pair(seconds()))
    timing = pairs[0].write(Probe(1, 64)).timing
    assert timing is not None
    assert timing.post_us >= 1e6
    assert timing.total_us % 1e6 == 0


def test_with_telemetry_the_time_is_nixls_in_whole_microseconds(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    pairs.append(Pair(seconds()))
    pairs[0].write(Probe(1, 64))  # connects
    timing = pairs[0].write(Probe(1, 4 << 20)).timing
    assert timing is not None
    assert timing == Timing(int(timing.post_us), int(timing.total_us))
    assert 0 < timing.post_us <= timing.total_us
    # A 4 MiB copy takes less than the second that one look at this clock takes.
    assert timing.post_us < 1e6


def test_telemetry_that_does_not_answer_is_told_once_and_the_clock_takes_over(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "n")
    pairs.append(Pair(seconds()))
    pairs[0].ends[0]._telemetry = True  # as with a second process at one Prometheus port
    for _ in range(3):
        timing = pairs[0].write(Probe(1, 64)).timing
        assert timing is not None
        assert timing.total_us >= 1e6
    assert caplog.text.count("telemetry does not answer") == 1


def test_two_ends_of_one_operation_are_equal_whatever_they_took() -> None:
    assert Completed(7, Timing(1.0, 2.0)) == Completed(7)
    assert Completed(7) != Completed(8)
