"""The row mover's machine code, for three GPUs and two Tritons, without a GPU: wide accesses, no spills, few registers.

Each Triton compiles in a process of its own under a time limit that also ends ptxas, which Triton runs as a child.
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
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OLDEST = "3.6.0"
OLDEST_PATH = ROOT / ".triton" / OLDEST
ARCHITECTURES = (80, 90, 100)
LIMIT_S = 240.0
REGISTERS = 96

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@dataclass
class Limited:
    """A process that is ended with all its children when its time is up."""

    process: subprocess.Popen[bytes]
    output: Path
    deadline: float

    @classmethod
    def start(cls, command: Sequence[object], environment: dict[str, str], output: Path, limit_s: float) -> Limited:
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True
            )
        return cls(process, output, time.monotonic() + limit_s)

    def result(self) -> str:
        """What it printed. Raises TimeoutExpired at the limit, and AssertionError with its words when it fails."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        finally:
            self.kill()
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


Report = dict[str, dict]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Reports by Triton version, compiled by all of them at once, without anybody's cache."""
    paths = {importlib.metadata.version("triton"): ROOT}
    if (OLDEST_PATH / "triton").exists():
        paths[OLDEST] = OLDEST_PATH
    workers: dict[str, Limited] = {}
    for version, path in paths.items():
        directory = tmp_path_factory.mktemp(f"triton-{version}")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(path), str(ROOT)]))
        environment["PYTHONWARNINGS"] = "default"  # Triton's own are no failure of ours
        environment["TRITON_CACHE_DIR"] = str(directory / "cache")
        command = [sys.executable, HERE / "compile_worker.py", *ARCHITECTURES]
        workers[version] = Limited.start(command, environment, directory / "report.json", LIMIT_S)
    try:
        reports = {version: json.loads(worker.result()) for version, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    for version, report in reports.items():
        assert report["triton"].startswith(version)
    return {version: report["results"] for version, report in reports.items()}


@pytest.fixture(params=["oldest", "newest"])
def report(request: pytest.FixtureRequest, compiled: dict[str, Report]) -> Report:
    """By architecture and case, of the oldest and the newest Triton."""
    version = OLDEST if request.param == "oldest" else importlib.metadata.version("triton")
    if version not in compiled:
        pytest.skip(f"Triton {version} is not installed beside the newest; `make setup` does that")
    return compiled[version]


@pytest.fixture(params=ARCHITECTURES, ids=lambda architecture: f"sm_{architecture}")
def cases(request: pytest.FixtureRequest, report: Report) -> Report:
    """By case, of one architecture."""
    prefix = f"sm_{request.param}-"
    found = {name.removeprefix(prefix): each for name, each in report.items() if name.startswith(prefix)}
    assert len(found) == 32
    return found


def payload(case: dict) -> dict[str, list[int]]:
    """Widths in bits of the payload's loads and stores."""
    return case["widths"]


def test_aligned_rows_move_in_128_bit_accesses(cases: Report) -> None:
    aligned = {name: payload(case) for name, case in cases.items() if name.startswith(("aligned", "budgeted"))}
    assert len(aligned) == 24
    for name, widths in aligned.items():
        in_flight = cases[name]["accesses"] * (2 if "-and-" in name else 1)
        for kind in ("LDG", "STG"):
            assert widths[kind] == [128] * in_flight, name


@pytest.mark.parametrize("word", [8, 4, 2, 1])
def test_narrower_words_move_whole(cases: Report, word: int) -> None:
    narrow = {name: payload(case) for name, case in cases.items() if name.startswith(f"word{word}-")}
    assert len(narrow) == 2
    for name, widths in narrow.items():
        assert set(widths["LDG"]) == set(widths["STG"]) == {8 * word}, name


def test_nothing_spills_to_local_memory(cases: Report) -> None:
    for name, case in cases.items():
        assert (case["memory"]["spills"], case["memory"]["local"], case["memory"]["stack"]) == (0, 0, 0), name


def test_no_shared_memory_barrier_or_call(cases: Report) -> None:
    for name, case in cases.items():
        assert case["memory"]["shared"] == 0, name
        kinds = {opcode.split(".")[0] for opcode in case["opcodes"]}
        assert not kinds & {"LDS", "STS", "LDSM", "BAR", "CALL"}, name


def test_registers_leave_room_for_other_work(cases: Report) -> None:
    for name, case in cases.items():
        assert 0 < case["registers"] <= REGISTERS, name


def test_the_time_limit_ends_the_children_too(tmp_path: Path) -> None:
    """Ending Triton alone leaves a hanging ptxas behind."""
    hang = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    worker = Limited.start([sys.executable, "-c", hang], dict(os.environ), tmp_path / "out", 2.0)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.result()
    child = int(worker.output.read_text())
    until = time.monotonic() + 10
    while lives(child):
        assert time.monotonic() < until, "the child lives on"
        time.sleep(0.01)


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
