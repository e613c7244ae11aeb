"""Two network namespaces joined by a cable that can be pulled: what it takes is root and `ip`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC_SLAVE, _MNT_DETACH = 0x4000 | 0x80000, 2


class NotAllowed(Exception):
    """This machine gives us no network namespaces: why."""


@dataclass(slots=True)
class Cable:
    """Namespaces `near` and `far`, one interface each. `cut` pulls the far end, `heal` plugs it in again."""

    near: str = field(default_factory=lambda: f"kv{os.getpid()}n")
    far: str = field(default_factory=lambda: f"kv{os.getpid()}f")

    def lay(self) -> None:
        """Raises NotAllowed where the system refuses."""
        try:
            for name in (self.near, self.far):
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                self.near,
                "netns",
                self.near,
                "type",
                "veth",
                "peer",
                "name",
                self.far,
                "netns",
                self.far,
            )
            for name, address in ((self.near, "10.55.77.1/24"), (self.far, "10.55.77.2/24")):
                _ip("-n", name, "addr", "add", address, "dev", name)
                _ip("-n", name, "link", "set", name, "up")
                _ip("-n", name, "link", "set", "lo", "up")
            for name in (self.near, self.far):
                _await_carrier(name)
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            raise NotAllowed(f"{error} {getattr(error, 'stderr', '')}") from error

    def cut(self) -> None:
        _ip("-n", self.far, "link", "set", self.far, "down")

    def heal(self) -> None:
        _ip("-n", self.far, "link", "set", self.far, "up")

    def remove(self) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=10).stdout


def _await_carrier(name: str) -> None:
    """An interface without is none to UCX, which looks once, when an agent starts."""
    deadline = time.monotonic() + 5
    while "state UP" not in _ip("-n", name, "link", "show", "dev", name):
        if time.monotonic() > deadline:
            raise OSError(f"the interface {name} does not come up")
        time.sleep(0.01)


def enter(network: str) -> None:
    """Move a process of one thread into a namespace, and show it that one's interfaces: UCX looks for them in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{network}").open() as handle:
        calls = [
            lambda: libc.setns(handle.fileno(), _CLONE_NEWNET),
            lambda: libc.unshare(_CLONE_NEWNS),
            lambda: libc.mount(b"", b"/", None, _MS_REC_SLAVE, None),
            lambda: libc.umount2(b"/sys", _MNT_DETACH),
            lambda: libc.mount(network.encode(), b"/sys", b"sysfs", 0, None),
        ]
        for call in calls:
            if call():
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
