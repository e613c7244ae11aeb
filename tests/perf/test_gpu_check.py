"""What `make gpu-check` runs, cuts and packs, without a GPU."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest

from perf import gpu_check
from perf.gpu_check import LEAST_S, LIMIT_S, PARTS, PYTHON, RESERVE_S, Step, allowed_s, missing, packed, run
from perf.record import machine

ENVIRON = {**os.environ}


def python(name: str, code: str, seconds: float = 60.0) -> Step:
    return Step(name, seconds, (sys.executable, "-c", code))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_before_a_command_of_ten_minutes_is_ended(part: str):
    spent = 0.0
    for step in PARTS[part]:
        seconds = allowed_s(step, spent)
        assert seconds == 0 or seconds >= LEAST_S
        spent += seconds
    assert spent + RESERVE_S <= LIMIT_S < 600
    assert allowed_s(PARTS[part][0], 0.0) == PARTS[part][0].seconds, "the first is never cut"


@pytest.mark.parametrize("step", [step for part in PARTS.values() for step in part], ids=lambda step: step.name)
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
    assert list(run(steps, tmp_path, ENVIRON)) == [True, False, True]
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
    assert list(run([Step("memcheck", 60, ("no-such-sanitizer",))], tmp_path, ENVIRON)) == [True]
    assert "no-such-sanitizer is not on the PATH" in capsys.readouterr().out


def test_missing_modules_are_named_unless_a_wheel_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_check, "NEEDED", ("sys", "msgspec_of_tomorrow", "another_one"))
    monkeypatch.setattr(gpu_check, "ALSO_NEEDED", {"transfers": ("nixl_of_tomorrow",)})
    assert missing(["correctness"], None) == ["msgspec_of_tomorrow", "another_one"]
    (tmp_path / "msgspec_of_tomorrow-1.0-cp312-cp312-linux.whl").touch()
    assert missing(["correctness", "transfers"], tmp_path) == ["another_one", "nixl_of_tomorrow"]


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


def test_steps_run_in_the_interpreter_that_runs_the_check():
    assert PYTHON[0] == sys.executable
