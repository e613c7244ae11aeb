"""The location of a page store: a directory as a Path, or a service's URL as text. Loads no engine."""

from __future__ import annotations

from pathlib import Path

from kvmover.errors import StoreError

#: Prefixes of locations: object stores, memory pools, and a keeper's socket.
SCHEMES = ("s3://", "gs://", "az://")
POOL = "mooncake://"
KEEPER = "keeper://"
SERVICES = (*SCHEMES, POOL, KEEPER)


def is_bucket(text: str) -> bool:
    """Returns True if a location names an object store."""
    return text.startswith(SCHEMES)


def is_service(text: str) -> bool:
    """Returns True if a location names a service: an object store, a memory pool or a keeper."""
    return text.startswith(SERVICES)


def is_keeper(text: str) -> bool:
    """Returns True if a location names a keeper's socket."""
    return text.startswith(KEEPER)


def store_location(text: str) -> Path | str:
    """Returns the parsed location, with `~` expanded in paths. Raises StoreError for an unknown service.

    >>> store_location("s3://bucket/prefix"), store_location("mooncake://host:50051"), store_location("/srv/kv")
    ('s3://bucket/prefix', 'mooncake://host:50051', PosixPath('/srv/kv'))
    """
    if "://" in text and not is_service(text):
        raise StoreError(f"no store is at {text!r}: a location is a path, or begins with {', '.join(SERVICES)}")
    return text if is_service(text) else Path(text).expanduser()
