"""deploy/kvmover-keeper.service: systemd takes it, and its command starts a keeper that tells systemd so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmover.exposition import FIRST_METRICS_PORT

UNIT = Path(__file__).parents[2] / "deploy" / "kvmover-keeper.service"

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: nothing can be served")


def settings() -> dict[str, str]:
    """Of the section [Service]; each stands there once."""
    lines = re.findall(r"^([A-Z]\w+)=(.*)$", UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0], re.M)
    assert len(dict(lines)) == len(lines)
    return dict(lines)


def command() -> list[str]:
    words = shlex.split(settings()["ExecStart"])
    assert words[0].endswith("/kvmover")
    return words


def test_systemd_takes_the_unit_without_a_word_and_finds_it_well_shut_in(tmp_path: Path) -> None:
    """The command is not at its place on this machine, so that another stands in it."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(command()[0], "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    ours = [line for line in (ran.stdout + ran.stderr).splitlines() if UNIT.name in line]
    assert (ran.returncode, ours) == (0, [])
    wrong = tmp_path / "wrong.service"
    wrong.write_text(copy.read_text().replace("WatchdogSec", "WatchdogSecs"))
    ran = subprocess.run(["systemd-analyze", "verify", str(wrong)], capture_output=True, text=True, timeout=60)
    assert "WatchdogSecs" in ran.stdout + ran.stderr
    shut = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(copy)]
    ran = subprocess.run(shut, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout


def test_the_units_command_serves_and_says_that_it_is_ready_that_it_lives_and_that_it_ends(tmp_path: Path) -> None:
    unit = settings()
    assert unit["Type"] == "notify"
    assert unit["RuntimeDirectory"] == "kvmover"
    assert 0 <= int(command()[-1]) - FIRST_METRICS_PORT < 100
    given = {"RUNTIME_DIRECTORY": str(tmp_path), "KEEPER_BYTES": "8MiB"}
    assert unit["Environment"].startswith("KEEPER_BYTES=")
    words = [re.sub(r"\$\{(\w+)\}", lambda match: given[match[1]], word) for word in command()[1:-1]]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        watched = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        with subprocess.Popen(
            [sys.executable, "-m", "kvmover", *words, "0"], stdout=subprocess.PIPE, env={**os.environ, **watched}
        ) as keeper:
            try:
                assert manager.recv(1000).startswith(b"READY=1")
                assert (tmp_path / "kv.sock").is_socket()
                assert manager.recv(1000) == b"WATCHDOG=1"
                keeper.send_signal(signal.SIGTERM)
                while (said := manager.recv(1000)) == b"WATCHDOG=1":
                    pass
                assert said == b"STOPPING=1"
                assert keeper.wait(60) == 0
            finally:
                keeper.kill()
