"""The page store in a bucket through the kit: over a directory that obstore takes for one, and over a real server."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pytest
from bucket_stores import Faulty, store_in
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import LocalStore
from test_store_conformance import PageStoreConformance, PageStoreSubject, space_of

from kvmover.errors import StoreError
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.service import ObjectBucket
from kvmover.tools.conformance import Identity, StoreConformance


class BucketSubject(PageStoreSubject):
    """A rank's store in a bucket. It flushes after each put and looks before each question, as the kit's promises are
    of stores that do so by themselves.
    """

    def __init__(self, bucket: ObjectBucket, identity: Identity) -> None:
        space = space_of(identity)
        self.over(store_in(bucket, space), space, identity)

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        self.look()
        answers = super().put(pages, payloads)
        try:
            self.store.flush()
        except StoreError:
            return [False] * len(pages)
        return answers

    def look(self) -> None:
        if isinstance(self.store.objects, BucketObjects):  # in a namespace
            self.store.objects.catalog.survey()

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        self.look()
        return super().exists(pages)


class BucketConformance(PageStoreConformance):
    """`client` is obstore, and what fails in it."""

    client: ClassVar[Faulty] = Faulty()

    @contextmanager
    def failing(self, code: int) -> Generator[None]:
        """Every third call of obstore fails: the service has no numbers, and words of its own."""
        denied = code in (errno.EMFILE, errno.EDQUOT)
        self.client.error = PermissionDeniedError("403") if denied else GenericError("503")
        self.client.fails = lambda call, _name: "before" if call % 3 == 2 else ""
        try:
            yield
        finally:
            self.client.fails = lambda _call, _name: ""


@pytest.mark.proof
class TestBucketInADirectory(BucketConformance):
    def open(self, folder: Path, identity: Identity) -> BucketSubject:
        return BucketSubject(ObjectBucket(str(folder), self.client, LocalStore(folder)), identity)


class MirroredSubject(BucketSubject):
    """What the kit did to the files of a bucket is done to its objects first."""

    def __init__(self, mirror: Mirror, identity: Identity) -> None:
        self.mirror = mirror
        mirror.push()
        super().__init__(mirror.bucket(), identity)

    def look(self) -> None:
        self.mirror.push()
        super().look()

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        self.mirror.push()
        return super().get(pages)


class Mirror:
    """Objects of a prefix as files, for a kit that damages files."""

    def __init__(self, location: str, folder: Path, client: Faulty) -> None:
        self.folder, self.seen = folder, dict[Path, bytes]()
        self.location, self.client = location, client
        self.store: Any = ObjectBucket.open(location)._store

    def bucket(self) -> ObjectBucket:
        return ObjectBucket(self.location, self.client, self.store)

    def pull(self) -> list[Path]:
        for page in obstore.list(self.store):
            for each in page:
                path = self.folder / each["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                self.seen[path] = bytes(obstore.get(self.store, each["path"]).bytes())
                path.write_bytes(self.seen[path])
        return sorted(self.seen)

    def push(self) -> None:
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            data = path.read_bytes()
            if self.seen.get(path) != data:
                obstore.put(self.store, str(path.relative_to(self.folder)), data)
                self.seen[path] = data


class TestBucketOnAServer(BucketConformance):
    @pytest.fixture(autouse=True)
    def _server(self, bucket: str) -> None:
        self.location, self.mirrors = bucket, dict[Path, Mirror]()

    def mirror(self, folder: Path) -> Mirror:
        if folder not in self.mirrors:
            location = f"{self.location}/{len(self.mirrors)}"
            self.mirrors[folder] = Mirror(location, folder, self.client)
        return self.mirrors[folder]

    def open(self, folder: Path, identity: Identity) -> BucketSubject:
        return MirroredSubject(self.mirror(folder), identity)

    def files(self, folder: Path) -> list[Path]:
        return self.mirror(folder).pull()


#: Half a second each, or more.
SLOW = (
    "test_a_cleaner_at_work_costs_hits_but_never_bytes",
    "test_a_cleaner_on_another_machine_costs_hits_but_never_bytes",
    "test_a_page_that_lacks_a_rank_is_no_hit_for_who_needs_it",
    "test_every_rank_has_as_many_answers_whatever_fails",
    "test_ranks_of_every_kind_keep_their_pages_apart",
    "test_what_was_flushed_outlives_a_power_cut",
    "test_who_differs_in_anything_never_reads_my_pages",
)


def as_proof(name: str) -> Callable[[StoreConformance, Path], None]:
    """A check of the kit that is left to `make prove`."""

    @pytest.mark.proof
    def check(self: StoreConformance, tmp_path: Path) -> None:
        getattr(StoreConformance, name)(self, tmp_path)

    return check


for each in SLOW:
    setattr(TestBucketOnAServer, each, as_proof(each))
