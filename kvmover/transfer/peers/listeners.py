"""The listeners of a process, for TCP connections, and a probe by a plain connection that tells if all are closed.

UCX leaks a socket for each refused connection (NIXL 1.5.1, UCX over TCP: whether its agent connects, removes the peer,
or has other settings for retries). A plain connection leaks no socket, so a lost peer is dialled unless all of its
listeners refuse one.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvmover.transfer.protocol.handshake import MAX_LISTENERS, Listener

_DESCRIPTORS = Path("/proc/self/fd")


def own_listeners() -> tuple[Listener, ...]:
    """Returns up to MAX_LISTENERS listeners of this process that other hosts may reach, its transport's among them; ()
    off Linux.

    All of them end with the process at the latest. 0.1 ms for 30 file descriptors.
    """
    return tuple(sorted({*_listening()}, key=lambda each: (each.address, each.port)))[:MAX_LISTENERS]


def _listening() -> Iterator[Listener]:
    if not _DESCRIPTORS.is_dir():
        return
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as open_socket:
                if open_socket.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if open_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found = Listener(*open_socket.getsockname()[:2])
                    if found.is_remote():
                        yield found


class TcpProbe:
    """The probe's connections to listeners. Each is closed without sending a byte."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._answers: list[socket.socket | int] = [_begun(listener) for listener in listeners]

    def is_refused(self) -> bool:
        """End the probe. Returns True if all listeners refused; False if one has not (silence is no proof), without
        listeners, and on later calls.
        """
        answers, self._answers = self._answers, []
        refused = [_refused(answer) for answer in answers]
        return bool(refused) and all(refused)

    def close(self) -> None:
        """End the probe."""
        self.is_refused()


def _begun(listener: Listener) -> socket.socket | int:
    """Returns a connection under way, or the errno of its failure."""
    family = socket.AF_INET6 if ":" in listener.address else socket.AF_INET
    try:
        begun = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        return error.errno or errno.EIO
    answer = begun.connect_ex((listener.address, listener.port))
    if answer in (0, errno.EINPROGRESS):
        return begun
    begun.close()
    return answer


def _refused(answer: socket.socket | int) -> bool:
    if isinstance(answer, int):
        return answer == errno.ECONNREFUSED
    with answer:
        return answer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
