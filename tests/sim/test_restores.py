"""Restores of several ranks under seeded schedules of bad disks, little room and impatience: nothing is corrupted or
blamed wrongly, nothing hangs, nothing is left.

`make simulate` and `make night` run 400 of each profile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.proofs import tries
from tests.sim.restores.mutations import MUTATIONS, Mutation
from tests.sim.restores.scenario import PROFILES
from tests.sim.restores.world import Broken, simulate

#: Of each profile.
SCHEDULES = max(10, int(os.environ.get("KVMOVER_SCHEDULES", tries(plain=1000, prove=2500, night=20_000))) // 50)

#: A mutation that survives so many schedules is not caught.
MUTANT_SCHEDULES = 200

#: Situations that some schedule of all profiles reaches.
REACHED = {
    *("from device", "from host", "from storage", "from peer", "alone", "aborted in look", "aborted in read"),
    *("lost rank_minimum", "lost threshold", "lost host_capacity", "lost device_capacity", "lost late"),
    *("lost read_failed", "lost poisoned", "lost capacity_evicted"),
}


@pytest.mark.searched
@pytest.mark.timeout(600)
def test_every_invariant_holds_after_every_round_of_a_schedule():
    seen = Counter[str]()
    for profile in PROFILES:
        seen.update(_all(range(SCHEDULES), profile))
    assert not REACHED - seen.keys()


def test_a_seed_replays_the_same_schedule_in_another_process():
    """Strings hash otherwise there, so no order of a set decides."""
    here = simulate(7, "rotten", trace=True).network.trace
    command = [sys.executable, "-m", "tests.sim.restores.replay", "7", "rotten"]
    there = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "77"}, capture_output=True, text=True)
    assert there.returncode == 0, there.stdout
    assert [line.partition("Scenario")[0] for line in there.stdout.splitlines()[:-1]] == [
        line.partition("Scenario")[0] for line in here or []
    ]


@pytest.mark.parametrize(("mutation", "profile"), MUTATIONS.items(), ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_broken_rule_is_caught(mutation: Mutation, profile: str, monkeypatch: pytest.MonkeyPatch):
    mutation(monkeypatch)
    with pytest.raises(Broken, match=r"(?s)seed \d+, profile .* \(replay: python -m tests\.sim\.restores\.replay"):
        _all(range(MUTANT_SCHEDULES), profile)


def _all(seeds: range, profile: str) -> Counter[str]:
    """In how many schedules each situation was reached."""
    seen = Counter[str]()
    for seed in seeds:
        seen.update(what for what, count in simulate(seed, profile).seen.items() if count)
    return seen
