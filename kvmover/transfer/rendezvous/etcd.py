"""A directory in etcd: every entry under a lease that this process keeps alive, so that it goes when the process does.

A Gateway speaks etcd's v3 API over its JSON gateway; a Keeper is the thread that keeps a lease alive.

NIXL's own etcd support is not used. It publishes an agent's metadata, which is not enough to connect a rank, and has no
lease: keys of killed processes stay for ever, and nothing tells them from those of the living (measured with 1.5.1).
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from kvmover.errors import (
    DeadlineExceeded,
    KvmoverError,
    LayoutError,
    PeerLost,
    ProtocolError,
    TransportError,
    TransportUnavailable,
)
from kvmover.transfer.rendezvous.directory import Entry, newest, read_entries, write_entries

_MAX_REPLY_BYTES = 64 << 20

Reply = TypeVar("Reply")


class EtcdRefused(TransportError):
    """etcd answered, and said no: the message is its own."""


class LeaseMissing(EtcdRefused):
    """etcd knows no lease of that number: it has run out, or never was."""


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 0


_NOT_FOUND = 5  # gRPC's status


class Gateway:
    """`endpoints`: `http://host:port` or https, of one cluster. `deadline_s` bounds a call over all of them."""

    def __init__(self, endpoints: Sequence[str], deadline_s: float) -> None:
        self._endpoints = [_endpoint(each) for each in endpoints]
        if not self._endpoints or deadline_s <= 0:
            raise LayoutError(f"etcd at {list(endpoints)} within {deadline_s} s cannot be asked")
        self._deadline_s = deadline_s

    def call(self, path: str, body: Mapping[str, object], reply: type[Reply]) -> Reply:
        """POST `body`, whose bytes travel as base64, and decode the answer.

        Raises EtcdRefused (LeaseMissing), TransportUnavailable where no endpoint takes a connection, DeadlineExceeded.
        """
        data = msgspec.json.encode(body)
        deadline, failures = time.monotonic() + self._deadline_s, dict[str, OSError | http.client.HTTPException]()
        for number in range(len(self._endpoints)):
            scheme, host = self._endpoints[0]
            share_s = (deadline - time.monotonic()) / (len(self._endpoints) - number)
            try:
                status, answer = _post(scheme, host, path, data, time.monotonic() + share_s)
                return _decode(status, answer, f"{scheme}://{host}{path}", reply)
            except (OSError, http.client.HTTPException) as error:
                failures[host] = error
                self._endpoints.append(self._endpoints.pop(0))
        words = ", ".join(f"{host}: {error}" for host, error in failures.items())
        if any(isinstance(error, TimeoutError) for error in failures.values()):
            raise DeadlineExceeded(f"etcd did not answer {path} within {self._deadline_s} s ({words})")
        raise TransportUnavailable(f"etcd cannot be reached ({words})")


def _endpoint(text: str) -> tuple[str, str]:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise LayoutError(f"etcd endpoint {text!r} is not http://host:port")
    return parts.scheme, parts.netloc


def _post(scheme: str, host: str, path: str, data: bytes, deadline: float) -> tuple[int, bytes]:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    connection = kinds[scheme](host, timeout=_left(deadline))
    try:
        connection.connect()
        sock = connection.sock
        sock.settimeout(_left(deadline))
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        sock.settimeout(_left(deadline))
        response = connection.getresponse()
        parts: list[bytes] = []
        while part := response.read1(1 << 16):
            parts.append(part)
            if sum(map(len, parts)) > _MAX_REPLY_BYTES:
                raise OSError(f"an answer of more than {_MAX_REPLY_BYTES} bytes")
            sock.settimeout(_left(deadline))
        return response.status, b"".join(parts)
    finally:
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _decode(status: int, answer: bytes, url: str, reply: type[Reply]) -> Reply:
    decode: Any = msgspec.json.decode
    try:
        if status >= http.client.INTERNAL_SERVER_ERROR:  # another member may have a leader
            raise http.client.HTTPException(f"{status} {decode(answer, type=_Error).message}")
        if status != http.client.OK:
            error = decode(answer, type=_Error)
            refused = LeaseMissing if error.code == _NOT_FOUND else EtcdRefused
            raise refused(f"{url} answers {status}: {error.message}")
        # 64-bit numbers are strings in this API.
        return decode(answer, type=reply, strict=False)
    except msgspec.MsgspecError as error:
        raise TransportUnavailable(f"{url} does not answer like etcd: {error}") from error


log = logging.getLogger(__name__)

#: Entries fetched by one call. A card is some 10 KB.
_PAGE = 64


class _Header(msgspec.Struct):
    revision: int = 0


class _Pair(msgspec.Struct):
    key: bytes
    value: bytes = b""


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_Pair] = []
    more: bool = False


class _Lease(msgspec.Struct):
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class _Kept(msgspec.Struct):
    result: _Lease


class _Any(msgspec.Struct):
    pass


class EtcdDirectory:
    """Entries at `prefix`/engine/rank/generation. etcd 3.4 or newer; a card must fit its 1.5 MiB for a request.

    `ttl_s`: how long an entry outlives its process, at least 2. While anything is published a thread renews the lease
    three times as often, and asks for another, and publishes again, where etcd lost it. No user or password is sent.
    """

    def __init__(
        self, endpoints: Sequence[str], prefix: str = "/kvmover", ttl_s: int = 10, deadline_s: float = 2.0
    ) -> None:
        if ttl_s < 2 or deadline_s > ttl_s / 2:
            raise LayoutError(f"a lease of {ttl_s} s cannot be kept by calls of up to {deadline_s} s")
        self._gateway = Gateway(endpoints, deadline_s)
        self._prefix, self._ttl_s = prefix.rstrip("/"), ttl_s
        self._lock = threading.RLock()
        self._entries: dict[tuple[str, int, int], tuple[Entry, int]] = {}  # and the lease it was last put under
        self._lease = 0
        self._keeper: Keeper | None = None

    def publish(self, entry: Entry) -> None:
        """Put an entry under this process's lease, which a thread renews from now on.

        Raises PeerLost where a newer generation holds the rank, TransportUnavailable where etcd cannot be reached.
        """
        with self._lock:
            self._check(entry)
            if not self._lease:
                self._lease = self._grant()
            try:
                self._put(entry)
            except LeaseMissing:
                self._lease = self._grant()
                self._put(entry)
            if self._keeper is None:
                self._keeper = Keeper(f"lease in etcd at {self._prefix}", self._ttl_s / 3, self._keep)

    def withdraw(self, entry: Entry) -> None:
        """Delete the entry; nothing happens where it is not there. Raises TransportUnavailable."""
        with self._lock:
            self._gateway.call("/v3/kv/deleterange", {"key": self._key(entry)}, _Any)
            self._entries.pop(_place(entry), None)

    def ranks(self, engine: str) -> tuple[Entry, ...]:
        """An engine's entries with a living lease: of each rank the one of the highest generation.

        Raises TransportUnavailable where etcd cannot be reached.
        """
        return newest(self._find(self._engine(engine)))

    def close(self) -> None:
        """Ends the lease, and with it every entry; where etcd cannot be told, it ends by itself within `ttl_s`."""
        keeper, self._keeper = self._keeper, None
        if keeper:
            keeper.stop()
        with self._lock:
            lease, self._lease = self._lease, 0
            self._entries.clear()
            if not lease:
                return
            try:
                self._gateway.call("/v3/lease/revoke", {"ID": lease}, _Any)
            except TransportError as error:
                log.warning("the lease at %s runs out by itself: %s", self._prefix, error)

    def _keep(self) -> None:
        with self._lock:
            if not self._entries:
                return
            kept = self._gateway.call("/v3/lease/keepalive", {"ID": self._lease}, _Kept)
            if kept.result.ttl <= 0:
                log.warning("the lease at %s ran out; publishing %d entries again", self._prefix, len(self._entries))
                self._lease = self._grant()
            for place, (entry, lease) in list(self._entries.items()):
                if lease != self._lease:
                    self._put_again(place, entry)

    def _put_again(self, place: tuple[str, int, int], entry: Entry) -> None:
        """Under the lease of now, but not what a newer process has taken over since."""
        try:
            self._check(entry)
        except PeerLost as error:
            log.warning("not published again: %s", error)
            del self._entries[place]
            return
        self._put(entry)

    def _check(self, entry: Entry) -> None:
        found = self._find(f"{self._engine(entry.engine)}{entry.rank}/")
        newer = max((each.generation for each in found), default=0)
        if newer > entry.generation:
            raise PeerLost(f"{entry.text()} has been replaced by generation {newer}")

    def _grant(self) -> int:
        return self._gateway.call("/v3/lease/grant", {"TTL": self._ttl_s}, _Lease).id

    def _put(self, entry: Entry) -> None:
        pair = {"key": self._key(entry), "value": write_entries([entry]), "lease": self._lease}
        self._gateway.call("/v3/kv/put", pair, _Any)
        self._entries[_place(entry)] = entry, self._lease

    def _find(self, start: str) -> Iterator[Entry]:
        """All entries whose keys begin with `start`, as they were at one moment."""
        key, revision = start.encode(), 0
        while True:
            query = {"key": key, "range_end": _after(start.encode()), "limit": _PAGE, "revision": revision}
            found = self._gateway.call("/v3/kv/range", query, _Range)
            for pair in found.kvs:
                yield from self._read(pair)
            if not found.more:
                return
            key, revision = found.kvs[-1].key + b"\0", found.header.revision

    def _read(self, pair: _Pair) -> Iterator[Entry]:
        """The entry in `pair`; what somebody else wrote there is said and left out, and hides nobody."""
        try:
            (entry,) = read_entries(pair.value)
        except (ProtocolError, ValueError) as error:
            log.warning("%s in etcd is not an entry: %s", pair.key, error)
            return
        if self._key(entry) != pair.key:
            log.warning("%s in etcd holds %s", pair.key, entry.text())
            return
        yield entry

    def _engine(self, engine: str) -> str:
        return f"{self._prefix}/{quote(engine, safe='')}/"

    def _key(self, entry: Entry) -> bytes:
        return f"{self._engine(entry.engine)}{entry.rank}/{entry.generation}".encode()


def _place(entry: Entry) -> tuple[str, int, int]:
    return entry.engine, entry.rank, entry.generation


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Keeper:
    """Calls `work` every `period_s` until stopped, whatever it raises: a failure is logged when it begins and ends.

    A thread of its own, because a directory that hangs must not stop transfers, nor a long prefill the directory.
    """

    def __init__(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        self._period_s, self._work = period_s, work
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when `work` runs no more and will not again."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._work()
            except KvmoverError as error:
                if not self._failing:
                    log.warning("%s: %s", self._thread.name, error)
                self._failing = True
                continue
            if self._failing:
                log.warning("%s: works again", self._thread.name)
            self._failing = False
