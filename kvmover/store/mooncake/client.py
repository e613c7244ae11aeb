"""A PoolClient is this process's membership in a memory pool, and the only user of the mooncake package.

All bytes pass through staging memory registered once, so that a late transfer never writes into a request's pages.
Mooncake's codes become an OSError or one of few reasons, so that counters stay few. Its calls release the GIL, except
`setup`, before which the master is probed. Calls run in a CallLane, one at a time with a limit; after a silent master,
calls fail at once for a while (`Silence`).
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from queue import SimpleQueue
from threading import Event, Lock, Thread, get_native_id
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from kvmover.errors import StoreError, how_to_install
from kvmover.store.deletion import Permit
from kvmover.store.files import SHORT
from kvmover.store.mooncake.format import PoolAddress

#: Seconds: a call that failed faster does not start a rest.
_SLOW_S = 1.0
#: Seconds without calls to the master after it was silent.
_REST_S = 10.0
#: Nice value of a thread that waits for Mooncake: a tenth of the CPU weight of a rank's own threads.
_NICE = 10


class Silence:
    """A circuit breaker for a dead master, which would fail each call only after seconds and hold requests' pages."""

    def __init__(self, said: str, clock: Callable[[], float]) -> None:
        """Create a closed breaker. `said`: message of refused calls. `clock`: in seconds."""
        self._said, self._clock, self._over_s = said, clock, -math.inf

    def now(self) -> float:
        """Return the time (s) for `heard_nothing`."""
        return self._clock()

    def check(self) -> None:
        """Raise OSError during a rest."""
        if self._clock() < self._over_s:
            raise OSError(errno.ETIMEDOUT, self._said)

    def heard_nothing(self, began_s: float) -> None:
        """Begin a rest if the failed call that began at `began_s` took at least `_SLOW_S`."""
        if self._clock() - began_s >= _SLOW_S:
            self._over_s = self._clock() + _REST_S


Answer = TypeVar("Answer")


class _Call:
    """A call and its result."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make, self.ended = make, Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = self.make()
        except Exception as error:  # re-raised in the calling thread
            self.error = error


class CallLane:
    """A thread that runs one call at a time. While a call exceeds its limit, all others are refused at once.

    So frequent callers wait for a limit only once, and a call keeps its memory until it has ended.
    """

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[_Call | None]()
        self._free = Lock()
        self._late_s = math.inf
        Thread(target=self._run, daemon=True, name=name).start()

    @property
    def is_busy(self) -> bool:
        """True if a call is running."""
        return self._free.locked()

    def call(self, make: Callable[[], Answer], limit_s: float, silent: str) -> Answer:
        """Run `make` in the thread. Returns its result, or raises its exception.

        Raises OSError with message `silent` after `limit_s` seconds, waiting for the previous call included.
        """
        until_s = time.monotonic() + limit_s
        if time.monotonic() >= self._late_s or not self._free.acquire(timeout=limit_s):
            raise OSError(errno.ETIMEDOUT, silent)
        call = _Call(make)
        self._late_s = until_s
        self._calls.put(call)
        if not call.ended.wait(max(0.0, until_s - time.monotonic())):
            raise OSError(errno.ETIMEDOUT, silent)
        if call.error is not None:
            raise call.error
        return call.answer

    def close(self) -> None:
        """End the thread after its running call. Returns at once."""
        self._calls.put(None)

    def _run(self) -> None:
        # Mooncake's client spins until a transfer has ended, while the transfer's threads need the core.
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)
        while (call := self._calls.get()) is not None:
            call.run()
            self._late_s = math.inf
            self._free.release()
            call.ended.set()


#: Limit of a transfer, s.
_MOVE_S = 20.0
#: Limits, s: the master's answer to the probe before joining, and leaving the pool.
_ALIVE_S, _LEAVE_S = 2.0, 5.0

#: Staging memory per direction; it grows for longer objects.
STAGING_BYTES = 16 << 20
#: Memory for list entries, allocated by Mooncake.
_ENTRIES_BYTES = 1 << 20

NO_OBJECT = "not in the pool"
#: Mooncake's error codes that this client tells apart.
_NO_OBJECT, _BEGUN, _NO_ROOM, _OUT_OF_RANGE = -704, -703, -200, -600
_NOT_MOVED, _MASTER_LOST, _MASTER_LATE = -800, -900, -901
SILENT_MASTER, SILENT_DONOR = "the pool's master does not answer", "a donor of the pool does not answer"
_REASONS = {
    _NO_OBJECT: NO_OBJECT,
    _BEGUN: "somebody else began to put it, and has not ended",
    _NO_ROOM: "the pool has no room",
    _OUT_OF_RANGE: f"{SHORT} fewer bytes than its box has",
    _NOT_MOVED: SILENT_DONOR,
    _MASTER_LOST: SILENT_MASTER,
    _MASTER_LATE: SILENT_MASTER,
}

Buffer: TypeAlias = bytes | memoryview


class Asker(Enum):
    """A caller of the master; its value is the limit of the wait, s.

    All requests of an engine wait for its scheduler. If a worker gives up, a page is not stored.
    """

    SCHEDULER = 1.0
    WORKER = 5.0


class MooncakeClient(Protocol):
    """The used subset of MooncakeDistributedStore, which tests replace. Negative results are error codes."""

    def register_buffer(self, address: int, nbytes: int, /) -> int:
        """Register memory for transfers. Returns 0 on success."""
        ...

    def unregister_buffer(self, address: int, /) -> int:
        """Deregister memory. Returns 0 on success."""
        ...

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """Return for each key 1 if it exists, 0 if not, or a code."""
        ...

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Put objects from registered memory. Returns 0 or a code for each."""
        ...

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Get whole objects into registered memory. Returns bytes read or a code for each."""
        ...

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        sources: list[list[list[int]]],
        sizes: list[list[list[int]]],
        /,
    ) -> list[list[list[int]]]:
        """Get ranges of objects. Returns bytes read or a code, by [buffer][object][range]."""
        ...

    def get_batch(self, keys: list[str], /) -> list[bytes]:
        """Return whole objects, from memory of Mooncake; b"" if absent."""
        ...

    def get_size(self, key: str, /) -> int:
        """Return the bytes of an object, or a code."""
        ...

    def put(self, key: str, value: bytes, config: Any, /) -> int:
        """Put a small object. Returns 0 or a code."""
        ...

    def remove(self, key: str, force: Literal[True], /) -> int:
        """Remove an object. Returns 0 or a code."""
        ...

    def remove_by_regex(self, pattern: str, force: Literal[True], /) -> int:
        """Remove objects by key. Returns their number, or a code."""
        ...

    def close(self) -> int:
        """Leave the pool."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectRanges:
    """The wanted ranges (offset, bytes) of an object of `nbytes` bytes."""

    key: str
    nbytes: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """True if the only range is the whole object, which permits a batched call."""
        return self.ranges == ((0, self.nbytes),)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(nbytes for _, nbytes in self.ranges)


