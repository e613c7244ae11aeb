"""Machine code without a GPU: one of two Tritons compiles a file's kernels for one of four GPUs, within a time limit.

The limit also ends ptxas, which Triton runs as a child.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest

from tests.proofs import family

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OLDEST = "3.6.0"
OLDEST_PATH = ROOT / ".triton" / OLDEST
LIMIT_S = 480.0


@dataclass(frozen=True)
class Compiler:
    """A Triton, `oldest` or `newest`; the compute capability it compiles for, 90 for 9.0, or an AMD GPU's name; and
    cases, `few` or `all`.
    """

    triton: str
    architecture: int | str
    cases: str

    def __str__(self) -> str:
        target = self.architecture if isinstance(self.architecture, str) else f"sm_{self.architecture}"
        return f"{self.triton}-{target}-{self.cases}"

    def reports(self, worker: str) -> dict[str, dict]:
        """What `worker`, a file of this folder, prints of its cases, compiled without anybody's cache. Skips the test
        where this Triton is not installed."""
        with TemporaryDirectory(prefix="kvmover-compiled-") as folder:
            return self._reports(worker, Path(folder))

    def _reports(self, worker: str, folder: Path) -> dict[str, dict]:
        installed = importlib.metadata.distribution("triton")
        version, path = installed.version, Path(str(installed.locate_file("")))
        if self.triton == "oldest":
            version, path = OLDEST, OLDEST_PATH
            if not (path / "triton").exists():
                pytest.skip(f"Triton {version} is not installed beside the newest; `make setup` does that")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(path), str(ROOT)]))
        environment["PYTHONWARNINGS"] = "default"  # Triton's own are no failure of ours
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
        command = [sys.executable, HERE / worker, self.architecture, self.cases]
        found = json.loads(Limited.start(command, environment, folder / "report.json", LIMIT_S).result())
        assert found["triton"].startswith(version)
        return found["results"]


#: A plain run has the newest compile a few cases: each takes most of a second, most of it to disassemble. `make prove`
#: has each Triton compile a few for each GPU and all for one, but the newest alone for sm_120; `make night` all.
FEW = Compiler("newest", 90, "few")
_FEW, _ALL = (
    [Compiler(*each, cases) for each in product(("oldest", "newest"), (80, 90, 100, 120))] for cases in ("few", "all")
)
_PROVED = {Compiler("newest", 90, "all"), Compiler("oldest", 100, "all")}
_LATE = Compiler("oldest", 120, "few")
COMPILERS = family([*_FEW, *_ALL], few=[FEW], proved=[*(each for each in _FEW if each != _LATE), *_PROVED])


@dataclass
class Limited:
    """A process that is ended with all its children when its time is up."""

    process: subprocess.Popen[bytes]
    output: Path
    deadline: float
    running: ClassVar[list[Limited]] = []

    @classmethod
    def start(cls, command: Sequence[object], environment: dict[str, str], output: Path, limit_s: float) -> Limited:
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True
            )
        cls.running.append(limited := cls(process, output, time.monotonic() + limit_s))
        return limited

    def result(self) -> str:
        """What it printed. Raises TimeoutExpired at the limit, and AssertionError with its words when it fails."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        finally:
            self.kill()
            self.running.remove(self)
        assert self.process.returncode == 0, self.output.with_suffix(".err").read_text()
        return self.output.read_text()

    def kill(self) -> None:
        """The process group outlives its leader as long as a child lives."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait()
