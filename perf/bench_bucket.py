"""The page store in an object store beside obstore alone: set, get, and what a start reads of a million objects.

`python -m perf.bench_bucket [s3://bucket/prefix] [--objects N]`. Without a location over moto's server on this machine,
which is Python and far slower than any service, and over a directory that obstore takes for one: there the processor
of this side is what is measured. Raw is one object for all pages, put whole and read by the same ranges; and an object
a page, sixteen at a time.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import obstore
from obstore.store import LocalStore, MemoryStore

from kvmover.layout import Component
from kvmover.store import Namespace, PagePart, PageStore, Policy, memory_of_buffer
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.sealed import HEAD, FillingSegment, segment_name
from kvmover.store.bucket.service import ObjectBucket
from kvmover.store.part import part_key
from perf.command_line import options
from perf.record import interleaved, write

SERVER = Path(__file__).parents[1] / "tests" / "store" / "bucket_server.py"
SPACE = Namespace("bench", "1", 64)
#: Bytes of a row: pages of 64 cells, 64 KiB and 1 MiB long.
ROWS = (8, 128)
RAW = "obstore, one object"
PAGES_BYTES, ROUNDS, AT_ONCE = 32 << 20, 5, 16


def main() -> None:
    asked = options(__doc__)
    asked.add_argument("location", nargs="?")
    asked.add_argument("--objects", type=int, default=1_000_000)
    given = asked.parse_args()
    rows: list[dict[str, object]] = []
    for medium, opened in _media(given.location).items():
        with opened() as (store, location):
            for dim in ROWS:
                rows += _case(medium, store, location, dim)
    rows += _start(given.objects)
    print(f"wrote {write('bucket', rows)}")


def _media(location: str | None) -> Mapping[str, Callable[[], Any]]:
    if location:
        return {location.split("/")[0]: lambda: _given(location)}
    return {"moto": _moto, "directory": _directory}


@contextmanager
def _given(location: str) -> Iterator[tuple[Any, str]]:
    yield ObjectBucket.open(location)._store, location


@contextmanager
def _moto() -> Iterator[tuple[Any, str]]:
    with moto_server() as location:
        yield ObjectBucket.open(location)._store, location


@contextmanager
def moto_server() -> Iterator[str]:
    """The location of an empty prefix on moto's server, in a process of its own, which the environment then names."""
    server = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything"}
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT")):
        pass
    yield "s3://bench/prefix"
    server.stdin.close()
    server.wait()


