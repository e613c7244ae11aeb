"""The README keeps its word: its numbers are measured, its example runs, its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from perf import readme

TEXT = readme.README.read_text()


def test_the_numbers_are_those_of_the_measured_files() -> None:
    assert readme.updated(TEXT, readme.numbers()) == TEXT, "run: python -m perf.readme"
    live = readme.LIVE.read_text()
    assert readme.updated(live, readme.scenarios()) == live, "run: python -m perf.readme"


def test_the_example_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    promised = re.search(r"four heads: (\[.*\])", example)
    assert promised is not None
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip() == promised[1]


def test_the_plan_on_the_first_screen_is_what_the_command_prints() -> None:
    (command, line) = re.findall(r"\$ kvmover (plan .*?)\n\.\.\.\n(.*?)\n```", TEXT, re.DOTALL)[0]
    call = [sys.executable, "-c", "from kvmover.cli import main; main()", *shlex.split(command)]
    printed = subprocess.run(call, capture_output=True, text=True, check=True, timeout=60).stdout
    assert line in printed


def test_every_picture_and_page_it_names_exists() -> None:
    for name in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (Path(readme.README).parent / name).is_file(), name


def test_every_demo_scenario_is_on_the_first_screen() -> None:
    from kvmover.demo.scenarios import SCENARIOS

    (shown,) = re.findall(r"\$ kvmover demo\n(.*?)```", TEXT, re.DOTALL)
    assert [line.split()[0] for line in shown.splitlines()] == [scenario.name for scenario in SCENARIOS]
