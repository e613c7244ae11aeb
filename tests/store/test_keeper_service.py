"""`kvmover keeper` as a service: its line, its metrics and health, and its words to systemd, of a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.observe.endpoint import MetricsEndpoint
from kvmover.store import KeeperCollector, KeeperServer, PageStore, Put, StoreCollector
from kvmover.store.keeper.service_manager import notify, watchdog_s
from kvmover.tools.scrape import Scrape

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: nothing can be served")


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket at which systemd listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as near:
        near.bind(str(tmp_path / "notify"))
        near.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield near


@contextmanager
def begun(folder: Path, *more: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvmover", "keeper", "--socket", str(folder / "kv"), "--bytes", "8MiB", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_keeper_says_that_it_serves_is_scraped_and_tells_systemd(tmp_path: Path, manager: socket.socket) -> None:
    with begun(tmp_path, "--metrics-port", "0", "--metrics-address", "127.0.0.1") as process:
        line = line_of(process)
        assert line.startswith(f"serving 8 MiB at {tmp_path}/kv, metrics at 127.0.0.1:")
        assert line.endswith(", Ctrl-C ends it\n")
        assert manager.recv(1000).decode().splitlines()[0] == "READY=1"
        port = int(line.split(":")[1].split(",")[0])
        with PageStore.open(f"keeper://{tmp_path}/kv", SPACE) as store:
            put = Rank.of(store, GQA, Fleet(page_tokens=PAGE), 0).put(pages_of(3))
            assert all(each.ok for each in put)
            while (now := Scrape.of(answer(port, "/metrics")[1], 0.0)).total("kvmover_keeper_objects") != 3:
                pass  # a snapshot may be a second old
            assert now.total("kvmover_keeper_capacity_bytes") == 8 << 20
            assert now.total("kvmover_keeper_held_bytes") > 0
            assert now.total("kvmover_keeper_sessions") == 1
            assert now.total("kvmover_keeper_made_slabs_total") == now.total("kvmover_keeper_slabs") == 1
        assert answer(port, "/healthz") == (200, "ok\n")
        process.send_signal(signal.SIGTERM)
        assert manager.recv(1000) == b"STOPPING=1"
        assert process.wait(20) == 0


def test_the_watchdog_hears_that_the_loop_goes_round(tmp_path: Path, manager: socket.socket) -> None:
    with begun(tmp_path, WATCHDOG_USEC="200000") as process:
        assert manager.recv(1000).startswith(b"READY=1")
        assert [manager.recv(1000) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        process.terminate()


def test_a_metrics_port_that_is_taken_costs_no_keeper(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with begun(tmp_path, "--metrics-port", port, "--metrics-address", "127.0.0.1") as process:
            assert line_of(process) == f"serving 8 MiB at {tmp_path}/kv, Ctrl-C ends it\n"
            process.terminate()
            assert process.wait(20) == 0


def test_a_keeper_whose_loop_stands_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = KeeperServer(tmp_path / "kv", 8 << 20)
    with MetricsEndpoint("127.0.0.1", 0, lambda: server.is_well) as endpoint:
        endpoint.add(KeeperCollector(lambda: server.snapshot))
        assert answer(endpoint.port, "/healthz")[0] == 200
        monkeypatch.setattr("kvmover.store.keeper.server._WELL_S", 0.0)
        assert answer(endpoint.port, "/healthz") == (503, "not well\n")
        assert answer(endpoint.port, "/metrics")[0] == 200
    server.close()


def test_a_manager_that_does_not_listen_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify("READY=1")
    assert "was not told READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environment", "every_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "8000000"}, 2.0),
        ({"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "7"}, 2.0),
        ({"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_told_four_times_within_its_patience(
    environment: dict[str, str], every_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog_s(7) == every_s


def test_a_store_counts_outcomes_bad_objects_and_flushes_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageStore.open(tmp_path, SPACE) as store, MetricsEndpoint("127.0.0.1", 0) as endpoint:
        rank = Rank.of(store, GQA, Fleet(page_tokens=PAGE), 0)
        endpoint.add(StoreCollector(store, "decode", 3))
        pages = pages_of(3)
        assert [each.outcome for each in rank.put(pages)] == [Put.WRITTEN] * 3
        rank.get([*pages, *pages_of(1, "another")])

        def refuse() -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(store.objects, "flush", refuse)
            with pytest.raises(StoreError):
                store.flush()
        now = Scrape.of(answer(endpoint.port, "/metrics")[1], 0.0)
        assert now.by("kvmover_store_puts_total", "outcome")["written"] == 3
        gots = now.by("kvmover_store_gots_total", "outcome", engine="decode", rank="3")
        assert (gots["read"], gots["absent"], gots["poisoned"]) == (3, 1, 0)
        assert now.total("kvmover_store_read_bytes_total") == 3 * rank.part.nbytes
        assert now.total("kvmover_store_failed_flushes_total") == 1
