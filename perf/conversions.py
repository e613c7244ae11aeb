"""The conversions that are tuned: the gathers of the benchmark's cases, from plain numbers to fp8 and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.region import Region, Side
from kvmover.layout import Codec

#: What an engine keeps numbers of bfloat16 in, by how many a row has.
NARROW: Mapping[int, Codec] = {128: Codec.fp8("bfloat16", 128), 576: Codec.fp8_ds_mla()}

#: Of every plane. What is read is random bits, so any does.
SCALE = 0.25


def forms(dim: int) -> tuple[Codec, Codec]:
    """Plain rows of `dim` numbers, and what they are converted to."""
    return Codec.plain("bfloat16", dim), NARROW[dim]


def conversion(region: Region, dim: int) -> Conversion:
    """A gather of plain rows that converts them: the same, but for the width of the rows that are written."""
    reads, writes = forms(dim)
    assert region.row_bytes == reads.row_bytes, f"rows of {region.row_bytes} B are not {dim} numbers of bfloat16"
    wire, was, row = region.dst, reads.row_bytes, writes.row_bytes

    def scaled(offsets: np.ndarray) -> np.ndarray:
        assert not (offsets % was).any()
        return offsets // was * row

    memory = tuple(torch.zeros(len(each) // was * row, dtype=torch.uint8, device=each.device) for each in wire.memory)
    strides = wire.head_bytes // was * row, wire.token_bytes // was * row
    dst = Side.of(memory, wire.allocation, scaled(wire.offset), scaled(wire.units), *strides)
    scales = (np.full((region.planes, form.scales), SCALE, np.float32) for form in (reads, writes))
    return Conversion(region.src, dst, region.heads, region.tokens, reads, writes, *scales)


def back(of: Conversion) -> Conversion:
    """The other way: a scatter of what it has written."""
    return Conversion(of.dst, of.src, of.heads, of.tokens, of.writes, of.reads, of.dst_scales, of.src_scales)
