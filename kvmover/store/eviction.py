"""Eviction frees a whole segment: it picks the segment and the objects to carry forward. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Largest share of a segment carried forward: beyond it, carrying costs more than it frees.
CARRIED_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A segment that may be evicted: its size, and its hot bytes, neither dead nor of the next pages to evict."""

    name: str
    data_bytes: int
    hot_bytes: int


def victim(candidates: Sequence[EvictionCandidate]) -> EvictionCandidate | None:
    """Returns the candidate with the smallest share of hot bytes, the first of equals; None if all bytes are hot.

    >>> victim([EvictionCandidate("a", 100, 60), EvictionCandidate("b", 50, 10), EvictionCandidate("c", 9, 9)])
    EvictionCandidate(name='b', data_bytes=50, hot_bytes=10)
    """
    able = [each for each in candidates if each.data_bytes and each.hot_bytes < each.data_bytes]
    return min(able, key=lambda each: each.hot_bytes / each.data_bytes, default=None)


def carried(segment_bytes: int, held: npt.ArrayLike, stamps: npt.ArrayLike, kept: npt.ArrayLike = ()) -> list[int]:
    """Returns positions of the hot objects to carry forward: first all that are `kept`, then the most recently used.

    `held`, `stamps`: bytes and second of last use of each hot object. Objects that are not `kept` are carried only
    while the total stays within CARRIED_SHARE of the segment.

    >>> carried(100, held=[20, 20, 20, 20], stamps=[1, 4, 4, 2])
    [1, 2]
    >>> carried(100, held=[20, 20, 20, 20], stamps=[1, 4, 4, 2], kept=[True, False, False, False])
    [0, 1]
    """
    sizes, seconds = np.asarray(held, np.int64), np.asarray(stamps, np.int64)
    always = np.asarray(kept, np.bool_) if np.size(kept) else np.zeros(len(sizes), np.bool_)
    order = np.lexsort((-seconds, ~always))
    fits = np.cumsum(sizes[order]) <= segment_bytes * CARRIED_SHARE
    found: list[int] = order[always[order] | fits].tolist()
    return found
