"""`python -m tests.sim.migrations.replay SEED [PROFILE]` prints one schedule message by message, and what broke."""

from __future__ import annotations

import argparse
import sys

from tests.sim.migrations.world import PROFILES, MigrationBroken, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("profile", nargs="?", choices=sorted(PROFILES), default="default")
    chosen = parser.parse_args()
    try:
        world = simulate(chosen.seed, chosen.profile, trace=True)
    except MigrationBroken as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join([*(world.network.trace or []), "one side has the request", ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
