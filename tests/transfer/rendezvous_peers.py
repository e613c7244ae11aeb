"""What the tests of the rendezvous talk to: an etcd server, and processes that publish by it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvmover.errors import TransportError
from kvmover.transfer.rendezvous import Directory, Entry, EtcdDirectory
from kvmover.transfer.rendezvous.etcd import Gateway

ETCD = shutil.which("etcd")

#: The shortest lease etcd gives.
TTL_S = 2

Value = TypeVar("Value")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def eventually(look: Callable[[], Value], right: Callable[[Value], bool], within_s: float = 20) -> Value:
    """What `look` returns once it is right, or the last of it."""
    deadline = time.monotonic() + within_s
    while not right(value := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


class EtcdServer:
    """A cluster of one, its data in `room`."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self.url, self._peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.start()

    def start(self) -> None:
        words = {
            "data-dir": self._room / "data",
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": self._peers,
            "initial-advertise-peer-urls": self._peers,
            "initial-cluster": f"default={self._peers}",
            "heartbeat-interval": 20,
            "election-timeout": 200,
        }
        with (self._room / "log").open("ab") as log:
            options = [f"--{name}={value}" for name, value in words.items()]
            self._process = subprocess.Popen([str(ETCD), *options], stdout=log, stderr=log)
        log_of = (self._room / "log").read_text
        assert eventually(self._healthy, bool), log_of()[-2000:]

    def _healthy(self) -> bool:
        try:
            Gateway([self.url], 1).call("/v3/kv/range", {"key": b"health"}, object)
        except TransportError:
            return False
        return True

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def forget(self) -> None:
        shutil.rmtree(self._room / "data")

    def directory(self, **options: Any) -> EtcdDirectory:
        return EtcdDirectory([self.url], ttl_s=TTL_S, deadline_s=1.0, **options)


class Publisher:
    """A process that publishes `entries` and lives until it is told otherwise. `where` makes its directory."""

    def __init__(self, where: Callable[..., Directory], *arguments: object, entries: Sequence[Entry]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_publish, args=(theirs, where, arguments, tuple(entries)), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> Publisher:
        assert self._pipe.poll(30), "the publisher does not answer"
        said = self._pipe.recv()
        assert said == "published", said
        return self

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def pause(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def leave(self) -> int | None:
        """Let it close its directory and end; its exit code."""
        self._pipe.send("leave")
        self._process.join(20)
        return self._process.exitcode


def etcd_directory(url: str) -> Directory:
    return EtcdDirectory([url], ttl_s=TTL_S, deadline_s=1.0)


def _publish(pipe: Any, where: Callable[..., Directory], arguments: Sequence[Any], entries: Sequence[Entry]) -> None:
    try:
        directory = where(*arguments)
        for entry in entries:
            directory.publish(entry)
    except Exception as error:
        pipe.send(repr(error))
        raise
    pipe.send("published")
    with contextlib.suppress(EOFError):  # the test is gone
        pipe.recv()
    directory.close()
