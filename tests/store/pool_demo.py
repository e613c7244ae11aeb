"""The demo's storage scenario over a pool of memory, which `make demo` runs: TP4 writes, TP2 and another TP4 read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests.mooncake_home import find_mooncake
from tests.store.pool_processes import PoolProcesses

#: What the scenario's conversation takes at most.
_GIVEN_BYTES = 256 << 20


def demo_at(location: str, *words: str) -> Sequence[str]:
    """The command that plays it at a location."""
    return sys.executable, "-m", "kvmover", "demo", "--scenario", "storage", "--store", location, *words


def main() -> int:
    """What ranks and Mooncake say is shown where it went wrong."""
    find_mooncake()
    processes = PoolProcesses()
    try:
        processes.donate(_GIVEN_BYTES)
        sys.stdout.write(f"\nAnd over a pool of memory, {processes.location}:\n")
        sys.stdout.flush()
        ran = subprocess.run(demo_at(processes.location), stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(ran.stderr if ran.returncode else "")
        return ran.returncode
    finally:
        processes.close()


if __name__ == "__main__":
    sys.exit(main())
