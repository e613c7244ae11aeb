"""Rows of a live run are kept whether it passed or not, and no table shows those of a run in which tests failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import readme, record
from tests.live.conftest import failed_tests
from tests.live.table import Results, Row


def run(engine: str, same: int) -> Results:
    return Results([Row(engine, "a pair", 20, same, 20 - same, 0, 0.0, 1, 2)])


def kept(folder: Path) -> list[tuple[str, str, str]]:
    return [(row["engine"], row["same"], row["failed_tests"]) for row in record.read("live", folder)]


def test_a_run_that_failed_is_kept_with_its_names_beside_the_last_that_passed(tmp_path: Path) -> None:
    run("vllm", 20).keep([], tmp_path)
    run("sglang", 19).keep([], tmp_path)
    run("vllm", 18).keep(["test_a", "test_b"], tmp_path)
    assert kept(tmp_path) == [("vllm", "18", "test_a; test_b"), ("sglang", "19", ""), ("vllm", "20", "")]
    assert [row["same"] for row in record.passed("live", tmp_path)] == ["19", "20"]
    run("vllm", 17).keep(["test_b"], tmp_path)
    assert kept(tmp_path)[0] == ("vllm", "17", "test_b")
    assert len(kept(tmp_path)) == 3
    run("vllm", 16).keep([], tmp_path)
    assert kept(tmp_path) == [("vllm", "16", ""), ("sglang", "19", "")]


def test_a_few_files_that_passed_take_the_place_of_their_own_scenarios(tmp_path: Path) -> None:
    run("vllm", 18).keep(["test_a"], tmp_path)
    run("sglang", 19).keep([], tmp_path)
    Results([Row("vllm", "a pair", 20, 20, 0, 0, 0.0, 1, 2), Row("vllm", "new", 8, 8, 0, 0, 0.0, 1, 2)]).keep_beside(
        tmp_path
    )
    assert kept(tmp_path) == [("vllm", "20", ""), ("vllm", "8", ""), ("sglang", "19", "")]


def test_the_page_tells_rows_that_were_run_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"hardware": "CPU", "versions": "python 3.11", "date": "2026-11-26"}
    whole = [{"engine": "vllm", "scenario": f"pair {n}", "commit": "aaa", **about} for n in range(3)]
    run("sglang", 20).keep([], tmp_path)
    row = record.read("live", tmp_path)[0]
    record.write(
        "live", [{**row, "commit": "bbb", "date": "2026-11-27"}, *({**row, **each} for each in whole)], tmp_path
    )
    mixed = record.read("live", tmp_path)
    monkeypatch.setattr(record, "read", lambda name, folder=record.RESULTS: mixed)
    monkeypatch.setattr(readme, "read", record.read)
    lines = readme.scenarios().splitlines()
    assert lines[0].startswith("Last run in which all passed: 2026-11-26, commit aaa (")
    assert lines[1] == "Scenarios run by themselves: 1, 2026-11-27, commit bbb."


def test_rows_that_were_kept_before_there_was_a_mark_are_those_of_a_run_that_passed(tmp_path: Path) -> None:
    record.write("live", [{"engine": "vllm", "same": 20}], tmp_path)
    run("vllm", 1).keep(["test_a"], tmp_path)
    assert kept(tmp_path) == [("vllm", "1", "test_a"), ("vllm", "20", "")]


def test_tables_are_made_of_runs_that_passed_and_name_those_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = readme.scenarios()
    rows = record.read("live")
    record.write("live", [{"failed_tests": "", **row} for row in rows], tmp_path)
    run("vllm", 3).keep(["test_of_a_kind"], tmp_path)
    red = record.read("live", tmp_path)
    monkeypatch.setattr(record, "read", lambda name, folder=record.RESULTS: red)
    monkeypatch.setattr(readme, "read", record.read)
    page = readme.scenarios()
    assert "test_of_a_kind." in page
    assert [line for line in page.splitlines() if "test_of_a_kind" not in line] == before.splitlines()


def test_the_names_are_those_of_tests_that_failed_or_whose_servers_did() -> None:
    stats: dict[str, Any] = {
        "failed": [SimpleNamespace(nodeid="tests/live/vllm/test_x.py::test_b[1]")],
        "error": [SimpleNamespace(nodeid="tests/live/vllm/test_x.py::test_a")] * 2,
        "passed": [SimpleNamespace(nodeid="tests/live/vllm/test_x.py::test_c")],
    }
    reporter: Any = SimpleNamespace(stats=stats)
    assert failed_tests(reporter) == ["test_a", "test_b[1]"]
