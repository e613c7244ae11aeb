"""Examples in docstrings of what operators use say what the code does."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "config",
    "config.load",
    "observe.charts",
    "observe.host",
    "observe.report",
    "observe.report_sums",
    "observe.scrape",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"kvmover.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
