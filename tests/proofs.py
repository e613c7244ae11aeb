"""Families of cases and searches: a plain run takes a few cases that reach everything once, `make prove` all others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")

#: Whether this run selects proofs: conftest.py says so before any test is imported.
proving = False


def family(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """`cases` as parameters of a test, each marked as a proof but those that are among the `few`.

    A tuple has the values of several parameters.
    """
    cases, few = list(cases), list(few)
    assert few
    assert all(case in cases for case in few), "one of the few is no case"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in few else pytest.mark.proof for case in cases]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def covering(cases: Sequence[Case], traits: Callable[[Case], set[Hashable]]) -> list[Case]:
    """A few of the cases that together have every trait that any has: at each step, the one that adds most."""
    having = [traits(case) for case in cases]
    missing, chosen = set[Hashable]().union(*having), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(having[number] & missing))
        missing -= having[best]
        chosen.add(best)
    return [case for number, case in enumerate(cases) if number in chosen]


def searched(few: int, many: int, **options: Any) -> Callable[[Any], Any]:
    """Hypothesis tries a `few` examples in a plain run and `many` in `make prove`."""
    return lambda test: pytest.mark.searched(settings(max_examples=many if proving else few, **options)(test))
