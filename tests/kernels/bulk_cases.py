"""Helpers of the bulk moves' tests: the bulk kernel emulated on CPU memory, copies by the host, and any move at all."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from row_moves import MOVES, NAMES, Move, PoolShape

from kvmover.kernels import bulk_ring
from kvmover.kernels.bulk_ring import FIELDS, Ring
from kvmover.kernels.region import Region, Side, copies, merged

SMALL = Ring(stages=3, stage_bytes=1024, lag=1)
OPENED = [move.open().region for move in MOVES]
ALIGNED = [move for move, region in zip(MOVES, OPENED, strict=True) if merged(region).alignment() == 16]

Piece = tuple[int, int]
Locate = Callable[[np.ndarray, int, int, int, int], Piece]
SOURCE, TARGET = 10, 14


def locate(table: np.ndarray, region: int, item: int, lane: int, side: int) -> Piece:
    """Address and bytes of a lane's piece, in Python's integers: `locate` of bulk.cu."""
    _, first, count, per_item, pieces, piece_bytes, run_bytes, tokens, planes, heads = table[region:][:10].tolist()
    number = (item - first) * per_item + lane
    if lane >= per_item or number >= count:
        return 0, 0
    rest, piece = divmod(number, pieces)
    rest, token = divmod(rest, tokens)
    rest, plane = divmod(rest, planes)
    unit, head = divmod(rest, heads)
    addresses, units, head_bytes, token_bytes = table[region + side :][:4].tolist()
    inside = piece * piece_bytes
    start = int(table[addresses + plane]) + int(table[units + unit])
    return start + head * head_bytes + token * token_bytes + inside, min(run_bytes - inside, piece_bytes)


def emulate(regions: Sequence[Region], how: Locate, shape: Ring = SMALL, blocks: int = 3) -> None:
    """Move CPU memory as the blocks of the kernel would, through a ring of their own."""
    launch = bulk_ring.describe([region for region in regions if region.nbytes], shape)
    for block in range(blocks):
        stage = np.zeros(shape.stage_bytes, np.uint8)
        region = 0
        for item in range(block, launch.items, blocks):
            while item >= launch.table[region]:
                region += FIELDS
            slot, loaded = int(launch.table[region + 5]), 0
            for side, lane in itertools.product((SOURCE, TARGET), range(bulk_ring.LANES)):
                address, nbytes = how(launch.table, region, item, lane, side)
                assert (address % 16, nbytes % 16) == (0, 0)
                assert lane * slot + nbytes <= shape.stage_bytes or not nbytes
                place = stage.ctypes.data + lane * slot
                if nbytes:
                    ctypes.memmove(*((place, address) if side == SOURCE else (address, place)), nbytes)
                loaded += nbytes if side == SOURCE else -nbytes
            assert loaded == 0, "what a stage waits for is what is stored from it"


def copied(regions: Sequence[Region]) -> None:
    """Move CPU memory by the copies that the copy engine is handed."""
    for region in regions:
        for source, target, nbytes in zip(*(each.tolist() for each in copies(region)), strict=True):
            ctypes.memmove(target, source, nbytes)


MEMORY = torch.zeros(64, dtype=torch.uint8)


def line(run_bytes: int, starts: Sequence[int], device: str = "cpu") -> Side:
    """Runs at these offsets. Nothing is touched: the memory has no bytes for them."""
    zero = np.zeros(1, np.int64)
    return Side.of((MEMORY.to(device),), zero, zero, np.array(starts, np.int64), run_bytes, run_bytes)


def between(src: str, dst: str, run_bytes: int, apart: int = 2, offset: int = 0, units: int = 4) -> Region:
    """Runs between two memories; `meta` stands for a GPU."""
    sides = (line(run_bytes, np.arange(units) * apart * run_bytes + offset, device) for device in (src, dst))
    return Region(*sides, 1, 1, run_bytes)


@st.composite
def any_moves(draw: st.DrawFn) -> Move:
    """Moves of all orders, page sizes, widths and numbers of everything, none included."""
    src_page, dst_page, tokens = draw(st.sampled_from([(4, 4, 4), (8, 4, 4), (1, 4, 1), (4, 8, 2)]))
    separate = draw(st.sampled_from([(), ("layer",), ("layer", "kv")]))
    heads = draw(st.integers(1, 2))
    src, dst = (PoolShape(draw(st.sampled_from(list(NAMES))), page, heads, separate) for page in (src_page, dst_page))
    return Move(
        src,
        dst,
        draw(st.sampled_from([1, 12, 16, 48, 656])),
        tokens,
        heads,
        layers=draw(st.integers(1, 2)),
        kv=draw(st.integers(1, 2)),
        units=draw(st.integers(0, 6)),
        seed=draw(st.integers(0, 3)),
    )
