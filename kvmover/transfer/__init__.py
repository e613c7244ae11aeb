"""Moving requests: the handshake, two pure state machines, an arena, and the Mover that an engine holds.

A Mover is polled by its engine; a Progress polls it in a thread, for a SharedMover, an AsyncMover or both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmover.transfer.aio import AsyncMover, AsyncTransfer
    from kvmover.transfer.handshake import Model, Place
    from kvmover.transfer.mover import Mover
    from kvmover.transfer.pace import Pace
    from kvmover.transfer.progress import Progress
    from kvmover.transfer.result import Cause, Ending, Gate, Integrity, MoverConfig, Result, Transfer
    from kvmover.transfer.seal import Key, Keys
    from kvmover.transfer.shared import SharedMover

_HOME = {
    "AsyncMover": "aio",
    "AsyncTransfer": "aio",
    "Cause": "result",
    "Ending": "result",
    "Gate": "result",
    "Integrity": "result",
    "Key": "seal",
    "Keys": "seal",
    "Model": "handshake",
    "Mover": "mover",
    "MoverConfig": "result",
    "Pace": "pace",
    "Place": "handshake",
    "Progress": "progress",
    "Result": "result",
    "SharedMover": "shared",
    "Transfer": "result",
}

__all__ = [
    "AsyncMover",
    "AsyncTransfer",
    "Cause",
    "Ending",
    "Gate",
    "Integrity",
    "Key",
    "Keys",
    "Model",
    "Mover",
    "MoverConfig",
    "Pace",
    "Place",
    "Progress",
    "Result",
    "SharedMover",
    "Transfer",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
