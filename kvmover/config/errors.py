"""A configuration that is refused raises this error."""

from kvmover.errors import KvmoverError


class ConfigError(KvmoverError, ValueError):
    """A key that does not exist, or a value that cannot be: the message names both, and where they were given."""