@contextmanager
def _directory() -> Iterator[tuple[Any, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield LocalStore(folder), folder


class _Case:
    """Pages of `dim` bytes a row, in one bucket, by each of the three."""

    def __init__(self, store: Any, location: str, dim: int) -> None:
        self.store, self.location = store, location
        self.part = PagePart.whole(Component.attention(8, 8, dim, "uint8"), SPACE.page_tokens)
        self.size, self.count = self.part.nbytes, PAGES_BYTES // self.part.nbytes
        self.buffer = mmap.mmap(-1, PAGES_BYTES)
        self.buffer.write(os.urandom(PAGES_BYTES))
        self.memory, self.view = memory_of_buffer(self.buffer), memoryview(self.buffer)
        self.addresses = [self.memory.address + number * self.size for number in range(self.count)]
        self.turn = 0
        self.writer = self.opened()
        self.set_ours()
        self.reader, self.pages = self.opened(), self.names()

    def opened(self) -> PageStore:
        bucket = ObjectBucket(self.location, cast(Any, obstore), self.store)
        store = PageStore(SPACE.folder, BucketObjects(bucket, SPACE.folder, SPACE.digest, Policy()))
        store.register(self.memory)
        return store

    def names(self) -> list[bytes]:
        return [(self.turn << 32 | number).to_bytes(32, "little") for number in range(self.count)]

    def page(self, number: int) -> memoryview:
        return self.view[number * self.size : (number + 1) * self.size]

    def set_ours(self) -> None:
        self.turn += 1
        answers = self.writer.view(SPACE, self.part).put(self.names(), self.addresses)
        assert all(answer.ok for answer in answers)
        self.writer.flush()

    def set_whole(self) -> None:
        obstore.put(self.store, "raw/whole", self.view)

    def set_each(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda n: obstore.put(self.store, f"raw/{n}", self.page(n)), range(self.count)))

    def get_ours(self) -> None:
        answers = self.reader.view(SPACE, self.part).get(self.pages, self.addresses)
        assert all(answer.ok for answer in answers)

    def get_whole(self) -> None:
        starts = [number * self.size for number in range(self.count)]
        came = obstore.get_ranges(self.store, "raw/whole", starts=starts, lengths=[self.size] * self.count)
        for number, data in enumerate(came):
            self.page(number)[:] = memoryview(data)

    def get_each(self) -> None:
        def get(number: int) -> None:
            self.page(number)[:] = memoryview(obstore.get(self.store, f"raw/{number}").bytes())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, range(self.count)))

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def _case(medium: str, store: Any, location: str, dim: int) -> list[dict[str, object]]:
    case = _Case(store, location, dim)
    rows: list[dict[str, object]] = []
    for what in ("set", "get"):
        ways = {RAW: f"{what}_whole", "obstore, an object a page": f"{what}_each", "kvmover": f"{what}_ours"}
        spreads = interleaved({name: getattr(case, way) for name, way in ways.items()}, ROUNDS)
        for name, spread in spreads.items():
            speed, of_raw = PAGES_BYTES / spread.median / 1e9, spreads[RAW].median / spread.median
            row = {"medium": medium, "page_kib": case.size >> 10, "who": name, "what": what}
            rows.append({**row, "value": round(speed, 3), "unit": "GB/s", "of_one_object": round(of_raw, 2)})
            print(f"{medium:<10}{case.size >> 10:>5} KiB {what} {name:<26}{speed:7.3f} GB/s, {of_raw:.2f} of {RAW}")
    case.close()
    return rows


class _Counting:
    """obstore, and the bytes that it brought."""

    def __init__(self) -> None:
        self.nbytes = self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    def get(self, store: Any, path: str) -> Any:
        found = obstore.get(store, path)
        self.calls += 1
        self.nbytes += found.meta["size"]
        return found


def _start(objects: int) -> list[dict[str, object]]:
    """Heads of `objects` objects of 64 cells, in memory, and no data: a start asks for none."""
    service, each = MemoryStore(), 4096
    part = PagePart.whole(Component.mla(64, 1, "uint8"), SPACE.page_tokens)
    key = part_key(SPACE.digest_for(part.component), part.box)
    payload, digests, now = memoryview(bytes(64)), bytes(64 * 8), int(time.time())
    for number in range(-(-objects // each)):
        segment = FillingSegment(segment_name(now, bytes(4), number), SPACE.digest, each << 12, 0.0)
        for _ in range(min(each, objects - number * each)):
            segment.add(payload, uuid.uuid4().bytes * 2, key, digests, now)
        obstore.put(service, f"{SPACE.folder}/{segment.name}{HEAD}", segment.head())
    rows: list[dict[str, object]] = []
    for who in ("every head", "a catalog"):
        client: Any = _Counting()
        began = time.perf_counter()
        engine = BucketObjects(ObjectBucket("memory://", client, service), SPACE.folder, SPACE.digest, Policy())
        taken = time.perf_counter() - began
        assert engine.stat().objects == objects
        for what, value, unit in (
            ("start", taken, "s"),
            ("start reads", client.nbytes / 1e6, "MB"),
            ("start asks", client.calls, ""),
        ):
            rows.append({"medium": "memory", "who": who, "what": what, "value": round(value, 2), "unit": unit})
            print(f"{objects} objects of 64 cells, by {who}: {what} {value:.2f} {unit}")
        engine.collect()
        engine.close()
    return rows


if __name__ == "__main__":
    main()
