"""Movers of two processes meet through a directory and nothing else, and a request moves between them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rendezvous_peers import ETCD, EtcdServer

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from mover_peer import Side

from kvmover.transfer.rendezvous import Directory, Entry, EtcdDirectory

pytestmark = pytest.mark.timeout(90)

TOKENS, PAGES = 300, list(range(20))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[list[str]]:
    """Endpoints of an etcd server."""
    if ETCD is None:
        pytest.skip("needs an etcd server (Debian: etcd-server)")
    server = EtcdServer(tmp_path)
    yield [server.url]
    server.stop()


def prefill(pipe: Any, etcd: list[str]) -> None:
    """A process that publishes its card in etcd, and sends what is asked for."""
    side = Side("prefill", 16, "NHD", None)
    digest = side.fill(7, PAGES, TOKENS)
    entry = Entry("prefill", 0, time.time_ns(), side.card())
    directory = EtcdDirectory(etcd)
    directory.publish(entry)
    side.send("through etcd", PAGES)
    pipe.send(digest)
    while not pipe.poll(0.001):
        side.poll()
    directory.close()
    side.mover.close()


def fetch(directory: Directory, request: str) -> str:
    """The digest of the request as it lands at a mover that finds its peer in `directory`."""
    side = Side("decode", 24, "HND", None)
    (entry,) = directory.ranks("prefill")
    assert side.connect(entry.card).startswith("prefill.")
    pages = list(range(13))
    side.receive(request, "prefill", 0, TOKENS, pages)
    said, _ = side.outcome(request, 30)
    assert said.startswith("landed"), said
    found = side.digest(pages, TOKENS)
    side.mover.close()
    directory.close()
    return found


def test_a_request_moves_between_processes_that_know_only_an_etcd(etcd: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, etcd), daemon=True)
    process.start()
    assert pipe.poll(40), "the prefill process does not answer"
    digest = pipe.recv()
    assert fetch(EtcdDirectory(etcd), "through etcd") == digest
    pipe.send("leave")
    process.join(20)
    assert process.exitcode == 0
    assert EtcdDirectory(etcd).ranks("prefill") == ()
