"""MoverConfig: how a mover behaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvmover.errors import LayoutError
from kvmover.fields import check_positive, settle, settle_whole, whole
from kvmover.plan.calibration import LEAST_REGION_BYTES
from kvmover.plan.cost import RDMA, Costs, Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.memory.arena import ALIGN_BYTES
from kvmover.transfer.peers.reconnect import Backoff
from kvmover.transfer.protocol.auth import Keys
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport.base import Revocation


class Integrity(StrEnum):
    """Whether what landed is compared with what was sent: not at all, or by a digest of each chunk."""

    NONE = "none"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """How a mover behaves. Sizes in bytes, times in seconds. Raises LayoutError for a value out of range.

    `arena_bytes`: staging memory on the pools' device, allocated twice: for sending and for receiving. A Mover wants it
    to hold one layer of a page of each of its pools, which is the least that a packed chunk can be.
    `deadline_s`: a transfer that has not ended by then fails.
    `drain_s`: how long a failed transfer waits for its sources to stop, before its memory is quarantined.
    `ping_s`: time between pings of a peer that owes an answer.
    `resend_s`: time before an unanswered message is resent.
    `silence_s`: a peer that answers nothing for so long is lost. Longer than an engine may go without a poll.
    `lease_s`: how long a source may write after it was last heard; renewed by every ping, so several pings
    long: a write that finds it over costs a round trip more.
    `linger_s`: time from the end of a source's lease until memory that it may have written is reused. Longer than a NIC
    retries.
    `revocation`: whether to deregister memory is taken to end what peers may do to it; regions of a lost peer are then
    free at once. None: as the transport proves.
    `sandbox_bytes`: memory that peers may write to when they measure the link; at least 128 KiB, or 0: no probes.
    `backoff`: when lost peers are dialled again.
    `costs`: assumed costs, replaced by measured ones.
    `route`: the route of every chunk. None: costs choose, for each pair of ranks. The destination's to choose.
    `verb`: whether the source writes or the destination reads. The destination's to choose.
    `replicas`: whether ranks with equal shards each send a part, or one sends all. The destination's to choose.
    `chunk_layers`: layers in a chunk, so that chunks leave while a prefill computes; 0: all. The destination's to
    choose.
    `integrity`: whether what landed is compared by a digest a chunk. The destination's to choose.
    `sms`: streaming multiprocessors that a copy may use; None: all. 8 of an H200 pack three times as fast as a 400 Gb/s
    network carries.
    `keys`: seal every message and card, and read only sealed ones. None: nothing is sealed.
    """

    arena_bytes: int = 64 << 20
    deadline_s: float = 30.0
    drain_s: float = 2.0
    ping_s: float = 0.5
    resend_s: float = 1.0
    silence_s: float = 10.0
    lease_s: float = 5.0
    linger_s: float = 40.0
    revocation: Revocation | None = None
    sandbox_bytes: int = 1 << 20
    backoff: Backoff = field(default_factory=Backoff)
    costs: Costs = RDMA
    route: Route | None = None
    verb: Verb = Verb.PUSH
    replicas: Replicas = Replicas.STRIPE
    chunk_layers: int = 0
    integrity: Integrity = Integrity.NONE
    sms: int | None = 8
    keys: Keys | None = None

    def __post_init__(self) -> None:
        what = "mover config"
        settle_whole(self, what, LayoutError, arena_bytes=ALIGN_BYTES, sandbox_bytes=0, chunk_layers=0)
        check_positive(
            self, what, LayoutError, "deadline_s", "drain_s", "ping_s", "resend_s", "silence_s", "lease_s", "linger_s"
        )
        if self.sms is not None:
            object.__setattr__(self, "sms", whole(self.sms, f"{what} has sms", LayoutError, 1))
        if 0 < self.sandbox_bytes < LEAST_REGION_BYTES:
            raise LayoutError(
                f"mover config has sandbox_bytes = {self.sandbox_bytes}; 0 or {LEAST_REGION_BYTES} and more"
            )
        settle(self, what, LayoutError, verb=Verb, replicas=Replicas, integrity=Integrity)
        if self.route is not None:
            settle(self, what, LayoutError, route=Route)
        if self.revocation is not None:
            settle(self, what, LayoutError, revocation=Revocation)
        for name, kind in (("backoff", Backoff), ("costs", Costs), ("keys", Keys | None)):
            if not isinstance(getattr(self, name), kind):
                raise LayoutError(f"{what} has {name} = {getattr(self, name)!r}; it must be a {name.capitalize()}")
