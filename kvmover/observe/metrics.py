"""Movers as Prometheus metrics: read from a snapshot when scraped, so that nothing is observed twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from kvmover.plan.cost import Route
from kvmover.transfer.meter import BOUNDS_S, Count, Gauge, Histogram, Snapshot, Stage
from kvmover.transfer.protocol.auth import Refusal
from kvmover.transfer.result import Cause

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

#: `kvmover_<count>_total`.
COUNTS: Mapping[Count, str] = {
    Count.SENT_BYTES: "Payload of chunks that this rank wrote.",
    Count.RECEIVED_BYTES: "Payload of chunks that are in this rank's pages.",
    Count.SENT_CHUNKS: "Chunks that this rank wrote.",
    Count.RECEIVED_CHUNKS: "Chunks that are in this rank's pages.",
    Count.DESCRIPTORS: "Byte runs of the writes and reads that were posted.",
    Count.MESSAGES: "Control messages sent, pings and repetitions included.",
    Count.RESENT_MESSAGES: "Messages sent again because nobody answered.",
    Count.MISMATCHED_CHUNKS: "Chunks that landed with another digest than they were sent with.",
    Count.LATE_MESSAGES: "Messages about what was over when they came.",
    Count.MALFORMED_MESSAGES: "Messages dropped because they made no sense, or came from strangers.",
    Count.REFUSED_PEERS: "Peers turned away because they hold another model.",
    Count.LOST_PEERS: "Peers that died, fell silent or were replaced.",
    Count.RECONNECTS: "Lost peers that were reached again.",
    Count.POLLS: "Polls: 50 a second with nothing to do, if a Progress makes them.",
    Count.FAULTS: "Exceptions that failed one attempt and nothing else: a bug, or a broken device.",
    Count.POLL_FAULTS: "Polls that raised and so failed all open transfers: a bug, or a broken device.",
}

#: `kvmover_<stage>_seconds`.
STAGES: Mapping[Stage, str] = {
    Stage.GATHER: "From the start of a chunk's packing until it is packed.",
    Stage.POST: "In the call that posts a write or a read.",
    Stage.WIRE: "From the post of a write or a read until its end is seen.",
    Stage.SCATTER: "From the start of a chunk's scatter until it is in the pages.",
    Stage.CREDIT_WAIT: "A chunk's wait for a region of the destination's arena.",
    Stage.STAGING_WAIT: "A granted chunk's wait for a region of the source's arena.",
    Stage.SEND: "From the call of send until the transfer ended.",
    Stage.RECEIVE: "From the call of receive until the transfer ended.",
}

#: `kvmover_<gauge>`.
GAUGES: Mapping[Gauge, str] = {
    Gauge.OPEN_SENDS: "Requests offered that have not ended.",
    Gauge.OPEN_RECEIVES: "Requests asked for that have not ended.",
    Gauge.EARLY_WANTS: "Requests that destinations ask for and nobody offers yet.",
    Gauge.CHUNKS_WAITING_FOR_CREDIT: "Chunks that wait for a region of this rank's arena for what arrives.",
    Gauge.CHUNKS_WAITING_FOR_STAGING: "Chunks that wait for a region of this rank's arena for what it sends.",
    Gauge.CHUNKS_WAITING_TO_BE_READ: "Packed chunks that their destinations have not read.",
    Gauge.WRITES_UNDER_WAY: "Writes posted whose end was not seen.",
    Gauge.READS_UNDER_WAY: "Reads posted whose end was not seen.",
    Gauge.ATTEMPTS_IN_LIMBO: "Ended attempts whose regions or pages a peer may still write.",
    Gauge.PEERS: "Connected peers.",
    Gauge.DIALLED_PEERS: "Lost peers that are being reached for.",
    Gauge.OUTGOING_ARENA_BYTES: "Size of the arena for what this rank sends.",
    Gauge.OUTGOING_LEASED_BYTES: "Leased regions of the arena for what this rank sends.",
    Gauge.INCOMING_ARENA_BYTES: "Size of the arena for what arrives at this rank.",
    Gauge.INCOMING_LEASED_BYTES: "Leased regions of the arena for what arrives, the quarantined ones included.",
    Gauge.INCOMING_QUARANTINED_BYTES: "Regions of the arena for what arrives that a peer may still write.",
}

_RANK = ("engine", "rank")
_VERBS = ("send", "receive")
#: A fault ends transfers when their mover, and with it the counting, is over.
_ENDS = ("landed", *(cause for cause in Cause if cause is not Cause.FAULT))


class Metered(Protocol):
    """A mover, by whatever class it is held."""

    def snapshot(self) -> Snapshot:
        """Counts, times and gauges as a copy; called for each scrape, from the exporter's thread."""
        ...


