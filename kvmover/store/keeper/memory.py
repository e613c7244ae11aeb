"""Memory that a keeper owns and others reach by descriptors: slabs, which are sealed, and journals, which grow.

A slab is an anonymous file in memory (memfd_create(2)), which nobody maps: its bytes go in and out by pwritev and
preadv. So a seal takes effect at once, whoever has the file open and wherever he was stopped: the kernel refuses each
write that begins later, and waits for one that is under way. And memory is given back at once, whoever reads it: the
file is cut to nothing, and a read of it comes short.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress

from kvmover.shared_memory import machine

#: Of fcntl(2): no write, nor a mapping to write, from now on; and none that there is already, either.
_FUTURE_WRITE, _WRITE, _GROW = 0x10, 0x08, 0x04

#: Of madvise(2): copy what is mapped to huge pages, now. What the kernel copies out of those costs a third less.
_COLLAPSE = 25
_HUGE_BYTES = 2 << 20


def is_here() -> bool:
    """Whether this system has what a keeper is made of."""
    return bool(machine()) and hasattr(os, "memfd_create")


def make(name: str, nbytes: int) -> int:
    """A descriptor of fresh memory, all of it there and this process's to pay for. Raises OSError."""
    fd = os.memfd_create(f"kvmover-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def readable(fd: int) -> int:
    """Another descriptor of the same memory, by which nothing can be changed."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def seal(fd: int, end: int) -> bool:
    """Nobody writes to a slab from now on, and what lies beyond byte `end` is given back. Raises OSError.

    False where somebody has it mapped to write: then nobody knows what it holds.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | _GROW)
    os.ftruncate(fd, end)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _WRITE)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def give_back(fd: int) -> None:
    """The memory of a slab is free, whoever has it open."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def is_sealed(fd: int) -> bool:
    """Whether nobody can write to a slab any more."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _WRITE)


def collapse(fd: int, nbytes: int) -> bool:
    """Copy a sealed slab to huge pages; False where this kernel does not, or has none. Takes some 0.4 ms a MB."""
    whole = nbytes - nbytes % _HUGE_BYTES
    if not whole:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    span = whole + _HUGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, span, 0, private, -1, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        return False
    try:
        at = -(-start // _HUGE_BYTES) * _HUGE_BYTES  # a huge page lies at a multiple of its size
        found = libc.mmap(at, whole, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, fd, 0)  # in place of what was reserved
        return found == at and libc.madvise(at, whole, _COLLAPSE) == 0
    finally:
        libc.munmap(start, span)
