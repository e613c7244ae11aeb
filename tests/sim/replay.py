"""`python -m tests.sim.replay SEED [PROFILE]` prints one schedule step by step, and what broke."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.sim.scenario import PROFILES
from tests.sim.world import Broken, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("profile", nargs="?", choices=sorted({*PROFILES, "swarm"}), default="default")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    try:
        world = simulate(chosen.seed, chosen.profile, trace=True)
    except Broken as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join([*(world.network.trace or []), "every invariant held", ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