class MoverCollector:
    """For `prometheus_client`, one for all movers of a process: `REGISTRY.register(MoverCollector([mover]))`.

    A SharedMover or a Progress is read in its own thread between two polls, whoever scrapes. A Mover is read at once:
    scrape it from the loop that polls it, or hand in what returns the snapshot that the loop took last.
    """

    def __init__(self, movers: Iterable[Metered]) -> None:
        self._movers = tuple(movers)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """The metric families of docs/metrics.md, from one snapshot of each mover. For prometheus_client."""
        taken = [mover.snapshot() for mover in self._movers]
        yield from _counters(taken)
        yield from _gauges(taken)
        yield from _histograms(taken)


def _counters(taken: list[Snapshot]) -> Iterator[CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily

    for count, text in COUNTS.items():
        family = CounterMetricFamily(f"kvmover_{count}", text, labels=_RANK)
        for at in taken:
            family.add_metric(_rank(at), at.meter.counts[count])
        yield family
    ended = CounterMetricFamily(
        "kvmover_transfers", "Transfers by how they ended: landed, or why not.", labels=(*_RANK, "verb", "end")
    )
    posted = CounterMetricFamily(
        "kvmover_posted_chunks", "Chunks by the route that they were sent.", labels=(*_RANK, "route")
    )
    unopened = CounterMetricFamily(
        "kvmover_unopened_messages",
        "Messages dropped unread, by what was wrong with their seal.",
        labels=(*_RANK, "reason"),
    )
    for at in taken:  # those that did not happen too, so that a first failure is a step from 0
        for verb in _VERBS:
            for end in _ENDS:
                ended.add_metric((*_rank(at), verb, end), at.meter.ended[verb, end])
        for route in Route:
            posted.add_metric((*_rank(at), route), at.meter.routes[route])
        for refusal in Refusal:
            unopened.add_metric((*_rank(at), refusal), at.meter.unopened[refusal])
    yield from (ended, posted, unopened)


def _gauges(taken: list[Snapshot]) -> Iterator[GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    for gauge, text in GAUGES.items():
        family = GaugeMetricFamily(f"kvmover_{gauge}", text, labels=_RANK)
        for at in taken:
            family.add_metric(_rank(at), at.gauges[gauge])
        yield family


def _histograms(taken: list[Snapshot]) -> Iterator[HistogramMetricFamily]:
    from prometheus_client.core import HistogramMetricFamily

    for stage, text in STAGES.items():
        family = HistogramMetricFamily(f"kvmover_{stage}_seconds", text, labels=_RANK)
        for at in taken:
            histogram = at.meter.stages[stage]
            family.add_metric(_rank(at), cumulative(histogram), histogram.sum_s)
        yield family


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, how many were at most that long), the last one open: counts 1, 0, 2 become 1, 1, 3."""
    return list(zip((*map(str, BOUNDS_S), "+Inf"), accumulate(histogram.counts), strict=True))


def _rank(at: Snapshot) -> tuple[str, str]:
    return at.engine, str(at.rank)
