"""A HostBoot says on which boot of its host a process runs: objects of another boot are believed only if synced."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: The boot of nobody: its objects are believed once they are checked.
NO_BOOT = b""


@dataclass(frozen=True, slots=True)
class HostBoot:
    """A boot of a host: decides whether objects that were not synced are believed.

    `boot`: 16 bytes that are equal for two processes if they share a kernel, and so its page cache.

    A process that is killed leaves its writes in the page cache, whole; a host that loses power may keep a header and
    lose the payload. So objects of the same boot are believed, others only if they were synced, or once verified.
    """

    boot: bytes

    @staticmethod
    def now() -> int:
        """Seconds since 1970, as stamps count them."""
        return int(time.time())


@cache
def this_boot() -> HostBoot:
    """Returns the boot of this process's host, read once from `boot_id` of Linux."""
    return HostBoot(UUID(_BOOT_ID.read_text().strip()).bytes)
