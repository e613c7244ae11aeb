"""Families of cases: a plain run takes a few that reach everything once, and `make prove` takes the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


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
