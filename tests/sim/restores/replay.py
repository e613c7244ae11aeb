"""`python -m tests.sim.restores.replay SEED [PROFILE]` prints one schedule round by round, and what broke."""

import sys

from tests.sim.replaying import replayed
from tests.sim.restores.scenario import PROFILES
from tests.sim.restores.world import Broken, simulate

if __name__ == "__main__":
    sys.exit(replayed(__doc__, PROFILES, simulate, Broken, "every invariant held"))
