"""Docstrings of the tools: every public name has one, and its examples say what the code does."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
from importlib import import_module

import pytest

import kvmover.tools

MODULES = sorted(found.name for found in pkgutil.walk_packages(kvmover.tools.__path__, "kvmover.tools."))


def examples(name: str) -> bool:
    return ">>> " in inspect.getsource(import_module(name))


@pytest.mark.parametrize("name", sorted(filter(examples, MODULES)))
def test_the_examples_of_a_tool_hold(name: str) -> None:
    ran = doctest.testmod(import_module(name))
    assert (ran.failed, ran.attempted > 0) == (0, True)


def test_tools_that_write_for_people_have_examples() -> None:
    shown = {"doctor.host_checks", "report.run_summary", "report.run_trace", "scrape", "plan_views.plan_words"}
    assert {f"kvmover.tools.{name}" for name in shown} <= {name for name in MODULES if examples(name)}
