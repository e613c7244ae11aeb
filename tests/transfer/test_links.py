"""Links: what was measured of copies and of polls is what routes are chosen by, on either side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, HandClock, Pair

from kvmover.plan.calibration import FEWEST, Calibration
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.links import REFIT_S, Links
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import LoopbackTransport
from kvmover.transport.base import Completed, Event, Timing


class TickingClock(HandClock):
    """Moves on by a microsecond each time that somebody looks."""

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def measured(mover: Mover) -> Calibration:
    (found,) = mover.calibrations()
    return found


def test_what_packed_chunks_take_of_a_side_is_measured_on_both_and_counts() -> None:
    pair = Pair.of(clock=TickingClock())
    pair.bench.ended([*pair.send(), *pair.receive()])
    for mover in (*pair.src.movers, *pair.dst.movers):
        link, base = measured(mover), mover.config.costs
        assert link.chunks >= FEWEST
        assert link.chunk_us is not None
        assert 0 < link.chunk_us < 1e3, "looks at the clock in one poll, and none of the copies and posts between"
        assert link.chunk_us != base.chunk_us
        (host,) = mover._core.links._links
        assert mover._core.links.costs(host, base, pair.bench.clock()).chunk_us == link.chunk_us


def test_the_receiving_side_learns_of_its_copies_though_it_never_writes() -> None:
    pair = Pair.of(clock=TickingClock())
    pair.bench.ended([*pair.send(), *pair.receive()])
    (mover,) = pair.dst.movers
    first = measured(mover)
    assert (first.writes, first.gather_rate) == (0, None)
    assert first.scatter_rate is not None
    clock = pair.bench.clock
    assert isinstance(clock, HandClock)
    clock.now += REFIT_S
    for _ in range(64):  # as many as are kept: the copies from before are forgotten
        mover._core.links.scattered(first.host, 1 << 20, 1.0)
    assert measured(mover).scatter_rate == (1 << 20) / 1e6


def test_a_side_that_reads_learns_of_the_wire_by_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = LoopbackTransport.poll

    def timed(transport: LoopbackTransport) -> list[Event]:
        timing = Timing(post_us=1.0, total_us=20.0)
        return [replace(event, timing=timing) if isinstance(event, Completed) else event for event in poll(transport)]

    monkeypatch.setattr(LoopbackTransport, "poll", timed)
    pair = Pair.of(clock=TickingClock(), config=replace(CONFIG, verb=Verb.PULL, route=Route.DIRECT))
    pair.bench.ended([*pair.send(), *pair.receive()])
    clock = pair.bench.clock
    assert isinstance(clock, HandClock)
    clock.now += REFIT_S  # longer than any read: the last one is over
    (reader,), (source,) = pair.dst.movers, pair.src.movers
    assert measured(reader).writes >= 1
    (link,) = reader._core.links._links.values()
    samples = [sample for window in link.measured._writes for sample in window]
    assert sum(sample.nbytes for sample in samples) == reader.meter.counts[Count.RECEIVED_BYTES]
    assert sum(sample.runs for sample in samples) == reader.meter.counts[Count.DESCRIPTORS]
    assert not source.calibrations(), "it posts nothing"


def test_chunks_that_are_not_packed_say_nothing_of_packed_ones() -> None:
    pair = Pair.of(clock=TickingClock(), config=replace(CONFIG, route=Route.DIRECT))
    pair.bench.ended([*pair.send(), *pair.receive()])
    links = pair.src.movers[0]._core.links
    links.copied("a", 4096, 1e-3)
    links.polled(1e-3)
    assert all(
        link.measured.calibrate("a", "", pair.bench.config.costs).chunk_us is None for link in links._links.values()
    )


def links_of(pair: Pair) -> Links:
    return pair.src.movers[0]._core.links


@pytest.mark.parametrize(("hidden_s", "kept"), [(4e-6, 1), (6e-6, 0)])
def test_a_write_whose_end_copies_hid_for_most_of_its_time_says_nothing_of_the_wire(hidden_s: float, kept: int) -> None:
    links = links_of(Pair.of())
    links.moved("a", Completed(1, Timing(post_us=1.0, total_us=10.0)), 1 << 20, 1, 1.0, hidden_s)
    assert sum(each.writes for each in links.calibrations(CONFIG.costs, 2.0)) == kept


def test_costs_that_are_asked_for_during_a_burst_leave_it_one_sample() -> None:
    """Writes of 20 us, one behind the other, each posted before the end of the one before."""
    links = links_of(Pair.of())
    links.moved("a", Completed(0, Timing(1.0, 1.0)), 64, 1, 0.5)
    assert links.calibrations(CONFIG.costs, 0.9)[0].writes == 1
    for number in range(5):
        links.moved("a", Completed(1 + number, Timing(1.0, 20.0)), 1 << 20, 1, 1.0 + number * 15e-6)
        links.costs("a", CONFIG.costs, 1.0 + number * 15e-6 + 25e-6)
    links.calibrations(CONFIG.costs, 2.0 + REFIT_S)
    (link,) = links._links.values()
    samples = [sample for window in link.measured._writes for sample in window]
    assert [(sample.nbytes, sample.runs) for sample in samples] == [(64, 1), (5 << 20, 5)]
    assert samples[1].total_us == pytest.approx(80)
