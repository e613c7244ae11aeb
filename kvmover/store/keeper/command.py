"""`kvmover keeper` serves a socket until it is told to end: it has no engine, and no reason to die with one."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from kvmover.store.keeper.server import KeeperServer


def serve_keeper(path: Path, capacity_bytes: int) -> None:
    """Own so much memory, and serve it at `path`, until SIGINT or SIGTERM. Raises StoreError.

    All that was kept is gone when this returns.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a slab is a descriptor
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = KeeperServer(path, capacity_bytes)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
