"""A fleet in a process of its own, which puts and gets what others race for: `pool_racer.py LOCATION FLEET SEED`."""

from __future__ import annotations

import random
import sys

from store_rank import GQA, SPACE, Rank, pages_of

from kvmover.plan.fleet_text import FleetText
from kvmover.store import PageStore

#: 32 MiB, which is more than is left of the pool of the test.
PAGES = pages_of(1024, "raced for")
ROUNDS, BATCH = 40, 8


def main(location: str, text: str, seed: str) -> None:
    """Every page that is read is compared, with what lies beside it."""
    kept, chance, fleet = 0, random.Random(int(seed)), FleetText.parse(text).fleet
    with PageStore.open(location, SPACE) as store:
        ranks = [Rank.of(store, GQA, fleet, rank) for rank in range(fleet.size)]
        for _ in range(ROUNDS):
            mine, others = (chance.sample(PAGES, BATCH) for _ in range(2))
            for rank in ranks:
                rank.put(mine)
            for rank in ranks:
                kept += sum(answer.ok for answer in rank.get(mine))
                rank.get(others)
        counters = store.counters
    assert not counters.poisoned, counters.poisoned
    asked = ROUNDS * BATCH * fleet.size
    sys.stdout.write(f"{kept} {asked - kept}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
