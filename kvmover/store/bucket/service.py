"""An ObjectBucket is one prefix of an object store, by obstore: objects are written whole, listed, and read in ranges.

Whatever the service says becomes an OSError with a reason of few words, so that counters have few names; its own words
go to the log. Every call ends: obstore's attempts and this module's limits are bounded in number and in time.
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

#: One request, its connection, and all attempts at it together.
_REQUEST_S, _CONNECT_S, _ATTEMPTS_S, _RETRIES = 20, 3, 30, 3

#: Requests that are under way at once.
_AT_ONCE = 16

#: The environment's own name for leave to speak without TLS: what is given to obstore by hand hides it.
_PLAIN_HTTP = "AWS_ALLOW_HTTP"

#: What the service may answer, by the name of obstore's exception; everything else is a service that does not serve.
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
    """CREATE refuses a name that is taken; OVERWRITE takes the place of what was there."""

    CREATE = "create"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """An object of a listing. `tag` changes with its bytes; `modified_s` is the service's clock."""

    name: str
    nbytes: int
    modified_s: float
    tag: str


class ObstoreClient(Protocol):
    """The calls of obstore that are used, so that a test may stand in for it."""

    def put(self, store: Any, path: str, file: Any, *, mode: str) -> Any:
        """Write an object whole."""
        ...

    def get(self, store: Any, path: str) -> Any:
        """An object, whole."""
        ...

    def get_range(self, store: Any, path: str, *, start: int, length: int) -> Any:
        """A range of an object, shorter where it ends before."""
        ...

    def head(self, store: Any, path: str) -> Mapping[str, Any]:
        """Size and times of an object."""
        ...

    def list(self, store: Any, prefix: str | None, *, offset: str | None) -> Iterable[Sequence[Mapping[str, Any]]]:
        """Objects by name, behind `offset`."""
        ...

    def list_with_delimiter(self, store: Any, prefix: str | None) -> Mapping[str, Any]:
        """Objects and folders right under a prefix."""
        ...

    def delete(self, store: Any, paths: str | Sequence[str]) -> None:
        """Delete objects; some services raise FileNotFoundError for one that is gone."""
        ...


