"""Residency is how long pages live, lie idle and wait for their next use: it tells a small cache from an idle one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

#: Upper bounds of the histograms, in seconds: a millisecond to three days and a half, by factors of four.
BOUNDS_S = tuple(0.001 * 4**power for power in range(15))


class DurationHistogram:
    """Counts by upper bound, for times in seconds; the last count is of all above the last bound."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class _Stay:
    stored_s: float
    used_s: float


class Residency:
    """Three histograms of one tier's pages: `lifetimes`, `idles` (last use to removal) and `gaps` (use to use).

    A page costs a third of a microsecond an event, so hand over a sample of them: always the same ids, for example
    those divisible by 61. Pages whose storing was not seen are not counted.

    >>> residency = Residency()
    >>> residency.stored([7], 1.0)
    >>> residency.used([7], 5.0)
    >>> residency.removed([7], 8.0)
    >>> residency.lifetimes.sum_s, residency.idles.sum_s, residency.gaps.sum_s
    (7.0, 3.0, 4.0)
    """

    def __init__(self) -> None:
        self.lifetimes, self.idles, self.gaps = DurationHistogram(), DurationHistogram(), DurationHistogram()
        self._stays = dict[int, _Stay]()

    def __len__(self) -> int:
        """Pages that are there."""
        return len(self._stays)

    def stored(self, pages: Iterable[int], now_s: float) -> None:
        for page in pages:
            self._stays[page] = _Stay(now_s, now_s)

    def used(self, pages: Iterable[int], now_s: float) -> None:
        for page in pages:
            stay = self._stays.get(page)
            if stay:
                self.gaps.add(now_s - stay.used_s)
                stay.used_s = now_s

    def removed(self, pages: Iterable[int], now_s: float) -> None:
        for page in pages:
            stay = self._stays.pop(page, None)
            if stay:
                self.lifetimes.add(now_s - stay.stored_s)
                self.idles.add(now_s - stay.used_s)
