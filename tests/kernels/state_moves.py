"""State-space model states as regions: temporal states by head, convolution states by sub-projection.

A state is a page of one token. The convolution state of Mamba-2 lies as channels x (width - 1), its channels being the
sub-projections x, B and C one after the other, each of them shared out over the ranks: so a rank's slice is three runs,
in rows of a few bytes where the channels lie innermost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvmover.kernels.region import Region, Side

LAYERS, SLOTS = 3, 6
HEADS, HEAD_DIM, STATE = 8, 4, 16
WIDTH = 3
#: Channels of x, B and C in the whole model.
PARTS = {"x": HEADS * HEAD_DIM, "B": 2 * STATE, "C": 2 * STATE}


@dataclass
class States:
    """The states of one rank of `ranks`: [layer, slot, ...] in bfloat16, as int16."""

    rank: int
    ranks: int
    order: str
    temporal: torch.Tensor
    conv: torch.Tensor

    @classmethod
    def of(cls, rank: int, ranks: int, order: str, fill: int) -> States:
        heads, channels = HEADS // ranks, sum(PARTS.values()) // ranks
        shape = (channels, WIDTH) if order == "channels" else (WIDTH, channels)
        random = torch.Generator().manual_seed(fill)
        sizes = (LAYERS, SLOTS, heads, HEAD_DIM, STATE), (LAYERS, SLOTS, *shape)
        temporal, conv = (torch.randint(-30000, 30000, size, dtype=torch.int16, generator=random) for size in sizes)
        return cls(rank, ranks, order, temporal, conv)

    def part(self, name: str) -> torch.Tensor:
        """A sub-projection's channels as a view [layer, slot, channel, width]."""
        conv = self.conv if self.order == "channels" else self.conv.transpose(2, 3)
        sizes = [size // self.ranks for size in PARTS.values()]
        number = list(PARTS).index(name)
        return conv[:, :, sum(sizes[:number]) : sum(sizes[: number + 1])]


def side(view: torch.Tensor, whole: torch.Tensor, slots: list[int], axes: tuple[int, int]) -> Side:
    """Rows of `view` [layer, slot, ...] in `whole`; `axes` are the ones that take the place of heads and tokens."""
    memory = whole.view(-1).view(torch.uint8)
    first = (view.data_ptr() - whole.data_ptr()) + np.arange(view.shape[0]) * view.stride(0) * 2
    units = np.array(slots, np.int64) * view.stride(1) * 2
    return Side.of((memory,), np.zeros(len(first), np.int64), first, units, *(view.stride(axis) * 2 for axis in axes))


def regions(src: States, dst: States, src_slots: list[int], dst_slots: list[int]) -> list[Region]:
    """What `src`, holding more heads, sends to `dst`: one region for the temporal state and one a sub-projection."""
    share = dst.ranks // src.ranks
    mine = dst.rank % share
    heads = HEADS // dst.ranks
    temporal = src.temporal[:, :, mine * heads : (mine + 1) * heads]
    row = HEAD_DIM * STATE * 2
    found = [
        Region(
            side(temporal, src.temporal, src_slots, (2, 3)),
            side(dst.temporal, dst.temporal, dst_slots, (2, 3)),
            heads,
            1,
            row,
        )
    ]
    for name, size in PARTS.items():
        channels = size // dst.ranks
        read, written = src.part(name)[:, :, mine * channels : (mine + 1) * channels], dst.part(name)
        sides = side(read, src.conv, src_slots, (2, 3)), side(written, dst.conv, dst_slots, (2, 3))
        found.append(Region(*sides, *loops(src.order, dst.order, channels)))
    return found


def loops(src_order: str, dst_order: str, channels: int) -> tuple[int, int, int]:
    """Heads, tokens and row bytes of a sub-projection: one run, a run for each step of the width, or elements."""
    if src_order != dst_order:
        return channels, WIDTH, 2
    return (1, 1, channels * WIDTH * 2) if src_order == "channels" else (1, WIDTH, channels * 2)


def expect(src: States, dst: States, src_slots: list[int], dst_slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `dst` must hold afterwards: its own bytes but for the named slots."""
    temporal, conv = dst.temporal.clone(), dst.conv.clone()
    after = States(dst.rank, dst.ranks, dst.order, temporal, conv)
    share = dst.ranks // src.ranks
    mine, heads = dst.rank % share, HEADS // dst.ranks
    for at, to in zip(src_slots, dst_slots, strict=True):
        temporal[:, to] = src.temporal[:, at, mine * heads : (mine + 1) * heads]
        for name, size in PARTS.items():
            channels = size // dst.ranks
            after.part(name)[:, to] = src.part(name)[:, at, mine * channels : (mine + 1) * channels]
    return temporal, conv


def run(orders: str, rank: int, move: Callable[[list[Region]], None]) -> None:
    """TP1 to TP2 or TP2 to TP4, scattered slots, every byte compared."""
    src_order, dst_order = orders.split("-")
    ranks = 2 if rank < 2 else 4
    src, dst = States.of(rank // 2 if ranks == 4 else 0, ranks // 2, src_order, 1), States.of(rank, ranks, dst_order, 2)
    slots = [4, 0, 2], [1, 5, 3]
    temporal, conv = expect(src, dst, *slots)
    move(regions(src, dst, *slots))
    assert torch.equal(dst.temporal, temporal)
    assert torch.equal(dst.conv, conv)


ORDERS = ("channels-channels", "width-width", "channels-width", "width-channels")
