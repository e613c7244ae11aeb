"""The errors that kvmover raises on purpose, so that a caller can catch by cause.

Bad input is refused, with the values in the message, before anything is sent or written.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.util import find_spec
from typing import ClassVar


class KvmoverError(Exception):
    """The base of all errors raised by kvmover."""


class LayoutError(KvmoverError, ValueError):
    """A layout, span, component, fleet or pool that cannot exist: the message names the value."""


class PlanError(KvmoverError, ValueError):
    """Two fleets or pools without a plan between them, or a page table that does not fit the plan."""


class TransportError(KvmoverError):
    """The base of all errors of a transport."""


class TransportUnavailable(TransportError):
    """A backend that cannot run on this machine: the message names the missing library or plugin."""


class DescriptorError(TransportError, ValueError):
    """Descriptors refused before anything was posted: empty, unequal, zero-length or outside registered memory."""


class PeerUnknown(TransportError):
    """A peer that was never connected, or was disconnected since."""


class PeerLost(TransportError):
    """A peer that died, restarted or became unreachable. Its old name is never used again."""


class DeadlineExceeded(TransportError):
    """A wait that reached its deadline. The operation may still be touching memory until quiescence is proved."""


class LeaseOver(TransportError):
    """A write that was not posted, because its permission had ended."""


class RefusedFor(StrEnum):
    """A reason for turning away a peer or its request, as a word for metrics; a sentence stands beside it."""

    IDENTITY = "identity"
    WEIGHTS = "weights"
    HANDSHAKE = "handshake"
    SEAT = "seat"
    CAPACITY = "capacity"


class PeerRefused(KvmoverError):
    """A handshake that ended because the two sides do not hold the same model: the message gives both values."""

    refused_for: ClassVar[RefusedFor] = RefusedFor.HANDSHAKE


class OtherWeights(PeerRefused):
    """A card of an engine that serves other or unnamed weights: the message has both sides'."""

    refused_for = RefusedFor.WEIGHTS


class PeerReplaced(PeerRefused):
    """A card of a process whose place a newer one has or just had: the message has both generations."""

    refused_for = RefusedFor.SEAT


class PeerAhead(PeerRefused):
    """A card of a process whose generation lies in the future: the message says by how much."""

    refused_for = RefusedFor.SEAT


class ProtocolError(KvmoverError):
    """A control message that is malformed, too large, or of a version this side does not speak."""


class TransferFailed(KvmoverError):
    """A request that did not land: the message is the reason, the same one that the peer was told."""


class StoreError(KvmoverError):
    """A page store that cannot be opened, or an invalid call to it. Failures of single pages are results instead."""


class TierError(KvmoverError, ValueError):
    """Pools, policies or calls that contradict each other: the message names the values. No page was moved."""


class HintError(KvmoverError, ValueError):
    """A hint that cannot be met: the message names the value. No state was changed."""


class ConsensusBroken(KvmoverError):
    """Ranks that must act alike did not: one has other operations under way, or other page ids in them."""


class PrefixError(KvmoverError, ValueError):
    """Arguments that the tree refuses. Every page given is still the caller's."""


class StaleHandle(PrefixError):
    """A node, handle or operation that is gone or never existed. Ids are never reused, so it cannot alias another."""


class InvariantBroken(KvmoverError, AssertionError):
    """A `check` found an impossible state: the message has the invariant's sentence and the place."""


class MissingLibrary(KvmoverError, ImportError):
    """A library that is not installed: the message names its user, and says how to install it."""


def how_to_install(extra: str) -> str:
    """Returns how to install an extra of kvmover, which is on no index: `pip install '.[s3]' in a checkout ...`."""
    return f"pip install '.[{extra}]' in a checkout of kvmover, or 'WHEEL[{extra}]' with the path of its wheel"


def need(module: str, what: str, extra: str) -> None:
    """Raise MissingLibrary if `module` cannot be imported: `the demo needs torch, which is not installed: ...`.

    `extra`: the extra of kvmover that installs it, named in the message.
    """
    if module not in sys.modules and find_spec(module) is None:
        name = module.replace("_", "-")
        raise MissingLibrary(f"{what} needs {name}, which is not installed: {how_to_install(extra)}")
