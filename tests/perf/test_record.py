"""Rows of benchmarks: two processes may write one file at once, and a commit is named by what was measured."""

from __future__ import annotations

import subprocess
from multiprocessing import get_context
from pathlib import Path

import pytest

from perf import record


def _replace_each(folder: Path, engine: str) -> None:
    for number in range(40):
        record.replace("rows", [{"engine": engine, "number": number}], ("engine", "number"), folder)


def test_two_processes_that_replace_rows_at_once_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOVER_COMMIT", "abc")
    context = get_context("spawn")
    writers = [context.Process(target=_replace_each, args=(tmp_path, engine)) for engine in ("sglang", "vllm")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(record.read("rows", tmp_path)) == 80


def test_a_commit_is_dirty_by_a_change_of_anything_but_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)

    monkeypatch.delenv("KVMOVER_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "perf" / "results").mkdir(parents=True)
    code, rows = tmp_path / "code.py", tmp_path / "perf" / "results" / "live.csv"
    for file in (code, rows):
        file.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = record.machine()["commit"]
    rows.write_text("2")
    assert record.machine()["commit"] == clean
    code.write_text("2")
    assert record.machine()["commit"] == f"{clean}-dirty"
