"""The README keeps its word: its numbers are measured, its example runs, its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvmover import cli
from perf import readme
from perf.headline import headline

TEXT = readme.README.read_text()


def test_the_numbers_are_those_of_the_measured_files() -> None:
    for path, block in readme.PAGES.items():
        text = path.read_text()
        assert readme.BLOCK.search(text), f"{path.name} has no markers"
        assert readme.updated(text, block()) == text, "run: python -m perf.readme"


def test_the_table_of_the_readme_has_ten_rows_with_their_units() -> None:
    rows = [line.split(" | ") for line in headline().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    assert {row[1] for row in rows} == {"GB/s", "ms", "requests/s", "answers"}


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


def test_every_family_of_models_that_live_servers_serve_is_in_a_table() -> None:
    made = (readme.README.parent / "tests" / "live" / "models.py").read_text(encoding="utf-8")
    families = set(re.findall(r'^    "[a-z0-9-]+": \($|^    "[a-z0-9-]+": \("(\w+)", ', made, re.M)) - {""}
    (shown,) = re.findall(r"\| Model, as transformers.*?\n\n", TEXT, re.DOTALL)
    assert len(families) >= 7
    assert not families - set(re.findall(r"`(\w+)`", shown))


def test_every_demo_scenario_is_on_the_first_screen() -> None:
    from kvmover.tools.demo.scenarios import SCENARIOS

    (shown,) = re.findall(r"\| Scenario \|.*?\n\n", TEXT, re.DOTALL)
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", shown, re.MULTILINE) == [scenario.name for scenario in SCENARIOS]


_MAKEFILE = (readme.README.parent / "Makefile").read_text().replace("\\\n\t\t", "")

#: Commands of `make pictures`, each with the picture that it draws; and the pictures that it records.
PICTURES = re.findall(r"kvmover (plan .*?) --svg (\S+)$", _MAKEFILE, re.M)
RECORDINGS = re.findall(r"perf\.terminal (\S+)", _MAKEFILE)


def test_every_picture_of_the_pages_is_drawn_by_a_command() -> None:
    drawn = {*RECORDINGS, *(picture for _, picture in PICTURES)}
    root = readme.README.parent
    assert {str(path.relative_to(root)) for path in (root / "docs").glob("*.svg")} == drawn


def test_a_picture_is_what_the_command_draws_today(tmp_path: Path) -> None:
    assert len(PICTURES) == 2
    for number, (command, picture) in enumerate(PICTURES):
        drawn = tmp_path / f"{number}.svg"
        with pytest.raises(SystemExit):
            cli.main([*shlex.split(command), "--svg", str(drawn)])
        assert drawn.read_text() == (readme.README.parent / picture).read_text(), "run: make pictures"
