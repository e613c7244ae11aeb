"""Both machines of a migration between two lists of transfers, as values: every order of events can be walked.

A transfer lands at the target, and later the source hears of it, or either end fails by itself: also the source's when
it has landed, and the target's when the source believes in it. What is aborted at one end may still land at the other
if its bytes were under way. Either side may die between any two of these, which the other learns at some time later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvmover.migrate import arrival, departure
from kvmover.migrate.arrival import Announced, Arrival, ArrivalPhase, AskRound, ListenFor, SayDecision
from kvmover.migrate.departure import (
    AnnounceRound,
    CopyRound,
    Departure,
    DeparturePhase,
    HandOver,
    Withdraw,
)
from kvmover.migrate.migration import Decision
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.rounds import MigrationConfig, Round
from kvmover.transfer.events import Cancel

SHORT = MigrationConfig(tail_tokens=1, ahead_tokens=2, most_rounds=3)
FIRST_TOKENS, MOST_TOKENS = 2, 7


class Wire(NamedTuple):
    """A transfer: what each end has of it, "none", "open", "landed" or "failed", and whether its bytes are complete."""

    source: str = "none"
    target: str = "none"
    given: bool = False


@dataclass(frozen=True)
class HandOverWorld:
    """One moment. `faults`: how many more things may go wrong by themselves. `told`: what the target has said last,
    `heard` whether the source has that, `confirmed` whether the target knows. `died_here`: the target had taken it.
    """

    source: Departure
    target: Arrival
    rounds: tuple[Wire, ...] = (Wire(),) * 4
    announced: tuple[Round | None, ...] = (None,) * 4
    listening: frozenset[int] = frozenset()
    told: Decision | None = None
    heard: bool = False
    confirmed: bool = False
    faults: int = 2
    source_lives: bool = True
    target_lives: bool = True
    died_here: bool = False

    @property
    def source_goes_on(self) -> bool:
        phases = (DeparturePhase.COPYING, DeparturePhase.STOPPING, DeparturePhase.BACK)
        return self.source_lives and self.source.phase in phases

    @property
    def target_goes_on(self) -> bool:
        return self.target_lives and self.target.phase is ArrivalPhase.HERE

    def check(self) -> None:
        self.source.check()
        self.target.check()
        assert not (self.source_goes_on and self.target_goes_on), "both sides have the request"

    def check_end(self) -> None:
        """Nothing more will happen by itself. Who dies when the other knows that it had the request takes it along."""
        lives = self.source_lives, self.target_lives
        if lives == (True, True):
            assert self.source.ended, "both live, and the source does not know who has the request"
            assert self.target.ended, "both live, and the target does not know who has the request"
            assert self.source_goes_on != self.target_goes_on, "neither side has the request"
        elif lives == (True, False):
            assert self.source_goes_on or self.died_here, "the source lives, and has nothing"
        elif lives == (False, True):
            assert self.target_goes_on or self.confirmed, "the target lives, and has nothing"


def begun() -> HandOverWorld:
    source, offers = departure.begin(FIRST_TOKENS)
    target, asks = arrival.begin(source.round)
    world = HandOverWorld(source, target)
    return _target_acts(_source_acts(world, offers), asks)


def _source_step(world: HandOverWorld, event: departure.DepartureEvent) -> HandOverWorld:
    state, actions = departure.step(SHORT, world.source, event)
    return _source_acts(replace(world, source=state), actions)


def _source_acts(world: HandOverWorld, actions: list[departure.DepartureAction]) -> HandOverWorld:
    for action in actions:
        match action:
            case CopyRound(each):
                wire = world.rounds[each.number]._replace(source="open", given=not each.last)
                world = _with(world, each.number, wire)
            case AnnounceRound(each):
                announced = (*world.announced[: each.number], each, *world.announced[each.number + 1 :])
                world = replace(world, announced=announced)
            case HandOver():
                number = world.source.round.number
                if world.rounds[number].source == "open":
                    world = _with(world, number, world.rounds[number]._replace(given=True))
            case Withdraw():
                rounds = (w._replace(source="failed") if w.source == "open" else w for w in world.rounds)
                world = replace(world, rounds=tuple(rounds))
    return world


def _target_step(world: HandOverWorld, event: arrival.ArrivalEvent) -> HandOverWorld:
    state, actions = arrival.step(world.target, event)
    return _target_acts(replace(world, target=state), actions)


def _target_acts(world: HandOverWorld, actions: list[arrival.ArrivalAction]) -> HandOverWorld:
    for action in actions:
        match action:
            case AskRound(each):
                world = _with(world, each.number, world.rounds[each.number]._replace(target="open"))
            case ListenFor(number):
                world = replace(world, listening=world.listening | {number})
            case SayDecision(decision):
                world = replace(world, told=decision, heard=False)
            case Withdraw():
                rounds = (w._replace(target="failed") if w.target == "open" else w for w in world.rounds)
                world = replace(world, rounds=tuple(rounds), listening=frozenset())
    return world


def _with(world: HandOverWorld, number: int, wire: Wire) -> HandOverWorld:
    return replace(world, rounds=(*world.rounds[:number], wire, *world.rounds[number + 1 :]))


def going_on(world: HandOverWorld) -> Iterator[HandOverWorld]:
    """What happens by itself in the end, unless something else makes it impossible."""
    if world.source_lives:
        yield from _source_goes(world)
    if world.target_lives:
        yield from _target_goes(world)


def _source_goes(world: HandOverWorld) -> Iterator[HandOverWorld]:
    source = world.source
    copies = source.phase is DeparturePhase.COPYING and source.tokens < MOST_TOKENS
    if copies or source.phase is DeparturePhase.STOPPING:
        yield _source_step(world, departure.Wrote(source.tokens + 1))
    for number, wire in enumerate(world.rounds):
        if wire.source == "open" and wire.target == "landed":
            yield _source_step(_with(world, number, wire._replace(source="landed")), RoundLanded(number))
        if wire.source == "open" and wire.target == "failed":
            yield _source_step(_with(world, number, wire._replace(source="failed")), RoundFailed("told"))
    if world.told is not None and not world.heard:
        yield _source_step(replace(world, heard=True), departure.Decided(world.told))
    if not world.target_lives and not source.ended:
        yield _source_step(world, PartnerEnded("the target is dead"))


def _target_goes(world: HandOverWorld) -> Iterator[HandOverWorld]:
    for number, wire in enumerate(world.rounds):
        if wire.target == "open" and wire.given:
            yield _target_step(_with(world, number, wire._replace(target="landed")), RoundLanded(number))
        if wire.target == "open" and wire.source == "failed":
            yield _target_step(_with(world, number, wire._replace(target="failed")), RoundFailed("told"))
    for number in world.listening:
        following = world.announced[number]
        if following is not None:
            yield _target_step(replace(world, listening=world.listening - {number}), Announced(following))
        elif world.source.phase is DeparturePhase.BACK:
            yield _target_step(replace(world, listening=world.listening - {number}), RoundFailed("told"))
    if world.heard and not world.confirmed:
        yield _target_step(replace(world, confirmed=True), arrival.Acknowledged())
    if not world.source_lives and not world.target.ended:
        yield _target_step(world, PartnerEnded("the source is dead"))


def going_wrong(world: HandOverWorld) -> Iterator[HandOverWorld]:
    """What may happen instead: an end of a transfer fails by itself, an engine gives up, a side dies."""
    over = world.source.ended and world.target.ended
    if world.source_lives and not over:
        yield replace(world, source_lives=False)
    if world.target_lives and not over:
        here = world.target.phase is ArrivalPhase.HERE
        yield replace(world, target_lives=False, died_here=here)
    if not world.faults:
        return
    world = replace(world, faults=world.faults - 1)
    for number, wire in enumerate(world.rounds):
        if wire.source == "open" and world.source_lives:
            yield _source_step(_with(world, number, wire._replace(source="failed")), RoundFailed("here"))
        if wire.target == "open" and world.target_lives:
            yield _target_step(_with(world, number, wire._replace(target="failed")), RoundFailed("here"))
    for number in world.listening if world.target_lives else ():
        yield _target_step(replace(world, listening=world.listening - {number}), RoundFailed("here"))
    if world.source_lives:
        yield _source_step(world, Cancel("the engine keeps it"))
    if world.target_lives:
        yield _target_step(world, Cancel("the engine has no room"))
