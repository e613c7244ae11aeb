"""A Perplexity says what a model makes of a text over moved KV, beside KV that stayed where it was computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text whose first half's KV stayed in place, and moved before the second.

    `exact`: every bit has to be equal. `bytes_identical`: moved rows are those that were sent, or as their conversion
    is defined. `differ`: tokens whose surprise has another bit; `most`: the largest difference of a surprise, in nats.
    """

    title: str
    tokens: int
    in_place: float
    moved: float
    differ: int
    most: float
    exact: bool = False
    bytes_identical: bool = True

    @classmethod
    def of(cls, title: str, in_place: Sequence[float], moved: Sequence[float]) -> Perplexity:
        """Compare the surprises of the same tokens."""
        apart = [abs(a - b) for a, b in zip(in_place, moved, strict=True)]
        before, after = (math.exp(math.fsum(each) / len(each)) for each in (in_place, moved))
        return cls(title, len(apart), before, after, sum(each > 0 for each in apart), max(apart))

    @property
    def passed(self) -> bool:
        """True if moved rows are right, and every surprise is equal to the last bit or need not be."""
        return self.bytes_identical and not (self.exact and self.differ)

    def sentence(self) -> str:
        """Return the comparison in words."""
        said = f"perplexity of {self.tokens:,} tokens, {self.title}: "
        if not self.bytes_identical:
            return f"{said}moved rows DIFFER from those that were sent"
        if not self.differ:
            return f"{said}{self.moved!r}, equal to the last bit"
        differs = f"{self.differ:,} tokens {'DIFFER' if self.exact else 'differ'}, by {self.most:.2g} nats at most"
        return f"{said}{self.moved:.9g} beside {self.in_place:.9g} in place; {differs}"
