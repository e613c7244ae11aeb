"""The tiers raise these errors."""

from __future__ import annotations

from kvmover.errors import KvmoverError


class TierError(KvmoverError, ValueError):
    """Pools, policies or calls that make no sense together: the message names the values. Nothing was moved."""


class ConsensusBroken(KvmoverError):
    """Ranks that must act alike did not: another one has other operations under way, or other page ids in them."""
