"""What a caller sees of a transfer: its configuration, a handle while it runs, and a Result when it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from kvmover.enums import settle
from kvmover.errors import LayoutError, TransferFailed
from kvmover.numbers import check_positive, settle_whole, whole
from kvmover.plan.cost import RDMA, Costs, Route
from kvmover.plan.legs import Replicas
from kvmover.plan.measure import LEAST_REGION_BYTES
from kvmover.transfer.arena import ALIGN_BYTES
from kvmover.transfer.backoff import Backoff
from kvmover.transfer.seal import Keys
from kvmover.transfer.wire import Verb

#: More layers and positions than any model or request has.
ALL = 1 << 62


class Integrity(StrEnum):
    """Whether what landed is compared with what was sent: not at all, or by a digest of each chunk."""

    NONE = "none"
    DIGEST = "digest"


class Cause(StrEnum):
    """Why a transfer failed, in a word that a metric can carry; the reason says it whole. A fault is our own side's."""

    ABORTED = "aborted"
    PEER_ABORTED = "peer_aborted"
    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    TRANSPORT = "transport"
    INTEGRITY = "integrity"
    PROTOCOL = "protocol"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """How a mover behaves. Sizes in bytes, times in seconds. Raises LayoutError for a value out of range.

    `arena_bytes`: staging memory on the pools' device, allocated twice: for sending and for receiving.
    `deadline_s`: a transfer that has not ended by then fails.
    `drain_s`: how long a failed transfer waits for its sources to stop, before its memory is quarantined.
    `ping_s`: time between pings of a peer that owes an answer.
    `resend_s`: time before an unanswered message is resent.
    `silence_s`: a peer that answers nothing for so long is lost. Longer than an engine may go without a poll.
    `linger_s`: time from a peer's restart until memory that its dead process may write is reused. Longer than a NIC
    retries.
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
    linger_s: float = 60.0
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
        check_positive(self, what, LayoutError, "deadline_s", "drain_s", "ping_s", "resend_s", "silence_s", "linger_s")
        if self.sms is not None:
            object.__setattr__(self, "sms", whole(self.sms, f"{what} has sms", LayoutError, 1))
        if 0 < self.sandbox_bytes < LEAST_REGION_BYTES:
            raise LayoutError(
                f"mover config has sandbox_bytes = {self.sandbox_bytes}; 0 or {LEAST_REGION_BYTES} and more"
            )
        settle(self, what, LayoutError, verb=Verb, replicas=Replicas, integrity=Integrity)
        if self.route is not None:
            settle(self, what, LayoutError, route=Route)
        for name, kind in (("backoff", Backoff), ("costs", Costs), ("keys", Keys | None)):
            if not isinstance(getattr(self, name), kind):
                raise LayoutError(f"{what} has {name} = {getattr(self, name)!r}; it must be a {name.capitalize()}")


class Passed(Protocol):
    """What a CUDA event can say of itself."""

    def query(self) -> bool:
        """Whether the event has passed: everything queued before it is done. Must not block."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """Once `event` has passed, layers below `layers` of positions below `tokens` are in the pages.

    Layers by number in the whole model, positions in the whole request. A prefill that computes layer by layer records
    an event a group of layers, one that computes in chunks an event a chunk; one that does both, for each pair.
    """

    event: Passed
    layers: int = ALL
    tokens: int = ALL


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended on this rank.

    `reason`: None when it landed, else what went wrong, the same sentence on both sides.
    `seconds`: from `send` or `receive` to the end.
    `nbytes`: payload bytes of this rank's legs, whether or not they landed.
    `runs`: descriptors that the direct route takes for them.
    `writes`: chunks, each of them one write or read.
    `routes`: the route of each rank on the other side that has chunks of the request.
    `peers`: how many such ranks there are.
    `held`: a one-sided operation may still touch the pages, so they must not be reused; see `Transfer.held`.
    `cause`: why it failed, in a word for a metric; None when it landed.
    `resent`: chunks that did not match their digest at first.
    `incomplete`: one tuple a component, indices into the page table of the pages that this rank asked for and that are
    not whole; empty where all landed.
    `aux`: payloads by source rank.
    """

    reason: str | None
    seconds: float
    nbytes: int = 0
    runs: int = 0
    writes: int = 0
    routes: tuple[Route, ...] = ()
    peers: int = 0
    held: bool = False
    cause: Cause | None = None
    resent: int = 0
    incomplete: tuple[tuple[int, ...], ...] = ()
    aux: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @property
    def landed(self) -> bool:
        """Whether all bytes are in the pages (a receive), or all destinations have them (a send)."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Ending:
    """How one transfer of one rank ended, for whoever watches a mover: logs, spans, the log of a run."""

    engine: str
    rank: int
    verb: Literal["send", "receive"]
    request: str
    result: Result


@dataclass(slots=True, eq=False)
class Transfer:
    """One request on one rank. Poll the mover and look at `result`.

    `held`: an operation may still touch the pages. It can only be true of a transfer that ended with `result.held`, and
    turns false when that is over: then they are the engine's again.
    """

    request: str
    started: float
    result: Result | None = field(default=None)
    held: bool = False

    @property
    def ended(self) -> bool:
        """Whether `result` is there. Pages may still be held: see `held`."""
        return self.result is not None

    def landed(self) -> Result:
        """The result, once ended. Raises TransferFailed with the reason when it did not land."""
        if self.result is None:
            raise TransferFailed(f"{self.request} has not ended")
        if self.result.reason is not None:
            raise TransferFailed(f"{self.request}: {self.result.reason}")
        return self.result
