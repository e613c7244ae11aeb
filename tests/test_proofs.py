"""What a plain run leaves out another target runs; and the few cases that it takes reach what all of them reach."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.proofs import covering, family

ROOT = Path(__file__).parent.parent


def test_what_a_plain_run_leaves_out_a_target_selects() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = re.findall(r"not (\w+)", options[options.index("-m") + 1])
    selected = re.findall(r"-m (\w+) tests|-m \"(\w+) or", (ROOT / "Makefile").read_text())
    assert sorted(left_out) == sorted("".join(each) for each in selected) == ["engine", "proof"]


def test_every_case_of_a_family_is_taken_or_a_proof() -> None:
    cases = family([("a", 1), ("b", 2), ("c", 3)], few=[("b", 2)])
    assert [case.values for case in cases] == [("a", 1), ("b", 2), ("c", 3)]
    assert [list(case.marks) for case in cases] == [[pytest.mark.proof], [], [pytest.mark.proof]]


def test_few_that_are_no_cases_are_refused() -> None:
    with pytest.raises(AssertionError, match="no case"):
        family(range(3), few=[4])
    with pytest.raises(AssertionError):
        family(range(3), few=[])


def test_a_covering_has_every_trait_and_leaves_out_who_adds_none() -> None:
    words = ["a", "ab", "bc", "abc", "d", "cd"]
    assert covering(words, set) == ["abc", "d"]
