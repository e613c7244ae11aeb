"""A transport is the wire: one interface, NIXL behind it, a loopback for tests. Loads neither nixl nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public
from kvmover.transport.base import (
    Completed,
    Descriptors,
    Event,
    Failed,
    Memory,
    MemoryKind,
    Note,
    Revocation,
    Timing,
    Transport,
    memory_of,
    union,
    whole,
)

if TYPE_CHECKING:
    from kvmover.transport.checks import MAX_NOTE_BYTES
    from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport
    from kvmover.transport.nics import NET_DEVICES, read_topology
    from kvmover.transport.nixl import NixlTransport
    from kvmover.transport.nixl_agent import OLDEST_NIXL, NixlAgent, nixl_release, nixl_version, start_agent

_LAZY = {
    "MAX_NOTE_BYTES": "checks",
    "NixlAgent": "nixl_agent",
    "LoopbackNetwork": "loopback",
    "LoopbackTransport": "loopback",
    "NixlTransport": "nixl",
    "OLDEST_NIXL": "nixl_agent",
    "nixl_release": "nixl_agent",
    "NET_DEVICES": "nics",
    "read_topology": "nics",
    "nixl_version": "nixl_agent",
    "start_agent": "nixl_agent",
}

__all__ = [
    "MAX_NOTE_BYTES",
    "NET_DEVICES",
    "OLDEST_NIXL",
    "Completed",
    "Descriptors",
    "Event",
    "Failed",
    "LoopbackNetwork",
    "LoopbackTransport",
    "Memory",
    "MemoryKind",
    "NixlAgent",
    "NixlTransport",
    "Note",
    "Revocation",
    "Timing",
    "Transport",
    "memory_of",
    "nixl_release",
    "nixl_version",
    "read_topology",
    "start_agent",
    "union",
    "whole",
]


def __getattr__(name: str) -> object:
    return public(__name__, _LAZY, name)
