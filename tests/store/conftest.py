"""A service of buckets, started once a run for the tests that ask for one."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


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


def bucket_environment(endpoint: str) -> dict[str, str]:
    """What obstore reads to reach a service on this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
