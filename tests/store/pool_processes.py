"""A pool of memory of one's own: a master and donors, each a process on a free port, over TCP."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path

#: What a donor's process runs: it joins, says so, and leaves with its standard input.
_DONOR = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
here = ("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20)
print(store.setup(*here, "tcp", "", "127.0.0.1:" + sys.argv[1]), flush=True)
sys.stdin.read()
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PoolProcesses:
    """`location` is the pool's. The master believes in a donor that is silent, and waits for the
    end of a put, for `patience_s`.
    """

    def __init__(self, patience_s: int = 3) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found
        assert found.submodule_search_locations
        self._binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
        self._patience_s, self.port = patience_s, free_port()
        self.location = f"mooncake://127.0.0.1:{self.port}"
        self.donors: list[subprocess.Popen[str]] = []
        self.start_master()

    def start_master(self) -> None:
        flags = {"rpc_port": self.port, "metrics_port": free_port(), "rpc_thread_num": 2}
        flags |= {"client_ttl": self._patience_s, "put_start_release_timeout_sec": self._patience_s}
        flags |= {"put_start_discard_timeout_sec": self._patience_s - 1}
        flags |= {"rpc_address": "127.0.0.1", "metrics_host": "127.0.0.1", "enable_metric_reporting": "false"}
        words = [str(self._binary), *(f"--{name}={value}" for name, value in flags.items())]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # A session of its own has a share of the cores of its own: ranks that spin beside it do not take it.
        self.master = subprocess.Popen(words, **quiet, start_new_session=True)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the master does not listen")

    def donate(self, nbytes: int = 64 << 20) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _DONOR, str(self.port), str(nbytes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        donor = subprocess.Popen(words, text=True, **pipes, start_new_session=True)
        self.donors.append(donor)
        assert donor.stdout
        assert donor.stdout.readline().strip() == "0"
        return donor

    def close(self) -> None:
        for process in (*self.donors, self.master):
            process.kill()
            process.wait(10)
        for donor in self.donors:
            for pipe in (donor.stdin, donor.stdout):
                assert pipe
                pipe.close()
