"""What every program that replays a schedule does: read its seed and profile, print it step by step, and what broke."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any


def replayed(
    usage: str | None, profiles: Iterable[str], simulate: Callable[..., Any], broken: type[BaseException], held: str
) -> int:
    """The exit status: 1 where `simulate(seed, profile, trace=True)` raises `broken`. `held`: what holds otherwise."""
    parser = argparse.ArgumentParser(description=usage)
    parser.add_argument("seed", type=int)
    parser.add_argument("profile", nargs="?", choices=sorted(profiles), default="default")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    try:
        world = simulate(chosen.seed, chosen.profile, trace=True)
    except broken as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join([*(world.network.trace or []), held, ""]))
    return 0
