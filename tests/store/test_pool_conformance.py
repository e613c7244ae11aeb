"""The page store in a pool of memory through the kit: over a pool in this process, and over master and donor."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from pool_processes import PoolProcesses
from pool_stores import NO_MASTER, NO_ROOM, NOT_MOVED, DictClient, FaultyClient, open_over
from test_store_conformance import PageStoreConformance, PageStoreSubject, space_of

from kvmover.store.mooncake.client import PoolClient
from kvmover.store.mooncake.format import PoolAddress
from kvmover.tools.conformance import PAGES, Identity


class PoolMirror:
    """Objects below a prefix as files, for a kit that damages files: what it did to them is done to the objects."""

    def __init__(self, client: FaultyClient, folder: Path) -> None:
        self.client, self.folder, self.prefix = client, folder, f"test/{uuid.uuid4().hex}"
        self.seen = dict[Path, bytes]()

    def pull(self) -> list[Path]:
        keys = [key for key in list(self.client.keys) if key.startswith(self.prefix + "/")]
        for key, data in zip(keys, self.client.client.get_batch(keys) if keys else [], strict=True):
            path = self.folder / key.removeprefix(self.prefix + "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.seen[path] = data
            path.write_bytes(data)
        return sorted(self.seen)

    def push(self) -> None:
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            data = path.read_bytes()
            if self.seen.get(path) != data:
                key = f"{self.prefix}/{path.relative_to(self.folder)}"
                self.client.client.remove(key, True)
                if data:
                    self.client.put(key, data, self.client.kept)
                self.seen[path] = data

    def clean(self) -> None:
        """Every other page goes, as Mooncake's master evicts."""
        for page in PAGES[::2]:
            for key in [key for key in list(self.client.keys) if page.hex() in key and key.startswith(self.prefix)]:
                self.client.client.remove(key, True)


class PoolSubject(PageStoreSubject):
    """A rank's store in a pool, and the files that stand for its objects."""

    def __init__(self, mirror: PoolMirror, identity: Identity) -> None:
        self.mirror = mirror
        mirror.push()
        space = space_of(identity)
        self.over(open_over(mirror.client, space, mirror.prefix), space, identity)

    def put(self, pages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bool]:
        self.mirror.push()
        return super().put(pages, payloads)

    def get(self, pages: Sequence[bytes]) -> list[bytes | None]:
        self.mirror.push()
        return super().get(pages)

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        self.mirror.push()
        return super().exists(pages)

    def clean(self) -> None:
        self.mirror.clean()


class PoolConformance(PageStoreConformance):
    """`client` is the pool's, and what fails in it."""

    client: FaultyClient

    def mirror(self, folder: Path) -> PoolMirror:
        mirrors = vars(self).setdefault("mirrors", dict[Path, PoolMirror]())
        return mirrors.setdefault(folder, PoolMirror(self.client, folder))

    def open(self, folder: Path, identity: Identity) -> PoolSubject:
        return PoolSubject(self.mirror(folder), identity)

    def files(self, folder: Path) -> list[Path]:
        return self.mirror(folder).pull()

    @contextmanager
    def failing(self, code: int) -> Generator[None]:
        """Every third call of Mooncake fails: by room, the master or a donor."""
        full = code in (errno.ENOSPC, errno.EDQUOT)
        failure = NO_ROOM if full else NO_MASTER if code == errno.EIO else NOT_MOVED
        self.client.fails = lambda call, _name: failure if call % 3 == 2 else 0
        try:
            yield
        finally:
            self.client.fails = lambda _call, _name: 0


class TestPoolInThisProcess(PoolConformance):
    @pytest.fixture(autouse=True)
    def _client(self) -> None:
        self.client = FaultyClient(DictClient())


@pytest.fixture(scope="module")
def joined(pool: PoolProcesses) -> Generator[PoolClient]:
    """One member of the pool, whose client all stores of this file share."""
    client = PoolClient.open(PoolAddress.parse(pool.location))
    yield client
    client.close()


@pytest.mark.proof
class TestPoolOfProcesses(PoolConformance):
    @pytest.fixture(autouse=True)
    def _client(self, joined: PoolClient) -> None:
        self.client = FaultyClient(joined._client, joined._kept)
