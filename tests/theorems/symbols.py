"""Numbers without a value: the project's own functions run on them, and z3 says which of their branches can be taken.

A comparison of symbols is decided at once, one way in each run, so a function sees nothing but True and False; all runs
together take every branch that some numbers take. A claim is proved if no run in which it is false can be reached.

A symbol is a polynomial. Products of unknowns are unknowns of their own, so most of what z3 is asked is linear; it is
told what they are products of where that is not enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import gcd as gcd_of_numbers
from typing import Any, TypeAlias

import z3

#: Milliseconds that z3 has to rule out a branch, and to decide a claim.
BRANCH_MS, CLAIM_MS = 500, 60_000

#: Unknowns of a product, by number, in order.
Monomial: TypeAlias = tuple[int, ...]


class Verdict(StrEnum):
    """An answer to a claim: it holds for all numbers, not for some, or z3 could not tell in time."""

    PROVED = "proved"
    FALSE = "false"
    OPEN = "open"


class Unreachable(Exception):
    """A run in which an assumption of its lemma is false."""


class FalseClaim(Exception):
    """A claim is false in this run, if the run can be reached at all."""


@dataclass(slots=True, eq=False)
class Run:
    """One run of a lemma. `decisions`: the outcomes of its comparisons. `forks`: those of runs that differ in the last.

    `linear` knows all facts, `whole` also the products. `quotients`, `divisors`, `inverses`: results so far, so that
    equal questions have equal answers. `coprime`: pairs that are known to be.
    """

    decisions: list[bool]
    forks: list[list[bool]] = field(default_factory=list[list[bool]])
    linear: z3.Solver = field(default_factory=z3.Solver)
    whole: z3.Solver = field(default_factory=z3.Solver)
    quotients: dict[tuple[Symbol, Symbol], tuple[Symbol, Symbol]] = field(default_factory=dict[Any, Any])
    divisors: dict[tuple[Symbol, Symbol], Symbol] = field(default_factory=dict[Any, Any])
    inverses: dict[tuple[Symbol, Symbol], Symbol] = field(default_factory=dict[Any, Any])
    coprime: set[tuple[Symbol, Symbol]] = field(default_factory=set[Any])
    guide: Number | None = None
    _names: dict[Monomial, z3.ArithRef] = field(default_factory=dict[Any, Any])
    _decided: int = 0
    _unknowns: int = 0

    def fresh(self) -> Symbol:
        """Returns a new unknown."""
        self._unknowns += 1
        return Symbol({(self._unknowns,): 1})

    def name(self, monomial: Monomial) -> z3.ArithRef:
        """Returns z3's unknown for a product of unknowns."""
        if monomial not in self._names:
            self._names[monomial] = z3.Int("*".join(f"n{number}" for number in monomial))
            if len(monomial) > 1:
                first, rest = self.name(monomial[:1]), self.name(monomial[1:])
                both = self._names[monomial]
                self.whole.add(both == first * rest)
                self.fact(z3.Implies(z3.And(first >= 1, rest >= 1), z3.And(both >= first, both >= rest)))
                self.fact(z3.Implies(z3.And(first >= 0, rest >= 0), both >= 0))
                self.fact(z3.Implies(z3.Or(first == 0, rest == 0), both == 0))
                self.fact(z3.Implies(first == 1, both == rest), z3.Implies(rest == 1, both == first))
        return self._names[monomial]

    def fact(self, *facts: Any) -> None:
        """Tell both solvers what holds in this run."""
        self.linear.add(*facts)
        self.whole.add(*facts)

    def forced(self, condition: Any) -> bool | None:
        """Returns the one outcome that a condition can have in this run; None if z3 does not rule out the other."""
        for solver in (self.linear, self.whole):
            solver.set("timeout", BRANCH_MS)
            for outcome, opposite in ((True, z3.Not(condition)), (False, condition)):
                if solver.check(opposite) == z3.unsat:
                    return outcome
        return None

    def surely(self, condition: Any) -> bool:
        """Returns True if a condition follows from the linear facts alone."""
        self.linear.set("timeout", BRANCH_MS)
        return self.linear.check(z3.Not(condition)) == z3.unsat

    def decide(self, condition: Any) -> bool:
        """Returns the outcome of a comparison in this run; the other one, if it can be, is left to a later run."""
        if self._decided < len(self.decisions):
            outcome = self.decisions[self._decided]
        else:
            outcome = self.forced(condition)
            if outcome is None:
                outcome = True
                self.forks.append([*self.decisions, False])
            self.decisions.append(outcome)
        self._decided += 1
        self.fact(condition if outcome else z3.Not(condition))
        return outcome

    def divided(self, number: Symbol, divisor: Symbol) -> tuple[Symbol, Symbol]:
        """Returns quotient and rest of a division, rounded down, by a positive number.

        Multiples of a divisor that is one product are taken out first: `(a * d + b) // d` is `a + b // d`.
        """
        if (number, divisor) in self.quotients:
            return self.quotients[number, divisor]
        multiple, number = number.parted(divisor)
        if multiple.parts:
            quotient, rest = self.divided(number, divisor)
            return multiple + quotient, rest
        if divisor <= 0:
            raise ZeroDivisionError("symbols are divided by positive numbers only")
        if self.surely(z3.And(number.term >= 0, number.term < divisor.term)):
            return symbol(0), number
        quotient, rest = self.fresh(), self.fresh()
        self.fact(equal(number, divisor * quotient + rest), rest.term >= 0, rest.term < divisor.term)
        for near in (-1, 0, 1, 2):  # so that neighbours of the divisor need no product
            over = number.term >= (divisor * near).term
            self.fact(z3.Implies(over, quotient.term >= near), z3.Implies(z3.Not(over), quotient.term < near))
            self.fact(z3.Implies(quotient.term == near, equal(number, divisor * near + rest)))
        self.quotients[number, divisor] = quotient, rest
        return self.quotients[number, divisor]

    def reached(self) -> z3.CheckSatResult:
        """Returns whether some numbers take this run."""
        for solver in (self.linear, self.whole):
            solver.set("timeout", CLAIM_MS)
            found = solver.check()
            if found == z3.unsat:
                break
        return found


