"""Running requests that move over bad wires, between engines that die, are cut off or give up: one of the two has each
request in the end, whole, and never both.

`make simulate` and `make night` run 285 of each profile.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from kvmover.migrate import arrival, arriving_rank, departing_rank, departure
from kvmover.migrate.arrival import ArrivalPhase
from tests.proofs import family, tries
from tests.sim.migrations.world import PROFILES, MigrationBroken, simulate

#: Of each profile.
SCHEDULES = max(8, int(os.environ.get("KVMOVER_SCHEDULES", tries(plain=560, prove=2500, night=20_000))) // 70)

#: A mutation that survives so many schedules of each profile is not caught. The first is the one that caught a mutation
#: after hundreds that did not.
MUTANT_SEEDS = (392, *range(100))

REACHED = {"here", "back", "both lived", "a died while copying", "a died while handing over", "b died while copying"}


@pytest.fixture(autouse=True)
def quiet() -> Iterable[None]:
    """Every lost peer is a warning."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.searched
@pytest.mark.timeout(600)
def test_every_invariant_of_a_hand_over_holds_in_every_schedule():
    assert not REACHED - _all(range(SCHEDULES)).keys()


Mutation = Callable[[pytest.MonkeyPatch], None]


def a_failed_round_takes_back_what_was_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        departure, "_retract", lambda state, reason, _: (state, []) if state.ended else departure._back(state, reason)
    )


def a_hand_over_goes_out_before_the_last_row(patch: pytest.MonkeyPatch) -> None:
    copy = departing_rank.DepartingRank._copy

    def hasty(self: departing_rank.DepartingRank, round_: departing_rank.Round) -> None:
        copy(self, round_)
        if round_.last:
            self._mover.attach(self._rounds[-1], self._now.payload)

    patch.setattr(departing_rank.DepartingRank, "_copy", hasty)
    patch.setattr(departing_rank.Mover, "attach", _once)


def _once(mover: departing_rank.Mover, transfer: departing_rank.Transfer, payload: bytes) -> None:
    request = mover._source._open(transfer)
    if request is not None and request.aux is None:
        mover._source.attach(transfer, payload)


def every_round_that_landed_is_the_last(patch: pytest.MonkeyPatch) -> None:
    landed = arrival._landed

    def greedy(state: arrival.Arrival, number: int) -> arrival.Arrived:
        after, actions = landed(state, number)
        return arrival._taken(after) if after.landed_tokens and number and not after.ended else (after, actions)

    patch.setattr(arrival, "_landed", greedy)


def a_round_that_was_not_asked_for_has_landed(patch: pytest.MonkeyPatch) -> None:
    """The round before it has."""
    patch.setattr(arriving_rank.ArrivingRank, "_current", property(_last_of, lambda self, value: None), raising=False)


def _last_of(rank: arriving_rank.ArrivingRank) -> departing_rank.Transfer | None:
    return rank._rounds[-1] if rank._rounds else None


def a_dead_source_leaves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        arrival,
        "_taken",
        lambda state: (
            (replace(state, phase=ArrivalPhase.DECLINED, reason="dead"), [])
            if state.phase is ArrivalPhase.DECLINING
            else _TAKEN(state)
        ),
    )


def nobody_asks_twice_what_became_of_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(departing_rank, "has_failed", lambda transfer: False)


_TAKEN = arrival._taken
MUTATIONS: list[Mutation] = [
    a_failed_round_takes_back_what_was_handed_over,
    a_hand_over_goes_out_before_the_last_row,
    every_round_that_landed_is_the_last,
    a_round_that_was_not_asked_for_has_landed,
    a_dead_source_leaves_nothing,
    nobody_asks_twice_what_became_of_a_request,
]


@pytest.mark.parametrize(
    "mutation", family(MUTATIONS, [a_hand_over_goes_out_before_the_last_row]), ids=lambda each: each.__name__
)
def test_a_broken_rule_of_a_hand_over_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch):
    mutation(monkeypatch)
    with pytest.raises(MigrationBroken, match=r"(?s)seed \d+, profile .* \(replay: python -m tests\.sim\.migrations"):
        _all(MUTANT_SEEDS)


def _all(seeds: Iterable[int]) -> Counter[str]:
    """In how many schedules each situation was reached."""
    seen = Counter[str]()
    for seed in seeds:
        for profile in PROFILES:
            seen.update(simulate(seed, profile).seen.keys())
    return seen
