"""Moves and digests in host memory run in the C core at a memcpy's rate; without it, in numpy and torch.

`reference` and `digest_reference` define them: the same bytes and the same numbers. In C a region is a nest of loops.
Each loop has a count, and its steps add to two numbers: a row's addresses at both ends, or a row's address and digest
key. `torch.get_num_threads` threads work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmover.c_core import NATIVE

from . import digest_reference, reference
from .digest_reference import End, H, Logical, T
from .region import Offsets, Region, RegionError, Side

#: A loop's count, and its steps' addends to two numbers that wrap at 64 bits: a table [step], or an even distance.
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
            (len(src.planes.offset), src.planes.addresses, dst.planes.addresses),
            (len(src.units), np.ascontiguousarray(src.units), np.ascontiguousarray(dst.units)),
        )
        NATIVE.copy_rows(loops, region.row_bytes, torch.get_num_threads())


def digest(regions: Sequence[Region], logicals: Sequence[Logical], side: End) -> int:
    """Return the digest of all rows at one end of the regions, 0 <= digest < 2^64. Raises RegionError as `move`."""
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
    """Return loops over rows one head wide: each row's address, and the sum that mix64 makes its key of."""
    head_bytes, head_key = region.row_bytes // logical.heads_in_row, logical.head_step * H
    first_head = np.uint64(logical.first_head * H % digest_reference.MODULUS)
    positions = np.asarray(logical.positions, np.int64).view(np.uint64) * np.uint64(T)
    return (
        (region.tokens, at.token_bytes, logical.position_step * T),
        (logical.heads_in_row, head_bytes, head_key),
        (region.heads, at.head_bytes, head_key * logical.heads_in_row),
        (region.planes, at.addresses(), (logical.plane_keys().view(np.uint64) + first_head).view(np.int64)),
        (region.units, np.ascontiguousarray(at.units), positions.view(np.int64)),
    )


def _check_host(side: Side) -> None:
    if side.memory[0].device.type != "cpu":
        raise RegionError(f"memory on {side.memory[0].device} is not the host's")
