"""Whole movers under seeded schedules of requests and faults: nothing is corrupted, nothing hangs, nothing is left.

`make simulate` runs 20,000 of them alone, `make night` as many beside its other tests.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.proofs import family, tries
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.world import Broken, World, simulate

#: Profiles, and of how many schedules in sixteen each has.
SHARES = {
    "default": 2,
    "lossy": 1,
    "hostile": 1,
    "reordered": 1,
    "echoes": 1,
    "ambushed": 1,
    "frail": 1,
    "revoked": 1,
    "drowsy": 1,
    "replaced": 1,
    "pulled": 1,
    "several": 1,
    "staggered": 1,
    "mixed": 1,
    "repeated": 1,
    "swarm": 2,
}

#: Schedules, in tests of at most so many each, which several workers can share.
SCHEDULES = int(os.environ.get("KVMOVER_SCHEDULES", tries(plain=160, prove=2500, night=20_000)))
BLOCK = 500
BLOCKS = [
    (profile, range(first, min(first + BLOCK, SCHEDULES * share // 16)))
    for profile, share in SHARES.items()
    for first in range(0, SCHEDULES * share // 16, BLOCK)
]

#: A mutation that survives so many schedules is not caught.
MUTANT_SCHEDULES = 400

#: The schedule that caught a mutation after many that did not: tried first. The others are tried where it does no more.
CAUGHT_AT = {
    "a_renewal_revives_old_grants": 359,
    "a_want_opens_what_is_over": 88,
    "a_slab_is_renewed_under_its_neighbours": 32,
    "regions_that_went_out_with_wants_count_for_ever": 78,
    "a_dead_peer_is_waited_for": 123,
    "lost_page_ids_are_not_missed": 64,
    "any_answer_notes_all_pages": 199,
    "ranks_are_counted_without_their_engine": 224,
    "what_one_engine_said_is_heard_before_another_asked": 200,
    "a_spoilt_chunk_of_a_failed_request_is_whole": 225,
}

#: In how many of a hundred schedules a situation is reached, at the least: half of what is usual.
REACHED: dict[str, dict[str, int]] = {
    "default": {
        **{f"receive {end}": least for end, least in {"landed": 45, "failed": 45, "quarantined": 9}.items()},
        **{f"send {end}": least for end, least in {"landed": 35, "failed": 45, "quarantined": 5}.items()},
        "receive quarantined and given back": 8,
        "send quarantined and given back": 5,
        "some pages whole, others not": 8,
        "push direct landed": 11,
        "push packed landed": 8,
        "pull direct landed": 8,
        "pull packed landed": 5,
        "landed gated": 20,
        "landed grown": 12,
        "landed allocated": 12,
        "landed at a second engine": 5,
        "landed by layers": 9,
        "landed aux": 15,
        "landed hybrid": 10,
        "landed resent": 2,
        "landed slow copies": 16,
        "landed slow consumer": 8,
        "landed after a restart": 3,
        "landed behind its predecessor's clock": 1,
        "pages reused under a read": 10,
        "given up under a chunk": 6,
        "refused": 2,
        "granted with a Want": 2,
        "stopped for longer than silence": 11,
        "crashed and came back": 12,
        "cut and healed": 6,
    },
    "lossy": {
        **{f"lost {kind}": 5 for kind in ("Aux", "Chunk", "Staged", "Taken", "Kept", "Hello")},
        **{f"lost {kind}": 18 for kind in ("Want", "Offered", "Granted", "Done", "Ping", "Pong")},
        "lost Noted": 10,
        "receive landed": 90,
        "send landed": 90,
        "landed resent": 7,
        "landed gated": 30,
        "landed aux": 20,
    },
    "hostile": {"lost Abort": 14, "lost Drained": 10, "receive landed": 30, "landed resent": 2},
    "echoes": {"receive landed": 25, "landed resent": 1, "receive quarantined": 14},
    "ambushed": {"pages reused under a read": 18, "given up under a chunk": 22, "receive landed": 12},
    "drowsy": {
        "receive landed": 24,
        "send landed": 17,
        "receive quarantined and given back": 19,
        "landed after a lapse": 5,
        "push mapped landed": 1,
    },
    "several": {"landed at a second engine": 30, "landed where another failed": 8},
    "staggered": {"landed at a second engine": 50},
    "mixed": {"receive landed": 44, "send landed": 35, "noted between newer releases": 24},
    "repeated": {"receive landed": 90, "landed again of what is given repeatedly": 45},
    "replaced": {"replaced and heard of again": 90, "receive landed": 20},
    "frail": {
        "landed behind its predecessor's clock": 2,
        "crashed and came back": 40,
        "crashed for ever": 9,
        "receive quarantined and given back": 9,
    },
    "revoked": {"slab renewed": 7, "write refused": 3, "receive landed": 10},
}


@pytest.fixture(autouse=True)
def silent():
    """What movers say of faults is not read here, and takes longer to format than the faults to happen."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.searched
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


@pytest.mark.parametrize(("seed", "profile"), family([(9, "hostile"), (3, "default")], few=[(9, "hostile")]))
def test_a_seed_replays_the_same_schedule_in_another_process(seed: int, profile: str):
    """Strings hash otherwise there, so no order of a set decides."""
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
        _run([CAUGHT_AT.get(mutation.__name__, 0), *range(MUTANT_SCHEDULES)], profile)


@pytest.mark.parametrize("profile", ["swarm", "frail", "replaced", "reordered"])
def test_when_faults_stop_a_request_lands_whatever_was(profile: str):
    for seed in range(SCHEDULES // 100):
        World(seed, profile).recover()


def _run(seeds: Iterable[int], profile: str) -> Counter[str]:
    """In how many schedules each situation was reached."""
    reached = Counter[str]()
    for seed in seeds:
        reached.update(what for what, count in simulate(seed, profile).seen.items() if count)
    return reached
