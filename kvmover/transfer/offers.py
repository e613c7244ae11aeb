"""Offers: what a source knows of a request it gives out, of each destination that asked, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvmover.errors import PlanError
from kvmover.transfer import sending, wire
from kvmover.transfer.core import Core
from kvmover.transfer.meter import Stage
from kvmover.transfer.posts import Job, Pages
from kvmover.transfer.result import Cause, Gate, Result, Transfer

#: Which event makes an attempt fail for which cause; any other is a peer that breaks the protocol.
CAUSES: dict[type[sending.Event], Cause] = {
    sending.Cancel: Cause.ABORTED,
    sending.PeerAborted: Cause.PEER_ABORTED,
    sending.PeerGone: Cause.PEER_LOST,
    sending.Tick: Cause.DEADLINE,
    sending.WriteFailed: Cause.TRANSPORT,
}


@dataclass(slots=True, eq=False)
class Attempt:
    """One destination's attempt at a request. `waiting`: chunks that the engine has not produced."""

    state: sending.Sending
    job: Job
    waiting: tuple[int, ...]

    def behind(self, passed: list[Gate]) -> Callable[[int], bool]:
        """Whether all that a chunk reaches into was produced before one of the gates that passed."""

        def produced(chunk: int) -> bool:
            layer, token = self.job.lane.reach(chunk, self.job.want.stop)
            return any(layer <= gate.layers and token <= gate.tokens for gate in passed)

        return produced


@dataclass(slots=True, eq=False)
class Request:
    """A request that this rank offers. `expected`: destination ranks that will ask, known from the first that does.

    `gates`: what has to pass before more is in the pages; None where everything is. `reason`: why it is failing; its
    transfer ends when no destination is being served any more.
    """

    transfer: Transfer
    pages: Pages
    gates: list[Gate] | None
    deadline: float
    aux: bytes | None = None
    passed: list[Gate] = field(default_factory=list[Gate])
    expected: frozenset[int] | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    reason: str | None = None
    cause: Cause | None = None
    held: bool = False

    @property
    def all_asked(self) -> bool:
        asked = {attempt.job.peer.card.place.rank for attempt in self.attempts.values()}
        return self.expected is not None and self.expected <= asked

    def look(self) -> bool:
        """Ask the gates that have not passed; whether one has now."""
        passed = [gate for gate in self.gates or () if gate.event.query()]
        if passed and self.gates is not None:
            self.gates = [gate for gate in self.gates if gate not in passed]
            self.passed += passed
        return bool(passed)

    def take_ready(self, attempt: Attempt) -> tuple[int, ...]:
        """Chunks that wait no more: what they hold is in the pages."""
        ready = attempt.waiting if self.gates is None else tuple(filter(attempt.behind(self.passed), attempt.waiting))
        gone = frozenset(ready)
        attempt.waiting = tuple(chunk for chunk in attempt.waiting if chunk not in gone)
        return ready


def close(request: Request, core: Core) -> None:
    """Tell the engine how it ended, and count it."""
    attempts, transfer = request.attempts.values(), request.transfer
    chunks = [chunk for attempt in attempts for chunk in attempt.job.lane.chunks]
    seconds = core.clock() - transfer.started
    core.meter.ended["send", request.cause.value if request.cause else "landed"] += 1
    core.meter.took(Stage.SEND, seconds)
    transfer.held = request.held
    transfer.result = Result(
        request.reason,
        seconds,
        sum(chunk.nbytes for chunk in chunks),
        sum(attempt.job.lane.direct_runs() for attempt in attempts),
        len(chunks),
        tuple(attempt.job.want.route for attempt in attempts if attempt.job.lane.chunks),
        sum(bool(attempt.job.lane.chunks) for attempt in attempts),
        request.held,
        request.cause,
    )
    core.ended("send", transfer.request, transfer.result)


def check_aux(payload: bytes | None) -> None:
    if payload is not None and len(payload) > wire.MAX_AUX_BYTES:
        raise PlanError(f"a payload of {len(payload)} bytes is over the limit of {wire.MAX_AUX_BYTES}")
