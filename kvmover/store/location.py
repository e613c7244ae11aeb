"""Where page stores are: a directory, as a Path, or as text who keeps them. Loads nothing of any."""

from __future__ import annotations

from pathlib import Path

from kvmover.errors import StoreError

#: How the locations of object stores begin, of pools of memory, and that of a keeper's socket.
SCHEMES = ("s3://", "gs://", "az://")
POOL = "mooncake://"
KEEPER = "keeper://"
SERVICES = (*SCHEMES, POOL, KEEPER)


def is_bucket(text: str) -> bool:
    """Whether a location names an object store."""
    return text.startswith(SCHEMES)


def is_service(text: str) -> bool:
    """Whether a location names somebody who keeps pages: an object store, a pool of memory or a keeper."""
    return text.startswith(SERVICES)


def is_keeper(text: str) -> bool:
    """Returns whether a location names a keeper's socket."""
    return text.startswith(KEEPER)


def store_location(text: str) -> Path | str:
    """Returns the location that a person means. `~` is a home directory. Raises StoreError for an unknown service.

    >>> store_location("s3://bucket/prefix"), store_location("mooncake://host:50051"), store_location("/srv/kv")
    ('s3://bucket/prefix', 'mooncake://host:50051', PosixPath('/srv/kv'))
    """
    if "://" in text and not is_service(text):
        raise StoreError(f"no store is at {text!r}: a location is a path, or begins with {', '.join(SERVICES)}")
    return text if is_service(text) else Path(text).expanduser()
