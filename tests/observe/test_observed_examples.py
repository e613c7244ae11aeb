"""Docstrings of what operators use: every public name has one, and its examples say what the code does."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
from importlib import import_module

import pytest

MODULES = [
    "config",
    "config.load",
    "observe.formats",
    "transfer.meter",
]


TOOLS = ("tools", "tools.demo", "tools.doctor", "tools.plan_views", "tools.report")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"kvmover.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("package", ["config", "observe", *TOOLS])
def test_every_public_name_says_what_it_is(package: str) -> None:
    silent: list[str] = []
    face = import_module(f"kvmover.{package}")
    for module in [import_module(each.name) for each in pkgutil.iter_modules(face.__path__, f"{face.__name__}.")]:
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            members = vars(value).items() if inspect.isclass(value) else ()
            calls = {f"{name}.{member}": call for member, call in members if not member.startswith(("_", "test_"))}
            silent += [
                f"{module.__name__}.{each}"
                for each, call in ({name: value} | calls).items()
                if isinstance(call, (type, property, classmethod)) or inspect.isfunction(call)
                if not call.__doc__
            ]
    assert not silent