class ObjectBucket:
    """Objects under `location`, such as `s3://bucket/prefix`. Safe for several threads."""

    def __init__(self, location: str, client: ObstoreClient, store: Any) -> None:
        self.location = location
        self._client, self._store = client, store
        self._pool = ThreadPoolExecutor(_AT_ONCE, "kvmover-bucket")

    @classmethod
    def open(cls, location: str) -> ObjectBucket:
        """The bucket of a location; nothing is asked of it yet. Raises StoreError.

        Credentials, region and endpoint are what obstore finds in the environment: `AWS_ACCESS_KEY_ID`,
        `AWS_ENDPOINT_URL` and their like.
        """
        if not is_bucket(location):
            raise StoreError(f"{location} is no object store; those begin with {', '.join(SCHEMES)}")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StoreError(f"{location} needs obstore: {how_to_install('s3')}") from error
        try:
            store = from_url(location, client_options=_client_options(), retry_config=_retry_config())
        except Exception as error:  # obstore has a base of its own for what it cannot make of a location
            raise StoreError(f"cannot use {location}: {_first_line(error)}") from error
        return cls(location.rstrip("/"), cast(ObstoreClient, obstore), store)

    def gather(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer | OSError]:
        """What each call answers, or the OSError that it raised; `_AT_ONCE` at a time, and one after `close`."""
        waits = calls
        if len(calls) > 1:
            with suppress(RuntimeError):  # of a pool that is shut down, by `close` or with the process
                waits = [self._pool.submit(call).result for call in calls]
        answers: list[Answer | OSError] = []
        for wait in waits:
            try:
                answers.append(wait())
            except OSError as error:
                answers.append(error)
        return answers

    def begin(self, call: Callable[[], object]) -> None:
        """Let `call`, which raises nothing, run in a thread of the bucket's. Not after `close`."""
        with suppress(RuntimeError):
            self._pool.submit(call)

    def close(self) -> None:
        """End the threads, once what they are at is done. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)

    def put(self, name: str, data: bytes | bytearray | memoryview, mode: PutMode) -> None:
        """Write an object: it is there whole, or not at all. Raises OSError, FileExistsError for CREATE of a name that
        is taken. After another error it may be there all the same.
        """
        with _said("put", self.location, name):
            self._client.put(self._store, name, data, mode=mode.value)

    def get(self, name: str) -> bytes:
        """An object, whole. Raises OSError, FileNotFoundError where there is none."""
        with _said("get", self.location, name):
            return bytes(self._client.get(self._store, name).bytes())

    def read(self, name: str, start: int, nbytes: int) -> memoryview:
        """A range of an object, shorter where it ends before. Raises OSError."""
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
        """When an object was put last, by the service's clock. Raises OSError."""
        with _said("head", self.location, name):
            return float(self._client.head(self._store, name)["last_modified"].timestamp())

    def has(self, name: str) -> bool:
        """Returns whether there is an object of that name. Raises OSError where the service does not say."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str, after: str = "") -> list[BucketEntry]:
        """Objects whose name begins with the folder `prefix`, by name, behind `after`. Raises OSError."""
        with _said("list", self.location, prefix):
            pages = self._client.list(self._store, prefix or None, offset=after or None)
            return sorted((_entry(each) for page in pages for each in page), key=lambda entry: entry.name)

    def folders(self) -> list[str]:
        """Names of the folders right under the location. Raises OSError."""
        with _said("list", self.location, ""):
            found = self._client.list_with_delimiter(self._store, None)["common_prefixes"]
            return sorted(name.rstrip("/") for name in found)

    def delete(self, names: Sequence[str], permit: Permit) -> None:
        """Delete objects, in this order, one request each; those that are gone are no matter. Raises OSError."""
        for name in names:
            try:
                with _said("delete", self.location, name):
                    self._client.delete(self._store, name)
            except FileNotFoundError:
                continue

    def delete_all(self, names: Sequence[str], permit: Permit) -> None:
        """Delete objects in any order, many at a time. Raises OSError for the first that could not be."""
        for answer in self.gather([partial(self.delete, [name], permit) for name in names]):
            if isinstance(answer, OSError):
                raise answer


def _client_options() -> Any:
    limits = {"timeout": _REQUEST_S, "connect_timeout": _CONNECT_S}
    options: dict[str, object] = {name: f"{seconds * 1000:.0f}ms" for name, seconds in limits.items()}
    if os.environ.get(_PLAIN_HTTP, "").lower() in ("1", "true"):
        options["allow_http"] = True
    return options


def _retry_config() -> Any:
    return {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_ATTEMPTS_S)}


def _entry(found: Mapping[str, Any]) -> BucketEntry:
    tag = str(found.get("e_tag") or found["last_modified"])
    return BucketEntry(found["path"], int(found["size"]), found["last_modified"].timestamp(), tag)


@contextmanager
def _said(call: str, location: str, name: str) -> Generator[None]:
    """Raise an OSError for what obstore raises in a block, and tell the log its words."""
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


#: Ranges with less between them are asked for at once: what a request costs is some hundred KiB of time.
_NEAR_BYTES = 256 << 10
#: One request asks for no more: a service answers several faster than a long one.
_REQUEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One ranged read, and which of the ranges that were asked for lie in it."""

    name: str
    start: int
    nbytes: int
    items: tuple[int, ...]


def requests(ranges: Sequence[tuple[str, int, int]]) -> Iterator[RangeRequest]:
    """Ranged reads that together bring `ranges`, (object, offset, bytes) each: neighbours of an object in one.

    A range is in one request, however long it is.

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
