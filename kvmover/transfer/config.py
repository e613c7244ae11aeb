"""MoverConfig sets how a mover behaves, Backoff how it dials lost peers again, Pace how it sleeps between polls.

NIXL wakes no poller, and a poller that never sleeps takes a core and starves other users of the core: with two such
pollers on two cores a note's round trip took 112 ms. So a thread that polls has a Pace.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, fields
from enum import StrEnum

from kvmover.errors import LayoutError
from kvmover.fields import check_positive, settle, settle_whole, whole
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.plan.calibration import LEAST_REGION_BYTES
from kvmover.plan.cost import RDMA, Costs, Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.memory.arena import ALIGN_BYTES
from kvmover.transfer.protocol.auth import Keys
from kvmover.transfer.protocol.content import IdentityCheck
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport.base import Revocation


class Integrity(StrEnum):
    """The check of landed bytes against the sent ones: no check, or a digest of each chunk."""

    NONE = "none"
    DIGEST = "digest"


class Exports(StrEnum):
    """The GPU memory of a rank that peers may map: no memory, its arenas over the NVLink fabric, or its pools too."""

    NONE = "none"
    ARENAS = "arenas"
    POOLS = "pools"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The schedule of dials of a lost peer: after `first_s` seconds, then twice as long each time, at most `most_s`.

    Each wait is shortened by up to the fraction `jitter` of it. After `attempts` failures the peer is given up.

    The defaults wait 0.5, 1, 2, 4, 8, 16, 30, 30, ... s and give up after some 3 minutes.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    jitter: float = 0.25
    attempts: int = 12

    def __post_init__(self) -> None:
        rules = (
            ("first_s", 0 < self.first_s <= self.most_s, f"must be in (0, most_s], and most_s is {self.most_s}"),
            ("most_s", self.most_s < math.inf, "must be finite"),
            ("jitter", 0 <= self.jitter < 1, "must be in [0, 1)"),
            ("attempts", self.attempts >= 1, "must be at least 1"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise LayoutError(f"backoff.{name} = {getattr(self, name)}: {rule}")

    def wait_s(self, name: str, attempt: int) -> float:
        """Return the seconds before the `attempt`-th try (from 0) at `name`, the same everywhere and spread over names.

        If many ranks dial one peer, `name` is of both ends: a thousand ranks that lost the peer must not dial at once.
        """
        longest_s = min(self.most_s, math.ldexp(self.first_s, min(attempt, 64)))
        return longest_s * (1 - self.jitter * zlib.crc32(f"{name}/{attempt}".encode()) / (1 << 32))


#: A time that must not exceed another, and the reason.
_ORDER_OF_TIMES = (
    ("ping_s", "silence_s", "a peer that is pinged less often than that is lost whatever it answers"),
    ("resend_s", "deadline_s", "a message that is lost would not be sent again before the transfer has failed"),
)

_MOST_SMS = 1024


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """The behaviour of a mover. Sizes in bytes, times in seconds.

    Raises LayoutError for a value out of range, and for a ping longer than the silence or a resend than the deadline.

    `arena_bytes`: staging memory on the pools' device, allocated twice: for sending and for receiving. A Mover requires
    that it hold one layer of a page of each of its pools, the least packed chunk.
    `deadline_s`: time after which an open transfer fails.
    `drain_s`: time that a failed transfer waits for its sources to stop, before its memory is quarantined.
    `ping_s`: time between pings of a peer that owes an answer.
    `resend_s`: time before an unanswered message is resent.
    `silence_s`: time without an answer after which a peer is lost. Must exceed an engine's longest time without a poll.
    `lease_s`: time that a source may write after it was last heard. Every ping renews it, so it should span several
    pings: a write after its end costs a round trip more.
    `linger_s`: time from the end of a source's lease until memory that it may have written is reused. Must exceed a
    NIC's retries.
    `revocation`: whether to deregister memory is taken to end peers' access to it; regions of a lost peer are then
    free at once. None: as the transport proves.
    `sandbox_bytes`: memory that peers may write to when they measure the link; at least 128 KiB, or 0: no probes.
    `backoff`: when lost peers are dialled again.
    `costs`: assumed costs, replaced by measured ones.
    `route`: the route of every chunk. None: costs choose, for each pair of ranks. The destination's to choose.
    `verb`: whether the source writes or the destination reads. The destination's to choose.
    `replicas`: whether ranks with equal shards each send a part, or one sends all. The destination's to choose.
    `chunk_layers`: layers in a chunk, so that chunks leave while a prefill computes; 0: all. The destination's to
    choose.
    `integrity`: whether landed bytes are compared by a digest a chunk. The destination's to choose.
    `identity`: whether a destination gets a request if one side cannot say of which prompt it is. The source's to
    choose.
    `sms`: streaming multiprocessors that a copy may use; None: all. 8 of an H200 pack three times as fast as a 400 Gb/s
    network carries.
    `engine`: the engine of copies on the GPU; `auto`: the row mover. A name holds for every copy: a transfer with rows
    that it cannot move fails. Experimental, not measured on a GPU: `green_context`, `ring`, `tensor_ring`, `copy_3d`.
    `lossy`: largest error of a number, against the largest that shares its scale, if a peer stores the cache in another
    form: 0.0625 lets bfloat16 and fp8 meet. 0: only peers from and to which every number arrives unchanged.
    `exports`: this rank's GPU memory that peers may map. Arenas: made so that packed chunks cross hosts over NVLink
    where they can. Pools too: a leg may go mapped. A kernel of one process then touches memory of another, and the
    effect of killing the latter was not seen on a GPU yet: so not by default.
    `keys`: seal every message and card, and read only sealed ones. None: no seals.
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
    identity: IdentityCheck = IdentityCheck.CHECKED
    sms: int | None = 8
    engine: CopyEngine = CopyEngine.AUTO
    exports: Exports = Exports.NONE
    keys: Keys | None = None
    lossy: float = 0.0

    def __post_init__(self) -> None:
        what = "mover config"
        settle_whole(self, what, LayoutError, arena_bytes=ALIGN_BYTES, sandbox_bytes=0, chunk_layers=0)
        check_positive(
            self, what, LayoutError, "deadline_s", "drain_s", "ping_s", "resend_s", "silence_s", "lease_s", "linger_s"
        )
        if type(self.lossy) not in (int, float) or not 0 <= self.lossy <= 1:  # no bool, which is an int
            raise LayoutError(f"{what} has lossy = {self.lossy!r}; it is a share from 0 to 1")
        for shorter, longer, why in _ORDER_OF_TIMES:
            if getattr(self, shorter) > getattr(self, longer):
                least, most = (f"{name} = {getattr(self, name)}" for name in (shorter, longer))
                raise LayoutError(f"{what} has {least} and {most}; {why}")
        if self.sms is not None:
            object.__setattr__(self, "sms", whole(self.sms, f"{what} has sms", LayoutError, 1))
            if self.sms > _MOST_SMS:
                raise LayoutError(f"{what} has sms = {self.sms}; no GPU has more than {_MOST_SMS}, and none is all")
        if 0 < self.sandbox_bytes < LEAST_REGION_BYTES:
            raise LayoutError(
                f"mover config has sandbox_bytes = {self.sandbox_bytes}; 0 or {LEAST_REGION_BYTES} and more"
            )
        kinds = {"verb": Verb, "replicas": Replicas, "integrity": Integrity, "exports": Exports, "engine": CopyEngine}
        settle(self, what, LayoutError, **kinds, identity=IdentityCheck)
        if self.route is not None:
            settle(self, what, LayoutError, route=Route)
        if self.revocation is not None:
            settle(self, what, LayoutError, revocation=Revocation)
        for name, kind in (("backoff", Backoff), ("costs", Costs), ("keys", Keys | None)):
            if not isinstance(getattr(self, name), kind):
                raise LayoutError(f"{what} has {name} = {getattr(self, name)!r}; it must be a {name.capitalize()}")


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of a polling thread: it sleeps `share` of the time since the last event, or to the nearest expected end
    of a transfer if that is less, within bounds, in seconds.

    By default an event that comes after 2 ms of quiet is seen at most 0.5 ms late, and one 0.4 ms before or after its
    expected time 0.1 ms. No sleep is shorter than
    `shortest_s`, to which Linux adds 60 us, nor longer than `open_s` while a transfer is open, or else `idle_s`. A poll
    that did work is followed at once by the next. Raises LayoutError unless all are positive and
    `shortest_s <= open_s <= idle_s`.
    """

    share: float = 0.25
    shortest_s: float = 50e-6
    open_s: float = 1e-3
    idle_s: float = 20e-3

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise LayoutError(f"progress has {each.name} = {getattr(self, each.name)}; it must be positive")
        if not self.shortest_s <= self.open_s <= self.idle_s:
            raise LayoutError(
                f"progress has shortest_s = {self.shortest_s}, open_s = {self.open_s}, idle_s = {self.idle_s};"
                " they must not shrink in this order"
            )

    def nap_s(self, quiet_s: float, open_transfers: int, expected_s: float = math.inf) -> float:
        """Return the seconds to sleep, `quiet_s` seconds after the last event and `expected_s` before or after the
        nearest expected one, with so many transfers open.
        """
        longest_s = self.open_s if open_transfers else self.idle_s
        return min(max(self.share * min(quiet_s, expected_s), self.shortest_s), longest_s)
