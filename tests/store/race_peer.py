"""One of several processes on one store: a writer for a number of rounds, a reader or a cleaner until it is told."""

from __future__ import annotations

import json
import random
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store_rank import GQA, SPACE, Rank, pages_of

from kvmover.layout import Fleet
from kvmover.store import Got, PageStore, Policy, Put

PAGES = 40
POLICY = Policy(quota_bytes=30 * 16384, segment_bytes=5 * 16384)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def until_told() -> Iterator[int]:
    """Rounds until the parent says a word."""
    turn = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        yield turn
        turn += 1


def main(role: str, root: Path, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    pages = pages_of(PAGES)
    counts: dict[str, Any] = dict.fromkeys((*Put, *Got, "deleted"), 0)
    with PageStore.open(root, SPACE, POLICY) as store:
        # Writers are two ranks of TP2; readers want whole pages, or quarters.
        fleet = {"writer": Fleet(tp=2), "reader": Fleet(tp=(1, 4)[seed % 2])}.get(role, Fleet())
        ranks = [Rank.of(store, GQA, fleet, rank, 12) for rank in range(fleet.size)]
        say("ready")
        sys.stdin.readline()
        for turn in range(rounds) if role == "writer" else until_told():
            some = chance.sample(pages, 12)
            if role == "cleaner":
                counts["deleted"] += store.evict(chance.randrange(5 * 16384)) if turn % 50 else store.clear()
                store.collect()
                continue
            for rank in ranks:
                answers = rank.put(some) if role == "writer" else rank.get(some)
                for answer in answers:
                    counts[answer.outcome] += 1
            if role == "reader" and turn % 10 == 0:
                store.collect()
        counts["reasons"] = dict(store.counters.failed)
        counts["poisoned"] = dict(store.counters.poisoned)
    say(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
