"""The target side of a migration, as a pure state machine: `step(state, event)`.

It lands announced rounds one by one. Once the last round and its hand-over have landed, the request is the target's,
and it resends that decision until the source has heard it. A failure before makes it decline: it sends that decision,
and keeps listening. Until the source confirms the decision, the source may be dead; if that becomes known, the target
takes the request after all, with as many tokens as have landed. So exactly one side has it while one lives.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from kvmover.migrate.departure import Withdraw
from kvmover.migrate.migration import Decision
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.rounds import Round
from kvmover.transfer.events import Cancel


class ArrivalPhase(StrEnum):
    """The progress of a migration at the target."""

    COPYING = "copying"
    DECLINING = "declining"
    HERE = "here"
    DECLINED = "declined"


class Announced(msgspec.Struct, frozen=True):
    """The source has announced the next round's tokens."""

    round: Round


class Acknowledged(msgspec.Struct, frozen=True):
    """Every rank of the source has the decision."""


class PatienceOver(msgspec.Struct, frozen=True):
    """The source has been silent on the decision for `patience_s`, and is not known to be dead."""


class AskRound(msgspec.Struct, frozen=True):
    """An order to ask for a round's tokens."""

    round: Round


class ListenFor(msgspec.Struct, frozen=True):
    """An order to ask for a round's announcement."""

    number: int


class SayDecision(msgspec.Struct, frozen=True):
    """An order to send the decision until the source has heard it."""

    decision: Decision


ArrivalEvent = Announced | RoundLanded | RoundFailed | PartnerEnded | Acknowledged | PatienceOver | Cancel
ArrivalAction = AskRound | ListenFor | SayDecision | Withdraw


class Arrival(msgspec.Struct, frozen=True):
    """A target's state: `landed_tokens` tokens are in the pages, `round` was asked for last."""

    round: Round
    landed_tokens: int = 0
    phase: ArrivalPhase = ArrivalPhase.COPYING
    reason: str | None = None

    @property
    def ended(self) -> bool:
        """Returns True if the request's side is known."""
        return self.phase in (ArrivalPhase.HERE, ArrivalPhase.DECLINED)

    def check(self) -> None:
        """Raise AssertionError for a hole between rounds, or a contradictory phase."""
        self.round.check()
        assert self.landed_tokens in (self.round.start, self.round.stop), "a round does not begin where one ended"
        declines = self.phase in (ArrivalPhase.DECLINING, ArrivalPhase.DECLINED)
        assert not declines or self.reason is not None, "declined for no reason"
        whole = self.round.last and self.landed_tokens == self.round.stop
        assert not whole or self.phase is ArrivalPhase.HERE, "all is here, and it is not taken"


Arrived = tuple[Arrival, list[ArrivalAction]]


def begin(first: Round) -> Arrived:
    """Returns the first state and its orders."""
    return Arrival(first), [ListenFor(first.number + 1), AskRound(first)]


def step(state: Arrival, event: ArrivalEvent) -> Arrived:
    """Advance by one event, unless ended. Returns the state and its orders."""
    match event:
        case _ if state.ended:
            return state, []
        case RoundLanded(number):
            return _landed(state, number)
        case Announced(following):
            return _announced(state, following)
        case PartnerEnded():
            return _taken(state)
        case RoundFailed(reason) | Cancel(reason):
            return _decline(state, reason)
        case Acknowledged() | PatienceOver():
            declined = state.phase is ArrivalPhase.DECLINING
            return (replace(state, phase=ArrivalPhase.DECLINED) if declined else state), []


def _landed(state: Arrival, number: int) -> Arrived:
    if state.phase is not ArrivalPhase.COPYING or number != state.round.number:
        return state, []
    state = replace(state, landed_tokens=state.round.stop)
    return _taken(state) if state.round.last else (state, [])


def _announced(state: Arrival, following: Round) -> Arrived:
    """Ask for the round; decline one that does not follow the last."""
    if state.phase is not ArrivalPhase.COPYING:
        return state, []
    done = state.round
    fits = following.number == done.number + 1 and following.start == state.landed_tokens == done.stop
    if done.last or not fits or following.stop <= following.start:
        return _decline(state, f"{following} was announced after {done}, of which {state.landed_tokens} tokens landed")
    listen: list[ArrivalAction] = [] if following.last else [ListenFor(following.number + 1)]
    return replace(state, round=following), [*listen, AskRound(following)]


def _taken(state: Arrival) -> Arrived:
    return replace(state, phase=ArrivalPhase.HERE, reason=None), [SayDecision(Decision(taken=True))]


def _decline(state: Arrival, reason: str) -> Arrived:
    if state.phase is not ArrivalPhase.COPYING:
        return state, []
    decision = Decision(taken=False, reason=reason)
    return replace(state, phase=ArrivalPhase.DECLINING, reason=reason), [Withdraw(reason), SayDecision(decision)]
