"""The source side of a migration, as a pure state machine: `step(config, state, event)`.

It copies written tokens round by round, while the request goes on. The last round ends at a token that is announced
before it is computed. When the request reaches it, it stops, and the hand-over goes out beside the last rows: from then
on the target decides, and the source waits for its answer, or for its death. Until then the source may take the request
back at any moment, since only the hand-over lets the target continue.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from kvmover.errors import PlanError
from kvmover.migrate.migration import Decision
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.rounds import MigrationConfig, Round, next_round
from kvmover.transfer.events import Cancel

#: Further tokens that an unlimited request may write.
UNBOUNDED = 1 << 62


class DeparturePhase(StrEnum):
    """The progress of a migration at the source."""

    COPYING = "copying"
    STOPPING = "stopping"
    HANDING_OVER = "handing over"
    GONE = "gone"
    BACK = "back"


class Wrote(msgspec.Struct, frozen=True):
    """A step of the request ended: `tokens` tokens are in the pages, or will be after its event."""

    tokens: int


class Decided(msgspec.Struct, frozen=True):
    """The target has decided which side has the request."""

    decision: Decision


class CopyRound(msgspec.Struct, frozen=True):
    """An order to offer a round's tokens."""

    round: Round


class AnnounceRound(msgspec.Struct, frozen=True):
    """An order to announce the round just offered."""

    round: Round


class HandOver(msgspec.Struct, frozen=True):
    """An order to send the payload. Only the target's answer or death then gives the request back."""


class Withdraw(msgspec.Struct, frozen=True):
    """An order to abort all transfers under way."""

    reason: str


DepartureEvent = Wrote | RoundLanded | RoundFailed | Decided | PartnerEnded | Cancel
DepartureAction = CopyRound | AnnounceRound | HandOver | Withdraw


class Departure(msgspec.Struct, frozen=True):
    """A source's state: `tokens` are written, and all before `round` is in the target's pages. `reason`: why it came
    back.
    """

    tokens: int
    round: Round
    phase: DeparturePhase = DeparturePhase.COPYING
    reason: str | None = None

    @property
    def may_write(self) -> int:
        """Returns the further tokens that may be computed here."""
        match self.phase:
            case DeparturePhase.COPYING | DeparturePhase.BACK:
                return UNBOUNDED
            case DeparturePhase.STOPPING:
                return self.round.stop - self.tokens
            case DeparturePhase.HANDING_OVER | DeparturePhase.GONE:
                return 0

    @property
    def ended(self) -> bool:
        """Returns True if the request's side is known."""
        return self.phase in (DeparturePhase.GONE, DeparturePhase.BACK)

    def check(self) -> None:
        """Raise AssertionError for a contradictory phase."""
        self.round.check()
        phase, stopped = self.phase, self.tokens == self.round.stop
        assert phase is not DeparturePhase.COPYING or not self.round.last, "the last round is copied while it grows"
        assert phase is not DeparturePhase.STOPPING or (self.round.last and self.tokens < self.round.stop), (
            f"stopping at {self.round.stop}, with {self.tokens} tokens written"
        )
        assert phase is not DeparturePhase.HANDING_OVER or (self.round.last and stopped), (
            f"handing over {self.tokens} tokens of {self.round}"
        )
        assert self.may_write >= 0, "written past where it was to stop"
        assert phase is not DeparturePhase.BACK or self.reason is not None, "back for no reason"


Departed = tuple[Departure, list[DepartureAction]]


def begin(tokens: int) -> Departed:
    """Returns the first state, and the order to copy `tokens`."""
    first = Round(0, 0, tokens)
    return Departure(tokens, first), [CopyRound(first)]


def step(config: MigrationConfig, state: Departure, event: DepartureEvent) -> Departed:
    """Advance by one event. Returns the state and its orders. Raises PlanError for more tokens than `may_write`."""
    match event:
        case Wrote(tokens):
            return _wrote(state, tokens)
        case RoundLanded(number):
            return _landed(config, state, number)
        case Decided(decision):
            return _decided(state, decision)
        case PartnerEnded(reason):
            return (state, []) if state.ended else _back(state, reason)
        case RoundFailed(reason):
            return _retract(state, reason, [])
        case Cancel(reason):
            return _retract(state, reason, [Withdraw(reason)])


def _wrote(state: Departure, tokens: int) -> Departed:
    if tokens < state.tokens or tokens - state.tokens > state.may_write:
        raise PlanError(
            f"{tokens} tokens are written where {state.tokens} were, and {state.may_write} more may be:"
            f" {state.phase.value}"
        )
    state = replace(state, tokens=tokens)
    if state.phase is DeparturePhase.STOPPING and tokens == state.round.stop:
        return replace(state, phase=DeparturePhase.HANDING_OVER), [HandOver()]
    return state, []


def _landed(config: MigrationConfig, state: Departure, number: int) -> Departed:
    if state.phase is not DeparturePhase.COPYING or number != state.round.number:
        return state, []
    following = next_round(config, state.round, state.tokens)
    phase = DeparturePhase.STOPPING if following.last else DeparturePhase.COPYING
    return replace(state, round=following, phase=phase), [CopyRound(following), AnnounceRound(following)]


def _decided(state: Departure, decision: Decision) -> Departed:
    """Apply the decision, even before the hand-over."""
    if state.phase is DeparturePhase.GONE or (state.phase is DeparturePhase.BACK and not decision.taken):
        return state, []
    if decision.taken:
        return replace(state, phase=DeparturePhase.GONE, reason=None), []
    return _back(state, decision.reason)


def _retract(state: Departure, reason: str, actions: list[DepartureAction]) -> Departed:
    """Take the request back; after the hand-over wait: a transfer that failed here may have landed there."""
    if state.ended:
        return state, []
    if state.phase is DeparturePhase.HANDING_OVER:
        return replace(state, reason=state.reason or reason), actions
    return _back(state, reason)


def _back(state: Departure, reason: str) -> Departed:
    return replace(state, phase=DeparturePhase.BACK, reason=reason), [Withdraw(reason)]
