"""A KeeperServer serves one socket: it owns the memory of slabs and journals, and runs the state machine's actions.

One thread answers all clients, in one order. It never blocks on a client: one that takes no answer is disconnected. A
SlabProver, in its own thread, compares each sealed slab with its digests once, so that readers may skip the check.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import resource
import selectors
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from socket import socketpair
from threading import Event, Thread

from kvmover.errors import StoreError
from kvmover.store.files import reason_of
from kvmover.store.keeper import memory
from kvmover.store.keeper.journal import JournalChange, encode_entry, page_and_digests
from kvmover.store.keeper.keeper_machine import is_overgrown, rewritten, step
from kvmover.store.keeper.keeper_metrics import KeeperCounts, KeeperSnapshot
from kvmover.store.keeper.messages import (
    PACKET_BYTES,
    Attach,
    CommitObjects,
    KeeperRefusal,
    Refused,
    decode_request,
    encode,
)
from kvmover.store.keeper.service_manager import notify, watchdog_s
from kvmover.store.keeper.state import (
    AppendEntry,
    CopyObjects,
    DropSlab,
    FillGrant,
    JournalGrant,
    KeeperAction,
    KeeperEvent,
    KeeperState,
    KeeperTick,
    KeptNamespace,
    MakeSlab,
    ReadGrant,
    Reply,
    SealSlab,
    SessionHeard,
    SessionOpened,
    SessionOver,
    SlabFailed,
    SlabProved,
)
from kvmover.store.record import DIGEST_BYTES, RecordTable, holds

log = logging.getLogger(__name__)

#: Bytes read and compared at a time, in whole cells.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SealedSlab:
    """A sealed slab to prove: owned descriptors of its memory and of the journal, and the table of its objects.

    `base`: the place of the journal's first byte.
    """

    number: int
    fd: int
    nbytes: int
    journal: int
    base: int
    objects: RecordTable

    def bad(self) -> frozenset[int]:
        """Return the byte offsets of objects that differ from their digests. Raises OSError."""
        found, of = set[int](), self.objects
        buffer = bytearray(_CHUNK_BYTES)
        for at, offset, nbytes in zip(of.at.tolist(), of.offset.tolist(), of.nbytes.tolist(), strict=True):
            _, digests = page_and_digests(self._read, at)
            cells = len(digests) // DIGEST_BYTES
            size = nbytes // cells
            if size > len(buffer):
                buffer = bytearray(size)
            step = len(buffer) // size
            for first in range(0, cells, step):
                count = min(step, cells - first)
                view = memoryview(buffer)[: count * size]
                if os.preadv(self.fd, [view], offset + first * size) < len(view) or not holds(
                    view, count, digests, first
                ):
                    found.add(offset)
        return frozenset(found)

    def _read(self, place: int, nbytes: int) -> bytes:
        return os.pread(self.journal, nbytes, place - self.base)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.fd)
        os.close(self.journal)


class SlabProver:
    """A thread that proves slabs one by one. `wake_fd` is readable if `take` has results."""

    def __init__(self) -> None:
        self._slabs = Queue[SealedSlab | None]()
        self._proved = deque[SlabProved]()
        self._near, self._far = socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._thread = Thread(target=self._work, daemon=True, name="kvmover-prover")
        self._thread.start()

    @property
    def wake_fd(self) -> int:
        """Descriptor that is readable when `take` has results, or after `wake`."""
        return self._near.fileno()

    def prove(self, slab: SealedSlab) -> None:
        """Queue a slab, taking ownership of its descriptors."""
        self._slabs.put(slab)

    def wake(self) -> None:
        """Make `wake_fd` readable."""
        with suppress(OSError):
            self._far.send(b".")

    def take(self) -> list[SlabProved]:
        """Return the slabs proved since the last call."""
        with suppress(BlockingIOError):
            self._near.recv(4096)
        return [self._proved.popleft() for _ in range(len(self._proved))]

    def _work(self) -> None:
        while (slab := self._slabs.get()) is not None:
            try:
                memory.collapse(slab.fd, slab.nbytes)
                if memory.is_sealed(slab.fd):
                    self._proved.append(SlabProved(slab.number, slab.bad()))
                    self.wake()
            except OSError:  # evicted meanwhile
                pass
            finally:
                slab.close()

    def close(self) -> None:
        """End the thread, after all queued slabs."""
        self._slabs.put(None)
        self._thread.join()
        self._near.close()
        self._far.close()


#: Concurrent connections; further ones are closed on accept.
SESSIONS = 1024

#: Between two snapshots, and the age at which the loop counts as stuck, s.
_SNAPSHOT_S, _WELL_S = 1.0, 10.0

#: A slab is 1/64 of the keeper's capacity, within these limits.
_SHARE, _LEAST_BYTES, _MOST_BYTES = 64, 2 << 20, 256 << 20


def slab_bytes_of(capacity_bytes: int) -> int:
    """Return the slab size of a keeper.

    >>> slab_bytes_of(64 << 30) >> 20, slab_bytes_of(1 << 30) >> 20, slab_bytes_of(1 << 20) >> 20
    (256, 16, 1)
    """
    share = min(_MOST_BYTES, capacity_bytes // _SHARE // _LEAST_BYTES * _LEAST_BYTES)
    return min(capacity_bytes, max(_LEAST_BYTES, share))


class KeeperServer:
    """A keeper with up to `capacity_bytes` of memory, the only one at socket `path`."""

    def __init__(self, path: Path, capacity_bytes: int, slab_bytes: int | None = None) -> None:
        """Acquire the lock of `path` and listen.

        Raises StoreError if the host is no Linux or has less memory, `slab_bytes` exceeds the capacity, another keeper
        serves the socket, or `path` is another kind of file.
        """
        if not memory.is_here():
            raise StoreError("a keeper needs memfd_create(2) and /proc: Linux")
        slab_bytes = slab_bytes_of(capacity_bytes) if slab_bytes is None else slab_bytes
        if not 1 <= slab_bytes <= capacity_bytes:
            raise StoreError(f"slabs of {slab_bytes} bytes in a keeper of {capacity_bytes}")
        self.path, self.state = path, KeeperState(capacity_bytes, slab_bytes)
        self._slabs: dict[int, int] = {}
        self._journals: dict[bytes, int] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._next_session, self._over = 1, False
        self.counts = KeeperCounts()
        #: The state at most a second ago, while `serve` runs; for any thread.
        self.snapshot = KeeperSnapshot.of(self.state, self.counts, time.monotonic())
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if capacity_bytes > host_bytes:
            raise StoreError(f"a keeper of {capacity_bytes} bytes on a host that has {host_bytes}")
        self._lock_fd, self._listener = _listen(path)
        self._bound = _file_number(path)
        self._selector, self._prover = selectors.DefaultSelector(), SlabProver()
        self._selector.register(self._prover.wake_fd, selectors.EVENT_READ, self._proved)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self, until: Callable[[], bool] = lambda: False, poll_s: float | None = None) -> None:
        """Answer until `until` returns True (checked after events and every `poll_s` seconds), or until `close`."""
        while not self._over and not until():
            for key, _ in self._selector.select(poll_s):
                key.data()
            now = time.monotonic()
            if now - self.snapshot.taken_s >= _SNAPSHOT_S:
                self.snapshot = KeeperSnapshot.of(self.state, self.counts, now)

    @property
    def is_well(self) -> bool:
        """Returns True if `serve` went round in the last 10 s. For any thread, while `serve` has a `poll_s` below."""
        return time.monotonic() - self.snapshot.taken_s < _WELL_S

    def wake(self) -> None:
        """Make `serve` check `until` now. Callable from any thread or signal handler."""
        self._prover.wake()

    def close(self) -> None:
        """Disconnect all clients, remove the socket and free all memory. Idempotent."""
        if self._over:
            return
        self._over = True
        for number in list(self._sockets):
            self._end(number)
        self._selector.unregister(self._listener)
        self._listener.close()
        if _file_number(self.path) == self._bound:  # else another process has replaced the file
            self.path.unlink(missing_ok=True)
        self._selector.close()
        self._prover.close()
        for fd in self._slabs.values():
            memory.give_back(fd)
        for fd in self._journals.values():
            os.close(fd)
        os.close(self._lock_fd)

    # Connections

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError as error:
            log.warning("nobody can connect: %s", reason_of(error))
            return
        if len(self._sockets) >= SESSIONS:
            self.counts.turned_away += 1
            near.close()
            return
        near.setblocking(False)
        number, self._next_session = self._next_session, self._next_session + 1
        self._sockets[number] = near
        self._selector.register(near, selectors.EVENT_READ, lambda: self._hear(number))
        self._step(SessionOpened(number))

    def _hear(self, number: int) -> None:
        try:
            packet, _, flags, _ = self._sockets[number].recvmsg(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            self._end(number)
            return
        request = None if flags & socket.MSG_TRUNC else decode_request(packet)
        if isinstance(request, Attach):
            self._give_up_cut()
        self._step(SessionHeard(number, request))

    def _end(self, number: int) -> None:
        near = self._sockets.pop(number, None)
        if near is None:
            return
        self._selector.unregister(near)
        self._step(SessionOver(number))
        near.close()  # last: a client that sees the end finds its session forgotten

    # Actions of the state machine

    def _step(self, event: KeeperEvent) -> None:
        now, words = int(time.time()), ""
        gone, failed = list[int](), list[int]()
        for action in self._decided(event, now):
            match action:
                case MakeSlab(number, nbytes):
                    words = self._make(number, nbytes)
                    failed += [number] if words else []
                case CopyObjects(source, number, moves):
                    failed += [] if self._copy(source, number, moves) else [number]
                    words = ""  # a failed slab for carried objects does not fail the reply
                case SealSlab(number, end):
                    self._seal(number, end)
                case DropSlab(number):
                    self._drop(number)
                case AppendEntry(namespace, entry):
                    self._append(namespace, entry)
                case Reply():
                    refused = Refused(KeeperRefusal.FULL, words)
                    if not self._reply(Reply(action.session, refused) if words else action):
                        gone.append(action.session)
        self.counts.failed_slabs += len(failed)
        for number in failed:
            self._step(SlabFailed(number))
        for number in gone:
            self._end(number)
        self._tidy(now)

    def _decided(self, event: KeeperEvent, now: int) -> list[KeeperAction]:
        """Run the state machine. Returns its actions.

        If it raises, the client of `event` is disconnected, the half-done step is undone, and [] is returned.
        """
        try:
            return step(self.state, event, now)
        except Exception:
            self.counts.faults += 1
            number = None if isinstance(event, SlabFailed | SlabProved | KeeperTick) else event.session
            asked = type(event.request if isinstance(event, SessionHeard) else event).__name__
            log.exception("fault %d of this keeper, which ends session %s: its %s", self.counts.faults, number, asked)
        self._undo(event, number, now)
        if number in self._sockets:
            self._end(number)
        elif number is not None:
            self.state.sessions.pop(number, None)
        return []

    def _undo(self, event: KeeperEvent, session: int | None, now: int) -> None:
        """Reconcile memory, journals and state after a step that raised half-way.

        Slabs made or dropped by that step were not announced, and are dropped. So is the slab filled by client
        `session`, if it was committing or has disconnected.
        """
        slabs = self.state.slabs
        for number in self._slabs.keys() - slabs.keys():
            self._drop(number)
        lost = {slab.number for slab in slabs.values() if slab.number not in self._slabs}
        if isinstance(event, SessionOver) or (isinstance(event, SessionHeard) and type(event.request) is CommitObjects):
            lost |= {slab.number for slab in slabs.values() if slab.writer == session}
        for name, kept in self.state.namespaces.items():
            kept.end = kept.base + self._journal_bytes(name)
            held = {each.segment for _, page in kept.index.pages() for each in page.objects}
            for nowhere in held - {slab.name for slab in slabs.values()}:
                kept.index.drop(nowhere)
        sealed = [slab for slab in slabs.values() if slab.writer is None]
        lost |= {slab.number for slab in sealed if self.state.namespaces[slab.namespace].index.empty(slab.name)}
        for number in sorted(lost):
            self._step(SlabFailed(number))
        for slab in sealed:
            if slab.number in self._slabs and not memory.is_sealed(self._slabs[slab.number]):
                self._seal(slab.number, slab.end)
        for name, kept in self.state.namespaces.items():
            self._rewrite(name, kept, now)

    def _journal_bytes(self, namespace: bytes) -> int:
        return os.fstat(self._journal(namespace)).st_size

    def _make(self, number: int, nbytes: int) -> str:
        """Allocate a slab. Returns "" or the reason of failure."""
        try:
            self._slabs[number] = memory.make(f"slab-{number}", nbytes)
        except OSError as error:
            return f"the host has no {nbytes} bytes: {reason_of(error)}"
        self.counts.made_slabs += 1
        return ""

    def _copy(self, source: int, number: int, moves: list[tuple[int, int, int]]) -> bool:
        """Copy carried objects. Returns False if a copy is short; the prover checks digests after sealing."""
        if source not in self._slabs or number not in self._slabs:
            return False
        try:
            for offset, to, nbytes in moves:
                data = os.pread(self._slabs[source], nbytes, offset)
                if len(data) < nbytes or os.pwrite(self._slabs[number], data, to) < nbytes:
                    return False
        except OSError:
            return False
        return True

    def _give_up_cut(self) -> None:
        """Drop slabs shorter than their committed bytes: writers can truncate, and readers must not get zeros."""
        cut = [number for number, fd in self._slabs.items() if os.fstat(fd).st_size < self.state.slabs[number].end]
        for number in cut:
            log.error("slab %d was cut by who filled it, and is given up", number)
            self._step(SlabFailed(number))

    def _seal(self, number: int, end: int) -> None:
        if number not in self._slabs:
            return  # its allocation failed
        if not memory.seal(self._slabs[number], end):
            log.error("slab %d is mapped by who filled it, and is given up", number)
            self._step(SlabFailed(number))
            return
        slab = self.state.slabs[number]
        kept = self.state.namespaces[slab.namespace]
        mine = os.dup(self._slabs[number])
        journal = memory.readable(self._journal(slab.namespace))
        self._prover.prove(SealedSlab(number, mine, end, journal, kept.base, kept.index.table(slab.name)))

    def _proved(self) -> None:
        for event in self._prover.take():
            if event.bad:
                self.counts.poisoned_objects += len(event.bad)
                log.error("slab %d has %d objects that are not what was said", event.slab, len(event.bad))
            self._step(event)

    def _drop(self, number: int) -> None:
        if number in self._slabs:
            memory.give_back(self._slabs.pop(number))
            self.counts.dropped_slabs += 1

    def _append(self, namespace: bytes, entry: bytes) -> None:
        os.pwrite(self._journal(namespace), entry, self._journal_bytes(namespace))

    def _journal(self, namespace: bytes) -> int:
        if namespace not in self._journals:
            self._journals[namespace] = memory.make("journal", 0)
        return self._journals[namespace]

    def _reply(self, reply: Reply) -> bool:
        """Send an answer with duplicates of the granted descriptors. Returns False if the client did not take it."""
        if isinstance(reply.answer, Refused):
            self.counts.refused[reply.answer.refusal] += 1
        granted: list[int] = []
        try:
            match reply.grant:
                case JournalGrant(namespace):
                    granted.append(memory.readable(self._journal(namespace)))
                case FillGrant(slab):
                    granted.append(os.dup(self._slabs[slab]))
                case ReadGrant(slabs):
                    granted += [memory.readable(self._slabs[slab]) for slab in slabs]
                case None:
                    pass
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", granted))] if granted else []
            self._sockets[reply.session].sendmsg([encode(reply.answer)], rights)
        except OSError as error:
            log.warning("session %d is ended: %s", reply.session, reason_of(error))
            return False
        finally:
            for fd in granted:
                os.close(fd)
        return True

    def _tidy(self, now: int) -> None:
        """Rewrite overgrown journals."""
        for namespace, kept in self.state.namespaces.items():
            if is_overgrown(kept):
                self._rewrite(namespace, kept, now)

    def _rewrite(self, namespace: bytes, kept: KeptNamespace, now: int) -> None:
        """Append ENDED to a journal and start the next one, which has only living objects."""
        old = self._journals.pop(namespace)
        data = os.pread(old, kept.end - kept.base, 0)
        ended = encode_entry(JournalChange.ENDED, kept.end, now)
        os.pwrite(old, ended, len(data))
        kept.end += len(ended)
        proved = {slab.name for slab in self.state.slabs.values() if slab.is_proved}
        fresh = rewritten(kept, data, now, proved)
        os.close(old)
        os.pwrite(self._journal(namespace), fresh, 0)


def _refuse_other_than_socket(path: Path) -> None:
    """Raise StoreError if `path` exists and is no socket: a keeper would delete a foreign file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StoreError(
                f"no keeper can serve {path}: it is there, and is no socket; name a file that is not there"
            )