class _Staging:
    """A registered buffer for one direction, used only inside that direction's CallLane.

    It grows by doubling. Outgrown buffers stay registered until the client leaves, because a failed transfer may still
    write to them.
    """

    def __init__(self, client: MooncakeClient) -> None:
        """Register STAGING_BYTES. Raises OSError if Mooncake refuses."""
        self._client = client
        self._buffers: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._grow(STAGING_BYTES)

    def reserve(self, nbytes: int) -> memoryview:
        """Return a buffer of at least `nbytes`; call it inside the lane. Raises OSError if registering fails."""
        if nbytes > len(self._buffers[-1]):
            self._grow(max(nbytes, 2 * len(self._buffers[-1])))
        return memoryview(self._buffers[-1])

    def _grow(self, nbytes: int) -> None:
        buffer = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if code := self._client.register_buffer(self.address, nbytes):
            raise OSError(errno.ENOMEM, f"Mooncake does not register {nbytes} bytes of memory ({code})")
        self._buffers.append(buffer)
        self._addresses.append(self.address)

    def release(self) -> None:
        """Deregister all buffers, before the client leaves."""
        for address in self._addresses:
            self._client.unregister_buffer(address)


class PoolClient:
    """A member of a pool. Safe for one asking, one reading and one writing thread. Every call has a time limit.

    A scheduler's lookups have a lane of their own. After a worker has waited for a silent master, every call is refused
    at once for `_REST_S` seconds.
    """

    def __init__(
        self, location: str, client: MooncakeClient, kept: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Register staging memory. `kept`: Mooncake's configuration for unevictable puts. Raises OSError."""
        self._silence = Silence(SILENT_MASTER, clock)
        self.location = location
        self._client, self._kept = client, kept
        self._incoming, self._outgoing = _Staging(client), _Staging(client)
        self._asks = {each: CallLane(f"kvmover-pool-{each.name.lower()}") for each in Asker}
        self._reads, self._writes = CallLane("kvmover-pool-reads"), CallLane("kvmover-pool-writes")
        self._is_open = True

    @classmethod
    def open(cls, address: PoolAddress) -> PoolClient:
        """Join the pool. Raises StoreError if Mooncake is missing, its master does not answer, or its setup fails."""
        own_host = _see_alive(address)
        try:
            mooncake: Any = import_module("mooncake.store")
        except ImportError as error:
            raise StoreError(f"{address.location} needs Mooncake: {how_to_install('mooncake')} ({error})") from error
        client, kept = mooncake.MooncakeDistributedStore(), mooncake.ReplicateConfig()
        kept.with_hard_pin, kept.replica_num = True, 2
        here = (own_host, address.metadata, address.donate_bytes, _ENTRIES_BYTES)
        code = client.setup(*here, address.protocol, "", address.master)
        if code:
            raise StoreError(f"cannot join {address.location}: Mooncake's setup says {code}")
        try:
            return cls(address.location, client, kept)
        except OSError as error:
            client.close()
            raise StoreError(f"cannot join {address.location}: {error.strerror}") from error

    # Lookups

    def exists(self, keys: Sequence[str], asker: Asker) -> list[bool]:
        """Return for each key whether its object exists, by one request to the master. Raises OSError."""
        codes = self._ask(lambda: self._client.batch_is_exist(list(keys)), asker)
        if failed := next((code for code in codes if code < 0), 0):
            raise OSError(errno.EREMOTEIO, _REASONS.get(failed, SILENT_MASTER))
        return [code == 1 for code in codes]

    def entries(self, keys: Sequence[str], asker: Asker) -> list[bytes]:
        """Return small objects whole; b"" for an absent object. Raises OSError."""
        return self._ask(lambda: self._client.get_batch(list(keys)), asker)

    def size(self, key: str) -> int:
        """Return the bytes of an object. Raises FileNotFoundError if it is absent, OSError for other failures."""
        return _checked(self._ask(lambda: self._client.get_size(key)))

    def remove(self, key: str, permit: Permit) -> None:
        """Remove an object, even under readers; an absent object is ignored. Raises OSError."""
        with suppress(FileNotFoundError):
            _checked(self._ask(lambda: self._client.remove(key, True)))

    def remove_all(self, folder: str, permit: Permit) -> int:
        """Remove all objects whose key begins with `folder/`. Returns their number. Raises OSError."""
        pattern = "^" + folder.replace(".", "[.]") + "/"
        return _checked(self._move(self._writes, lambda: self._client.remove_by_regex(pattern, True)))

    # Bytes

    @contextmanager
    def reading(self, wanted: Sequence[ObjectRanges]) -> Generator[list[list[memoryview] | str]]:
        """Read the ranges of objects. Yields for each object its ranges, or the reason of failure. Raises OSError.

        The views are unchecked staging memory, which the next `reading` overwrites.
        """
        size = sum(each.wanted_bytes for each in wanted)
        answers = self._move(self._reads, lambda: self._read(self._incoming.reserve(size), wanted))
        yield answers

    def _read(self, memory: memoryview, wanted: Sequence[ObjectRanges]) -> list[list[memoryview] | str]:
        """Read whole objects by one call, which is faster, and ranges of the others by a second call."""
        places: list[list[int]] = []
        at = 0
        for each in wanted:
            places.append([])
            for _, nbytes in each.ranges:
                places[-1].append(at)
                at += nbytes
        whole = [item for item, each in enumerate(wanted) if each.is_whole]
        some = [item for item, each in enumerate(wanted) if not each.is_whole]
        codes: dict[int, list[int]] = {}
        base = self._incoming.address
        if whole:
            addresses, sizes = [base + places[item][0] for item in whole], [wanted[item].nbytes for item in whole]
            came = self._client.batch_get_into([wanted[item].key for item in whole], addresses, sizes)
            codes.update((item, [code]) for item, code in zip(whole, came, strict=True))
        if some:
            keys, targets = [wanted[item].key for item in some], [places[item] for item in some]
            sources = [[offset for offset, _ in wanted[item].ranges] for item in some]
            lengths = [[nbytes for _, nbytes in wanted[item].ranges] for item in some]
            [parts] = self._client.get_into_ranges([base], [keys], [targets], [sources], [lengths])
            codes.update(zip(some, parts, strict=True))
        return [_pieces(memory, each, places[item], codes[item]) for item, each in enumerate(wanted)]

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[Buffer]]) -> list[str]:
        """Write whole objects, each from its pieces. The first of two writers wins.

        Returns "" or the reason of failure for each. Raises OSError.
        """
        sizes = [sum(map(len, pieces)) for pieces in objects]
        return self._move(self._writes, lambda: self._write(keys, objects, sizes))

    def _write(self, keys: Sequence[str], objects: Sequence[Sequence[Buffer]], sizes: Sequence[int]) -> list[str]:
        memory, at, addresses = self._outgoing.reserve(sum(sizes)), 0, list[int]()
        for pieces in objects:
            addresses.append(self._outgoing.address + at)
            for piece in pieces:
                memory[at : at + len(piece)] = piece
                at += len(piece)
        began_s = self._silence.now()
        codes = self._judged(self._client.batch_put_from(list(keys), addresses, list(sizes)), began_s)
        return ["" if code >= 0 else _REASONS.get(code, f"Mooncake says {code}") for code in codes]

    def put_entry(self, key: str, data: bytes) -> None:
        """Write a small unevictable object, with two replicas if there are two donors. Raises OSError."""
        began_s = self._silence.now()
        _checked(self._judged(self._move(self._writes, lambda: self._client.put(key, data, self._kept)), began_s))

    def close(self) -> None:
        """Leave the pool and withdraw the donated memory. Idempotent; never raises OSError.

        If a call is still running, Mooncake's client stays open, because it must outlive its calls.
        """
        if not self._is_open:
            return
        self._is_open = False
        lanes = (*self._asks.values(), self._reads, self._writes)
        if not any(lane.is_busy for lane in lanes):  # Mooncake's client must outlive its calls
            leaving = CallLane("kvmover-pool-leaves")
            with suppress(OSError):
                leaving.call(self._leave, _LEAVE_S, SILENT_MASTER)
            leaving.close()
        for lane in lanes:
            lane.close()

    def _leave(self) -> None:
        self._incoming.release()
        self._outgoing.release()
        self._client.close()

    def _ask(self, make: Callable[[], Any], asker: Asker = Asker.WORKER) -> Any:
        began_s = self._silence.now()
        try:
            answer = self._call(self._asks[asker], make, asker.value, SILENT_MASTER)
        except OSError as error:
            if asker is Asker.WORKER and error.errno == errno.ETIMEDOUT:
                self._silence.heard_nothing(began_s)
            raise
        return self._judged(answer, began_s)

    def _move(self, lane: CallLane, make: Callable[[], Any]) -> Any:
        return self._call(lane, make, _MOVE_S, SILENT_DONOR)

    def _call(self, lane: CallLane, make: Callable[[], Any], limit_s: float, silent: str) -> Any:
        if not self._is_open:
            raise OSError(errno.EBADF, f"{self.location} was left")
        self._silence.check()
        return lane.call(make, limit_s, silent)

    def _judged(self, answer: Any, began_s: float) -> Any:
        """Return `answer`, one code or a list; report a silent master's codes to `Silence` first."""
        codes = cast("list[Any]", answer) if isinstance(answer, list) else [answer]
        if any(code in (_MASTER_LOST, _MASTER_LATE) for code in codes):
            self._silence.heard_nothing(began_s)
        return cast("Any", answer)


