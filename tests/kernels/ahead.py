"""Compilers and the interpreter take processes of their own: they begin when the run does, beside the tests before.

A module of tests says in `AHEAD` which parameter of its tests stands for which work. One piece is done at a time, in
the order of the tests, so that two cores are busy and not more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

Work = Callable[[Any], Any]


class Ahead:
    """Work by module, parameter and value. What nobody has announced is done when somebody asks for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._begun = dict[tuple[str, str, str], Future[Any]]()

    def announce(self, items: Iterable[pytest.Item]) -> None:
        """Begin with what these tests will ask for, each piece once."""
        for item in items:
            module: Any = getattr(item, "module", None)
            values = getattr(getattr(item, "callspec", None), "params", {})
            for name, work in getattr(module, "AHEAD", {}).items():
                if name in values and (key := (module.__name__, name, str(values[name]))) not in self._begun:
                    self._begun[key] = self._thread.submit(partial(work, values[name]))

    def result(self, module: Any, name: str, value: object) -> Any:
        """What the work came to; raises what it raised, a skip too."""
        begun = self._begun.get((module.__name__, name, str(value)))
        return module.AHEAD[name](value) if begun is None else begun.result()

    def close(self) -> None:
        """Begin with nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
