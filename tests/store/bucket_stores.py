"""Stores in buckets as the tests open them: over a service that answers, or over one that fails as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import MemoryStore
from store_rank import SPACE

from kvmover.store import Namespace, PageStore, Policy
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.service import ObjectBucket

#: All that obstore raises for what a service answered, and what the system raises beneath it.
ERRORS: list[Exception] = [
    GenericError("503 Service Unavailable"),
    GenericError("operation timed out"),
    FileNotFoundError("404 Not Found"),
    PermissionDeniedError("403 Forbidden"),
    UnauthenticatedError("401 Unauthorized"),
    AlreadyExistsError("409 Conflict"),
    PreconditionError("412 Precondition Failed"),
    NotSupportedError("501 Not Implemented"),
    ConnectionRefusedError("connection refused"),
    OSError("broken pipe"),
    ValueError("no such option"),
]


class Faulty:
    """obstore, but `fails` says of each call, by its number and name, whether it raises.

    An error comes before the call, so that nothing is done, or after it, so that all is: "before", "after" or "".
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails: Callable[[int, str], str] = lambda _number, _name: ""
        self.error: Exception = ERRORS[0]

    def _call(self, name: str, store: Any, path: Any, **options: Any) -> Any:
        when = self.fails(len(self.calls), name)
        self.calls.append((name, str(path)))
        if when == "before":
            raise self.error
        answer = getattr(obstore, name)(store, path, **options)
        if when == "after":
            raise self.error
        return answer

    def put(self, store: Any, path: str, file: Any, *, mode: str) -> Any:
        return self._call("put", store, path, file=bytes(file), mode=mode)

    def get(self, store: Any, path: str) -> Any:
        return self._call("get", store, path)

    def get_range(self, store: Any, path: str, *, start: int, length: int) -> Any:
        return self._call("get_range", store, path, start=start, length=length)

    def head(self, store: Any, path: str) -> Mapping[str, Any]:
        return self._call("head", store, path)

    def list(self, store: Any, prefix: str | None, *, offset: str | None) -> Iterable[Sequence[Mapping[str, Any]]]:
        return self._call("list", store, prefix, offset=offset)

    def list_with_delimiter(self, store: Any, prefix: str | None) -> Mapping[str, Any]:
        return self._call("list_with_delimiter", store, prefix)

    def delete(self, store: Any, paths: str | Sequence[str]) -> None:
        self._call("delete", store, paths)


def open_over(
    service: MemoryStore, client: Any = obstore, policy: Policy | None = None, space: Namespace = SPACE
) -> PageStore:
    """A store over a service in this process: another call is another machine's."""
    return store_in(ObjectBucket("memory://", client, service), space, policy)


def store_in(bucket: ObjectBucket, space: Namespace, policy: Policy | None = None) -> PageStore:
    """A store over a bucket that stays open for the next namespace."""

    def opens(space: Namespace) -> BucketObjects:
        return BucketObjects(bucket, space.folder, space.digest, policy or Policy())

    return PageStore(space.folder, opens(space), opens)


def names(service: MemoryStore, suffix: str = "") -> list[str]:
    """Names of all objects that end so."""
    return sorted(each["path"] for page in obstore.list(service) for each in page if each["path"].endswith(suffix))


def learn(store: PageStore) -> None:
    """See at once what others wrote, and deleted, where a store otherwise looks now and then."""
    assert isinstance(store.objects, BucketObjects)
    assert store.objects.catalog.survey()


def damage(service: MemoryStore, name: str, at: int) -> None:
    """Change one byte of an object, which no service does."""
    raw = bytearray(obstore.get(service, name).bytes())
    raw[at] ^= 0x40
    obstore.put(service, name, bytes(raw))


def bucket_environment(endpoint: str) -> dict[str, str]:
    """What obstore reads to reach a service on this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
