"""BucketObjects keeps the pages of a namespace in an object store."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmover.store.bucket.catalog import BucketCatalog
from kvmover.store.bucket.reader import BucketReader
from kvmover.store.bucket.service import ObjectBucket
from kvmover.store.bucket.upkeep import BucketUpkeep
from kvmover.store.bucket.writer import BucketWriter
from kvmover.store.machine import Machine


class BucketObjects:
    def __init__(self, bucket: ObjectBucket, folder: str, namespace: bytes, segment_bytes: int, view) -> None:
        self.catalog = BucketCatalog(bucket, folder, namespace, Machine(b""))
        self.writer = BucketWriter(self.catalog, segment_bytes)
        self.reader = BucketReader(self.catalog, self.writer, view)
        self.upkeep = BucketUpkeep(self.catalog, self.writer, self.reader, 60)
