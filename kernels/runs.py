"""Runs are the bytes of a region that are contiguous on both sides, merged as far as they go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .region import Offsets, Region, Side


def merged(region: Region) -> Region:
    """The same bytes in the longest rows that are contiguous on both sides: tokens, heads, planes and units joined."""
    while True:
        longer = _joined(region)
        if longer is region:
            return region
        region = longer


def _joined(region: Region) -> Region:
    """`region` with one of its loops joined into the row, or itself."""
    run, sides = region.row_bytes, (region.src, region.dst)
    if region.tokens > 1 and all(side.token_bytes == run for side in sides):
        return replace(region, tokens=1, row_bytes=run * region.tokens)
    if region.heads > 1 and all(side.head_bytes == run for side in sides):
        return replace(region, heads=1, row_bytes=run * region.heads)
    if region.planes > 1 and all(_follow(side.offset, run) and not np.ptp(side.allocation) for side in sides):
        src, dst = (replace(side, allocation=side.allocation[:1], offset=side.offset[:1]) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.planes)
    if region.units > 1 and all(_follow(side.units, run) for side in sides):
        src, dst = (replace(side, units=side.units[:1]) for side in sides)
        return replace(region, src=src, dst=dst, row_bytes=run * region.units)
    return region


def _follow(offsets: Offsets, run: int) -> bool:
    return bool((np.diff(offsets) == run).all())


def mean_copy(region: Region) -> float:
    """Mean bytes of the `copies` of a merged region, without the list of them."""
    run = region.row_bytes
    if region.heads * region.tokens > 1 or not region.units:
        return run
    breaks = (np.diff(region.src.units) != run) | (np.diff(region.dst.units) != run)
    return run * region.units / (1 + np.count_nonzero(breaks))


def copies(region: Region) -> tuple[Offsets, Offsets, Offsets]:
    """Source addresses, destination addresses and sizes [copy] of a region: units that follow each other are one copy.

    No copy spans two allocations, also where they touch.
    """
    region = merged(region)
    run, inside = region.row_bytes, region.heads * region.tokens * region.units
    src, dst = _starts(region, region.src), _starts(region, region.dst)
    first = np.ones(len(src), bool)
    first[1:] = (np.diff(src) != run) | (np.diff(dst) != run)
    first[:: max(inside, 1)] = True
    at = np.flatnonzero(first)
    return src[at], dst[at], np.diff(np.append(at, len(src))) * run


def _starts(region: Region, side: Side) -> Offsets:
    """Addresses of all runs, in the order plane, head, token, unit."""
    heads, tokens = np.arange(region.heads) * side.head_bytes, np.arange(region.tokens) * side.token_bytes
    inside = (heads[:, None, None] + tokens[:, None] + side.units).reshape(-1)
    return (side.addresses()[:, None] + inside).reshape(-1)
