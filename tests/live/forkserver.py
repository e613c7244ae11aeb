"""Starts servers of an engine from one process that has imported it: a start is a fork, and not 10 s of imports.

`Forkserver` runs this file in an engine's environment. Each line that it reads starts a server: JSON of the module
that is run, its arguments, what its environment has besides, and its log. It answers with the server's pid.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


class Forkserver:
    """The side that asks."""

    def __init__(self, python: Path, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`modules` are imported once, in `environment`; what they say goes to `log`."""
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [python, __file__, *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**environment},
                cwd=python.parent.parent,
                text=True,
            )

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, network: str = ""
    ) -> int:
        """The pid of a server whose environment is this one and has `environment` besides. `network`: its namespace,
        "" for this one."""
        command = {
            "module": module,
            "arguments": [*arguments],
            "environment": {**environment},
            "log": str(log),
            "network": network,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Its servers live on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def main(modules: list[str]) -> None:
    with redirect_stdout(sys.stderr):  # pids alone go to whoever reads this process's output
        for module in modules:
            importlib.import_module(module)
    gc.freeze()  # a collection in a child would copy all that it shares with this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for a server
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(command)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _serve(command: Mapping[str, Any]) -> None:
    """Run the module as `python -m` would, in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for path, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (command["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.update(command["environment"])
    if command["network"]:
        from perf.network_cable import enter

        enter(command["network"])
    sys.argv = [command["module"], *command["arguments"]]
    runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
