"""Positions are the tokens of a request that a rank holds: equal runs of consecutive tokens at equal distances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from kvmover.errors import LayoutError
from kvmover.layout.span import Span


@dataclass(frozen=True, slots=True)
class Stripe:
    """A stripe of `count` runs of `width` consecutive tokens, starts `step` apart: a Span whose elements are `width`
    wide.

    Page-interleaved context parallelism is `Stripe(rank * P, n, ranks * P, P)`, token interleave is width 1, and a
    whole request is one run. Runs never touch: adjacent ones are merged, so `==` compares sets. Raises LayoutError for
    runs that overlap or are empty.

    >>> Stripe(0, 3, 64, 16) & Stripe(0, 1, 40, 40)
    (Stripe(start=0, count=1, step=16, width=16),)
    >>> Stripe(0, 6, 32, 16) & Stripe(24, 3, 48, 24)
    (Stripe(start=32, count=2, step=96, width=16), Stripe(start=72, count=1, step=8, width=8))
    """

    start: int
    count: int
    step: int
    width: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1 or self.width < 1 or (self.count > 1 and self.step < self.width):
            raise LayoutError(f"stripe needs start >= 0, count >= 1 and step >= width >= 1, got {self.quad()}")
        if self.count == 1 or self.step == self.width:
            object.__setattr__(self, "width", (self.count - 1) * self.step + self.width)
            object.__setattr__(self, "count", 1)
            object.__setattr__(self, "step", self.width)

    def quad(self) -> list[int]:
        """Returns [start, count, step, width], for messages and JSON."""
        return [self.start, self.count, self.step, self.width]

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + (self.count - 1) * self.step + self.width

    @property
    def tokens(self) -> int:
        """The number of tokens: count * width."""
        return self.count * self.width

    @property
    def starts(self) -> Span:
        """The first tokens of the runs."""
        return Span(self.start, self.count, self.step)

    def __iter__(self) -> Iterator[int]:
        return (first + token for first in self.starts for token in range(self.width))

    def index(self, position: int) -> int:
        """Returns the index of `position` among the stripe's tokens in order. Raises LayoutError outside the stripe."""
        run, token = divmod(position - self.start, self.step)
        if not 0 <= run < self.count or token >= self.width:
            raise LayoutError(f"position {position} is not in stripe {self.quad()}")
        return run * self.width + token

    def clip(self, start: int, stop: int) -> Positions:
        """Returns the tokens in [start, stop): at most a cut run, whole runs, and a cut run."""
        held = self.start + (self.count - 1) * self.step + self.width
        low, high = max(start, self.start), min(stop, held)
        if low >= high:
            return ()
        if self.count == 1:
            return (self,) if high - low == self.width else (Stripe(low, 1, high - low, high - low),)
        first, head = divmod(low - self.start, self.step)
        last, tail = divmod(high - 1 - self.start, self.step)
        if first == last:
            return self._piece(first, head, min(tail + 1, self.width))
        whole_from = first + (head > 0)
        whole_to = last + (tail + 1 >= self.width)
        pieces = self._piece(first, head, self.width) if head else ()
        if whole_from < whole_to:
            begin = self.start + whole_from * self.step
            pieces += (Stripe(begin, whole_to - whole_from, self.step, self.width),)
        return pieces + (self._piece(last, 0, tail + 1) if whole_to == last else ())

    def _piece(self, run: int, low: int, high: int) -> Positions:
        return (Stripe(self.start + run * self.step + low, 1, high - low, high - low),) if low < high else ()

    def __and__(self, other: Stripe) -> Positions:
        """Returns the common tokens. Equal overlaps of runs recur every lcm(steps): one Span `&` for each."""
        if self.count == 1:
            return other.clip(self.start, self.start + self.width)
        if other.count == 1:
            return self.clip(other.start, other.start + other.width)
        pieces: list[Stripe] = []
        shift = max(self.width, other.width)  # keeps the moved starts positive
        every = gcd(self.step, other.step)
        lowest = 1 - other.width
        lowest += (other.start - self.start - lowest) % every
        for lead in range(lowest, self.width, every):  # other's run starts `lead` tokens after ours
            both = Span(self.start + shift, self.count, self.step) & Span(
                other.start - lead + shift, other.count, other.step
            )
            if both:
                low, high = max(0, lead), min(self.width, lead + other.width)
                pieces.append(Stripe(both.start - shift + low, both.count, both.step, high - low))
        return normal(pieces)


Positions = tuple[Stripe, ...]


def normal(pieces: Iterable[Stripe]) -> Positions:
    """Returns the stripes in order of their first token."""
    return tuple(sorted(pieces, key=lambda stripe: (stripe.start, stripe.step)))


def common(left: Positions, right: Stripe) -> Positions:
    """Returns the tokens of `left` that `right` holds too."""
    return left[0] & right if len(left) == 1 else normal(piece for stripe in left for piece in stripe & right)


def tokens_of(positions: Positions) -> int:
    """Returns the number of tokens: stripes of one value are disjoint."""
    return sum(stripe.tokens for stripe in positions)
