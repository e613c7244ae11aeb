"""`kvmover keeper` serves a socket until it is told to end: it has no engine, and no reason to die with one."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event

from kvmover.store.keeper.server import KeeperServer


def serve_keeper(path: Path, capacity_bytes: int, begun: Callable[[], None] = lambda: None) -> None:
    """Own so much memory, and serve it at `path`, until SIGINT or SIGTERM. Raises StoreError.

    `begun` is called once engines can connect. All that was kept is gone when this returns.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a slab is a descriptor
    server, is_over = KeeperServer(path, capacity_bytes), Event()

    def end(*_: object) -> None:
        """Raises nothing, wherever it comes between."""
        is_over.set()
        server.wake()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    begun()
    try:
        server.serve(is_over.is_set)
    finally:
        server.close()
