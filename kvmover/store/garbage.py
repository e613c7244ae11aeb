"""Garbage is what deletions have left on disk, until somebody sweeps it: blocks, and segments that may be empty."""

from __future__ import annotations

from collections.abc import Sequence

#: Segment, offset and bytes of blocks in its data file.
BlockRange = tuple[str, int, int]


class Garbage:
    """Blocks in which nothing lives, and names of segments to look at. `leaving`: those that are being removed."""

    def __init__(self) -> None:
        self._ranges: list[BlockRange] = []
        self._names: dict[str, None] = {}
        self.leaving: set[str] = set()

    def add(self, ranges: Sequence[BlockRange], names: Sequence[str]) -> None:
        """Blocks to give back, and segments that may be empty now."""
        self._ranges += ranges
        self._names.update(dict.fromkeys(names))

    def take(self) -> tuple[list[BlockRange], list[str]]:
        """All of it, neighbouring blocks together; nothing is left."""
        ranges, names = joined(self._ranges), list(self._names)
        self._ranges, self._names = [], {}
        return ranges, names


def joined(ranges: Sequence[BlockRange]) -> list[BlockRange]:
    """Ranges in order, neighbours as one.

    >>> joined([("a", 8, 4), ("a", 0, 8), ("b", 12, 4)])
    [('a', 0, 12), ('b', 12, 4)]
    """
    found: list[BlockRange] = []
    for name, offset, nbytes in sorted(ranges):
        last, start, size = found[-1] if found else ("", 0, 0)
        if last == name and start + size == offset:
            found[-1] = name, start, size + nbytes
        else:
            found.append((name, offset, nbytes))
    return found
