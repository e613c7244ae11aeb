"""The hand-over of a running request: in every order of events one side has it, never both, and never neither."""

from __future__ import annotations

from collections import Counter, deque
from types import ModuleType

import pytest
from hand_over_world import HandOverWorld, begun, going_on, going_wrong
from msgspec.structs import replace

from kvmover.errors import PlanError
from kvmover.migrate import arrival, departure
from kvmover.migrate.arrival import Arrival, ArrivalPhase
from kvmover.migrate.departure import Departure, DeparturePhase
from kvmover.migrate.migration import Decision
from kvmover.migrate.migration_events import PartnerEnded, RoundFailed, RoundLanded
from kvmover.migrate.rounds import MigrationConfig, Round, next_round


def walk() -> Counter[str]:
    """Every moment that any order of events leads to, checked; what became of both sides, by how it ended."""
    seen, todo, ends = {begun()}, deque([begun()]), Counter[str]()
    while todo:
        world = todo.popleft()
        world.check()
        following = list(going_on(world))
        moved = [other for other in following if other != world]
        if not moved:
            world.check_end()
            ends[_end(world)] += 1
        for other in (*moved, *going_wrong(world)):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    ends["moments"] = len(seen)
    return ends


def _end(world: HandOverWorld) -> str:
    source = world.source.phase.value if world.source_lives else "dead"
    target = world.target.phase.value if world.target_lives else "dead"
    return f"{source}, {target}"


def test_in_every_order_of_losses_and_deaths_one_side_has_the_request():
    ends = walk()
    assert ends.pop("moments") > 10_000
    assert ends.keys() == {
        *("gone, here", "back, declined", "dead, here", "back, dead"),
        *("gone, dead", "dead, declined", "dead, dead"),  # of which it was known who had the request
    }


def _takes_back(state: Departure, reason: str, actions: list[departure.DepartureAction]) -> departure.Departed:
    """A round that failed here takes the request back, also after the hand-over."""
    return (state, []) if state.ended else departure._back(state, reason)


def _declines_at_once(state: Arrival, reason: str) -> arrival.Arrived:
    """What failed is declined for good before the source has heard."""
    after, actions = _DECLINE(state, reason)
    return replace(after, phase=ArrivalPhase.DECLINED) if after.phase is ArrivalPhase.DECLINING else after, actions


def _waits_for_ever(state: Departure, reason: str) -> departure.Departed:
    """Neither the target's word nor its death brings a request back that was handed over."""
    return (state, []) if state.phase is DeparturePhase.HANDING_OVER else _BACK(state, reason)


def _takes_what_is_not_handed_over(state: Arrival, number: int) -> arrival.Arrived:
    """Any round that lands makes the request ours."""
    after, actions = _LANDED(state, number)
    return arrival._taken(after) if after.phase is ArrivalPhase.COPYING and number > 0 else (after, actions)


_DECLINE, _BACK, _LANDED = arrival._decline, departure._back, arrival._landed


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (departure, "_retract", _takes_back),
        (arrival, "_decline", _declines_at_once),
        (departure, "_back", _waits_for_ever),
        (arrival, "_landed", _takes_what_is_not_handed_over),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_broken_rule_is_caught(module: ModuleType, name: str, broken: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        walk()


def test_rounds_shrink_until_little_is_left_and_the_last_one_ends_where_nothing_is_written_yet():
    config, done, tokens = MigrationConfig(), Round(0, 0, 1000), 1100
    stops = list[int]()
    while not done.last:
        done = next_round(config, done, tokens)
        stops.append(done.stop)
        tokens += (done.stop - done.start) // 10
    assert stops == [1100, 1110, 1111 + config.ahead_tokens]


def test_rounds_end_though_the_request_writes_as_fast_as_it_is_copied():
    done, rounds = Round(0, 0, 100), 1
    while not done.last:
        done = next_round(MigrationConfig(), done, done.stop + 100)
        rounds += 1
    assert rounds == MigrationConfig().most_rounds


def test_a_source_that_writes_past_its_last_round_is_refused_with_both_numbers():
    state = Departure(10, Round(1, 8, 12, last=True), DeparturePhase.STOPPING)
    with pytest.raises(PlanError, match="13 tokens are written where 10 were, and 2 more may be: stopping"):
        departure.step(MigrationConfig(), state, departure.Wrote(13))
    stopped, actions = departure.step(MigrationConfig(), state, departure.Wrote(12))
    assert (stopped.phase, stopped.may_write) == (DeparturePhase.HANDING_OVER, 0)
    assert actions == [departure.HandOver()]


def test_a_round_that_leaves_a_hole_is_declined():
    state, _ = arrival.begin(Round(0, 0, 10))
    state, _ = arrival.step(state, RoundLanded(0))
    after, actions = arrival.step(state, arrival.Announced(Round(1, 11, 20)))
    assert after.phase is ArrivalPhase.DECLINING
    assert "was announced after" in str(actions)


def test_a_target_that_was_told_that_its_source_is_dead_ends_a_source_that_lives():
    """One word of the target and the source stops: two sides at once are worse than a request that pauses."""
    state, _ = departure.begin(10)
    after, _ = departure.step(MigrationConfig(), state, departure.Decided(Decision(taken=True)))
    assert (after.phase, after.may_write) == (DeparturePhase.GONE, 0)


def test_a_target_goes_on_with_what_has_landed_when_its_source_is_known_to_be_dead():
    state, _ = arrival.begin(Round(0, 0, 10))
    state, _ = arrival.step(state, RoundLanded(0))
    state, _ = arrival.step(state, arrival.Announced(Round(1, 10, 14)))
    state, _ = arrival.step(state, RoundFailed("lost"))
    assert state.phase is ArrivalPhase.DECLINING
    state, _ = arrival.step(state, PartnerEnded("killed"))
    assert (state.phase, state.landed_tokens) == (ArrivalPhase.HERE, 10)
