"""An ObjectBucket is one prefix of an object store, through obstore: objects are put whole, listed and read by range.

Every error of the service becomes an OSError with one of few reasons, so that counters stay few; its own message goes
to the log. Every call ends: retries are bounded in number and time.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from kvmover.errors import StoreError, how_to_install
from kvmover.store.deletion import Permit
from kvmover.store.location import SCHEMES, is_bucket

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

#: Seconds for one request, for its connection, and for all its attempts together; and the number of retries.
_REQUEST_S, _CONNECT_S, _ATTEMPTS_S, _RETRIES = 20, 3, 30, 3

#: Concurrent requests of one bucket.
_AT_ONCE = 16

#: Environment variable that permits plain HTTP. Explicit client options make obstore ignore it, so it is read here.
_PLAIN_HTTP = "AWS_ALLOW_HTTP"

#: Error number by the name of obstore's exception; every other exception counts as an unreachable service.
_CODES = MappingProxyType(
    {
        "FileNotFoundError": errno.ENOENT,
        "NotFoundError": errno.ENOENT,
        "AlreadyExistsError": errno.EEXIST,
        "PermissionDeniedError": errno.EACCES,
        "UnauthenticatedError": errno.EACCES,
        "NotSupportedError": errno.ENOTSUP,
        "PreconditionError": errno.EEXIST,
    }
)
_UNREACHED = "the object store does not answer"


class PutMode(StrEnum):
    """A mode of writing: CREATE refuses a name that exists; OVERWRITE replaces the object."""

    CREATE = "create"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """An object of a listing. `tag` changes with its bytes; `modified_s` is by the service's clock."""

    name: str
    nbytes: int
    modified_s: float
    tag: str


class ObstoreClient(Protocol):
    """The used subset of obstore's functions, which tests replace."""

    def put(self, store: Any, path: str, file: Any, *, mode: str) -> Any:
        """Write an object whole."""
        ...

    def get(self, store: Any, path: str) -> Any:
        """Read an object whole."""
        ...

    def get_range(self, store: Any, path: str, *, start: int, length: int) -> Any:
        """Read a range of an object, shorter if the object ends before."""
        ...

    def head(self, store: Any, path: str) -> Mapping[str, Any]:
        """Read size and times of an object."""
        ...

    def list(self, store: Any, prefix: str | None, *, offset: str | None) -> Iterable[Sequence[Mapping[str, Any]]]:
        """List objects sorted by name, those after `offset`."""
        ...

    def list_with_delimiter(self, store: Any, prefix: str | None) -> Mapping[str, Any]:
        """List objects and folders directly under a prefix."""
        ...

    def delete(self, store: Any, paths: str | Sequence[str]) -> None:
        """Delete objects; some services raise FileNotFoundError for an absent object."""
        ...


