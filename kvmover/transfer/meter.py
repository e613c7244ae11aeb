"""Meter holds the counts of a mover and the times of its work's parts, in plain numbers that exporters read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvmover.errors import RefusedFor
from kvmover.exposition import OPERATION_BOUNDS_S, DurationHistogram


class Count(StrEnum):
    """The totals since the mover was made. Bytes are payload."""

    SENT_BYTES = "sent_bytes"
    RECEIVED_BYTES = "received_bytes"
    SENT_CHUNKS = "sent_chunks"
    RECEIVED_CHUNKS = "received_chunks"
    DESCRIPTORS = "descriptors"
    MESSAGES = "messages"
    NOTES = "notes"
    RESENT_MESSAGES = "resent_messages"
    MISMATCHED_CHUNKS = "mismatched_chunks"
    LAPSED_CHUNKS = "lapsed_chunks"
    LATE_MESSAGES = "late_messages"
    MALFORMED_MESSAGES = "malformed_messages"
    LOST_PEERS = "lost_peers"
    RECONNECTS = "reconnects"
    RENEWED_SLABS = "renewed_slabs"
    POLLS = "polls"
    FAULTS = "faults"
    POLL_FAULTS = "poll_faults"


class Stage(StrEnum):
    """The timed stages, in seconds: the parts of a chunk's way, its waits, and requests as a whole."""

    GATHER = "gather"
    POST = "post"
    WIRE = "wire"
    SCATTER = "scatter"
    CREDIT_WAIT = "credit_wait"
    STAGING_WAIT = "staging_wait"
    SEND = "send"
    RECEIVE = "receive"


#: Seconds that the chunks of one transfer spent in each part of their way, on one rank. Chunks overlap.
Spent = defaultdict[Stage, float]


def summed(all_spent_s: Iterable[Mapping[Stage, float]]) -> dict[Stage, float]:
    """Return seconds by stage, summed over several attempts or ranks.

    >>> summed([{Stage.WIRE: 2.0}, {Stage.WIRE: 1.0, Stage.POST: 0.5}]) == {Stage.WIRE: 3.0, Stage.POST: 0.5}
    True
    """
    total = Spent(float)
    for spent_s in all_spent_s:
        for stage, seconds in spent_s.items():
            total[stage] += seconds
    return dict(total)


class Gauge(StrEnum):
    """The gauges of a mover at this moment. Reserved bytes are those of whole regions, quarantined ones included."""

    OPEN_SENDS = "open_sends"
    OPEN_RECEIVES = "open_receives"
    EARLY_WANTS = "early_wants"
    CHUNKS_WAITING_FOR_CREDIT = "chunks_waiting_for_credit"
    CHUNKS_WAITING_FOR_STAGING = "chunks_waiting_for_staging"
    CHUNKS_WAITING_TO_BE_READ = "chunks_waiting_to_be_read"
    WRITES_UNDER_WAY = "writes_under_way"
    READS_UNDER_WAY = "reads_under_way"
    ATTEMPTS_IN_LIMBO = "attempts_in_limbo"
    PEERS = "peers"
    DIALLED_PEERS = "dialled_peers"
    OUTGOING_ARENA_BYTES = "outgoing_arena_bytes"
    OUTGOING_RESERVED_BYTES = "outgoing_reserved_bytes"
    INCOMING_ARENA_BYTES = "incoming_arena_bytes"
    INCOMING_RESERVED_BYTES = "incoming_reserved_bytes"
    INCOMING_QUARANTINED_BYTES = "incoming_quarantined_bytes"


#: The ending of a request that never became a transfer.
UNBEGUN = "unbegun"


def _empty() -> dict[Stage, DurationHistogram]:
    return {stage: DurationHistogram(OPERATION_BOUNDS_S) for stage in Stage}


@dataclass(slots=True)
class Meter:
    """The counts and times of a mover.

    `ended`: transfers by (verb, how): `("receive", "landed")`, a Cause, or UNBEGUN. `routes`: chunks by route.
    `unopened`: messages dropped unread, by a Refusal of their seal. `refused`: peers, and requests of peers, that were
    turned away, by a RefusedFor. `beats`: grows with every count and time: while it stands still, the mover is idle.
    """

    counts: Counter[Count] = field(default_factory=Counter[Count])
    stages: dict[Stage, DurationHistogram] = field(default_factory=_empty)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    routes: Counter[str] = field(default_factory=Counter[str])
    unopened: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    beats: int = 0

    def add(self, count: Count, by: int = 1) -> None:
        """Add `by` to a count."""
        self.counts[count] += by
        self.beats += 1

    def took(self, stage: Stage, seconds: float, spent_s: Spent | None = None) -> None:
        """Add a time of a stage, in seconds; also to `spent_s`, the sums of one transfer."""
        self.stages[stage].add(seconds)
        if spent_s is not None:
            spent_s[stage] += seconds
        self.beats += 1

    def left_unopened(self, refusal: str) -> None:
        """Count a message dropped unread, by a Refusal."""
        self.unopened[refusal] += 1
        self.beats += 1

    def never_began(self, verb: str) -> None:
        """Count a request of an engine that failed before it was a transfer: no peer was found, or it was refused."""
        self.ended[verb, UNBEGUN] += 1
        self.beats += 1

    def turned_away(self, refused_for: RefusedFor) -> None:
        """Count a peer, or a request of a peer, that was turned away."""
        self.refused[refused_for] += 1
        self.beats += 1

    def copy(self) -> Meter:
        """Return a copy that does not change, for exporters in other threads."""
        stages = {stage: histogram.copy() for stage, histogram in self.stages.items()}
        return Meter(
            self.counts.copy(),
            stages,
            self.ended.copy(),
            self.routes.copy(),
            self.unopened.copy(),
            self.refused.copy(),
            self.beats,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mover of one rank at one moment, unchanging: any thread may read it."""

    engine: str
    rank: int
    meter: Meter
    gauges: Mapping[Gauge, int]
