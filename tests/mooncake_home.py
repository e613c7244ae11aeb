"""Where `make mooncake` leaves Mooncake. It is no part of .venv: this process finds it, and every process it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = Path(__file__).parent.parent / ".mooncake"

#: What a test says that is skipped without it.
NEEDED = "needs Mooncake: `make mooncake`"


def find_mooncake() -> None:
    """Behind all other places, here and in PYTHONPATH, which the environments of the engines hear of too."""
    if (HOME / ".ready").exists() and str(HOME) not in sys.path:
        sys.path.append(str(HOME))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HOME))))