_run: Run | None = None


def run() -> Run:
    """Returns the run that is under way."""
    assert _run is not None, "symbols are compared in a run only"
    return _run


Number: TypeAlias = "Symbol | int"


class Symbol:
    """A whole number without a value: a polynomial of unknowns. `//` and `%` round down, by positive divisors."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[Monomial, int]) -> None:
        self.parts = {monomial: count for monomial, count in sorted(parts.items()) if count}

    @property
    def term(self) -> Any:
        """The number as z3 has it, linear in its products."""
        return z3.Sum([count * run().name(monomial) if monomial else count for monomial, count in self.parts.items()])

    @property
    def value(self) -> int | None:
        """The number, where it is known."""
        return self.parts.get((), 0) if not set(self.parts) - {()} else None

    def __repr__(self) -> str:
        return " + ".join(f"{count}*{monomial}" for monomial, count in self.parts.items()) or "0"

    def __hash__(self) -> int:
        return hash(tuple(self.parts.items()))

    def __add__(self, other: Number) -> Symbol:
        found, other = dict(self.parts), symbol(other)
        for monomial, count in other.parts.items():
            found[monomial] = found.get(monomial, 0) + count
        return Symbol(found)

    def __mul__(self, other: Number) -> Symbol:
        found = dict[Monomial, int]()
        for mine, count in self.parts.items():
            for theirs, times in symbol(other).parts.items():
                both = tuple(sorted((*mine, *theirs)))
                found[both] = found.get(both, 0) + count * times
        return Symbol(found)

    def __neg__(self) -> Symbol:
        return self * -1

    def __sub__(self, other: Number) -> Symbol:
        return self + symbol(other) * -1

    def __rsub__(self, other: Number) -> Symbol:
        return symbol(other) - self

    def __divmod__(self, other: Number) -> tuple[Symbol, Symbol]:
        return run().divided(self, symbol(other))

    def __rdivmod__(self, other: Number) -> tuple[Symbol, Symbol]:
        return divmod(symbol(other), self)

    def __floordiv__(self, other: Number) -> Symbol:
        return divmod(self, other)[0]

    def __rfloordiv__(self, other: Number) -> Symbol:
        return divmod(other, self)[0]

    def __mod__(self, other: Number) -> Symbol:
        return divmod(self, other)[1]

    def __rmod__(self, other: Number) -> Symbol:
        return divmod(other, self)[1]

    def to(self, kind: Any) -> Symbol:
        """Returns the number: a kernel's numbers are claimed to fit before it is launched."""
        return self

    def parted(self, divisor: Symbol) -> tuple[Symbol, Symbol]:
        """Returns how many times a divisor is in this number as it is written, and what else is."""
        (factor, count), *others = divisor.parts.items() or [((), 0)]
        multiple = dict[Monomial, int]()
        if not others and count > 0:
            for monomial, times in self.parts.items():
                left = Counter(monomial)
                left.subtract(factor)
                if times % count == 0 and min(left.values(), default=0) >= 0:
                    multiple[tuple(sorted(left.elements()))] = times // count
        found = Symbol(multiple)
        return found, self - found * divisor

    def _over_zero(self) -> bool:
        return self.value > 0 if self.value is not None else run().decide(self.term > 0)

    def __gt__(self, other: Number) -> bool:
        return (self - other)._over_zero()

    def __ge__(self, other: Number) -> bool:
        return (self - other + 1)._over_zero()

    def __lt__(self, other: Number) -> bool:
        return (symbol(other) - self)._over_zero()

    def __le__(self, other: Number) -> bool:
        return (symbol(other) - self + 1)._over_zero()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Symbol, int)) and not (self - other)

    def __bool__(self) -> bool:
        return self.value != 0 if self.value is not None else run().decide(self.term != 0)

    __radd__ = __add__
    __rmul__ = __mul__


