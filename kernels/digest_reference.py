"""The reference digest of rows, in plain torch, is the tests' oracle and serves CPU memory without the C core.

The digest of a set of words is a sum modulo 2^64 of one term a word, so digests of parts add up in any order:

    key  = mix64(mix64(plane * P + S) + head * H + position * T)     64 bits: a row's, one head wide
    a    = low half of key + number * A                              32 bits
    b    = high half of key + number * B                             32 bits
    odd  = (low half of a * b) xor (high half of a * b), or 1        32 bits
    term = (word + a, 32 bits) * odd                                 64 bits

`word` is 32 bits of a head's row, little endian, the last one filled with zero bytes; `number` counts the words of that
row; plane, head and position are logical coordinates, the same whatever the layout, page size, sharding or row width.
mix64 is the finaliser of splitmix64 (Steele, Lea, Flood 2014).

The sum is multilinear hashing (Carter, Wegman 1979; Lemire, Kaser, "Strongly universal string hashing is fast", 2014)
with a pseudorandom odd multiplier a word; folding the halves of a product into the multiplier is wyhash's. `a` is added
first, as NH of UMAC (Black et al., 1999) does, so that a word of zeros counts too: a missing row is no row of zeros.

A changed word is always found: its term changes by a non-zero number below 2^32 times an odd one. Any other fixed error
(words, rows, heads, layers or pages swapped, a stale page, a missing row) is missed with a probability of about 2^-32
if the multipliers are taken as random, and far less if the bytes are random. The digest has no secret and is not
cryptographic: two contents of one digest can be made on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from . import reference
from .region import Offsets, Region, RegionError, Side

#: The end of a region that is read.
End = Literal["src", "dst"]

#: Multipliers of plane, head and position: odd, with bits as if at random (primes of xxHash). S is the start.
P, S = 0x165667B19E3779F9, 0x27D4EB2F165667C5
H, T = 0xC2B2AE3D27D4EB4F, 0x9E3779B185EBCA87
#: Steps of the two halves from word to word.
A, B = 0x9E3779B1, 0x85EBCA77
#: Multipliers of mix64.
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

LOW = (1 << 32) - 1
MODULUS = 1 << 64

#: Bytes of rows summed at once: the terms, sixteen times as many bytes, stay in the cache.
PART_BYTES = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Logical:
    """The logical coordinates of a region's rows, from which the digest makes their keys.

    `planes` [plane] and `positions` [unit] int64 on the host: the caller's number of each plane, the same on both sides
    of a transfer, such as layer * 2 + kv; and the position of each unit's first token in the whole request. Token i of
    a unit is `position_step` * i further. A row holds `heads_in_row` heads side by side; head i of the region, counted
    through the rows, is head `first_head` + `head_step` * i of the model. `whole`: see `Side`.
    """

    planes: Offsets
    positions: Offsets
    first_head: int = 0
    head_step: int = 1
    heads_in_row: int = 1
    position_step: int = 1
    whole: Offsets | None = None

    @property
    def listed(self) -> Offsets:
        """The positions that a launch's table has: the whole list, or `positions`."""
        return self.positions if self.whole is None else self.whole

    def check(self, region: Region) -> None:
        """Raise RegionError unless these are the coordinates of `region`."""
        if (len(self.planes), len(self.positions)) != (region.planes, region.units):
            raise RegionError(
                f"coordinates of {len(self.planes)} planes x {len(self.positions)} units"
                f" for a region of {region.planes} x {region.units}"
            )
        if self.heads_in_row < 1 or region.row_bytes % self.heads_in_row:
            raise RegionError(f"a row of {region.row_bytes} bytes does not hold {self.heads_in_row} heads")

    def plane_keys(self) -> Offsets:
        """Return the inner mix64 of each plane [plane]."""
        z = np.asarray(self.planes, np.int64).view(np.uint64) * np.uint64(P) + np.uint64(S)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(M1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(M2)
        return (z ^ (z >> np.uint64(31))).view(np.int64)


def digest(regions: Sequence[Region], logicals: Sequence[Logical], side: End) -> int:
    """Return the digest of all rows at one end of the regions, 0 <= digest < 2^64. Raises RegionError as `check`."""
    check(regions, logicals)
    total = 0
    for region, logical in zip(regions, logicals, strict=True):
        at: Side = getattr(region, side)
        unit_bytes = region.heads * region.tokens * region.row_bytes
        step = max(1, PART_BYTES // unit_bytes)
        for plane, key in enumerate(logical.plane_keys().tolist()):
            one = at.some_planes(slice(plane, plane + 1))
            for first in range(0, region.units, step):
                units = slice(first, first + step)
                packed = _packed(replace(region, src=replace(one, units=at.units[units])))
                total += _sum(packed, region, logical, key, torch.from_numpy(logical.positions[units]))
    return total % MODULUS


def check(regions: Sequence[Region], logicals: Sequence[Logical]) -> None:
    """Raise RegionError unless every region can be moved and has its coordinates."""
    if len(regions) != len(logicals):
        raise RegionError(f"{len(logicals)} sets of coordinates for {len(regions)} regions")
    for region, logical in zip(regions, logicals, strict=True):
        region.check()
        logical.check(region)


def _packed(region: Region) -> torch.Tensor:
    """Return the source's rows of one plane as bytes [unit, head, token, byte]."""
    shape = len(region.src.units), region.heads, region.tokens, region.row_bytes
    packed = torch.empty(shape, dtype=torch.uint8)
    zero, token, head = np.zeros(1, np.int64), region.row_bytes, region.tokens * region.row_bytes
    starts = np.arange(shape[0], dtype=np.int64) * (head * region.heads)
    reference.move([replace(region, dst=Side.of((packed.view(-1),), zero, zero, starts, head, token))])
    return packed


def _sum(packed: torch.Tensor, region: Region, logical: Logical, plane_key: int, positions: torch.Tensor) -> int:
    """Return the summed terms of one plane's rows; int64 wraps as 64 bits do."""
    split = packed.unflatten(3, (logical.heads_in_row, -1))
    words = torch.nn.functional.pad(split, (0, -split.shape[-1] % 4)).view(torch.int32).to(torch.int64)
    number = torch.arange(words.shape[-1])
    heads = torch.arange(region.heads * logical.heads_in_row) * logical.head_step + logical.first_head
    heads = heads.view(region.heads, 1, logical.heads_in_row)
    tokens = positions[:, None, None, None] + (torch.arange(region.tokens) * logical.position_step)[:, None]
    key = _mix64(plane_key + heads * _signed(H) + tokens * _signed(T))[..., None]
    a = ((key & LOW) + number * A) & LOW
    product = a * ((_right(key, 32) + number * B) & LOW)
    odd = (product ^ _right(product, 32)) & LOW | 1
    return int((((words + a) & LOW) * odd).sum())


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _right(z, 30)) * _signed(M1)
    z = (z ^ _right(z, 27)) * _signed(M2)
    return z ^ _right(z, 31)


def _right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - MODULUS if constant >> 63 else constant
