"""A MoverCollector exports movers as Prometheus metrics, read from a snapshot at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvmover.errors import RefusedFor
from kvmover.exposition import RANK, Metric, MetricKind, families, named
from kvmover.plan.cost import Route
from kvmover.transfer.meter import UNBEGUN, Count, Gauge, Snapshot, Stage
from kvmover.transfer.protocol.auth import Refusal
from kvmover.transfer.result import Cause

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: The metrics of a mover, by their names in its meter.
METRICS: Mapping[StrEnum, Metric] = {
    **named(
        "",
        MetricKind.COUNTER,
        {
            Count.SENT_BYTES: "Payload of chunks that this rank wrote.",
            Count.RECEIVED_BYTES: "Payload of chunks that are in this rank's pages.",
            Count.SENT_CHUNKS: "Chunks that this rank wrote.",
            Count.RECEIVED_CHUNKS: "Chunks that are in this rank's pages.",
            Count.DESCRIPTORS: "Byte runs of the writes and reads that were posted.",
            Count.MESSAGES: "Control messages sent, pings and repetitions included.",
            Count.NOTES: "Notes that carried them: what one poll says to one peer travels in one.",
            Count.RESENT_MESSAGES: "Messages sent again because nobody answered.",
            Count.MISMATCHED_CHUNKS: "Chunks that landed with another digest than they were sent with.",
            Count.LAPSED_CHUNKS: "Chunks not written because the permission was over, and granted again.",
            Count.LATE_MESSAGES: "Messages about what was over when they came.",
            Count.MALFORMED_MESSAGES: "Messages dropped because they made no sense, or came from strangers.",
            Count.LOST_PEERS: "Peers that died, fell silent or were replaced.",
            Count.RECONNECTS: "Lost peers that were reached again.",
            Count.RENEWED_SLABS: "Slabs of the arena that were registered anew, to shut lost peers out.",
            Count.POLLS: "Polls: 50 a second with nothing to do, if a Progress makes them.",
            Count.FAULTS: "Exceptions that failed one attempt and nothing else: a bug, or a broken device.",
            Count.POLL_FAULTS: "Polls that raised and so failed all open transfers: a bug, or a broken device.",
        },
    ),
    **named(
        "",
        MetricKind.GAUGE,
        {
            Gauge.OPEN_SENDS: "Requests offered that have not ended.",
            Gauge.OPEN_RECEIVES: "Requests asked for that have not ended.",
            Gauge.EARLY_WANTS: "Requests that destinations ask for and nobody offers yet.",
            Gauge.CHUNKS_WAITING_FOR_CREDIT: "Chunks that wait for a region of this rank's arena for what arrives.",
            Gauge.CHUNKS_WAITING_FOR_STAGING: "Chunks that wait for a region of this rank's arena for what it sends.",
            Gauge.CHUNKS_WAITING_TO_BE_READ: "Packed chunks that their destinations have not read.",
            Gauge.WRITES_UNDER_WAY: "Writes posted whose end was not seen.",
            Gauge.READS_UNDER_WAY: "Reads posted whose end was not seen.",
            Gauge.ATTEMPTS_IN_LIMBO: "Ended attempts whose regions or pages a peer may still write.",
            Gauge.PEERS: "Connected peers that live, as far as they were heard.",
            Gauge.DIALLED_PEERS: "Lost peers that are being reached for.",
            Gauge.OUTGOING_ARENA_BYTES: "Size of the arena for what this rank sends.",
            Gauge.OUTGOING_RESERVED_BYTES: "Reserved bytes of the arena for outgoing chunks.",
            Gauge.INCOMING_ARENA_BYTES: "Size of the arena for what arrives at this rank.",
            Gauge.INCOMING_RESERVED_BYTES: "Reserved bytes of the arena for incoming chunks, quarantine included.",
            Gauge.INCOMING_QUARANTINED_BYTES: "Regions of the arena for what arrives that a peer may still write.",
        },
    ),
    **named(
        "",
        MetricKind.HISTOGRAM,
        {
            Stage.GATHER: "From the start of a chunk's packing until it is packed.",
            Stage.POST: "In the call that posts a write or a read.",
            Stage.WIRE: "From the post of a write or a read until its end is seen.",
            Stage.SCATTER: "From the start of a chunk's scatter until it is in the pages.",
            Stage.CREDIT_WAIT: "A chunk's wait for a region of the destination's arena.",
            Stage.STAGING_WAIT: "A granted chunk's wait for a region of the source's arena.",
            Stage.SEND: "From the call of send until the transfer ended.",
            Stage.RECEIVE: "From the call of receive until the transfer ended.",
        },
    ),
}

_VERBS = ("send", "receive")
#: Without FAULT: it ends the mover, and its counting, with the transfers.
_ENDS = ("landed", *(cause for cause in Cause if cause is not Cause.FAULT), UNBEGUN)


class Metered(Protocol):
    """A mover of any class."""

    def snapshot(self) -> Snapshot:
        """Returns counts, times and gauges, in the exporter's thread."""
        ...


class MoverCollector:
    """A collector for `prometheus_client` of all movers of a process: `REGISTRY.register(MoverCollector([mover]))`.

    Scrape a plain Mover from the loop that polls it, or pass an object that returns the loop's last snapshot.
    """

    def __init__(self, movers: Iterable[Metered]) -> None:
        self._movers = tuple(movers)

    def collect(self) -> Iterator[Family]:
        """Yields the metric families of docs/metrics.md."""
        taken = [mover.snapshot() for mover in self._movers]
        yield from families(METRICS, taken)
        yield from _by_how(taken)


_ENDED = Metric(
    "transfers", MetricKind.COUNTER, "Transfers by how they ended: landed, or why not.", (*RANK, "verb", "end")
)
_POSTED = Metric("posted_chunks", MetricKind.COUNTER, "Chunks by the route that they were sent.", (*RANK, "route"))
_UNOPENED = Metric(
    "unopened_messages",
    MetricKind.COUNTER,
    "Messages dropped unread, by what was wrong with their seal.",
    (*RANK, "reason"),
)

_REFUSED = Metric(
    "refused",
    MetricKind.COUNTER,
    "Peers, and requests of peers, that were turned away, by why.",
    (*RANK, "reason"),
)


def _by_how(taken: list[Snapshot]) -> Iterator[Family]:
    """Yields counts with one more label, zeros too, so that a first failure is a step."""
    found = _ENDED, _POSTED, _UNOPENED, _REFUSED
    ended, posted, unopened, refused = (cast(Any, metric.family()) for metric in found)
    for at in taken:
        rank = at.engine, str(at.rank)
        for verb in _VERBS:
            for end in _ENDS:
                ended.add_metric((*rank, verb, end), at.meter.ended[verb, end])
        for route in Route:
            posted.add_metric((*rank, route), at.meter.routes[route])
        for refusal in Refusal:
            unopened.add_metric((*rank, refusal), at.meter.unopened[refusal])
        for why in RefusedFor:
            refused.add_metric((*rank, why), at.meter.refused[why])
    yield from (ended, posted, unopened, refused)
