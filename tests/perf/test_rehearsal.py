"""Every part of the GPU check runs to its tables on a make-believe H100: real programs, bytes compared, no times."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvmover.tools.demo import smollm2
from perf import gpu_check
from perf.gpu_check import PARTS, Part
from perf.record import read

#: What each part leaves, but logs and the tests' own report.
TABLES: Mapping[str, set[str]] = {
    "correctness": {"bench_chunk.csv", "bench_digest.csv"},
    "transfers": {"tokens.csv", "collectivex.csv", "transfer.csv", "transfer_latency.csv"},
    "budgets": {"bench_launches.csv", "roofline.csv", "bench_kernels.csv", "bench_host.csv"},
    "english": {"tokens.csv"},
    "tuning": {"nvidia-h100-80gb-hbm3.json"},
}


def rehearsed(command: tuple[str, ...]) -> tuple[str, ...]:
    """A command with its program of perf/ on the make-believe GPU."""
    at = command.index("-m") + 1 if "-m" in command else 0
    if command[at].startswith("perf."):
        return *command[:at], "tests.perf.rehearsal", *command[at:]
    return command


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_to_its_tables_on_a_make_believe_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that need a GPU are collected, and the tools of one, which are not here, are left out."""
    steps = tuple(replace(step, command=rehearsed(step.command), seconds=800) for step in PARTS[name].steps)
    monkeypatch.setattr(gpu_check, "PARTS", {name: Part(900, steps)})
    monkeypatch.setattr(gpu_check, "ABOUT", rehearsed(gpu_check.ABOUT))
    monkeypatch.setattr(gpu_check, "kept_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(sys, "argv", ["gpu_check", name, "--out", str(tmp_path / "out")])
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("KVMOVER_COMMIT", "a rehearsal")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin")
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    with tarfile.open(tmp_path / "out" / f"{name}.tgz") as pack:
        pack.extractall(tmp_path / "came", filter="data")
    came = {path.name: path for path in (tmp_path / "came").iterdir()}
    logs = {path.stem: path.read_text() for path in came.values() if path.suffix == ".log"}
    assert ended.value.code == 0, "\n".join(logs.values())
    assert "NVIDIA H100" in logs["machine"]
    assert {each for each in came if each.endswith((".csv", ".json"))} == TABLES[name]
    for path in came.values():
        if path.suffix == ".csv":
            rows = read(path.stem, path.parent)
            assert rows
            assert {row["commit"] for row in rows} == {"a rehearsal"}
            assert all(row["hardware"].startswith("NVIDIA H100") for row in rows)
    if "tokens.csv" in came:
        rows = read("tokens", tmp_path / "came")
        assert all(row["same"] == row["tokens"] and row["routes"] == "mapped" for row in rows)


@pytest.mark.proof
@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(smollm2.missing()), reason="the trained model's packages are not installed")
def test_a_trained_models_answers_over_mapped_pools_are_those_of_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.perf.rehearsal", "perf.gpu_tokens", "smollm2"]
    environ = {**os.environ, "KVMOVER_WHOLE_REHEARSAL": "1", "KVMOVER_COMMIT": "a rehearsal"}
    done = subprocess.run([*command, "--out", tmp_path], cwd=gpu_check.ROOT, env=environ, check=False)
    assert done.returncode == 0
    rows = read("tokens", tmp_path)
    assert len(rows) == 3
    assert all(row["same"] == row["tokens"] and row["routes"] == "mapped" for row in rows)
