"""Transfers move requests: a handshake, two pure state machines, an arena, and the Mover that an engine holds.

An engine polls its Mover, or a Progress polls it in a thread, for a SharedMover, an AsyncMover or both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public

if TYPE_CHECKING:
    from kvmover.transfer.config import Integrity, MoverConfig, Pace
    from kvmover.transfer.mover import Mover
    from kvmover.transfer.peers.processes import PeerProcess
    from kvmover.transfer.protocol.auth import Key, Keys
    from kvmover.transfer.protocol.content import Content, IdentityCheck
    from kvmover.transfer.protocol.handshake import Model, Place
    from kvmover.transfer.result import Cause, Ending, Gate, Result, Service, Transfer
    from kvmover.transfer.threads.progress import Progress
    from kvmover.transfer.threads.wrappers import AsyncMover, AsyncTransfer, SharedMover

_HOME = {
    "AsyncMover": "threads.wrappers",
    "AsyncTransfer": "threads.wrappers",
    "Cause": "result",
    "Content": "protocol.content",
    "Ending": "result",
    "Gate": "result",
    "IdentityCheck": "protocol.content",
    "Integrity": "config",
    "Key": "protocol.auth",
    "Keys": "protocol.auth",
    "Model": "protocol.handshake",
    "Mover": "mover",
    "MoverConfig": "config",
    "Pace": "config",
    "PeerProcess": "peers.processes",
    "Place": "protocol.handshake",
    "Progress": "threads.progress",
    "Result": "result",
    "Service": "result",
    "SharedMover": "threads.wrappers",
    "Transfer": "result",
}

__all__ = [
    "AsyncMover",
    "AsyncTransfer",
    "Cause",
    "Content",
    "Ending",
    "Gate",
    "IdentityCheck",
    "Integrity",
    "Key",
    "Keys",
    "Model",
    "Mover",
    "MoverConfig",
    "Pace",
    "PeerProcess",
    "Place",
    "Progress",
    "Result",
    "Service",
    "SharedMover",
    "Transfer",
]


def __getattr__(name: str) -> object:
    return public(__name__, _HOME, name)
