"""What a bucket does over a real server, and what it says when the service fails."""

from __future__ import annotations

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest
from bucket_stores import bucket_environment
from obstore.store import LocalStore, MemoryStore

from kvmover.errors import StoreError
from kvmover.store.bucket.service import ObjectBucket, PutMode
from kvmover.store.deletion import DeletionDoor, DeletionOrder
from kvmover.store.location import is_bucket

#: Leave to delete what somebody has ordered to be.
LEAVE = DeletionDoor(0.0).order(DeletionOrder.CLEARED)


def opened(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> ObjectBucket:
    if kind == "s3":
        return ObjectBucket.open(request.getfixturevalue("bucket"))
    return ObjectBucket(kind, obstore, LocalStore(tmp_path) if kind == "file" else MemoryStore())


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_a_bucket_does_what_a_store_needs(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    bucket = opened(request, tmp_path, kind)
    data = bytes(range(256)) * 40
    bucket.put("ns/b.data", memoryview(data), PutMode.OVERWRITE)
    bucket.put("ns/a.head", b"head", PutMode.CREATE)
    with pytest.raises(FileExistsError):
        bucket.put("ns/a.head", b"other", PutMode.CREATE)
    assert bucket.get("ns/a.head") == b"head"
    assert bytes(bucket.read("ns/b.data", 300, 100)) == data[300:400]
    assert bytes(bucket.read("ns/b.data", len(data) - 5, 100)) == data[-5:]
    assert bytes(bucket.read("ns/b.data", len(data) + 5, 100)) == b""
    assert bucket.size("ns/b.data") == len(data)
    for missing in (lambda: bucket.get("ns/no"), lambda: bucket.read("ns/no", 0, 1), lambda: bucket.size("ns/no")):
        with pytest.raises(FileNotFoundError):
            missing()
    found = bucket.list("ns")
    assert [(entry.name, entry.nbytes) for entry in found] == [("ns/a.head", 4), ("ns/b.data", len(data))]
    assert all(abs(time.time() - entry.modified_s) < 60 for entry in found)
    assert [entry.name for entry in bucket.list("ns", "ns/a.head")] == ["ns/b.data"]
    assert bucket.list("other") == []
    before = found[0].tag
    bucket.put("ns/a.head", b"other", PutMode.OVERWRITE)
    assert bucket.list("ns")[0].tag != before
    assert bucket.folders() == ["ns"]
    bucket.delete(["ns/no", "ns/a.head", "ns/a.head"], LEAVE)
    bucket.delete_all(["ns/b.data", "ns/no"], LEAVE)
    assert bucket.list("ns") == []
    bucket.close()
    bucket.close()


def test_a_service_that_is_not_there_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once; whatever the service's words are, the reason is one of few."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name, value in bucket_environment(f"http://127.0.0.1:{nobody.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("kvmover.store.bucket.service._RETRIES", 0)
        bucket = ObjectBucket.open("s3://bucket/prefix")
        calls = [
            lambda: bucket.get("a"),
            lambda: bucket.read("a", 0, 1),
            lambda: bucket.put("a", b"1", PutMode.CREATE),
            lambda: bucket.list("ns"),
            lambda: bucket.folders(),
            lambda: bucket.delete(["a"], LEAVE),
        ]
        for call in calls:
            with pytest.raises(OSError, match="does not answer"):
                call()
        bucket.close()


class Refusing(BaseHTTPRequestHandler):
    """A service that answers everything with 503."""

    def do_GET(self) -> None:
        self.send_error(503)

    def do_PUT(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_service_that_is_overloaded_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    for name, value in bucket_environment(f"http://127.0.0.1:{server.server_address[1]}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kvmover.store.bucket.service._RETRIES", 0)
    bucket = ObjectBucket.open("s3://bucket/prefix")
    try:
        for call in (lambda: bucket.get("a"), lambda: bucket.put("a", b"1", PutMode.CREATE), lambda: bucket.list("ns")):
            with pytest.raises(OSError, match="does not answer"):
                call()
    finally:
        bucket.close()
        server.shutdown()
        server.server_close()


def test_a_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and says nothing: a read ends by the limit of a request and of attempts."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        for name, value in bucket_environment(f"http://127.0.0.1:{silent.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("kvmover.store.bucket.service._REQUEST_S", 0.1)
        monkeypatch.setattr("kvmover.store.bucket.service._RETRIES", 1)
        bucket = ObjectBucket.open("s3://bucket/prefix")
        with pytest.raises(OSError, match="does not answer"):
            bucket.read("a", 0, 1)
        bucket.close()


def test_a_bucket_that_is_not_there_is_no_empty_one(bucket: str) -> None:
    other = ObjectBucket.open("s3://nobody-has-made-this/prefix")
    with pytest.raises(OSError, match="does not answer"):
        other.list("ns")
    other.close()


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"s3://bucket needs obstore: pip install '\.\[s3\]'"):
        ObjectBucket.open("s3://bucket")


def test_what_is_no_bucket_is_refused() -> None:
    assert not is_bucket("/srv/s3://kv")
    with pytest.raises(StoreError, match="/srv/kv is no object store"):
        ObjectBucket.open("/srv/kv")
