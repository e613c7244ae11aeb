"""A PoolClient is this process's membership in a pool of memory: the only file that imports mooncake.

All bytes go by way of memory of its own, which is registered once: what comes late then comes into nobody's pages.
Whatever Mooncake says becomes an OSError or a reason of few words, so that counters have few names. Its calls release
Python's lock, but for `setup`, so a master is first seen to be alive. Calls that may hang run in a CallLane, one at a
time in its thread, with a limit; after a master's Silence no worker waits for it for a while.
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

#: An answer that failed within this cost nothing: the next call asks again.
_SLOW_S = 1.0
#: A master that was silent is asked again after this.
_REST_S = 10.0
#: The nice value of a thread that waits for Mooncake, a tenth of the weight of a rank's own.
_NICE = 10


class Silence:
    """A dead master takes seconds to fail each call: stores in a row would hold the pages of requests as long."""

    def __init__(self, said: str, clock: Callable[[], float]) -> None:
        """`said`: the words for a call that is refused. `clock`: in seconds."""
        self._said, self._clock, self._over_s = said, clock, -math.inf

    def now(self) -> float:
        """Return the time, for `heard`."""
        return self._clock()

    def check(self) -> None:
        """Raise OSError while the master is left alone."""
        if self._clock() < self._over_s:
            raise OSError(errno.ETIMEDOUT, self._said)

    def heard_nothing(self, began_s: float) -> None:
        """Leave the master alone for a while, if a call that began then was long without an answer."""
        if self._clock() - began_s >= _SLOW_S:
            self._over_s = self._clock() + _REST_S


Answer = TypeVar("Answer")


class _Call:
    """One call, and how it ended."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make, self.ended = make, Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = self.make()
        except Exception as error:  # it is the caller's, who waits for it
            self.error = error


