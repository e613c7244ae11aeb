"""Moves and digests in host memory, by the C core at a memcpy's rate; where it was not built, as they are defined.

`reference` and `digest_reference` have the definitions, in numpy and torch: the same bytes and the same numbers. In C a
region is a nest of loops, each with a number of places and what a place adds to two numbers: the addresses of a row at
both ends, or its address and the key of its digest. As many threads work as torch may use for one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmover.c_core import NATIVE

from . import digest_reference, reference
from .digest_reference import End, H, Logical, T
from .region import Offsets, Region, RegionError, Side

#: Places of a loop, and what they add to each of two numbers, which wrap at 64 bits: a table [place], or even steps.
Loop = tuple[int, Offsets | int, Offsets | int]


def move(regions: Sequence[Region]) -> None:
    """Copy every row of every region, in no promised order. Raises RegionError before the first byte is written."""
    if NATIVE is None:
        reference.move(regions)
        return
    work = reference.checked(regions)
    for region in work:
        _check_host(region.src)
    for region in work:
        src, dst = region.src, region.dst
        loops: tuple[Loop, ...] = (
            (region.tokens, src.token_bytes, dst.token_bytes),
            (region.heads, src.head_bytes, dst.head_bytes),
            (region.planes, src.addresses(), dst.addresses()),
            (region.units, _table(src.units), _table(dst.units)),
        )
        NATIVE.copy_rows(loops, region.row_bytes, torch.get_num_threads())


def digest(regions: Sequence[Region], logicals: Sequence[Logical], side: End) -> int:
    """The digest of all rows at one end of the regions: 0 <= digest < 2^64. Raises RegionError, as a move does."""
    if NATIVE is None:
        return digest_reference.digest(regions, logicals, side)
    digest_reference.check(regions, logicals)
    total = 0
    for region, logical in zip(regions, logicals, strict=True):
        if region.nbytes:
            at: Side = getattr(region, side)
            _check_host(at)
            row_bytes = region.row_bytes // logical.heads_in_row
            total += NATIVE.digest_rows(_keyed(region, at, logical), row_bytes, torch.get_num_threads())
    return total % digest_reference.MODULUS


def _keyed(region: Region, at: Side, logical: Logical) -> tuple[Loop, ...]:
    """Rows one head wide: addresses, and the sum that mix64 makes a key of."""
    head_bytes, head_key = region.row_bytes // logical.heads_in_row, logical.head_step * H
    first_head = np.uint64(logical.first_head * H % digest_reference.MODULUS)
    positions = np.asarray(logical.positions, np.int64).view(np.uint64) * np.uint64(T)
    return (
        (region.tokens, at.token_bytes, logical.position_step * T),
        (logical.heads_in_row, head_bytes, head_key),
        (region.heads, at.head_bytes, head_key * logical.heads_in_row),
        (region.planes, at.addresses(), (logical.plane_keys().view(np.uint64) + first_head).view(np.int64)),
        (region.units, _table(at.units), positions.view(np.int64)),
    )


def _table(offsets: Offsets) -> Offsets:
    """As C reads it."""
    return np.ascontiguousarray(offsets, np.int64)


def _check_host(side: Side) -> None:
    if side.memory[0].device.type != "cpu":
        raise RegionError(f"memory on {side.memory[0].device} is not the host's")
