"""kvmover raises these errors on purpose, so that a caller can catch by cause.

Bad input is refused with the values in the message before anything is sent or written.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.util import find_spec
from typing import ClassVar


class KvmoverError(Exception):
    """Base of all errors raised by kvmover."""


class LayoutError(KvmoverError, ValueError):
    """A layout, span, component, fleet or pool that cannot exist: the message names the value."""


class PlanError(KvmoverError, ValueError):
    """Two fleets or pools between which nothing can be planned, or a page table that does not fit the plan."""


class TransportError(KvmoverError):
    """Base of what the wire can do to a caller."""


class TransportUnavailable(TransportError):
    """A backend that cannot run on this machine: the message names the library or plugin it misses."""


class DescriptorError(TransportError, ValueError):
    """Descriptors refused before anything was posted: empty, unequal, zero-length or outside registered memory."""


class PeerUnknown(TransportError):
    """A peer that was never connected, or was disconnected since."""


class PeerLost(TransportError):
    """A peer that died, restarted or became unreachable. Its old name is never used again."""


class DeadlineExceeded(TransportError):
    """A wait that reached its deadline. The operation may still be touching memory until quiescence is proved."""


class LeaseOver(TransportError):
    """A write that was not posted, because the permission for it ended before."""


class RefusedFor(StrEnum):
    """A word for why a peer, or a request of one, was turned away, in metrics; the sentence beside it says it whole."""

    IDENTITY = "identity"
    WEIGHTS = "weights"
    HANDSHAKE = "handshake"
    SEAT = "seat"
    CAPACITY = "capacity"


class PeerRefused(KvmoverError):
    """A handshake that ended because the two sides do not hold the same model: the message gives both values."""

    refused_for: ClassVar[RefusedFor] = RefusedFor.HANDSHAKE


class OtherWeights(PeerRefused):
    """A card of an engine that serves other weights, or does not say which: the message has both sides'."""

    refused_for = RefusedFor.WEIGHTS


class PeerReplaced(PeerRefused):
    """A card of a process whose place a newer one has, or had until short ago: the message has both generations."""

    refused_for = RefusedFor.SEAT


class PeerAhead(PeerRefused):
    """A card of a process whose generation is of a time that has yet to come: the message says how far it is."""

    refused_for = RefusedFor.SEAT


class ProtocolError(KvmoverError):
    """A control message that is malformed, too large, or of a version this side does not speak."""


class TransferFailed(KvmoverError):
    """A request that did not land: the message is the reason, the same one that the peer was told."""


class StoreError(KvmoverError):
    """A page store that cannot be opened, or a call to it that makes no sense. What befalls a page is a result."""


class TierError(KvmoverError, ValueError):
    """Pools, policies or calls that make no sense together: the message names the values. Nothing was moved."""


class HintError(KvmoverError, ValueError):
    """A hint that says nothing that could be met: the message names the value. Nothing was changed."""


class ConsensusBroken(KvmoverError):
    """Ranks that must act alike did not: another one has other operations under way, or other page ids in them."""


class PrefixError(KvmoverError, ValueError):
    """Arguments that the tree cannot take. No page changed hands: those given are still the caller's."""


class StaleHandle(PrefixError):
    """A node, handle or operation that is gone, or never was. Ids are never used again, so it aliases no other."""


class InvariantBroken(KvmoverError, AssertionError):
    """A `check` found state that cannot be: the message has the invariant's sentence and the place."""


class MissingLibrary(KvmoverError, ImportError):
    """A library that is not installed: the message says what needs it, and how to install it."""


def how_to_install(extra: str) -> str:
    """Return how to install an extra of kvmover, which no index has: `pip install '.[s3]' in a checkout ...`."""
    return f"pip install '.[{extra}]' in a checkout of kvmover, or 'WHEEL[{extra}]' with the path of its wheel"


def need(module: str, what: str, extra: str) -> None:
    """Raise MissingLibrary where `module` cannot be imported: `the demo needs torch, which is not installed: ...`.

    `extra`: the extra of kvmover that brings it; the message says how to install that.
    """
    if module not in sys.modules and find_spec(module) is None:
        name = module.replace("_", "-")
        raise MissingLibrary(f"{what} needs {name}, which is not installed: {how_to_install(extra)}")
