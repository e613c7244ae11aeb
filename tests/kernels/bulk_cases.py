"""Helpers of the bulk moves' tests: the bulk kernel emulated on CPU memory, copies by the host, and any move at all."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from row_moves import MOVES, NAMES, Move, PoolShape

from kvmover.kernels import experimental
from kvmover.kernels.experimental import MAP_WORDS, Pieces, Ring
from kvmover.kernels.region import Region, Side, copies, merged

SMALL = Ring(stages=3, stage_bytes=1024, lag=1)
OPENED = [move.open().region for move in MOVES]
ALIGNED = [move for move, region in zip(MOVES, OPENED, strict=True) if merged(region).alignment() == 16]

#: Address and bytes; or coordinates, bytes, and the place of the map in which they count.
Piece = tuple[int, int, int]
Locate = Callable[[np.ndarray, int, int, int, int], Piece]
AT = SimpleNamespace(**experimental.words())


def locate(table: np.ndarray, region: int, item: int, lane: int, side: int) -> Piece:
    """A lane's piece, in Python's integers: `locate` of bulk.cu."""
    of, at = table[region:].tolist(), table[region + side :].tolist()
    number = (item - of[AT.FIRST_TILE]) * of[AT.PER_ITEM] + lane
    if lane >= of[AT.PER_ITEM] or number >= of[AT.COUNT]:
        return 0, 0, 0
    rest, piece = divmod(number, of[AT.PIECES])
    rest, token = divmod(rest, of[AT.TOKENS])
    rest, plane = divmod(rest, of[AT.PLANES])
    unit, head = divmod(rest, of[AT.HEADS])
    inside = piece * of[AT.PIECE_BYTES]
    start = int(table[at[AT.LIST] + unit]) + head * at[AT.HEAD_STRIDE] + token * at[AT.TOKEN_STRIDE] + inside
    nbytes = min(of[AT.RUN_BYTES] - inside, of[AT.PIECE_BYTES])
    if of[AT.MAPPED] & (experimental.SRC_MAPPED if side == AT.SRC else experimental.DST_MAPPED):
        return start, nbytes, at[AT.ADDRESSES] + plane * MAP_WORDS
    return start + int(table[at[AT.ADDRESSES] + plane]), nbytes, 0


def locate_of_the_source(folder: Path) -> Locate:
    """`locate` of bulk.cu itself, compiled for the host: it is plain C++ up to the first line of PTX."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    call = "*out = locate(table, table + region, item, lane, side);"
    arguments = "const i64* table, i64 region, u32 item, u32 lane, int side, Piece* out"
    (folder / "host.cpp").write_text(
        f'#include "{experimental.SOURCE}"\nextern "C" void piece({arguments}) {{ {call} }}\n'
    )
    command = [compiler, *experimental.RING.options, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, folder / "host.so", folder / "host.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "host.so"))

    class Out(ctypes.Structure):
        _fields_ = (("address", ctypes.c_int64), ("map", ctypes.c_int64), ("bytes", ctypes.c_uint32))

    def call_it(table: np.ndarray, region: int, item: int, lane: int, side: int) -> Piece:
        out = Out()
        library.piece(ctypes.c_void_p(table.ctypes.data), ctypes.c_int64(region), item, lane, side, ctypes.byref(out))
        return out.address, out.bytes, out.map

    return call_it


def named(table: np.ndarray, piece: Piece) -> list[tuple[int, int]]:
    """Addresses and sizes of the runs of a piece. Of a box, the rows that its map names, as tensor_maps.c keeps it."""
    begin, nbytes, place = piece
    if not place:
        assert (begin % 16, nbytes % 16) == (0, 0)
        return [(begin, nbytes)] if nbytes else []
    assert place % 8 == 0, "a map begins at a multiple of 64 bytes"
    address, width, height, pitch, box = table[place : place + 5].tolist()
    columns, rows = box & 0xFFFFFFFF, box >> 32
    row, word = begin >> 32, begin & 0xFFFFFFFF
    assert nbytes == 8 * columns * rows, "what the barrier expects is what the copy brings"
    assert word + columns <= width, "what is outside would be zeros"
    assert 0 <= row <= height - rows, "what is outside would be zeros"
    return [(address + (row + each) * pitch + 8 * word, 8 * columns) for each in range(rows)]


def emulate(
    regions: Sequence[Region], how: Locate, shape: Ring = SMALL, blocks: int = 3, of: Pieces = Pieces.RUNS
) -> None:
    """Move CPU memory as the blocks of the kernel would, through a ring of their own."""
    launch = experimental.describe([region for region in regions if region.nbytes], shape, of)
    for block in range(blocks):
        stage = np.zeros(shape.stage_bytes, np.uint8)
        region = 0
        for item in range(block, launch.tiles, blocks):
            while item >= launch.table[region + AT.END]:
                region += AT.WORDS
            slot, loaded = int(launch.table[region + AT.PIECE_BYTES]), 0
            for side, lane in itertools.product((AT.SRC, AT.DST), range(experimental.LANES)):
                place = stage.ctypes.data + lane * slot
                runs = named(launch.table, how(launch.table, region, item, lane, side))
                total = sum(nbytes for _, nbytes in runs)
                assert not runs or (total <= slot and lane * slot + total <= shape.stage_bytes)
                loaded += total if side == AT.SRC else -total
                for address, nbytes in runs:
                    ctypes.memmove(*((place, address) if side == AT.SRC else (address, place)), nbytes)
                    place += nbytes
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
