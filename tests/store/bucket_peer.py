"""A writer in a process of its own, which dies at a point of its second segment: `bucket_peer.py LOCATION POINT`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import obstore
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.store import PagePart, PageStore, Policy
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.service import ObjectBucket

POINTS = ("before data", "in data", "before head", "after head")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Mortal:
    """obstore, in a process that dies at the point that it was told."""

    def __init__(self, point: str) -> None:
        self.point, self.armed = point, False

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    def put(self, store: Any, path: str, file: Any, *, mode: str) -> Any:
        is_data = path.endswith(".data")
        if self.armed and self.point == ("before data" if is_data else "before head"):
            die()
        if self.armed and is_data and self.point == "in data":
            return obstore.put(store, path, self.some(bytes(file)), chunk_size=5 << 20)
        answer = obstore.put(store, path, file, mode=mode)
        if self.armed and not is_data and self.point == "after head":
            die()
        return answer

    @staticmethod
    def some(data: bytes) -> Iterator[bytes]:
        yield data[: 6 << 20]
        die()


def main(location: str, point: str) -> None:
    client = Mortal(point)
    real = ObjectBucket.open(location)
    bucket = ObjectBucket(location, client, real._store)
    store = PageStore(SPACE.folder, BucketObjects(bucket, SPACE.folder, SPACE.digest, Policy()))
    rank = Rank(store, PagePart.whole(GQA, PAGE), slots=400)
    rank.put(pages_of(6, f"first {point}"))
    store.flush()
    client.armed = True
    rank.put(pages_of(400, f"second {point}"))
    store.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
