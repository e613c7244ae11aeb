"""Where page stores are: a directory, as a Path, or as text who keeps them. Loads nothing of any."""

from __future__ import annotations

from pathlib import Path

#: How the locations of object stores begin, of pools of memory, and that of a keeper's socket.
SCHEMES = ("s3://", "gs://", "az://")
POOL = "mooncake://"
KEEPER = "keeper://"


def is_bucket(text: str) -> bool:
    """Whether a location names an object store."""
    return text.startswith(SCHEMES)


def is_service(text: str) -> bool:
    """Whether a location names somebody who keeps pages: an object store, a pool of memory or a keeper."""
    return text.startswith((*SCHEMES, POOL, KEEPER))


def store_location(text: str) -> Path | str:
    """What a person's words mean. `~` is a home directory.

    >>> store_location("s3://bucket/prefix"), store_location("mooncake://host:50051"), store_location("/srv/kv")
    ('s3://bucket/prefix', 'mooncake://host:50051', PosixPath('/srv/kv'))
    """
    return text if is_service(text) else Path(text).expanduser()