def symbol(number: Number) -> Symbol:
    """Returns a number as a symbol."""
    return number if isinstance(number, Symbol) else Symbol({(): number})


def equal(one: Number, other: Number) -> Any:
    """Returns z3's statement that two numbers are equal."""
    return symbol(one).term == symbol(other).term


def is_symbolic(*numbers: Any) -> bool:
    """Returns True if one of these is a symbol."""
    return any(isinstance(number, Symbol) for number in numbers)


class SymbolRange:
    """A `range` of symbols. A loop over it is one pass: over the number that the lemma guides it to, or over any."""

    def __init__(self, *limits: Number) -> None:
        self.start, self.stop, self.step = (0, *limits, 1) if len(limits) == 1 else (*limits, 1)[:3]

    def length(self) -> Number:
        """Returns how many numbers are in it."""
        return max(0, -((self.start - self.stop) // self.step))

    def __iter__(self) -> Iterator[Number]:
        guide = run().guide
        if guide is not None:
            claim(self.start <= guide)
            claim(guide < self.stop)
            claim((guide - self.start) % self.step == 0)
            yield guide
        elif self.length() > 0:
            turn = run().fresh()
            run().fact(turn.term >= 0, turn.term < symbol(self.length()).term)
            yield self.start + turn * self.step


def claim(holds: bool) -> None:
    """Claim what has been compared: the run fails if it is False."""
    if not holds:
        raise FalseClaim


def gcd(*numbers: Any) -> Any:
    """Returns the greatest common divisor, with the numbers that Euclid's algorithm finds beside it."""
    if not is_symbolic(*numbers):
        return gcd_of_numbers(*numbers)
    first, *rest = numbers
    for other in rest:
        first = _gcd(symbol(first), symbol(other))
    return first


def _gcd(a: Symbol, b: Symbol) -> Symbol:
    here = run()
    if (a, b) not in here.divisors:
        if a == 0 and b == 0:
            raise ZeroDivisionError("symbols have a greatest common divisor if one of them is not 0")
        divisor, p, q, u, v = (here.fresh() for _ in range(5))
        here.fact(divisor.term >= 1, equal(a, divisor * p), equal(b, divisor * q), equal(p * u - q * v, 1))
        for number, part in ((a, p), (b, q)):
            here.fact(z3.Implies(number.term >= 1, part.term >= 1), z3.Implies(number.term <= -1, part.term <= -1))
            here.fact(z3.Implies(number.term == 0, part.term == 0))
            here.quotients[number, divisor] = part, symbol(0)
        here.coprime |= {(p, q), (q, p)}
        here.divisors[a, b] = divisor
    return here.divisors[a, b]


def power(base: Any, exponent: int, modulus: Any) -> Any:
    """Returns `pow(base, -1, modulus)`, the inverse of a number that is coprime to the modulus."""
    if not is_symbolic(base, modulus):
        return pow(base, exponent, modulus)
    assert exponent == -1, "inverses only"
    here, base, modulus = run(), symbol(base), symbol(modulus)
    assert (base, modulus) in here.coprime, "only parts of a greatest common divisor are known to be coprime"
    if (base, modulus) not in here.inverses:
        inverse, turns = here.fresh(), here.fresh()
        here.fact(inverse.term >= 0, inverse.term < modulus.term, equal(base * inverse, modulus * turns + 1))
        here.quotients[base * inverse - 1, modulus] = turns, symbol(0)
        here.inverses[base, modulus] = inverse
    return here.inverses[base, modulus]


def exact(number: Any, divisor: Any, quotient: Any) -> None:
    """Claim that a division has this quotient and no rest: see `divides`."""
    divides(number, divisor, quotient, 0)


def divides(number: Any, divisor: Any, quotient: Any, rest: Any) -> None:
    """Claim that a division has this quotient and rest; the project's own division of the same numbers has too."""
    claim(number == divisor * quotient + rest)
    claim(rest >= 0)
    claim(rest < divisor)
    if is_symbolic(number, divisor, quotient, rest):
        run().quotients[symbol(number), symbol(divisor)] = symbol(quotient), symbol(rest)


def times(one: Any, other: Any, factor: Any) -> None:
    """Claim that two numbers are equal; then their multiples by a factor are."""
    claim(one == other)
    if is_symbolic(one, other, factor):
        run().fact(equal(one * factor, other * factor))


def ordered(one: Any, other: Any, factor: Any) -> None:
    """Recall that multiples by a factor that is not negative are ordered as the numbers are."""
    claim(factor >= 0)
    if is_symbolic(one, other, factor):
        gap, scaled = symbol(one) - other, (symbol(one) - other) * factor
        run().fact(z3.Implies(gap.term >= 0, scaled.term >= 0), z3.Implies(gap.term <= 0, scaled.term <= 0))
        run().fact(z3.Implies(gap.term >= 1, scaled.term >= symbol(factor).term))
        run().fact(z3.Implies(gap.term <= -1, scaled.term <= -symbol(factor).term))


def length(things: Any) -> Any:
    """Returns `len` of a container or of a range of symbols."""
    return things.length() if isinstance(things, SymbolRange) else len(things)


def numbers(*limits: Any) -> Any:
    """Returns a `range`, of symbols where a limit is one."""
    return SymbolRange(*limits) if is_symbolic(*limits) else range(*limits)


@dataclass(slots=True)
class Answer:
    """A lemma's verdict, the runs that it took, and for a false one the numbers that show it."""

    verdict: Verdict
    runs: int
    example: str = ""


def proved(lemma: Callable[[], None]) -> Answer:
    """Run a lemma through all of its branches. Returns whether no claim of it can be false."""
    global _run
    left, runs, verdict = [list[bool]()], 0, Verdict.PROVED
    while left:
        _run = here = Run(left.pop())
        runs += 1
        try:
            lemma()
        except Unreachable:
            pass
        except Exception as fault:  # of any type: no numbers of the lemma may reach it
            found = here.reached()
            if found == z3.sat:
                return Answer(Verdict.FALSE, runs, f"{type(fault).__name__} {fault}: {here.whole.model()}")
            verdict = verdict if found == z3.unsat else Verdict.OPEN
        finally:
            _run = None
        left += here.forks
    return Answer(verdict, runs)
