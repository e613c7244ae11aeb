"""A root as a crash leaves it, and a service of buckets and a pool of memory that are started once a run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_stores import bucket_environment
from pool_processes import PoolProcesses
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.store import PagePart, PageStore
from tests.mooncake_home import NEEDED


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A root as SIGKILL leaves it after ten pages, of which the first four were flushed."""
    live = tmp_path / "live"
    live.mkdir()
    store = PageStore.open(live, SPACE)
    rank, pages = Rank(store, PagePart.whole(GQA, PAGE)), pages_of(10)
    rank.put(pages[:4])
    store.flush()
    rank.put(pages[4:7])
    rank.put(pages[7:])
    copy = tmp_path / "crashed"
    shutil.copytree(live, copy)
    store.close()
    return copy


@pytest.fixture(scope="session")
def bucket_endpoint() -> Iterator[str]:
    """The address of moto's server, which runs in a process of its own."""
    pytest.importorskip("moto.server", reason="needs moto[server]")
    script = Path(__file__).with_name("bucket_server.py")
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.stdin.close()
    server.wait(10)
    server.stdout.close()


@pytest.fixture
def bucket(bucket_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of an empty prefix of a bucket; the environment says how it is reached."""
    for name, value in bucket_environment(bucket_endpoint).items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    with urllib.request.urlopen(urllib.request.Request(f"{bucket_endpoint}/{name}", method="PUT")):
        return f"s3://{name}/some/prefix"


@pytest.fixture(scope="session")
def pool() -> Iterator[PoolProcesses]:
    """A pool of memory with one donor, over TCP."""
    pytest.importorskip("mooncake.store", reason=NEEDED, exc_type=ImportError)
    processes = PoolProcesses()
    try:
        processes.donate()
        yield processes
    finally:
        processes.close()
