"""A Perplexity says what a model makes of a text from moved KV, beside KV that stayed where it was computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text over its first half's KV in place, and moved. `exact`: every bit has to be equal.

    `differ`: tokens whose surprise has another bit; `most`: the largest difference of a surprise, in nats.
    """

    name: str
    title: str
    tokens: int
    exact: bool
    in_place: float
    moved: float
    differ: int
    most: float

    @classmethod
    def of(cls, name: str, title: str, exact: bool, in_place: Sequence[float], moved: Sequence[float]) -> Perplexity:
        """Compare the surprises of the same tokens."""
        apart = [abs(a - b) for a, b in zip(in_place, moved, strict=True)]
        before, after = (math.exp(math.fsum(each) / len(each)) for each in (in_place, moved))
        return cls(name, title, len(apart), exact, before, after, sum(each > 0 for each in apart), max(apart))

    @property
    def passed(self) -> bool:
        """True if every surprise is equal to the last bit, or need not be."""
        return not self.exact or not self.differ

    def sentence(self) -> str:
        """Return the comparison in words."""
        if self.exact and not self.differ:
            return f"perplexity of {self.tokens:,} tokens, {self.title}: {self.moved!r}, equal to the last bit"
        return (
            f"perplexity of {self.tokens:,} tokens, {self.title}: {self.moved:.9g} beside {self.in_place:.9g} in place;"
            f" {self.differ:,} tokens differ, by {self.most:.2g} nats at most"
        )
