"""Pages of an index that are made of the same parts, so that all of them are read in the same way: in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvmover.store.columns import NumberColumns
from kvmover.store.part import PartKey
from kvmover.store.record import BLOCK_BYTES
from kvmover.store.stored import Places, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Pages whose objects are of the same `parts`, a row for each of these and a column for each page.

    `items`: which pages these are of those asked for. `segments` are numbers of the index.
    """

    items: Rows
    parts: tuple[PartKey, ...]
    segments: Rows
    offsets: Places
    sizes: Places


def alike_pages(
    rows: Rows, pages: NumberColumns, objects: NumberColumns, parts: Sequence[tuple[PartKey, ...]], sizes: Places
) -> Iterator[Alike]:
    """Of pages by their rows, -1 where there is none. `parts` and `sizes` are what numbers of columns stand for."""
    numbers = np.where(rows >= 0, pages.column("parts")[rows], 0)
    of = objects.column
    known: list[int] = np.unique(numbers[numbers > 0]).tolist()
    for number in known:
        items = np.flatnonzero(numbers == number)
        chain = [pages.column("first")[rows[items]]]
        while len(chain) < len(parts[number]):
            chain.append(of("next")[chain[-1]])
        placed = np.stack(chain[::-1])  # the newest is the first of a chain
        offsets = of("offset")[placed].astype(np.int64) * BLOCK_BYTES
        yield Alike(items, parts[number], of("segment")[placed], offsets, sizes[of("kind")[placed]])
