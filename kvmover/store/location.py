"""Where page stores are: a directory, as a Path, or a prefix of an object store or a pool of memory, as text. Loads
nothing of any.
"""

from __future__ import annotations

from pathlib import Path

#: How the locations of object stores begin, and of pools of memory.
SCHEMES = ("s3://", "gs://", "az://")
POOL = "mooncake://"


def is_bucket(text: str) -> bool:
    """Whether a location names an object store."""
    return text.startswith(SCHEMES)


def is_pool(text: str) -> bool:
    """Whether a location names a pool of memory."""
    return text.startswith(POOL)


def store_location(text: str) -> Path | str:
    """What a person's words mean. `~` is a home directory.

    >>> store_location("s3://bucket/prefix"), store_location("mooncake://host:50051"), store_location("/srv/kv")
    ('s3://bucket/prefix', 'mooncake://host:50051', PosixPath('/srv/kv'))
    """
    return text if is_bucket(text) or is_pool(text) else Path(text).expanduser()
