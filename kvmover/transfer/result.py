"""A caller holds a Transfer while a request runs, Gates of KV that is still computed, and a Result at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The cause of a failed transfer, in a word for a metric; the reason is a sentence. A fault is our own side's."""

    ABORTED = "aborted"
    PEER_ABORTED = "peer_aborted"
    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    TRANSPORT = "transport"
    INTEGRITY = "integrity"
    PROTOCOL = "protocol"
    FAULT = "fault"


class Service(Enum):
    """The engines that a request is given to.

    ONCE: every engine that asks before one has all it wants, which ends the request. REPEATED: every engine that asks,
    as often as it asks, with the tokens present by then. It ends when an engine asks for no token of it, or
    `deadline_s` after it was sent or more of it was produced.
    """

    ONCE = "once"
    REPEATED = "repeated"


class Passed(Protocol):
    """A CUDA event, or another object with its `query`."""

    def query(self) -> bool:
        """Return True if the event has passed: all work queued before it is done. Must not block."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """The promise that layers below `layers` of positions below `tokens` are in the pages once `event` has passed.

    `event` None: they are. Layers are numbered in the whole model, positions in the whole request. A prefill that
    computes layer by layer records an event a group of layers; in chunks, an event a chunk; in both, an event a pair.
    Pages may be named later than the gate passes: their KV moves when both has happened. Raises PlanError for an event
    without `query`, and for `layers` or `tokens` that are no numbers.
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
    """The outcome of a request on this rank.

    `reason`: None if it landed, else the failure in a sentence, the same on both sides.
    `seconds`: time from `send` or `receive` to the end.
    `nbytes`: payload bytes of this rank's legs, landed or not.
    `runs`: descriptors that the direct route takes for them.
    `writes`: chunks, each of them one write or read.
    `routes`: the route of each rank on the other side that has chunks of the request.
    `peers`: number of such ranks.
    `quarantined`: a one-sided operation may still touch the pages, so do not reuse them; see `Transfer.quarantined`.
    `cause`: the failure in a word for a metric; None if it landed.
    `resent`: chunks that did not match their digest at first.
    `incomplete`: one tuple a component, indices into the page table of the pages that this rank asked for and that are
    not whole, also of pages that were never named (`Mover.allocated`); empty if all landed.
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
    quarantined: bool = False
    cause: Cause | None = None
    resent: int = 0
    incomplete: tuple[tuple[int, ...], ...] = ()
    aux: dict[int, bytes] = field(default_factory=dict[int, bytes])
    spent_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])

    @property
    def landed(self) -> bool:
        """True if all bytes are in the pages (a receive), or all destinations have them (a send)."""
        return self.reason is None

    def __str__(self) -> str:
        """Return `landed: 40,960 bytes in 8.1 ms`, or `failed (deadline) after 5000.0 ms: ...`."""
        took = f"{self.seconds * 1e3:.1f} ms"
        if self.landed:
            return f"landed: {self.nbytes:,} bytes in {took}"
        return f"failed ({self.cause}) after {took}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of one transfer of one rank, for watchers of a mover: logs, spans, the log of a run."""

    engine: str
    rank: int
    verb: Literal["send", "receive"]
    request: str
    result: Result


@dataclass(slots=True, eq=False)
class Transfer:
    """A request on one rank. Poll the mover and look at `result`.

    `content`: the prompt that its caller named. `quarantined`: an operation may still touch the pages. It is only true
    after an end with `result.quarantined`, and turns false with the operation's end: the pages are the engine's again.
    """

    request: str
    started: float
    content: Content | None = None
    result: Result | None = field(default=None)
    quarantined: bool = False
    _then: Callable[[Transfer], None] | None = None

    def end(self, result: Result) -> None:
        """Set the result, once. The mover calls it; pages are `quarantined` if the result says so."""
        assert self.result is None, f"{self.request} has ended: {self.result}"
        self.result, self.quarantined = result, result.quarantined
        if self._then is not None:
            self._then(self)

    def then(self, call: Callable[[Transfer], None]) -> None:
        """Have `call` called once when the transfer ends, in the mover's thread, or at once if it has ended."""
        assert self._then is None, f"the end of {self.request} is told already"
        self._then = call
        if self.ended:
            call(self)

    @property
    def ended(self) -> bool:
        """True if `result` is there. Pages may still be quarantined: see `quarantined`."""
        return self.result is not None

    def landed(self) -> Result:
        """Return the result. Raises TransferFailed, with the reason, if the transfer did not land, or has not ended."""
        if self.result is None:
            raise TransferFailed(f"{self.request} has not ended")
        if self.result.reason is not None:
            raise TransferFailed(f"{self.request}: {self.result.reason}")
        return self.result
