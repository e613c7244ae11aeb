"""Both machines of a migration under announcements and decisions of anything: nothing raises, and none has it twice."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import PlanError, ProtocolError
from kvmover.migrate import Migration, Party, arrival, departure
from kvmover.migrate.arrival import Acknowledged, Announced, ArrivalEvent, ArrivalPhase, PatienceOver, SayDecision
from kvmover.migrate.departure import Decided, DepartureEvent, DeparturePhase, Wrote
from kvmover.migrate.migration import MAX_PAYLOAD_BYTES, Announcement, Decision
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.rounds import MigrationConfig
from kvmover.transfer.events import Cancel
from tests.drawn_values import ODD, damaged, drawn
from tests.proofs import searched

USUAL: dict[str, list[Any]] = {
    "number": [0, 1, 1, 2, 3],
    "start": [0, 4, 4, 8],
    "stop": [4, 8, 8, 12],
    "last": [False, False, True],
    "ranks": [1, 2, 65536],
}


def said(kind: type[Announcement | Decision | Migration], dice: Random) -> Any:
    """One that its decoder lets through, or None."""
    try:
        made = drawn(kind, dice, ["r", "x" * 200, "x" * 256], USUAL)
    except PlanError:  # a name or a payload that is too long
        return None
    try:
        return kind.decode(damaged(made.encode(), dice) if dice.random() < 0.3 else made.encode())
    except ProtocolError:
        return None


def _wrong(dice: Random) -> Any:
    number = dice.choice([0, 1, 2, 3, (1 << 63) - 1])
    return dice.choice([RoundLanded(number)] * 4 + [RoundFailed("f"), PartnerEnded("p"), Cancel("c")])


@searched(few=40, many=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_whatever_is_announced_lands_without_a_hole_or_is_declined(seed: int) -> None:
    dice = Random(seed)
    state, _ = arrival.begin(Migration("r", 0, Party("P", 1), Party("D", 1), 4).first_round)
    for _ in range(12):
        announced = said(Announcement, dice)
        event: ArrivalEvent = Announced(announced.round) if announced is not None else _wrong(dice)
        if dice.random() < 0.4:
            event = dice.choice([RoundLanded(state.round.number), RoundLanded(state.round.number), Acknowledged()])
        elif dice.random() < 0.1:
            event = dice.choice([PatienceOver(), _wrong(dice)])
        before = state
        state, actions = arrival.step(state, event)
        state.check()
        assert state.landed_tokens >= before.landed_tokens
        told = [action.decision.taken for action in actions if isinstance(action, SayDecision)]
        assert told in ([], [state.phase is ArrivalPhase.HERE])
        assert before.phase is not ArrivalPhase.DECLINED or state is before, "what it gave up it took"


@searched(few=40, many=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_whatever_is_decided_the_source_writes_only_what_is_its_own(seed: int) -> None:
    dice = Random(seed)
    config = MigrationConfig(tail_tokens=2, ahead_tokens=2, most_rounds=dice.choice([2, 3, 8]))
    state, _ = departure.begin(4)
    for _ in range(12):
        decision = said(Decision, dice)
        event: DepartureEvent = dice.choice(
            [
                Wrote(state.tokens + min(state.may_write, dice.choice([0, 1, 3]))),
                RoundLanded(state.round.number),
                _wrong(dice),
                Decided(decision) if decision is not None and dice.random() < 0.3 else Wrote(state.tokens),
            ]
        )
        before = state
        state, _ = departure.step(config, state, event)
        state.check()
        assert before.phase is not DeparturePhase.GONE or state == before, "what it gave away it took back"
        assert state.phase is not DeparturePhase.GONE or not state.may_write


@searched(few=40, many=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_what_is_no_migration_is_refused_by_its_own_error(seed: int) -> None:
    dice = Random(seed)
    migration = said(Migration, dice)
    if migration is not None:
        assert Migration.decode(migration.encode()) == migration
        assert len(migration.payload) <= MAX_PAYLOAD_BYTES
        migration.first_round.check()
        for number in ODD[:4]:
            assert migration.round_name(number)


def test_an_announcement_of_other_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no Announcement in 1 bytes"):
        Announcement.decode(b"\x00")
