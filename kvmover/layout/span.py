"""A Span is an arithmetic progression, the shape of a rank's share along any axis."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import msgspec
from msgspec.structs import force_setattr

from kvmover.errors import LayoutError


class Span(msgspec.Struct, frozen=True):
    """A progression of `count` numbers from `start`, `step` apart. Closed under `&`; in one canonical form, so that
    `==` compares sets. Raises LayoutError for negative numbers, or a step below 1.

    >>> Span(0, 8, 3) & Span(1, 9, 2)
    Span(start=3, count=3, step=6)
    >>> list(_)
    [3, 9, 15]
    """

    start: int
    count: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 0 or self.step < 1:
            raise LayoutError(f"span needs start >= 0, count >= 0 and step >= 1, got {self.triple()}")
        if self.count <= 1:
            force_setattr(self, "step", 1)
        if not self.count:
            force_setattr(self, "start", 0)

    @classmethod
    def share(cls, extent: int, parts: int, index: int) -> Span:
        """Returns part `index` of `extent` things dealt to `parts` owners in consecutive, balanced blocks.

        With more owners than things each thing is held by several neighbours: grouped-query heads under a larger tensor
        parallel size. `first = index * extent // parts` is the closed form of both cases (DESIGN.md, section 4). Raises
        LayoutError for an index outside the parts.

        >>> [Span.share(8, 4, r) for r in (0, 3)]
        [Span(start=0, count=2, step=1), Span(start=6, count=2, step=1)]
        >>> [Span.share(2, 4, r).start for r in range(4)], [Span.share(8, 3, r).count for r in range(3)]
        ([0, 0, 1, 1], [2, 3, 3])
        """
        if extent < 1 or parts < 1 or not 0 <= index < parts:
            raise LayoutError(f"there is no part {index} of {extent} in {parts} parts, counted from 0")
        first = index * extent // parts
        return cls(first, max(1, (index + 1) * extent // parts - first))

    @property
    def stop(self) -> int:
        """The number after the last one; 0 when empty."""
        return self.start + (self.count - 1) * self.step + 1 if self.count else 0

    def triple(self) -> list[int]:
        """Returns [start, count, step], for messages and JSON."""
        return [self.start, self.count, self.step]

    def index(self, value: int) -> int:
        """Returns the index of `value` in the progression. Raises LayoutError if it is not in it."""
        offset, rest = divmod(value - self.start, self.step)
        if rest or not 0 <= offset < self.count:
            raise LayoutError(f"{value} is not in span {self.triple()}")
        return offset

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.stop and (value - self.start) % self.step == 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.start + self.count * self.step, self.step))

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def __and__(self, other: Span) -> Span:
        """Returns the common numbers, by the Chinese remainder theorem: no enumeration."""
        divisor = gcd(self.step, other.step)
        if not self or not other or (other.start - self.start) % divisor:
            return EMPTY
        step = self.step // divisor * other.step
        modulus = other.step // divisor
        turns = (other.start - self.start) // divisor * pow(self.step // divisor, -1, modulus) % modulus
        first = self.start + turns * self.step
        low = max(self.start, other.start)
        first += max(0, -(-(low - first) // step)) * step
        high = min(self.stop, other.stop)
        return Span(first, (high - 1 - first) // step + 1, step) if first < high else EMPTY


EMPTY = Span(0, 0)
