"""Two network namespaces joined by a cable that can be pulled, or that is slow: what it takes is root and `ip`."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import math
import multiprocessing
import os
import random
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC_SLAVE, _MNT_DETACH = 0x4000 | 0x80000, 2


class NotAllowed(Exception):
    """The reason why this machine gives no network namespaces."""


#: Addresses of the near and the far end.
ADDRESSES = ("10.55.77.1", "10.55.77.2")


@dataclass(slots=True)
class Cable:
    """Namespaces `near` and `far`, one interface each. `cut` pulls the far end, `heal` plugs it in again.

    `bytes_per_s`: each way, by a token bucket.
    """

    near: str = field(default_factory=lambda: f"kv{os.getpid()}n")
    far: str = field(default_factory=lambda: f"kv{os.getpid()}f")
    bytes_per_s: float = math.inf

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
            self._up()
            if self.bytes_per_s < math.inf:
                self._limit()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            raise NotAllowed(f"{error} {getattr(error, 'stderr', '')}") from error

    def _up(self) -> None:
        for name, address in zip((self.near, self.far), ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        for name in (self.near, self.far):
            _await_carrier(name)

    def _limit(self) -> None:
        for name in (self.near, self.far):
            bucket = f"tbf rate {self.bytes_per_s * 8:.0f}bit burst 256kb latency 50ms".split()
            _run("tc", "-n", name, "qdisc", "replace", "dev", name, "root", *bucket)

    def cut(self) -> None:
        _ip("-n", self.far, "link", "set", self.far, "down")

    def heal(self) -> None:
        _ip("-n", self.far, "link", "set", self.far, "up")

    def remove(self) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(slots=True)
class SlowCable(Cable):
    """A cable of a TAP device at each end, whose packets a process delays and loses, for kernels without netem.

    `delay_s`: one way. `loss`: share of the packets. `bytes_per_s`: each way; packets that would wait for longer than
    `_QUEUE_S` are lost too.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    _process: BaseProcess | None = None

    def lay(self) -> None:
        """Raises NotAllowed where the system refuses."""
        try:
            for name in (self.near, self.far):
                _ip("netns", "add", name)
            context = multiprocessing.get_context("spawn")
            ready, theirs = context.Pipe()
            ends = (self.near, self.far)
            self._process = context.Process(
                target=_forward, args=(ends, theirs, self.delay_s, self.loss, self.bytes_per_s), daemon=True
            )
            self._process.start()
            if (wrong := ready.recv()) is not None:
                raise OSError(wrong)
            self._up()
        except (OSError, EOFError, subprocess.CalledProcessError) as error:
            self.remove()
            raise NotAllowed(f"{error} {getattr(error, 'stderr', '')}") from error

    def remove(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        Cable.remove(self)


#: A device of Ethernet frames, and the size of a frame: a process in Python carries the 2,000 a second of 1 Gb/s.
_TAP, _TAP_FLAGS, _TUNSETIFF, _MTU = "/dev/net/tun", 0x0002 | 0x1000, 0x400454CA, 60000

#: Seconds that a packet waits at most for those before it.
_QUEUE_S = 0.05


def _forward(ends: tuple[str, str], ready: Connection, delay_s: float, loss: float, bytes_per_s: float) -> None:
    """Carry packets between two devices, for as long as the process lives. The same packets are lost in every run."""
    try:
        devices = [_tap(name) for name in ends]
    except OSError as error:
        ready.send(str(error))
        return
    ready.send(None)
    dice, free = random.Random(0), [0.0, 0.0]
    flying: list[tuple[float, int, int, bytes]] = []
    for number in count():
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, _, end, packet = heapq.heappop(flying)
            with suppress(OSError):  # a device that is down loses packets
                os.write(devices[end], packet)
        waits_s = flying[0][0] - now if flying else None
        for device in select.select(devices, (), (), waits_s)[0]:
            packet, end = os.read(device, 1 << 16), 1 - devices.index(device)
            now = time.monotonic()
            left = max(now, free[end]) + len(packet) / bytes_per_s
            if left - now > _QUEUE_S or dice.random() < loss:
                continue
            free[end] = left
            heapq.heappush(flying, (left + delay_s, number, end, packet))


def _tap(network: str) -> int:
    """Returns a device of a namespace's name in this namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{network}").open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
    device = os.open(_TAP, os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", network.encode(), _TAP_FLAGS))
    _run("ip", "-n", network, "link", "set", network, "mtu", str(_MTU))
    return device


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout


def _await_carrier(name: str) -> None:
    """An interface without is none to UCX, which looks once, when an agent starts."""
    deadline = time.monotonic() + 5
    while True:
        said = _ip("-n", name, "link", "show", "dev", name)
        if "LOWER_UP" in said and "state DOWN" not in said:
            return
        if time.monotonic() > deadline:
            raise OSError(f"the interface {name} does not come up")
        time.sleep(0.01)


@contextmanager
def sockets_of(network: str) -> Iterator[None]:
    """Give the sockets that this thread makes meanwhile to a namespace, wherever they are used later."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as own, Path(f"/run/netns/{network}").open() as other:
        if libc.setns(other.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
        try:
            yield
        finally:
            libc.setns(own.fileno(), _CLONE_NEWNET)


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
