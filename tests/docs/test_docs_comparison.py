"""Each row of the comparison that names a test names one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TABLES = (ROOT / "docs" / "comparison.md").read_text().split("\n\n")

#: A cell that names tests: `the_beginning...` or the whole name, and the file if it is another than the table's.
NAMED = re.compile(r"`(?P<test>[a-z0-9]+_[a-z0-9_]+)(?P<cut>\.\.\.)?`(?: in `(?P<file>check_\w+\.py)`)?")


def rows(header: str) -> list[tuple[str, str]]:
    """Rows of the table that begins so: its first cell, and that with the tests."""
    (table,) = (table for table in TABLES if table.startswith(header) and table.partition("\n")[0].endswith("Test |"))
    cells = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [(cell[0].strip(), cell[-1]) for cell in cells]


@pytest.mark.parametrize(("engine", "header"), [("sglang", "| Family"), ("vllm", "| | kvmover's connector")], ids=str)
def test_every_family_has_a_test_that_there_is(engine: str, header: str) -> None:
    for what, cell in rows(header):
        found = list(NAMED.finditer(cell))
        assert found, f"no test is named for {what}"
        for named in found:
            path = ROOT / "tests" / "engines" / engine / (named["file"] or "check_kinds.py")
            tests = re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
            alike = [
                test for test in tests if test.startswith(named["test"]) and (named["cut"] or test == named["test"])
            ]
            assert len(alike) == 1, f"{named[0]} of {what} in {path.name}: {alike}"
