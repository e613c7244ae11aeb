"""The memory of a keeper, shared by descriptors: slabs, which are sealed, and journals, which grow.

A slab is an anonymous file in memory (memfd_create(2)), written by pwritev and read by preadv, never mapped to write.
So a seal takes effect at once: the kernel waits for writes under way and refuses later ones. Memory is released at once
even under a reader: the file is truncated to zero and the read comes short.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress

from kvmover.shared_memory import machine

#: Seals of fcntl(2): refuse new writes and writable mappings; refuse writes, existing mappings included; refuse growth.
_FUTURE_WRITE, _WRITE, _GROW = 0x10, 0x08, 0x04

#: MADV_COLLAPSE of madvise(2): move a mapping to huge pages, from which kernel copies cost a third less.
_COLLAPSE = 25
_HUGE_BYTES = 2 << 20


def is_here() -> bool:
    """Return True if this system has memfd_create(2) and a readable /proc."""
    return bool(machine()) and hasattr(os, "memfd_create")


def make(name: str, nbytes: int) -> int:
    """Create `nbytes` of allocated memory, charged to this process. Returns its descriptor. Raises OSError."""
    fd = os.memfd_create(f"kvmover-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def readable(fd: int) -> int:
    """Return a new read-only descriptor of the same memory, owned by the caller. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def seal(fd: int, end: int) -> bool:
    """Seal a slab against writes and truncate it to `end` bytes. Raises OSError.

    Returns False if a process has it mapped to write: its content cannot be trusted then.
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
    """Free the memory of a slab, even while other processes have it open, and close `fd`."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def is_sealed(fd: int) -> bool:
    """Return True if a slab is sealed against writes."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _WRITE)


def collapse(fd: int, nbytes: int) -> bool:
    """Move a sealed slab to huge pages, about 0.4 ms/MB. Returns False if it is too small or the kernel refuses."""
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
        at = -(-start // _HUGE_BYTES) * _HUGE_BYTES  # huge pages are aligned to their size
        found = libc.mmap(at, whole, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, fd, 0)  # MAP_FIXED in the reserved span
        return found == at and libc.madvise(at, whole, _COLLAPSE) == 0
    finally:
        libc.munmap(start, span)
