"""Listeners: where a process waits for TCP connections, and whether anybody is there still, by a plain connection.

UCX keeps a socket for every connection that is refused, for good (NIXL 1.5.1, UCX over TCP: whether its agent connects,
removes the peer, or has other settings for retries). A plain connection leaves none, so a lost peer is dialled only
where its listeners do not all refuse one.
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
    """Those of this process that other hosts may reach, the ones of its transport among them; none off Linux.

    Each ends with the process at the latest. 0.1 ms for 30 file descriptors.
    """
    return tuple(sorted({*_listening()}, key=lambda each: (each.address, each.port)))[:MAX_LISTENERS]


def _listening() -> Iterator[Listener]:
    if not _DESCRIPTORS.is_dir():
        return
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # closed since
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
    """Connections to some listeners under way: one that succeeds is closed without a word."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._answers: list[socket.socket | int] = [_begun(listener) for listener in listeners]

    def is_refused(self) -> bool:
        """Whether every listener has refused by now: nobody is there. Silence proves nothing. Ends the probe."""
        answers, self._answers = self._answers, []
        refused = [_refused(answer) for answer in answers]
        return bool(refused) and all(refused)

    def close(self) -> None:
        """Ask no more."""
        self.is_refused()


def _begun(listener: Listener) -> socket.socket | int:
    """A connection that is not waited for, or why there is none."""
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
