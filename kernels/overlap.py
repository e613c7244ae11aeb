"""The overlap check refuses calls that read a row which they also write, since rows move in no order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .region import Offsets, Region, RegionError, Side

#: First and one-past-last address of pieces of a side.
Extents = Callable[[Region, Side], tuple[Offsets, Offsets]]


def check_apart(regions: Sequence[Region]) -> None:
    """Raise RegionError where any source of the call overlaps any destination of it.

    Memory of its own on each side, which is the rule, is settled by comparing allocations; pages of one pool by the
    bytes from a unit's first row to its last; only where those interleave, as heads of one page do, row by row.
    """
    sources, targets = ([(region, getattr(region, side)) for region in regions] for side in ("src", "dst"))
    for extents in (_allocations, _units, _rows):
        shared = _first_overlap(_gather(sources, extents), _gather(targets, extents))
        if shared is None:
            return
    raise RegionError(f"source and destination share the byte at address {shared}")


def _gather(sides: Sequence[tuple[Region, Side]], extents: Extents) -> tuple[Offsets, Offsets]:
    parts = [extents(region, side) for region, side in sides]
    return np.concatenate([first for first, _ in parts]), np.concatenate([stop for _, stop in parts])


def _allocations(_: Region, side: Side) -> tuple[Offsets, Offsets]:
    first = np.array([tensor.data_ptr() for tensor in side.memory], np.int64)
    return first, first + np.array([tensor.numel() for tensor in side.memory], np.int64)


def _units(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    first = (side.addresses()[:, None] + side.units).reshape(-1)
    reach = (region.heads - 1) * side.head_bytes + (region.tokens - 1) * side.token_bytes + region.row_bytes
    return first, first + reach


def _rows(region: Region, side: Side) -> tuple[Offsets, Offsets]:
    units, _ = _units(region, side)
    heads = np.arange(region.heads, dtype=np.int64) * side.head_bytes
    tokens = np.arange(region.tokens, dtype=np.int64) * side.token_bytes
    first = (units[:, None, None] + heads[:, None] + tokens).reshape(-1)
    return first, first + region.row_bytes


def _first_overlap(read: tuple[Offsets, Offsets], written: tuple[Offsets, Offsets]) -> int | None:
    """An address inside an interval of both, or None."""
    order = np.argsort(written[0])
    first, furthest = written[0][order], np.maximum.accumulate(written[1][order])
    before = np.searchsorted(first, read[1]) - 1  # the last interval that begins before ours ends
    found = np.flatnonzero((before >= 0) & (furthest[before] > read[0]))
    return int(np.maximum(read[0], first[before])[found[0]]) if found.size else None