def _pieces(memory: memoryview, each: ObjectRanges, places: Sequence[int], codes: Sequence[int]) -> Any:
    for (_, nbytes), code in zip(each.ranges, codes, strict=True):
        if code != nbytes:
            return _REASONS.get(code, f"Mooncake says {code}") if code < 0 else f"{SHORT} {code} of {nbytes} bytes"
    return [memory[at : at + nbytes] for at, (_, nbytes) in zip(places, each.ranges, strict=True)]


def _checked(code: int) -> int:
    if code == _NO_OBJECT:
        raise FileNotFoundError(errno.ENOENT, NO_OBJECT)
    if code < 0:
        raise OSError(errno.EREMOTEIO, _REASONS.get(code, f"Mooncake says {code}"))
    return code


def _see_alive(address: PoolAddress) -> str:
    """Return this process's address for other members, of its route to the master, once the master has answered.

    A living master hangs up on 64 zero bytes. A stopped one stays silent, although its kernel accepts connections:
    Mooncake's setup would hold the GIL for minutes. Raises StoreError.
    """
    try:
        with socket.create_connection((address.host, address.port), _ALIVE_S) as connection:
            own_host = connection.getsockname()[0]
            connection.settimeout(_ALIVE_S)
            connection.sendall(bytes(64))
            with suppress(ConnectionResetError):
                connection.recv(64)
            return str(own_host)
    except OSError as error:
        raise StoreError(f"cannot join {address.location}: {SILENT_MASTER} ({error})") from error
