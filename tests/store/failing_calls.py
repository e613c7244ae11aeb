"""Calls of the system that fail as told, for tests of what an error says of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def failing(name: str, code: int, suffix: str = "", times: int = 1 << 30) -> Iterator[list[int]]:
    """`os.<name>` fails so many times: of a path, where that ends with `suffix`. Yields how often it has."""
    real, failed = getattr(os, name), [0]

    def call(*arguments, **options):
        path = "" if not arguments or isinstance(arguments[0], int) else os.fspath(arguments[0])
        if path.endswith(suffix) and failed[0] < times:
            failed[0] += 1
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    setattr(os, name, call)
    try:
        yield failed
    finally:
        setattr(os, name, real)
