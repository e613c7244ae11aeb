"""Where page stores are: a directory, as a Path, or as text an object store or a keeper. Loads nothing of either."""

from __future__ import annotations

from pathlib import Path

#: How the locations of object stores begin, and that of a keeper's socket.
SCHEMES = ("s3://", "gs://", "az://")
KEEPER = "keeper://"


def is_bucket(text: str) -> bool:
    """Whether a location names an object store, and not a directory."""
    return text.startswith(SCHEMES)


def is_service(text: str) -> bool:
    """Whether a location names somebody who keeps pages, an object store or a keeper, and not a directory."""
    return text.startswith((*SCHEMES, KEEPER))


def store_location(text: str) -> Path | str:
    """What a person's words mean. `~` is a home directory.

    >>> store_location("s3://bucket/prefix"), store_location("/srv/kv")
    ('s3://bucket/prefix', PosixPath('/srv/kv'))
    """
    return text if is_service(text) else Path(text).expanduser()
