"""A KeeperLink sends requests to a keeper, one at a time, and reconnects after a lost connection.

A request to a silent keeper blocks for up to `_ANSWER_S`; requests in the `_AGAIN_S` after it fail at once.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
import weakref
from pathlib import Path
from threading import RLock
from typing import TypeVar

from kvmover.errors import StoreError
from kvmover.store.keeper.journal import JOURNAL
from kvmover.store.keeper.messages import (
    GRANTS,
    OPENED,
    PACKET_BYTES,
    Answer,
    Attach,
    FollowJournal,
    JournalToFollow,
    KeeperRefusal,
    NoteUses,
    OpenSlabs,
    Refused,
    Request,
    SlabsToRead,
    Welcome,
    decode_answer,
    encode,
)

Expected = TypeVar("Expected", bound=Answer)

#: Seconds to wait for an answer, which usually takes under 1 ms; and seconds without reconnecting after a failure.
_ANSWER_S, _AGAIN_S = 10.0, 1.0


class StoreFenced(StoreError):
    """A newer generation of the same fleet owns the pages; the message names both generations."""


class KeeperRefused(OSError):
    """A keeper has refused a request; the message says why."""

    def __init__(self, refused: Refused) -> None:
        code = {KeeperRefusal.FULL: errno.ENOSPC, KeeperRefusal.GONE: errno.ENOENT}
        super().__init__(code.get(refused.refusal, errno.EPERM), refused.words)
        self.refusal = refused.refusal


class FollowedJournal:
    """A journal: its descriptor, closed with this object, and the place `base` of its first byte."""

    def __init__(self, fd: int, base: int) -> None:
        self.fd, self.base = fd, base
        weakref.finalize(self, os.close, fd).atexit = False

    def read(self, place: int, nbytes: int) -> bytes:
        """Read up to `nbytes` from a place on. Raises OSError."""
        return os.pread(self.fd, nbytes, place - self.base) if place >= self.base else b""


class KeeperLink:
    """A connection to the keeper at socket `path`, attached by `hello`; unattached without it. Thread-safe."""

    def __init__(self, path: Path, hello: Attach | None) -> None:
        self.path, self._hello = path, hello
        self._lock = RLock()
        self._socket: socket.socket | None = None
        self._failed_s = -_AGAIN_S
        self._closed = False
        #: The journal of the current connection; a new object per connection.
        self.journal: FollowedJournal | None = None
        self.slab_bytes = 0
        #: The refusal that fenced this client: it must not write any more.
        self.fenced: KeeperRefused | None = None

    def connect(self) -> None:
        """Connect and attach unless connected. Raises StoreFenced if fenced, OSError if the keeper fails or refuses."""
        with self._lock:
            if self._socket is not None and not self.is_over():
                return
            self._disconnect()
            if self._closed or time.monotonic() - self._failed_s < _AGAIN_S:
                raise OSError(errno.ENOTCONN, "the keeper does not answer")
            try:
                self._connect()
            except StoreFenced:
                self._disconnect()
                raise
            except OSError as error:
                self._failed_s = time.monotonic()
                self._disconnect()
                if isinstance(error, KeeperRefused):
                    raise
                raise OSError(error.errno, "the keeper does not answer") from error

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_ANSWER_S)
        self._socket.connect(str(self.path))
        if self._hello is None:
            return
        try:
            welcome, fds = self._exchange(self._hello, Welcome)
        except KeeperRefused as error:
            if error.refusal is KeeperRefusal.FENCED:
                self.fenced = error
                raise StoreFenced(f"{self.path}: {error.strerror}") from error
            raise
        journal = FollowedJournal(fds[0], welcome.base)
        if welcome.journal != JOURNAL:
            words = f"the keeper's journal is of version {welcome.journal}; this side reads {JOURNAL}"
            raise KeeperRefused(Refused(KeeperRefusal.INVALID, words))
        self.slab_bytes, self.journal = welcome.slab_bytes, journal

    def is_over(self) -> bool:
        """Return True if unconnected or the keeper has hung up. Sends no request and takes no lock."""
        near = self._socket
        if near is None:
            return True
        poll = select.poll()  # a fresh one, because two threads may not share a poll object
        try:
            poll.register(near, select.POLLRDHUP)
        except ValueError:  # another thread has just closed the socket
            return True
        return bool(poll.poll(0))

    def ask(self, request: Request, expected: type[Expected]) -> tuple[Expected, int]:
        """Return the answer and its first descriptor, owned by the caller, or -1. Raises as `ask_for_many`."""
        answer, fds = self.ask_for_many(request, expected)
        return answer, fds[0] if fds else -1

    def tell(self, said: NoteUses) -> None:
        """Send a message that gets no answer. Raises OSError or StoreFenced."""
        with self._lock:
            self.connect()
            assert self._socket is not None
            self._socket.send(encode(said))

    def settle(self) -> None:
        """Wait until the keeper has processed all earlier messages. Raises OSError or StoreFenced."""
        self.ask(OpenSlabs([]), SlabsToRead)

    def ask_for_many(self, request: Request, expected: type[Expected]) -> tuple[Expected, list[int]]:
        """Return the answer of type `expected` and its descriptors, owned by the caller.

        Raises KeeperRefused if refused, StoreFenced if a reconnect finds a newer generation, OSError if the keeper does
        not answer.
        """
        with self._lock:
            self.connect()
            try:
                return self._exchange(request, expected)
            except KeeperRefused as error:
                if error.refusal is KeeperRefusal.FENCED:
                    self.fenced = error
                raise
            except OSError as error:
                self._failed_s = time.monotonic()
                self._disconnect()
                raise OSError(error.errno or errno.ETIMEDOUT, "the keeper does not answer") from error

    def follow(self) -> FollowedJournal:
        """Request the current journal and set `journal` to it. Raises as `ask_for_many`."""
        with self._lock:
            answer, fd = self.ask(FollowJournal(), JournalToFollow)
            self.journal = FollowedJournal(fd, answer.base)
            return self.journal

    def _exchange(self, request: Request, expected: type[Expected]) -> tuple[Expected, list[int]]:
        assert self._socket is not None
        packet = encode(request)
        if len(packet) > PACKET_BYTES:
            raise OSError(errno.EMSGSIZE, f"{len(packet)} bytes are more than a packet")
        self._socket.send(packet)
        fds = array.array("i")
        answer, ancillary, flags, _ = self._socket.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(OPENED * fds.itemsize))
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        said = decode_answer(answer)
        lacks = flags & socket.MSG_CTRUNC or (isinstance(said, GRANTS) and not fds)
        if isinstance(said, expected) and not lacks:
            return said, fds.tolist()
        for fd in fds:
            os.close(fd)
        if isinstance(said, Refused):
            raise KeeperRefused(said)
        raise OSError(errno.EMFILE if lacks else errno.EPROTO, "the keeper does not answer")

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self.journal = None

    def close(self) -> None:
        """Close the connection for good. Idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()
