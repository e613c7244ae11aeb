"""Whole movers under seeded schedules of requests and faults: nothing is corrupted, nothing hangs, nothing is left.

`KVMOVER_SCHEDULES=20000 pytest -n 2 tests/sim` runs that many instead of the default.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.world import Broken, simulate

#: Profiles, and of how many schedules in ten each has.
SHARES = {"default": 4, "lossy": 2, "hostile": 3, "reordered": 1}

#: Schedules, in tests of at most so many each, which several workers can share.
SCHEDULES = int(os.environ.get("KVMOVER_SCHEDULES", "1200"))
BLOCK = 500
BLOCKS = [
    (profile, range(first, min(first + BLOCK, SCHEDULES * share // 10)))
    for profile, share in SHARES.items()
    for first in range(0, SCHEDULES * share // 10, BLOCK)
]

#: A mutation that survives so many schedules is not caught.
MUTANT_SCHEDULES = 300

#: How many of a hundred schedules reach a situation, at the least. What a schedule of the profile cannot reach is left out.
REACHED: dict[str, dict[str, int]] = {
    "default": {
        "receive landed": 60,
        "receive failed": 40,
        "receive held": 8,
        "receive held and given back": 8,
        "send landed": 55,
        "send failed": 45,
        "send held": 6,
        "send held and given back": 6,
        "push direct landed": 14,
        "push packed landed": 10,
        "pull direct landed": 12,
        "pull packed landed": 8,
        "landed gated": 30,
        "landed by layers": 14,
        "landed aux": 22,
        "landed hybrid": 14,
        "landed resent": 4,
        "landed slow copies": 22,
        "landed slow consumer": 12,
        "landed after a restart": 4,
        "pages reused under a read": 8,
        "given up under a chunk": 15,
        "some pages whole, others not": 10,
        "stopped for longer than silence": 15,
        "crashed and came back": 12,
        "crashed for ever": 2,
        "cut and healed": 6,
        "cut for ever": 2,
        "left for ever": 1,
        "refused": 3,
    },
    "lossy": {
        **{f"lost {kind}": 6 for kind in ("Aux", "Chunk", "Staged", "Taken", "Kept", "Done", "Granted", "Offered")},
        **{f"lost {kind}": 15 for kind in ("Hello", "Want", "Ping", "Pong")},
        "receive landed": 95,
        "landed resent": 10,
    },
    "hostile": {"lost Abort": 15, "lost Drained": 10, "receive landed": 50, "landed resent": 2},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("profile", "seeds"), BLOCKS, ids=[f"{p}-{seeds.start}" for p, seeds in BLOCKS])
def test_every_invariant_holds_after_every_step_of_a_schedule(profile: str, seeds: range):
    """In `reordered`, also for a Want that comes late or twice: NIXL keeps the notes of a peer in order."""
    reached = _run(seeds, profile)
    if len(seeds) < 100:
        return
    rare = {
        what: reached[what] * 100 // len(seeds)
        for what, least in REACHED.get(profile, {}).items()
        if reached[what] * 100 < least * len(seeds)
    }
    assert not rare, f"too few of a hundred schedules of {profile} reach: {rare}"


def test_a_seed_replays_the_same_schedule_in_another_process():
    """Strings hash otherwise there, so no order of a set decides."""
    for profile, seeds in (("default", (3, 9)), ("hostile", (3, 9)), ("lossy", (4,))):
        for seed in seeds:
            here = simulate(seed, profile, trace=True).network.trace
            command = [sys.executable, "-m", "tests.sim.replay", str(seed), profile]
            there = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "77"}, capture_output=True, text=True)
            assert there.returncode == 0, there.stdout
            assert there.stdout.splitlines()[:-1] == here


def test_a_broken_schedule_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch):
    mutation, profile = next(pair for pair in MUTATIONS if pair[0].__name__ == "digests_are_not_compared")
    mutation(monkeypatch)
    with pytest.raises(Broken) as broken:
        _run(range(MUTANT_SCHEDULES), profile)
    found = re.search(r"replay: python -m tests\.sim\.replay (\d+) (\w+)\)", str(broken.value))
    assert found
    with pytest.raises(Broken, match="landed with") as again:
        simulate(int(found[1]), found[2], trace=True)
    assert len(str(again.value).splitlines()) > 10


@pytest.mark.parametrize(("mutation", "profile"), MUTATIONS, ids=[mutation.__name__ for mutation, _ in MUTATIONS])
def test_a_broken_rule_is_caught(mutation: Mutation, profile: str, monkeypatch: pytest.MonkeyPatch):
    mutation(monkeypatch)
    with pytest.raises(Broken, match=r"seed \d+, profile"):
        _run(range(MUTANT_SCHEDULES), profile)


def _run(seeds: range, profile: str) -> Counter[str]:
    """In how many schedules each situation was reached."""
    reached = Counter[str]()
    for seed in seeds:
        reached.update(what for what, count in simulate(seed, profile).seen.items() if count)
    return reached
