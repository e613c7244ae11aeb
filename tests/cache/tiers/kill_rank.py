"""Fleets of one rank that serve prompts over one store until they are killed: forks of a process that has all imported.

For each line `seed root` on stdin two forks serve at once. Each kills itself at a system call that changes files:
before it, after it or half way through. Every page that it is given on the way is looked at.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rig import EAGER, Rank

from kvmover.cache.tiers import ControllerConfig
from kvmover.store import Policy

#: Prompts that share beginnings, so that what one life has stored is what another one wants.
TEXTS = [[0] * 33, [0] * 12 + [1] * 21, [0] * 12 + [1] * 8 + [0] * 13, [1] * 33]
#: Fewer pages than the prompts have, so that they are evicted from storage too.
KEEPS = Policy(quota_bytes=14 * 8192, segment_bytes=4 * 8192)
SETUP = ControllerConfig(EAGER)


def life(root: Path, seed: int, arm: Callable[[random.Random, int], None]) -> None:
    """Serve until the kill."""
    chance = random.Random(seed)
    arm(chance, int(chance.expovariate(1 / 30)))
    rank = Rank(root, setup=SETUP, keeps=KEEPS)
    for turn in range(1000):
        rank.serve(chance.choice(TEXTS)[: chance.randint(5, 33)])
        if chance.random() < 0.7:
            rank.controller.wait()
            rank.conserved()
            rank.forget()
            rank.poison_free()
        if turn % 5 == 4:
            rank.controller.wait()
            rank.store.collect()


def forked(root: Path, seed: int, arm: Callable[[random.Random, int], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        life(root, seed, arm)
    except BaseException as error:  # a failure of the life, not the kill that it is there for
        os.write(2, f"seed {seed}: {error!r}\n".encode())
    os._exit(1)


def serve() -> None:
    """Answer each line with the signals that ended its two lives."""
    from crash_load import arm  # pyright: ignore[reportMissingImports]  # of the store's tests, which only this process has on its path

    for line in sys.stdin:
        seed, root = line.rstrip("\n").split(" ", 1)
        twins = [forked(Path(root), 2 * int(seed) + twin, arm) for twin in range(2)]
        ends = [os.waitpid(child, 0)[1] for child in twins]
        sys.stdout.write(" ".join(str(os.WTERMSIG(end) if os.WIFSIGNALED(end) else 0) for end in ends) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