class CallLane:
    """A call that runs beyond its limit goes on alone; until it has ended every other is refused at once.

    So who asks often waits for a limit once, and the memory of a call is its own until it has ended.
    """

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[_Call | None]()
        self._free = Lock()
        self._late_s = math.inf
        Thread(target=self._run, daemon=True, name=name).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._free.locked()

    def call(self, make: Callable[[], Answer], limit_s: float, silent: str) -> Answer:
        """What `make` answers, or raises. `silent`: the words for who did not answer.

        Raises OSError where that takes longer than `limit_s`, the wait for the call before included.
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
        """End the thread, once what it is at is done. Waits for nothing."""
        self._calls.put(None)

    def _run(self) -> None:
        # Mooncake's client spins until a transfer has ended, whose own threads need the core meanwhile.
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)
        while (call := self._calls.get()) is not None:
            call.run()
            self._late_s = math.inf
            self._free.release()
            call.ended.set()


#: Nobody waits longer for bytes.
_MOVE_S = 20.0
#: How long a master may take to answer before we join, and members to be told that we leave.
_ALIVE_S, _LEAVE_S = 2.0, 5.0

#: Memory that bytes go by way of, in each direction; more where one object is longer.
STAGING_BYTES = 16 << 20
#: Memory for entries of lists, which Mooncake allocates itself.
_ENTRIES_BYTES = 1 << 20

NO_OBJECT = "not in the pool"
#: Mooncake's numbers, where what is done depends on them.
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
    """Who waits for an answer of the master, and for how many seconds.

    All requests of an engine wait for its scheduler. Where a worker gives up, a page is not stored.
    """

    SCHEDULER = 1.0
    WORKER = 5.0


class MooncakeClient(Protocol):
    """The calls of a MooncakeDistributedStore that are used, so that a test may stand in for it."""

    def register_buffer(self, address: int, nbytes: int, /) -> int:
        """Let bytes go to and from memory; 0 for success."""
        ...

    def unregister_buffer(self, address: int, /) -> int:
        """The opposite."""
        ...

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """1, 0, or a negative code of each key."""
        ...

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Put objects from registered memory; 0 or a negative code of each."""
        ...

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Get objects whole; bytes or a negative code of each."""
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
        """Get ranges of objects: by buffer, object and range, bytes or a negative code."""
        ...

    def get_batch(self, keys: list[str], /) -> list[bytes]:
        """Objects whole, in memory of Mooncake's own; empty for what is not there."""
        ...

    def get_size(self, key: str, /) -> int:
        """Bytes of an object, or a negative code."""
        ...

    def put(self, key: str, value: bytes, config: Any, /) -> int:
        """Put a small object; 0 or a negative code."""
        ...

    def remove(self, key: str, force: Literal[True], /) -> int:
        """0 or a negative code."""
        ...

    def remove_by_regex(self, pattern: str, force: Literal[True], /) -> int:
        """How many objects were removed, or a negative code."""
        ...

    def close(self) -> int:
        """Leave the pool."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectRanges:
    """Ranges (offset, bytes) that are wanted of an object, which has `nbytes` bytes."""

    key: str
    nbytes: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """One range, which is all: several such objects are asked for at once."""
        return self.ranges == ((0, self.nbytes),)

    @property
    def wanted_bytes(self) -> int:
        """Of all ranges."""
        return sum(nbytes for _, nbytes in self.ranges)


class _Staging:
    """Registered memory of our own, in one direction. Who holds the lane has it alone.

    It grows by doubling, and is kept until we leave: what a transfer that failed still writes must hit nobody.
    """

    def __init__(self, client: MooncakeClient) -> None:
        """Raises OSError."""
        self._client = client
        self._buffers: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._grow(STAGING_BYTES)

    def reserve(self, nbytes: int) -> memoryview:
        """At least so many bytes. While no call is under way. Raises OSError."""
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
        """Before the client leaves. Raises nothing."""
        for address in self._addresses:
            self._client.unregister_buffer(address)


class PoolClient:
    """Safe for one thread that asks, one that reads and one that writes. Every call ends: see `CallLane`.

    A scheduler's questions wait for no others. After a worker waited for a master that is silent, every call is refused
    at once for a while: see `Silence`.
    """

    def __init__(
        self, location: str, client: MooncakeClient, kept: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`kept`: Mooncake's configuration of a put that its master does not evict. Raises OSError."""
        self._silence = Silence(SILENT_MASTER, clock)
        self.location = location
        self._client, self._kept = client, kept
        self._incoming, self._outgoing = _Staging(client), _Staging(client)
        self._asks = {each: CallLane(f"kvmover-pool-{each.name.lower()}") for each in Asker}
        self._reads, self._writes = CallLane("kvmover-pool-reads"), CallLane("kvmover-pool-writes")
        self._is_open = True

    @classmethod
    def open(cls, address: PoolAddress) -> PoolClient:
        """Join the pool. Raises StoreError where Mooncake is not installed, or its master is not there."""
        _see_alive(address)
        try:
            mooncake: Any = import_module("mooncake.store")
        except ImportError as error:
            raise StoreError(f"{address.location} needs Mooncake: {how_to_install('mooncake')} ({error})") from error
        client, kept = mooncake.MooncakeDistributedStore(), mooncake.ReplicateConfig()
        kept.with_hard_pin, kept.replica_num = True, 2
        here = (_own_host(address), address.metadata, address.donate_bytes, _ENTRIES_BYTES)
        code = client.setup(*here, address.protocol, "", address.master)
        if code:
            raise StoreError(f"cannot join {address.location}: Mooncake's setup says {code}")
        try:
            return cls(address.location, client, kept)
        except OSError as error:
            client.close()
            raise StoreError(f"cannot join {address.location}: {error.strerror}") from error

    # Questions

    def exists(self, keys: Sequence[str], asker: Asker) -> list[bool]:
        """Which objects are there, by one question to the master. Raises OSError."""
        codes = self._ask(lambda: self._client.batch_is_exist(list(keys)), asker)
        if failed := next((code for code in codes if code < 0), 0):
            raise OSError(errno.EREMOTEIO, _REASONS.get(failed, SILENT_MASTER))
        return [code == 1 for code in codes]

    def entries(self, keys: Sequence[str], asker: Asker) -> list[bytes]:
        """Small objects, whole; b"" for one that is not there. Raises OSError."""
        return self._ask(lambda: self._client.get_batch(list(keys)), asker)

    def size(self, key: str) -> int:
        """Bytes of an object. Raises OSError, FileNotFoundError where there is none."""
        return _checked(self._ask(lambda: self._client.get_size(key)))

    def remove(self, key: str, permit: Permit) -> None:
        """Remove an object, whoever reads it. Raises OSError; one that is gone is no matter."""
        with suppress(FileNotFoundError):
            _checked(self._ask(lambda: self._client.remove(key, True)))

    def remove_all(self, folder: str, permit: Permit) -> int:
        """Remove everything whose key begins with the folder; how many. Raises OSError."""
        pattern = "^" + folder.replace(".", "[.]") + "/"
        return _checked(self._move(self._writes, lambda: self._client.remove_by_regex(pattern, True)))

    # Bytes

    @contextmanager
    def reading(self, wanted: Sequence[ObjectRanges]) -> Generator[list[list[memoryview] | str]]:
        """The ranges of each object, or why they did not come, for as long as the block lasts.

        The memory is unchecked, and the next `reading` writes there. Raises OSError.
        """
        size = sum(each.wanted_bytes for each in wanted)
        answers = self._move(self._reads, lambda: self._read(self._incoming.reserve(size), wanted))
        yield answers

    def _read(self, memory: memoryview, wanted: Sequence[ObjectRanges]) -> list[list[memoryview] | str]:
        """Objects that are wanted whole in one call, which is faster, and ranges of the others in another."""
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
        """Write objects whole, each from its pieces: why one is not there, or "". The first of two writers wins.

        Raises OSError.
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
        """Write a small object that is not evicted, twice where two donors are. Raises OSError."""
        began_s = self._silence.now()
        _checked(self._judged(self._move(self._writes, lambda: self._client.put(key, data, self._kept)), began_s))

    def close(self) -> None:
        """Leave the pool, with what this process gave to it. Safe to call twice, and raises nothing."""
        if not self._is_open:
            return
        self._is_open = False
        lanes = (*self._asks.values(), self._reads, self._writes)
        if not any(lane.is_busy for lane in lanes):  # Mooncake's client must outlive the calls of it
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
        """Return codes of a call, or one, after a look whether the master said any of it."""
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


def _see_alive(address: PoolAddress) -> None:
    """Raise StoreError unless the master answers: Mooncake's setup would hold Python's lock for minutes.

    A master that lives hangs up on what is no request. One that is stopped has a kernel that takes the connection, and
    says nothing.
    """
    try:
        with socket.create_connection((address.host, address.port), _ALIVE_S) as connection:
            connection.settimeout(_ALIVE_S)
            connection.sendall(bytes(64))
            with suppress(ConnectionResetError):
                connection.recv(64)
    except OSError as error:
        raise StoreError(f"cannot join {address.location}: {SILENT_MASTER} ({error})") from error


def _own_host(address: PoolAddress) -> str:
    """Under which address others reach this process: that of its way to the master."""
    with socket.create_connection((address.host, address.port), _ALIVE_S) as connection:
        return str(connection.getsockname()[0])
