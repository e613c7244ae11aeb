"""Examples in the docstrings of kvmover.cache say what the code does."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import kvmover.cache

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(kvmover.cache.__path__, "kvmover.cache.")
    if not found.name.endswith("._core")  # has no source in Python
)


def examples(name: str) -> bool:
    return ">>> " in inspect.getsource(importlib.import_module(name))


@pytest.mark.parametrize("name", [name for name in MODULES if examples(name)])
def test_the_examples_of_a_module_hold(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert (ran.failed, ran.attempted > 0) == (0, True)


def test_rooms_with_rules_for_users_have_examples() -> None:
    assert {
        f"kvmover.cache.{name}" for name in ("prefix.tree", "ledger.ledger", "prefix.components", "tiers.agreement")
    } <= {name for name in MODULES if examples(name)}
