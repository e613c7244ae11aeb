"""Shared memory: bytes of one process that other processes of its host and user map, and copy to and from themselves.

A share is an anonymous file in memory (memfd_create(2)): it has no name in any file system, is gone with the last
process that maps it, and is sealed, so that nobody can shrink it under a reader. Another process opens it through
/proc/PID/fd, which the kernel allows to processes of the same user, and knows it by its token, 128 random bits. So a
number that is reused, or another container's, opens nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple
from uuid import uuid4

from msgspec import Meta

from kvmover.errors import LayoutError

_PREFIX = "kvmover-"


class MapMode(Enum):
    """What another process's memory is mapped for."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class SharedRange:
    """Where a memory lies in a shared file: `offset` bytes from the beginning of what `pid` has open as `fd`."""

    pid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 32)]
    token: Annotated[str, Meta(max_length=32)]
    offset: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class NotShared(LayoutError):
    """Memory of another process that this one may not, or cannot, map."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process of a machine: its number, and when it began, in the kernel's ticks since boot. No two are equal."""

    pid: int
    started: int

    @classmethod
    def own(cls) -> HostProcess | None:
        """This process; None where the kernel does not say."""
        state = _state_of(os.getpid())
        return cls(os.getpid(), state[1]) if state is not None else None

    def has_ended(self) -> bool:
        """Whether it is known to have ended; asked on the machine that it ran on. What may not be looked at lives."""
        try:
            os.kill(self.pid, 0)  # also of processes that /proc hides
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            pass
        state = _state_of(self.pid)
        return state is not None and (state[0] in "ZX" or state[1] != self.started)


def _state_of(pid: int) -> tuple[str, int] | None:
    """The state and the start of a process, from proc_pid_stat(5): its name, in brackets, may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


class Maker:
    """A process of this host as the kernel knows it (pidfd_open(2)): no other that has its number later.

    Raises NotShared where it has ended, where another has its number by now, and where the kernel cannot say.
    """

    def __init__(self, process: HostProcess) -> None:
        try:
            self._fd = os.pidfd_open(process.pid)
        except (AttributeError, OSError) as error:
            raise NotShared(f"process {process.pid} cannot be watched: {error}") from error
        weakref.finalize(self, os.close, self._fd).atexit = False
        state = _state_of(process.pid)
        if state is None or state[1] != process.started:  # it was there when its number was taken for it
            raise NotShared(f"process {process.pid} is not the one that was announced")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def lives(self) -> bool:
        """Whether one of its threads may still run. False once all have ended, also while nobody has waited for it."""
        return not self._poll.poll(0)


class _Allocated(NamedTuple):
    """Memory of this process that others may map: the descriptor that they open, and where it lies."""

    fd: int
    address: int
    nbytes: int


#: What this process allocated and still has, by token.
_ALLOCATED: dict[str, _Allocated] = {}


def allocate(nbytes: int) -> mmap.mmap:
    """Zeroed memory that others may map. It lives as long as the answer, or a view of it. Raises LayoutError."""
    if not hasattr(os, "memfd_create"):
        raise LayoutError("memory that other processes map is to be had on Linux only")
    import fcntl

    token = uuid4().hex
    fd = os.memfd_create(f"{_PREFIX}{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _ALLOCATED[token] = _Allocated(fd, address, nbytes)
    weakref.finalize(memory, _close, token).atexit = False
    return memory


def _close(token: str) -> None:
    os.close(_ALLOCATED.pop(token).fd)


@cache
def machine() -> str:
    """Which host this is, since its last boot, and whose processes are seen: those of one answer can find each other.

    Empty where nothing can be mapped.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def shares_of(ranges: Sequence[tuple[int, int]]) -> list[SharedRange | None]:
    """The share that each (address, bytes) of this process lies in as a whole; None for memory of its own."""
    return [_share(address, nbytes) for address, nbytes in ranges]


def _share(address: int, nbytes: int) -> SharedRange | None:
    for token, held in _ALLOCATED.items():
        if held.address <= address and address + nbytes <= held.address + held.nbytes:
            return SharedRange(os.getpid(), held.fd, token, address - held.address)
    return None


def _path(share: SharedRange) -> str:
    return f"/proc/{share.pid}/fd/{share.fd}"


def _token(path: str) -> str | None:
    try:
        name = str(Path(path).readlink())
    except OSError:
        return None
    token = name.removeprefix(f"/memfd:{_PREFIX}").removesuffix(" (deleted)")
    return token if len(token) < len(name) else None


def map_file(share: SharedRange, access: MapMode) -> memoryview:
    """The whole file that a share of another process lies in, until the last view of it is gone, whoever dies.

    Raises NotShared where the file is not the one that was announced, or could shrink, and where the kernel does not
    let us.
    """
    import fcntl

    path = _path(share)
    if _token(path) != share.token:  # before it is opened: to open another file might do something
        raise NotShared(f"{path} is not the memory that was announced")
    try:
        fd = os.open(path, (os.O_RDWR if access is MapMode.WRITE else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise NotShared(f"{path} cannot be opened: {error.strerror}") from error
    try:
        if _token(f"/proc/self/fd/{fd}") != share.token:
            raise NotShared(f"{path} is not the memory that was announced")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise NotShared(f"{path} may be shrunk by who made it")
        how = mmap.ACCESS_WRITE if access is MapMode.WRITE else mmap.ACCESS_READ
        return memoryview(mmap.mmap(fd, 0, access=how))  # all of it
    finally:
        os.close(fd)
