"""A keeper's words to the service manager that started it: sd_notify(3) of systemd, a datagram to `NOTIFY_SOCKET`."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(*words: str) -> bool:
    """Send assignments such as `READY=1`. Returns False without a manager that listens; it never ends the keeper."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as near:
            near.sendto("\n".join(words).encode(), address)
    except OSError as error:
        log.warning("the service manager was not told %s: %s", ", ".join(words), error.strerror)
        return False
    return True


def watchdog_s(pid: int) -> float | None:
    """Returns how often to say `WATCHDOG=1`, s, a quarter of the manager's patience; None if it has no watchdog."""
    meant_for, patience_us = os.environ.get("WATCHDOG_PID", str(pid)), os.environ.get("WATCHDOG_USEC", "")
    if meant_for != str(pid) or not patience_us.isdigit() or not int(patience_us):
        return None
    return int(patience_us) / 4e6
