"""The words of lemmas: numbers that are given, assumed and claimed, for a proof or one by one.

A lemma is a function without arguments. In a proof its numbers are symbols; here they are all numbers up to a bound, or
drawn ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import pytest

from kvmover.layout import fleet, positions, span
from kvmover.plan import legs, units
from tests.theorems import symbols
from tests.theorems.symbols import Answer, Number, Unreachable, Verdict

#: Names of these modules that symbols need in their own form.
OWN_NAMES: tuple[ModuleType, ...] = (span, positions, fleet, legs, units)
STAND_INS: dict[str, Callable[..., Any]] = {
    "gcd": symbols.gcd,
    "pow": symbols.power,
    "len": symbols.length,
    "range": symbols.numbers,
}


@dataclass(slots=True)
class Choices:
    """Given numbers of one case. `chosen`: each with the number after the largest it may be. `random`: None for all."""

    bound: int
    random: Random | None = None
    chosen: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    at: int = 0

    def choose(self, least: int, below: int) -> int:
        """Returns the next number of this case."""
        if least >= below:
            raise Unreachable
        if self.at == len(self.chosen):
            value = least if self.random is None else self.random.randrange(least, below)
            self.chosen.append((value, below))
        value, _ = self.chosen[self.at]
        self.at += 1
        return value

    def advance(self) -> bool:
        """Go on to the next case. Returns False after the last."""
        self.at = 0
        if self.random is not None:
            self.chosen = []
            return True
        while self.chosen:
            value, below = self.chosen.pop()
            if value + 1 < below:
                self.chosen.append((value + 1, below))
                return True
        return False


_choices: Choices | None = None


def whole(least: Number = 0, below: Number | None = None) -> Any:
    """Returns a given number, from `least` on and less than `below`."""
    if _choices is not None:
        top = _choices.bound + 1
        return _choices.choose(int(least), top if below is None else min(top, int(below)))  # pyright: ignore
    found = symbols.run().fresh()
    symbols.run().fact(found.term >= symbols.symbol(least).term)
    if below is not None:
        symbols.run().fact(found.term < symbols.symbol(below).term)
    return found


def assume(holds: bool) -> None:
    """Leave out numbers for which this is False."""
    if not holds:
        raise Unreachable


@contextmanager
def guided(number: Any) -> Iterator[None]:
    """Loops over symbols pass over this number of theirs."""
    if _choices is not None:
        yield
        return
    symbols.run().guide = number
    yield
    symbols.run().guide = None


@contextmanager
def stand_in(module: str, name: str, value: Any) -> Iterator[None]:
    """A name of a module stands for another value meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.{name}", value)
        yield


@contextmanager
def stand_ins() -> Iterator[None]:
    """The project's modules take symbols where the language or a library wants numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for module in OWN_NAMES:
            for name, value in STAND_INS.items():
                patch.setattr(module, name, value, raising=False)
        yield


def proved(lemma: Callable[[], None]) -> Answer:
    """Prove a lemma for numbers without a bound."""
    with stand_ins():
        return symbols.proved(lemma)


def counted(lemma: Callable[[], None], bound: int, drawn: int = 0, most: int | None = None) -> int:
    """Check a lemma for all numbers up to a bound, or for some `drawn` ones. Returns how many cases it held for.

    `most`: cases after which to end. Raises FalseClaim, with the numbers, where it does not.
    """
    global _choices
    cases, _choices = 0, Choices(bound, Random(bound) if drawn else None)
    try:
        for _ in range(drawn) if drawn else iter(int, 1):
            try:
                lemma()
                cases += 1
            except Unreachable:
                pass
            except symbols.FalseClaim:
                raise symbols.FalseClaim(f"{[value for value, _ in _choices.chosen]}") from None
            if cases == most or not _choices.advance():
                break
    finally:
        _choices = None
    return cases


@dataclass(frozen=True, slots=True)
class Lemma:
    """A claim of a theorem. It is also checked one by one, for all numbers up to `bound`, or for some `drawn` ones."""

    theorem: str
    check: Callable[[], None]
    bound: int
    drawn: int


LEMMAS: list[Lemma] = []


def lemma(theorem: str, bound: int = 64, drawn: int = 0) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a function, whose docstring is its claim, to the lemmas of a theorem."""

    def added(check: Callable[[], None]) -> Callable[[], None]:
        assert check.__doc__, "a lemma says its claim"
        LEMMAS.append(Lemma(theorem, check, bound, drawn))
        return check

    return added


__all__ = ["LEMMAS", "Answer", "Lemma", "Verdict", "assume", "counted", "guided", "lemma", "proved", "whole"]