class ObjectBucket:
    """A prefix of an object store, `location`, such as `s3://bucket/prefix`. Thread-safe."""

    def __init__(self, location: str, client: ObstoreClient, store: Any) -> None:
        self.location = location
        self._client, self._store = client, store
        self._pool = ThreadPoolExecutor(_AT_ONCE, "kvmover-bucket")

    @classmethod
    def open(cls, location: str) -> ObjectBucket:
        """Open a location without sending a request yet.

        obstore reads credentials, region and endpoint from the environment: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`
        and so on. Raises StoreError if the location is no bucket URL, obstore is missing, or it refuses the location.
        """
        if not is_bucket(location):
            raise StoreError(f"{location} is no object store; those begin with {', '.join(SCHEMES)}")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StoreError(f"{location} needs obstore: {how_to_install('s3')}") from error
        try:
            retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_ATTEMPTS_S)}
            store = from_url(location, client_options=_client_options(), retry_config=retries)
        except Exception as error:  # obstore's errors for a bad location have a base class of their own
            raise StoreError(f"cannot use {location}: {_first_line(error)}") from error
        return cls(location.rstrip("/"), cast(ObstoreClient, obstore), store)

    def gather(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer | OSError]:
        """Run calls concurrently, `_AT_ONCE` at a time (serially after `close`). Returns each result or OSError."""
        waits = calls
        if len(calls) > 1:
            with suppress(RuntimeError):  # the pool is shut down, by `close` or at interpreter exit
                waits = [self._pool.submit(call).result for call in calls]
        answers: list[Answer | OSError] = []
        for wait in waits:
            try:
                answers.append(wait())
            except OSError as error:
                answers.append(error)
        return answers

    def begin(self, call: Callable[[], object]) -> None:
        """Run `call`, which must not raise, in a thread of the bucket. Ignored after `close`."""
        with suppress(RuntimeError):
            self._pool.submit(call)

    def close(self) -> None:
        """Cancel waiting calls, wait for running ones, and end the threads. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def put(self, name: str, data: bytes | bytearray | memoryview, mode: PutMode) -> None:
        """Write an object atomically.

        Raises FileExistsError for CREATE of an existing name. Raises OSError for other failures, after which the object
        may have been written all the same.
        """
        with _said("put", self.location, name):
            self._client.put(self._store, name, data, mode=mode.value)

    def get(self, name: str) -> bytes:
        """Read an object whole. Raises FileNotFoundError if it is absent, OSError for other failures."""
        with _said("get", self.location, name):
            return bytes(self._client.get(self._store, name).bytes())

    def read(self, name: str, start: int, nbytes: int) -> memoryview:
        """Read a range of an object, shorter if the object ends before. Raises OSError."""
        try:
            with _said("read", self.location, name):
                return memoryview(self._client.get_range(self._store, name, start=start, length=nbytes))
        except OSError as error:
            if error.errno != errno.EREMOTEIO or self.size(name) > start:
                raise
        return memoryview(b"")  # it begins behind the end, which a service calls an error like any other

    def size(self, name: str) -> int:
        """Bytes of an object. Raises OSError."""
        with _said("head", self.location, name):
            return int(self._client.head(self._store, name)["size"])

    def modified_s(self, name: str) -> float:
        """Return when an object was last put, in seconds of the service's clock. Raises OSError."""
        with _said("head", self.location, name):
            return float(self._client.head(self._store, name)["last_modified"].timestamp())

    def has(self, name: str) -> bool:
        """Return True if an object of that name exists. Raises OSError if the service does not answer."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str, after: str = "") -> list[BucketEntry]:
        """List the objects in folder `prefix` with names after `after`, sorted by name. Raises OSError."""
        with _said("list", self.location, prefix):
            pages = self._client.list(self._store, prefix or None, offset=after or None)
            return sorted((_entry(each) for page in pages for each in page), key=lambda entry: entry.name)

    def folders(self) -> list[str]:
        """Return the names of the folders directly under the location. Raises OSError."""
        with _said("list", self.location, ""):
            found = self._client.list_with_delimiter(self._store, None)["common_prefixes"]
            return sorted(name.rstrip("/") for name in found)

    def delete(self, names: Sequence[str], permit: Permit) -> None:
        """Delete objects in this order, one request each, skipping absent ones. Raises OSError at the first failure."""
        for name in names:
            try:
                with _said("delete", self.location, name):
                    self._client.delete(self._store, name)
            except FileNotFoundError:
                continue

    def delete_all(self, names: Sequence[str], permit: Permit) -> None:
        """Delete objects concurrently, in any order. Raises the first OSError after all requests ended."""
        for answer in self.gather([partial(self.delete, [name], permit) for name in names]):
            if isinstance(answer, OSError):
                raise answer


def _client_options() -> Any:
    limits = {"timeout": _REQUEST_S, "connect_timeout": _CONNECT_S}
    options: dict[str, object] = {name: f"{seconds * 1000:.0f}ms" for name, seconds in limits.items()}
    if os.environ.get(_PLAIN_HTTP, "").lower() in ("1", "true"):
        options["allow_http"] = True
    return options


def _entry(found: Mapping[str, Any]) -> BucketEntry:
    tag = str(found.get("e_tag") or found["last_modified"])
    return BucketEntry(found["path"], int(found["size"]), found["last_modified"].timestamp(), tag)


@contextmanager
def _said(call: str, location: str, name: str) -> Generator[None]:
    """Raise an OSError in place of an obstore exception, and log the message if the service is unreachable."""
    try:
        yield
    except Exception as error:
        code = next((_CODES[each.__name__] for each in type(error).__mro__ if each.__name__ in _CODES), None)
        if code is None:
            log.warning("%s %s/%s: %s", call, location, name, _first_line(error))
            raise OSError(errno.EREMOTEIO, _UNREACHED) from error
        raise OSError(code, os.strerror(code)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


#: Ranges with smaller gaps are merged into one request: a request costs the time of a few hundred KiB.
_NEAR_BYTES = 256 << 10
#: Merged requests stay below this size: a service answers several in parallel faster than a long one.
_REQUEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A ranged read. `items`: indices of the wanted ranges that lie in it."""

    name: str
    start: int
    nbytes: int
    items: tuple[int, ...]


def requests(ranges: Sequence[tuple[str, int, int]]) -> Iterator[RangeRequest]:
    """Yield ranged reads that cover `ranges`, (object, offset, bytes) each, with neighbours of an object merged.

    A range is never split, however long.

    >>> [(each.start, each.nbytes, each.items) for each in requests([("a", 4096, 10), ("a", 0, 10), ("b", 0, 5)])]
    [(0, 4106, (1, 0)), (0, 5, (2,))]
    """
    order = sorted(range(len(ranges)), key=lambda item: ranges[item])
    first = 0
    while first < len(order):
        name, start, nbytes = ranges[order[first]]
        end, stop = start + nbytes, first + 1
        while stop < len(order):
            other, at, more = ranges[order[stop]]
            if other != name or at - end > _NEAR_BYTES or max(end, at + more) - start > _REQUEST_BYTES:
                break
            end, stop = max(end, at + more), stop + 1
        yield RangeRequest(name, start, end - start, tuple(order[first:stop]))
        first = stop
