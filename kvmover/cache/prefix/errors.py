"""The prefix tree raises these errors, one a cause."""

from kvmover.errors import KvmoverError


class PrefixError(KvmoverError, ValueError):
    """Arguments that the tree cannot take. No page changed hands: those given are still the caller's."""


class StaleHandle(PrefixError):
    """A node, handle or operation that is gone, or never was. Ids are never used again, so it aliases no other."""


class InvariantBroken(KvmoverError, AssertionError):
    """A `check` found state that cannot be: the message has the invariant's sentence and the place."""
