"""Where page stores are: a directory, as a Path, or a prefix of an object store, as text. Loads nothing of either."""

from __future__ import annotations

from pathlib import Path

#: How the locations of object stores begin.
SCHEMES = ("s3://", "gs://", "az://")


def is_bucket(text: str) -> bool:
    """Whether a location names an object store, and not a directory."""
    return text.startswith(SCHEMES)


def store_location(text: str) -> Path | str:
    """What a person's words mean. `~` is a home directory.

    >>> store_location("s3://bucket/prefix"), store_location("/srv/kv")
    ('s3://bucket/prefix', PosixPath('/srv/kv'))
    """
    return text if is_bucket(text) else Path(text).expanduser()
