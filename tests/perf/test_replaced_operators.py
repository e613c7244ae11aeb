"""The table of replaced operators is read from the fixtures: each that one implements or names is in it."""

from __future__ import annotations

import re
from pathlib import Path

from perf.readme import LIVE
from perf.replaced_operators import FIXTURES, replaced_in, replaced_operators


def test_what_a_fixture_implements_and_what_it_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "fixture.py"
    path.write_text('REPLACED = ("b", "a")\ndef define(library):\n    library.impl("c", print, "CPU")\n')
    assert replaced_in(path) == ["a", "b", "c"]


def test_every_operator_that_a_fixture_of_vllm_defines_is_in_the_table() -> None:
    table = "\n".join(replaced_operators())
    for path in (FIXTURES / "vllm").rglob("*.py"):
        for name in re.findall(r'^ +(?:library\.define\()?"(\w+)\(Tensor', path.read_text(), re.MULTILINE):
            assert f"`{name}`" in table, path


def test_the_page_of_live_engines_has_the_table() -> None:
    assert "\n".join(replaced_operators()) in LIVE.read_text()
