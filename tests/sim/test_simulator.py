"""Whole movers under seeded schedules of requests and faults: nothing is corrupted, nothing hangs, nothing is left."""

from __future__ import annotations

import os
import re

import pytest

from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.world import Broken, simulate

#: Schedules of each profile, in so many tests that several workers can share them.
SCHEDULES = int(os.environ.get("KVMOVER_SCHEDULES", "480"))
BLOCKS = max(8, SCHEDULES // 400)

#: A mutation that survives so many schedules is not caught.
MUTANT_SCHEDULES = 300


@pytest.mark.parametrize("profile", ["default", "hostile"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_invariant_holds_after_every_step_of_a_schedule(profile, block):
    _run(range(block, SCHEDULES, BLOCKS), profile)


def test_schedules_reach_every_way_for_a_transfer_to_end():
    ended = sum((simulate(seed).ended for seed in range(1, 40)), simulate(0).ended)
    assert set(ended) == {f"{verb} {end}" for verb in ("send", "receive") for end in ("landed", "failed", "held")}


@pytest.mark.parametrize("profile", ["default", "hostile"])
def test_a_seed_replays_the_same_schedule(profile):
    for seed in range(5):
        first, again = (simulate(seed, profile, trace=True).network.trace for _ in range(2))
        assert first
        assert [_alike(line) for line in first] == [_alike(line) for line in again or []]


@pytest.mark.parametrize(("mutation", "profile"), MUTATIONS, ids=[mutation.__name__ for mutation, _ in MUTATIONS])
def test_a_broken_rule_is_caught(mutation: Mutation, profile: str, monkeypatch: pytest.MonkeyPatch):
    mutation(monkeypatch)
    with pytest.raises(Broken, match=r"seed \d+, profile"):
        _run(range(MUTANT_SCHEDULES), profile)


def test_a_want_that_comes_late_or_twice_opens_no_attempt_that_is_over():
    """NIXL keeps the notes of a peer in order, so this takes a wire worse than it."""
    _run(range(200), "reordered")


def _run(seeds: range, profile: str) -> None:
    for seed in seeds:
        simulate(seed, profile)


def _alike(line: str) -> str:
    """Attempts are numbered from the time of day, and transports from one counter for the whole process."""
    return re.sub(r"generation=\d+|(Want\('\w+'), \d+|([pd]\d)\.\d+", r"\1\2", line)
