"""The recorder of a terminal, and the recording that the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perf.terminal import PAUSE_S, Line, picture, recorded

_DOCS = Path(__file__).parents[2] / "docs"


def words(svg: str) -> str:
    """Returns the text of a picture, its rows joined."""
    rows = (element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    return " ".join("".join(rows).split())


def test_lines_are_recorded_with_their_seconds() -> None:
    program = "import time; print('one', flush=True); time.sleep(0.2); print('two')"
    first, second = recorded([sys.executable, "-c", program])
    assert (first.said, second.said) == ("one", "two")
    assert second.at_s - first.at_s > 0.1


def test_no_picture_is_made_of_a_command_that_fails() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        recorded([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_line_appears_when_it_was_printed_but_after_a_short_pause_and_a_wrapped_one_at_once() -> None:
    svg = picture("make it", [Line("\x1b[32mone\x1b[0m", 1), Line("two " * 40, 60)])
    assert words(svg).startswith("60 s, played in 2$ make it one two two")
    appear = dict(re.findall(r"terminal-line-(\d+)\)\"]\{animation:appear 1ms ([\d.]+)s", svg))
    assert appear == {"1": "1.00", "2": f"{1 + PAUSE_S:.2f}", "3": f"{1 + PAUSE_S:.2f}"}


def test_a_picture_fetches_nothing_from_elsewhere() -> None:
    assert set(re.findall(r"https?://[^\"]*", picture("make it", [Line("one", 1)]))) == {"http://www.w3.org/2000/svg"}


def test_the_recording_of_the_readme_shows_three_answers_that_are_the_same() -> None:
    said = words((_DOCS / "demo.svg").read_text(encoding="utf-8"))
    assert said.count("(the same)") == 3
    assert "DIFFERS" not in said
    assert "All 54 tokens of 3 requests" in said
