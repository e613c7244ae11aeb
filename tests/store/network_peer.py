"""A process of another machine, by its boot id, that puts, gets, flushes, evicts and collects until it is killed.

Each line to stdout is an answer of the store: what was read wrong, what raised, what a disk is blamed for.
"""

from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.store import Got, HostBoot, PagePart, PageStore, Policy

PAGES = 60
#: What a read may be answered by where others evict.
FAIR = (Got.READ, Got.ABSENT, Got.EVICTED)


def main(folder: Path, host: int, seed: int) -> None:
    """Work for ever."""
    chance = random.Random(seed)
    policy = Policy(segment_bytes=chance.choice([64 << 10, 512 << 10]))
    store = PageStore.open(folder, SPACE, policy, machine=HostBoot(bytes([host]) * 16))
    ranks = [Rank(store, PagePart.whole(component, PAGE), 8) for component in (GQA, MLA)]
    pages = pages_of(PAGES)
    while True:
        some, rank, what = chance.sample(pages, 6), chance.choice(ranks), chance.random()
        if what < 0.4:
            rank.put(some)
        elif what < 0.8:
            rank.exists(some)
            for answer in rank.get(some):
                if answer.outcome not in FAIR:
                    sys.stdout.write(f"answer {answer.outcome} {answer.reason}\n")
                    sys.stdout.flush()
        elif what < 0.9:
            store.flush()
        elif what < 0.95:
            store.evict(chance.randrange(1 << 18))
        else:
            store.collect()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except Exception:
        sys.stdout.write("raised " + traceback.format_exc().replace("\n", " | ") + "\n")
        sys.stdout.flush()
