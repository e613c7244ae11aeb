"""What a plain run leaves out another target runs; and the few cases that it takes reach what all of them reach."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from perf.night import COMMAND, rows
from tests.proofs import Effort, covering, family

ROOT = Path(__file__).parent.parent


def test_what_a_plain_run_leaves_out_a_target_selects() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = re.findall(r"not (\w+)", options[options.index("-m") + 1])
    selected = re.findall(r"-m (\w+) tests|-m \"\((\w+) or", (ROOT / "Makefile").read_text())
    selected.append((COMMAND[-1].split(" or ")[-1],))
    assert sorted(left_out) == sorted("".join(each) for each in selected) == ["engine", "night", "proof"]


@pytest.mark.parametrize(
    ("selection", "effort"),
    [
        ("not proof and not night and not engine", Effort.PLAIN),
        ("(proof or searched) and not night", Effort.PROVE),
        ("proof or searched or night", Effort.NIGHT),
        ("", Effort.NIGHT),
    ],
)
def test_a_run_tries_as_much_as_it_selects(selection: str, effort: Effort) -> None:
    assert Effort.of(selection) is effort


def test_a_night_is_told_by_folders_with_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = ["tests.sim.test_a|<failure/>", "tests.sim.test_a.TestB|", "tests.test_c|<skipped/>"]
    text = "".join(f'<testcase classname="{c.split("|")[0]}" time="1.5">{c.split("|")[1]}</testcase>' for c in cases)
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    found = [tuple(row.values()) for row in rows(report)]
    assert found == [("all", 3, 1, 1, "4"), ("sim", 2, 0, 1, "3"), ("tests", 1, 1, 0, "2")]


def test_every_case_of_a_family_is_taken_or_a_proof() -> None:
    cases = family([("a", 1), ("b", 2), ("c", 3)], few=[("b", 2)])
    assert [case.values for case in cases] == [("a", 1), ("b", 2), ("c", 3)]
    assert [list(case.marks) for case in cases] == [[pytest.mark.proof], [], [pytest.mark.proof]]


def test_a_case_that_is_not_proved_is_left_to_the_night() -> None:
    cases = family(range(3), few=[0], proved=[0, 1])
    assert [list(case.marks) for case in cases] == [[], [pytest.mark.proof], [pytest.mark.proof, pytest.mark.night]]


def test_few_that_are_no_cases_are_refused() -> None:
    with pytest.raises(AssertionError, match="no case"):
        family(range(3), few=[4])
    with pytest.raises(AssertionError):
        family(range(3), few=[])


def test_a_covering_has_every_trait_and_leaves_out_who_adds_none() -> None:
    words = ["a", "ab", "bc", "abc", "d", "cd"]
    assert covering(words, set) == ["abc", "d"]
