"""`python -m tests.sim.restores.replay SEED [PROFILE]` prints one schedule round by round, and what broke."""

from __future__ import annotations

import argparse
import sys

from tests.sim.restores.scenario import PROFILES
from tests.sim.restores.world import Broken, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("profile", nargs="?", choices=sorted(PROFILES), default="default")
    chosen = parser.parse_args()
    try:
        world = simulate(chosen.seed, chosen.profile, trace=True)
    except Broken as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join([*(world.network.trace or []), "every invariant held", ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
