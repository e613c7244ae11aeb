"""Families of cases and searches: a plain run takes a few cases that reach everything once, `make prove` the others,
and `make night` the whole of what takes too long for every commit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")


class Effort(IntEnum):
    """Runs by how much they try: `make test`, `make prove`, `make night`."""

    PLAIN = 0
    PROVE = 1
    NIGHT = 2

    @classmethod
    def of(cls, selection: str) -> Effort:
        """Returns the effort of a run with these markers, the value of `-m`."""
        if "not proof" in selection:
            return cls.PLAIN
        return cls.PROVE if "not night" in selection else cls.NIGHT


#: The effort of this run: conftest.py sets it before any test is imported.
effort = Effort.PLAIN


def tries(plain: int, prove: int, night: int) -> int:
    """Returns how many examples this run tries."""
    return (plain, prove, night)[effort]


def family(cases: Iterable[Any], few: Iterable[Any], proved: Iterable[Any] | None = None) -> list[Any]:
    """`cases` as parameters of a test, each marked as a proof but those that are among the `few`.

    A tuple has the values of several parameters. `proved`: the cases of `make prove`, where the others are left to
    `make night`.
    """
    cases, few = list(cases), list(few)
    proved = cases if proved is None else list(proved)
    assert few
    assert all(case in cases for case in [*few, *proved]), "one of the few is no case"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    left_out = [pytest.mark.proof if case in proved else (pytest.mark.proof, pytest.mark.night) for case in cases]
    marks = [() if case in few else mark for case, mark in zip(cases, left_out, strict=True)]
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


def searched(few: int, many: int, night: int = 0, **options: Any) -> Callable[[Any], Any]:
    """Hypothesis tries a `few` examples in a plain run, `many` in `make prove`, `night`, if given, in `make night`."""
    examples = tries(few, many, night or many)
    return lambda test: pytest.mark.searched(settings(max_examples=examples, **options)(test))
