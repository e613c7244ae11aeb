"""Movers of two processes meet through a directory and nothing else, and a request moves between them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rendezvous_peers import ETCD, EtcdServer, free_port

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from mover_peer import Side

from kvmover.transfer.rendezvous import Directory, Entry, EtcdDirectory, ListenerDirectory

pytestmark = pytest.mark.timeout(90)

TOKENS, PAGES = 300, list(range(20))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[list[str]]:
    """Endpoints of an etcd server, where there is one."""
    if ETCD is None:
        yield []
        return
    server = EtcdServer(tmp_path)
    yield [server.url]
    server.stop()


def prefill(pipe: Any, etcd: list[str], port: int) -> None:
    """A process that publishes its card in etcd and at a port, and sends whatever is asked for."""
    side = Side("prefill", 16, "NHD", None)
    digest = side.fill(7, PAGES, TOKENS)
    entry = Entry("prefill", 0, time.time_ns(), side.card())
    directories: list[Directory] = [ListenerDirectory(port, []), *([EtcdDirectory(etcd)] if etcd else [])]
    for directory in directories:
        directory.publish(entry)
    for request in ("through etcd", "through the listener"):
        side.send(request, PAGES)
    pipe.send(digest)
    while not pipe.poll(0.001):
        side.poll()
    for directory in directories:
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


def test_a_request_moves_between_processes_that_know_only_an_address_or_an_etcd(etcd: list[str]) -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, etcd, port), daemon=True)
    process.start()
    assert pipe.poll(40), "the prefill process does not answer"
    digest = pipe.recv()
    assert fetch(ListenerDirectory(0, [f"127.0.0.1:{port}"]), "through the listener") == digest
    if etcd:
        assert fetch(EtcdDirectory(etcd), "through etcd") == digest
    pipe.send("leave")
    process.join(20)
    assert process.exitcode == 0
    if not etcd:
        pytest.skip("the other half needs an etcd server (Debian: etcd-server)")
    assert EtcdDirectory(etcd).ranks("prefill") == ()
