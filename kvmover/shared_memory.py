"""Shared memory: bytes of one process that other processes of its host and user map.

A share is a sealed memfd_create(2) file, opened through /proc/PID/fd and recognised by a token of 128 random bits, so
that a reused process number opens no memory.
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
    """The access of a mapping."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class SharedRange:
    """A memory's place in a shared file, from `offset`, that `pid` has open as `fd`."""

    pid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 32)]
    token: Annotated[str, Meta(max_length=32)]
    offset: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class NotShared(LayoutError):
    """Memory of another process that this one cannot map."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process of a host: its number, and its start in ticks since boot."""

    pid: int
    started: int

    @classmethod
    def own(cls) -> HostProcess | None:
        """Returns this process; None if unknown."""
        state = _state_of(os.getpid())
        return cls(os.getpid(), state[1]) if state is not None else None

    def has_ended(self) -> bool:
        """Returns True if known to have ended, on its own host; an unseen process counts as alive."""
        try:
            os.kill(self.pid, 0)  # also finds processes that /proc hides
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            pass
        state = _state_of(self.pid)
        return state is not None and (state[0] in "ZX" or state[1] != self.started)


def _state_of(pid: int) -> tuple[str, int] | None:
    """Returns state and start (proc_pid_stat(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


class Maker:
    """A process of this host, held by pidfd_open(2) against a later one's reuse of its number.

    Raises NotShared if it has ended, or the kernel cannot say.
    """

    def __init__(self, process: HostProcess) -> None:
        try:
            self._fd = os.pidfd_open(process.pid)
        except (AttributeError, OSError) as error:
            raise NotShared(f"process {process.pid} cannot be watched: {error}") from error
        weakref.finalize(self, os.close, self._fd).atexit = False
        state = _state_of(process.pid)
        if state is None or state[1] != process.started:  # another process got its number before the open
            raise NotShared(f"process {process.pid} is not the one that was announced")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def lives(self) -> bool:
        """Returns True while a thread of it may run."""
        return not self._poll.poll(0)


class _Allocated(NamedTuple):
    """Memory of this process that others may map."""

    fd: int
    address: int
    nbytes: int


#: Allocations of this process, by token.
_ALLOCATED: dict[str, _Allocated] = {}


def allocate(nbytes: int) -> mmap.mmap:
    """Allocate zeroed memory that other processes may map, until its last view is gone. Raises LayoutError."""
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
    """Returns this host's boot id and pid namespace, or "": processes with the same can find each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def shares_of(ranges: Sequence[tuple[int, int]]) -> list[SharedRange | None]:
    """Returns the share that holds each (address, bytes) here; None for private memory."""
    return [_share(address, nbytes) for address, nbytes in ranges]


def _share(address: int, nbytes: int) -> SharedRange | None:
    for token, held in _ALLOCATED.copy().items():  # a collection of garbage may free allocations at any step
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
    """Map the whole file of a share, until its last view is gone, even if its process dies.

    Raises NotShared if it is not the announced file, could shrink, or the kernel refuses access.
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
            raise NotShared(f"{path} may be shrunk by its maker")
        how = mmap.ACCESS_WRITE if access is MapMode.WRITE else mmap.ACCESS_READ
        return memoryview(mmap.mmap(fd, 0, access=how))  # all of it
    finally:
        os.close(fd)
