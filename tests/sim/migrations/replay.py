"""`python -m tests.sim.migrations.replay SEED [PROFILE]` prints one schedule message by message, and what broke."""

import sys

from tests.sim.migrations.world import PROFILES, MigrationBroken, simulate
from tests.sim.replaying import replayed

if __name__ == "__main__":
    sys.exit(replayed(__doc__, PROFILES, simulate, MigrationBroken, "one side has the request"))
