"""A Machine says which life of which computer a process is in: the question behind every object that was not synced."""

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
class Machine:
    """Which life of which machine this is: the question behind every object that was not synced.

    `boot`: 16 bytes that are equal for two processes if they share a kernel, and so its page cache.

    A process that is killed leaves what it wrote in the page cache, whole; a machine that loses power may keep a header
    and lose the payload. So objects of the same boot are believed, others only if they were synced, or once verified.
    """

    boot: bytes

    @staticmethod
    def now() -> int:
        """Seconds since 1970, as stamps count them."""
        return int(time.time())


@cache
def this_machine() -> Machine:
    """The machine that this process runs on, in this life: read once from `boot_id` of Linux."""
    return Machine(UUID(_BOOT_ID.read_text().strip()).bytes)
