"""What `make gpu-check` runs, cuts and packs, without a GPU."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from perf import gpu_check, gpu_time
from perf.gpu_check import (
    ALL_S,
    LEAST_S,
    LONGEST_S,
    PARTS,
    PYTHON,
    RESERVE_S,
    Step,
    allowed_s,
    core_built,
    missing,
    packed,
    run,
)
from perf.record import machine

ENVIRON = {**os.environ}


def python(name: str, code: str, seconds: float = 60.0) -> Step:
    return Step(name, seconds, (sys.executable, "-c", code))


@pytest.mark.parametrize("part", PARTS)
def test_all_steps_of_a_part_fit_it_and_a_part_a_command_of_ten_minutes(part: str):
    spent, limit_s = 0.0, PARTS[part].limit_s
    for step in PARTS[part].steps:
        assert allowed_s(step, spent, limit_s) == step.seconds >= LEAST_S
        spent += step.seconds
    assert spent + RESERVE_S <= limit_s <= LONGEST_S < 600


def test_all_parts_fit_a_lease_and_tuning_which_can_wait_is_last():
    assert sum(part.limit_s for part in PARTS.values()) <= ALL_S <= 28 * 60
    assert list(PARTS)[-1] == "tuning"


@pytest.mark.parametrize("step", [step for part in PARTS.values() for step in part.steps], ids=lambda step: step.name)
def test_what_a_step_runs_is_there(step: Step):
    words = list(step.command)
    if "-m" in words and words[words.index("-m") + 1].startswith("perf."):
        assert (gpu_check.ROOT / f"{words[words.index('-m') + 1].replace('.', '/')}.py").is_file()
    assert all((gpu_check.ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_steps_are_logged_and_one_that_fails_stops_no_other(tmp_path: Path):
    steps = [
        python("first", "print('one')"),
        python("second", "raise SystemExit(3)"),
        python("third", "import sys; open(sys.argv[1] + '/made', 'w').write('two')"),
    ]
    steps[2] = Step("third", 60, (*steps[2].command, "LOG"))
    assert list(run(steps, tmp_path, ENVIRON, 600)) == [True, False, True]
    assert (tmp_path / "first.log").read_text() == "one\n"
    assert (tmp_path / "made").read_text() == "two"


def test_a_step_that_hangs_is_cut_at_what_is_left_and_the_next_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.5)
    hangs = python("hangs", "import time; print('begun', flush=True); time.sleep(60)", seconds=30)
    assert list(run([hangs, python("later", "")], tmp_path, ENVIRON, RESERVE_S + 2)) == [False, False]
    said = capsys.readouterr().out
    assert "hangs: cut after 2 s" in said
    assert "begun" in said
    assert "later: no time is left" in said


def test_a_tool_that_is_not_there_is_named_and_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert list(run([Step("memcheck", 60, ("no-such-sanitizer",))], tmp_path, ENVIRON, 60)) == [True]
    assert "no-such-sanitizer is not on the PATH" in capsys.readouterr().out


def test_missing_modules_are_named_unless_a_wheel_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_check, "NEEDED", ("sys", "msgspec_of_tomorrow", "another_one"))
    monkeypatch.setattr(gpu_check, "ALSO_NEEDED", {"transfers": ("nixl_of_tomorrow",)})
    site = tmp_path / "site"
    assert missing(["correctness"], None, site) == ["msgspec_of_tomorrow", "another_one"]
    (tmp_path / "msgspec_of_tomorrow-1.0-cp312-cp312-linux.whl").touch()
    assert missing(["correctness", "transfers"], tmp_path, site) == ["another_one", "nixl_of_tomorrow"]
    (site / "nixl_of_tomorrow").mkdir(parents=True)
    assert missing(["correctness", "transfers"], tmp_path, site) == ["another_one"], "a part before installed it"


def test_a_tree_without_a_compiler_says_that_its_core_is_missing(tmp_path: Path):
    (tmp_path / "setup.py").write_text("print('no compiler'); raise SystemExit(1)")
    assert core_built(tmp_path) == "_core: not built, so paths in Python are measured: no compiler"


@pytest.mark.proof
def test_the_core_is_built_in_a_tree_that_lacks_it(tmp_path: Path):
    for name in ("core", "kvmover", "kernels", "docs"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(gpu_check.ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(gpu_check.ROOT / name, tmp_path)
    assert core_built(tmp_path).startswith("_core: built in ")
    assert core_built(tmp_path) == "_core: there"


def test_all_that_was_written_is_in_one_file_after_every_step(tmp_path: Path):
    logs = tmp_path / "part"
    logs.mkdir()
    (logs / "a.log").write_text("a")
    packed(logs, tmp_path / "part.tgz")
    (logs / "b.csv").write_text("b")
    packed(logs, tmp_path / "part.tgz")
    with tarfile.open(tmp_path / "part.tgz") as pack:
        assert sorted(name for name in pack.getnames() if name != ".") == ["./a.log", "./b.csv"]
    assert not (tmp_path / "part.half").exists()


def test_a_tree_without_its_history_is_told_which_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVMOVER_COMMIT", "0123456-of-a-copy")
    assert machine()["commit"] == "0123456-of-a-copy"


def test_no_row_is_measured_of_an_unknown_commit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["gpu_time"])
    monkeypatch.setattr(gpu_time, "need_gpu", lambda program: None)
    monkeypatch.setenv("KVMOVER_COMMIT", "unknown")
    with pytest.raises(SystemExit, match="say it in KVMOVER_COMMIT"):
        gpu_time.main()
    monkeypatch.setenv("KVMOVER_COMMIT", "0123456")
    gpu_time.main()


def test_steps_run_in_the_interpreter_that_runs_the_check():
    assert PYTHON[0] == sys.executable
