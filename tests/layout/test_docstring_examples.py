"""The examples in the docstrings of layout and plan are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvmover.layout
import kvmover.plan

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (kvmover.layout, kvmover.plan)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) >= 8