def _file_number(path: Path) -> tuple[int, int] | None:
    """Return device and inode of `path`, or None if it cannot be read."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _listen(path: Path) -> tuple[int, socket.socket]:
    """Lock `path.lock` and listen on `path`, with mode 0600. Returns lock descriptor and socket. Raises StoreError."""
    fd = -1
    try:
        _refuse_other_than_socket(path)
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_other_than_socket(path)
        path.unlink(missing_ok=True)  # left by a dead keeper, because the lock was free
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(128)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        taken = isinstance(error, BlockingIOError)
        words = "another keeper serves it" if taken else reason_of(error)
        raise StoreError(f"no keeper can serve {path}: {words}") from error
    return fd, listener


def serve_keeper(path: Path, capacity_bytes: int, begun: Callable[[KeeperServer], None] = lambda server: None) -> None:
    """Run a keeper at `path` until SIGINT or SIGTERM, then free all its pages. Raises as `KeeperServer`.

    `begun` is called once engines can connect; then a service manager (`NOTIFY_SOCKET`) is told so, and later that it
    ends, and that it goes round if there is a watchdog. Sets handlers of both signals, so call it in the main thread.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each slab needs a descriptor
    server, is_over = KeeperServer(path, capacity_bytes), Event()

    def end(*_: object) -> None:
        """Stop serving. Never raises, because a signal may interrupt any statement."""
        is_over.set()
        server.wake()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        begun(server)
        notify("READY=1", f"STATUS=serving {capacity_bytes} bytes at {path}")
        every_s = watchdog_s(os.getpid())
        until = is_over.is_set if every_s is None else _heard_by_manager(is_over.is_set, every_s)
        server.serve(until, min(_SNAPSHOT_S, every_s or _SNAPSHOT_S))
    finally:
        notify("STOPPING=1")
        server.close()


def _heard_by_manager(is_over: Callable[[], bool], every_s: float) -> Callable[[], bool]:
    """Returns `is_over` with a word to the manager's watchdog, at most every `every_s`: `serve` asks it each round."""
    told_s = 0.0

    def asked() -> bool:
        nonlocal told_s
        if time.monotonic() - told_s >= every_s:
            notify("WATCHDOG=1")
            told_s = time.monotonic()
        return is_over()

    return asked
