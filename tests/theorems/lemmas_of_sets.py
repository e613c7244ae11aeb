"""Lemmas of sets: Span and Stripe hold after `&` what both held before."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvmover.layout.positions import Positions, Stripe
from kvmover.layout.span import Span
from tests.theorems.given import assume, guided, lemma, whole
from tests.theorems.symbols import claim, divides, exact, gcd, ordered, power, times


def within(number: Any, span: Span) -> Any:
    """Returns the place of a number that a span holds: `start + place * step`."""
    place = whole(0, span.count)
    assume(number is None or number == span.start + place * span.step)
    ordered(place, 0, span.step)
    ordered(place, span.count - 1, span.step)
    return place


@dataclass(frozen=True, slots=True)
class Meet:
    """Numbers in two spans, by the numbers that `Span.__and__` finds on its way.

    `first`: the first from `a.start` on, `at` steps of `a` from there. `skipped`: steps of the meet to its own first.
    """

    a: Span
    b: Span
    distance: Any
    first: Any
    step: Any
    at: Any
    turns: Any
    skipped: Any

    @classmethod
    def of(cls, a: Span, b: Span, distance: Any) -> Meet:
        """Returns the meet of spans whose starts are `distance` of their common divisors apart."""
        divisor, p, q, inverse, _ = parts(a, b)
        exact(b.start - a.start, divisor, distance)
        turns, at = divmod(distance * inverse, q)
        times(b.step, divisor * q, p)
        times(a.step, divisor * p, q)
        step = p * b.step
        claim(step > 0)
        first = a.start + at * a.step
        return cls(a, b, distance, first, step, at, turns, max(0, -(-(max(a.start, b.start) - first) // step)))

    @property
    def start(self) -> Any:
        """The first number of both."""
        return self.first + self.skipped * self.step


def parts(a: Span, b: Span) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the divisor of both steps, their parts, the inverse of the first, and its turns of the second."""
    divisor = gcd(a.step, b.step)
    p, q = a.step // divisor, b.step // divisor
    inverse = power(p, -1, q)
    return divisor, p, q, inverse, (p * inverse - 1) // q


def met(a: Span, b: Span, i: Any, j: Any) -> tuple[Meet, Any]:
    """Returns the meet of two spans, and the place in it of number `i` of `a`, which is number `j` of `b`."""
    divisor, p, q, inverse, rest = parts(a, b)
    times(a.step, divisor * p, i)
    times(b.step, divisor * q, j)
    times(p * inverse, q * rest + 1, i)
    meet = Meet.of(a, b, i * p - j * q)
    place = meet.turns + j * inverse - i * rest
    exact(i - meet.at, q, place)
    times(i - meet.at, q * place, a.step)
    times(q * a.step, meet.step, place)
    claim(a.start + i * a.step - meet.first == place * meet.step)
    ordered(place, meet.skipped, meet.step)
    claim(place >= meet.skipped)
    last = (min(a.stop, b.stop) - 1 - meet.start) // meet.step
    ordered(place - meet.skipped, last, meet.step)
    claim(place - meet.skipped <= last)
    ordered(place - meet.skipped, 0, meet.step)
    both = a & b
    claim(both.count > 0)
    claim(both.start == meet.start)
    claim(both.count == last + 1)
    return meet, place - meet.skipped


def places(meet: Meet, place: Any) -> tuple[Any, Any]:
    """Returns the places in both spans of a number of their meet."""
    a, b, distance = meet.a, meet.b, meet.distance
    divisor, p, q, inverse, rest = parts(a, b)
    on = place + meet.skipped
    ordered(place, 0, meet.step)
    for each in (place, meet.skipped):
        times(meet.step, q * a.step, each)
    in_a = meet.at + q * on
    claim(meet.start + place * meet.step - a.start == a.step * in_a)
    times(p * inverse, q * rest + 1, distance)
    times(distance * inverse, q * meet.turns + meet.at, p)
    times(a.step, divisor * p, meet.at)
    offset = distance * rest - meet.turns * p
    times(meet.at * p - distance, q * offset, divisor)
    times(b.step, divisor * q, offset)
    in_b = offset + p * on
    claim(meet.start + place * meet.step - b.start == b.step * in_b)
    return in_a, in_b


def given_span() -> Span:
    return Span(whole(0), whole(1), whole(1))


@lemma("spans", bound=6)
def a_common_number_is_in_the_meet() -> None:
    """A number of two spans is in their meet."""
    a, b = given_span(), given_span()
    i = within(None, a)
    met(a, b, i, within(a.start + i * a.step, b))


