"""What a caller sees of a transfer: a handle while it runs, gates of what is still computed, a Result at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Literal, Protocol

from kvmover.errors import PlanError, TransferFailed
from kvmover.fields import settle_whole
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Stage
from kvmover.transfer.protocol.content import Content

#: More layers and positions than any model or request has.
ALL = 1 << 62


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


class Service(Enum):
    """To whom a request is given. ONCE: to every engine that asks before one has all it wants, which ends it. REPEATED:
    to whoever asks, as often as that is, with what is there by then. It ends when an engine asks for nothing of it, or
    `deadline_s` after it was sent or more of it was produced.
    """

    ONCE = "once"
    REPEATED = "repeated"


class Passed(Protocol):
    """What a CUDA event can say of itself."""

    def query(self) -> bool:
        """Whether the event has passed: everything queued before it is done. Must not block."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """Once `event` has passed (None: it has), layers below `layers` of positions below `tokens` are in the pages.

    Layers by number in the whole model, positions in the whole request. Raises PlanError for an event without `query`,
    and for what is no number. A prefill that computes layer by layer records
    an event a group of layers, one that computes in chunks an event a chunk; one that does both, for each pair. Pages
    may be named later than the gate passes: what is in them moves when both has happened.
    """

    event: Passed | None
    layers: int = ALL
    tokens: int = ALL

    def __post_init__(self) -> None:
        settle_whole(self, "gate", PlanError, layers=0, tokens=0)
        if self.event is not None and not callable(getattr(self.event, "query", None)):
            raise PlanError(f"gate has event = {self.event!r}; it must have query(), as a CUDA event has, or be None")


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
    not whole, also of those that were never named (`Mover.allocated`); empty where all landed.
    `aux`: payloads by source rank.
    `spent_s`: seconds that chunks spent on this rank in each part of their way; chunks overlap.
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
    spent_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])

    @property
    def landed(self) -> bool:
        """Whether all bytes are in the pages (a receive), or all destinations have them (a send)."""
        return self.reason is None

    def __str__(self) -> str:
        """`landed: 40,960 bytes in 8.1 ms`, or `failed (deadline) after 5000.0 ms: ...`, whatever else is known."""
        took = f"{self.seconds * 1e3:.1f} ms"
        if self.landed:
            return f"landed: {self.nbytes:,} bytes in {took}"
        return f"failed ({self.cause}) after {took}: {self.reason}"


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

    `content`: the prompt that its caller named. `held`: an operation may still touch the pages. It can only be true of
    a transfer that ended with `result.held`, and turns false when that is over: then they are the engine's again.
    """

    request: str
    started: float
    content: Content | None = None
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
