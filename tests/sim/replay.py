"""`python -m tests.sim.replay SEED [PROFILE]` prints one schedule step by step, and what broke."""

import sys

from tests.sim.replaying import replayed
from tests.sim.scenario import PROFILES
from tests.sim.world import Broken, simulate

if __name__ == "__main__":
    sys.exit(replayed(__doc__, {*PROFILES, "swarm"}, simulate, Broken, "every invariant held"))