@lemma("spans", bound=6)
def a_number_of_the_meet_is_common() -> None:
    """A number of the meet of two spans is in both."""
    a, b = given_span(), given_span()
    divisor, *_ = parts(a, b)
    both = a & b
    assume(both.count > 0)
    meet = Meet.of(a, b, (b.start - a.start) // divisor)
    claim(both.start == meet.start)
    claim(both.step == meet.step or both.count == 1)
    place = whole(0, both.count)
    ordered(place, both.count - 1, meet.step)
    places(meet, place)
    number = both.start + place * both.step
    claim(max(a.start, b.start) <= number)
    claim(number < min(a.stop, b.stop))


def holds(positions: Positions, token: Any) -> int:
    """Returns how many of these stripes hold a token."""
    found = 0
    for stripe in positions:
        if stripe.start <= token and token < stripe.stop:
            found += bool((token - stripe.start) % stripe.step < stripe.width)
    return found


def given_stripe() -> Stripe:
    width = whole(1)
    return Stripe(whole(0), whole(1), whole(width), width)


@lemma("stripes", bound=5)
def a_clipped_stripe_holds_its_tokens_in_the_range() -> None:
    """A clipped stripe holds a token once if the stripe holds it and the range does, else not."""
    stripe = given_stripe()
    token, low, high = whole(0), whole(0), whole(0)
    if stripe.count > 1:
        from_on, to = max(low, stripe.start), min(high, stripe.stop)
        runs = [(each - stripe.start) // stripe.step for each in (token, from_on, to - 1)]
        runs += [0, stripe.count - 1]
        for one, other in combinations(runs, 2):
            ordered(one, other, stripe.step)
    here = low <= token and token < high and holds((stripe,), token) == 1
    claim(holds(stripe.clip(low, high), token) == int(here))


@lemma("stripes", bound=4)
def a_common_token_is_in_the_meet() -> None:
    """A token of two stripes is in their meet."""
    one, other = given_stripe(), given_stripe()
    assume(one.count > 1 and other.count > 1)  # else one of them clips the other
    i, j = whole(0, one.count), whole(0, other.count)
    here, there = whole(0, one.width), whole(0, other.width)
    token = one.start + i * one.step + here
    assume(token == other.start + j * other.step + there)
    lead = here - there
    every = gcd(one.step, other.step)
    p, q = one.step // every, other.step // every
    times(one.step, every * p, i)
    times(other.step, every * q, j)
    turns, above = divmod(other.start - one.start - (1 - other.width), every)
    on = turns + j * q - i * p
    ordered(on, 0, every)
    exact(lead - (1 - other.width + above), every, on)
    shift = max(one.width, other.width)
    a = Span(one.start + shift, one.count, one.step)
    b = Span(other.start - lead + shift, other.count, other.step)
    for place, span in ((i, a), (j, b)):
        ordered(place, 0, span.step)
        ordered(place, span.count - 1, span.step)
    meet, place = met(a, b, i, j)
    ordered(q, 1, one.step)
    times(meet.step, q * one.step, 1)
    low = max(0, lead)
    divides(token - (meet.start - shift + low), meet.step, place, here - low)
    ordered(place, (a & b).count - 1, meet.step)
    with guided(lead):
        claim(holds(one & other, token) >= 1)


@lemma("stripes", bound=3)
def a_token_of_the_meet_is_common() -> None:
    """A token of the meet of two stripes is in both, at runs that are as far apart as those that were met."""
    one, other = given_stripe(), given_stripe()
    assume(one.count > 1 and other.count > 1)
    every = gcd(one.step, other.step)
    lowest = 1 - other.width + (other.start - one.start - (1 - other.width)) % every
    lead = lowest + whole(0) * every
    assume(lead < one.width)
    shift = max(one.width, other.width)
    a = Span(one.start + shift, one.count, one.step)
    b = Span(other.start - lead + shift, other.count, other.step)
    both = a & b
    assume(both.count > 0)
    low, high = max(0, lead), min(one.width, lead + other.width)
    place, offset = whole(0, both.count), whole(0, high - low)
    meet = Meet.of(a, b, (b.start - a.start) // every)
    claim(both.start == meet.start)
    claim(both.step == meet.step or both.count == 1)
    ordered(place, both.count - 1, meet.step)
    in_one, in_other = places(meet, place)
    token = meet.start - shift + low + place * meet.step + offset
    divides(token - one.start, one.step, in_one, low + offset)
    divides(token - other.start, other.step, in_other, low + offset - lead)
    for stripe, run in ((one, in_one), (other, in_other)):
        ordered(run, 0, stripe.step)
        ordered(run, stripe.count - 1, stripe.step)
        claim(holds((stripe,), token) == 1)
    claim(other.start + in_other * other.step - (one.start + in_one * one.step) == lead)
