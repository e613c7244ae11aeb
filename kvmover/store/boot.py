"""A HostBoot identifies the boot of a process's host: objects of another boot are trusted only if synced."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: A boot that equals no host's: its objects are trusted only once verified.
NO_BOOT = b""


@dataclass(frozen=True, slots=True)
class HostBoot:
    """A boot of a host, which decides if unsynced objects are trusted.

    `boot`: 16 bytes, equal for two processes that share a kernel and so its page cache.

    A killed process leaves its writes whole in the page cache; a host that loses power may keep a header and lose the
    payload. So objects of the same boot are trusted, others only once synced or verified.
    """

    boot: bytes

    @staticmethod
    def now() -> int:
        """Returns the time in whole seconds since 1970, the unit of stamps."""
        return int(time.time())


@cache
def this_boot() -> HostBoot:
    """Returns the boot of this process's host, read once from Linux's `boot_id`."""
    return HostBoot(UUID(_BOOT_ID.read_text().strip()).bytes)
