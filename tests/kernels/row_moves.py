"""Moves for the kernels' tests: two pools of any order, the region between them, and what the destination must hold.

The expectation is a loop over logical coordinates of numpy views; it shares no address arithmetic with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch

from kvmover.kernels.region import Region, Side

AXES = ("layer", "kv", "page", "head", "token")
NHD = "layer kv page token head"
HND = "layer kv page head token"
PACKED = "page head layer kv token"
PAGE_FIRST = "page layer kv token head"
SCRAMBLED = "token layer head page kv"
NAMES = {NHD: "NHD", HND: "HND", PACKED: "packed", PAGE_FIRST: "page-first", SCRAMBLED: "scrambled"}

#: Bytes before and after every allocation that nobody may touch.
GUARD = 64


@dataclass(frozen=True)
class PoolShape:
    """A dense pool of `row_bytes` rows whose axes nest in `order`, with an allocation an index of the axes `separate`.

    Allocations start `misaligned` bytes past a multiple of 64.
    """

    order: str
    page_tokens: int
    heads: int
    separate: tuple[str, ...] = ()
    misaligned: int = 0

    def __str__(self) -> str:
        parts = [NAMES[self.order], str(self.page_tokens), *self.separate]
        return "-".join(parts + [f"off{self.misaligned}"] * (self.misaligned > 0))


class PoolMemory:
    """A pool's allocations, filled with `fill`, with guards around them."""

    def __init__(
        self, shape: PoolShape, layers: int, kv: int, pages: int, row_bytes: int, fill: np.random.Generator
    ) -> None:
        self.shape, self.row_bytes = shape, row_bytes
        extents = {"layer": layers, "kv": kv, "page": pages, "head": shape.heads, "token": shape.page_tokens}
        self.extents = extents
        together = [axis for axis in shape.order.split() if axis not in shape.separate]
        self.stride, size = {}, row_bytes
        for axis in reversed(together):
            self.stride[axis], size = size, size * extents[axis]
        count = int(np.prod([extents[axis] for axis in shape.separate], dtype=int))
        self.whole = [aligned(fill.integers(0, 256, size + 2 * GUARD, dtype=np.uint8)) for _ in range(count)]
        first = GUARD + shape.misaligned
        self.whole = [torch.cat([whole, torch.zeros(shape.misaligned, dtype=torch.uint8)]) for whole in self.whole]
        self.memory = tuple(whole[first : first + size] for whole in self.whole)

    def plane(self, layer: int, kv: int) -> tuple[int, int]:
        """(allocation, byte offset) of a plane."""
        at = {"layer": layer, "kv": kv}
        allocation = 0
        for axis in self.shape.separate:
            allocation = allocation * self.extents[axis] + at[axis]
        return allocation, sum(at[axis] * self.stride[axis] for axis in at if axis not in self.shape.separate)

    def view(self, layer: int, kv: int) -> np.ndarray:
        """The plane as [page, token, head, byte]."""
        allocation, offset = self.plane(layer, kv)
        axes = ("page", "token", "head")
        return np.lib.stride_tricks.as_strided(
            self.memory[allocation].numpy()[offset:],
            [*(self.extents[axis] for axis in axes), self.row_bytes],
            [*(self.stride[axis] for axis in axes), 1],
        )

    def side(self, layers: Sequence[int], kvs: Sequence[int], units: Sequence[tuple[int, int]], head: int) -> Side:
        """The rows from (page, token) of each unit and from `head` on."""
        planes = np.array([self.plane(layer, kv) for layer, kv in product(layers, kvs)], np.int64).reshape(-1, 2)
        offsets = [page * self.stride["page"] + token * self.stride["token"] for page, token in units]
        return Side.of(
            self.memory,
            planes[:, 0],
            planes[:, 1],
            np.array(offsets, np.int64) + head * self.stride["head"],
            self.stride["head"],
            self.stride["token"],
        )


def aligned(content: np.ndarray) -> torch.Tensor:
    """A copy in torch's own memory, which starts at a multiple of 64."""
    copy = torch.from_numpy(content).clone()
    assert copy.data_ptr() % 64 == 0
    return copy


@dataclass(frozen=True)
class Move:
    """One region: `heads` heads of `layers` x `kv` planes, in units of `tokens` tokens, from pool to pool.

    `tokens` divides both page sizes. `units` units of either pool are taken: `scattered`, one after the other (`even`)
    or `backwards`, on each side.
    """

    src: PoolShape
    dst: PoolShape
    row_bytes: int
    tokens: int
    heads: int = 2
    src_head: int = 0
    dst_head: int = 0
    layers: int = 2
    kv: int = 2
    units: int = 5
    seed: int = 0
    taken: tuple[str, str] = ("scattered", "scattered")

    def __str__(self) -> str:
        ways = [f"{src}-to-{dst}" for src, dst in [self.taken] if self.taken != ("scattered", "scattered")]
        return "-".join([f"{self.row_bytes}B-{self.src}-to-{self.dst}-x{self.tokens}", *ways])

    def open(self) -> OpenMove:
        return OpenMove(self)


@dataclass
class OpenMove:
    """A move with its memory: the region, and the whole allocations as they must be afterwards."""

    move: Move
    src: PoolMemory = field(init=False)
    dst: PoolMemory = field(init=False)

    def __post_init__(self) -> None:
        move, random = self.move, np.random.default_rng(self.move.seed)
        sides: list[tuple[PoolMemory, list[tuple[int, int]]]] = []
        for shape, taken in zip((move.src, move.dst), move.taken, strict=True):
            a_page = shape.page_tokens // move.tokens
            pages = -(-move.units // a_page) + 2
            memory = PoolMemory(shape, move.layers + 1, move.kv, pages, move.row_bytes, random)
            order = random.permutation(pages * a_page) if taken == "scattered" else np.arange(move.units)
            chosen = order[: move.units][:: -1 if taken == "backwards" else 1]
            sides.append((memory, [(int(unit) // a_page, int(unit) % a_page * move.tokens) for unit in chosen]))
        (self.src, self._from), (self.dst, self._to) = sides

    @cached_property
    def region(self) -> Region:
        move = self.move
        layers, kvs = range(1, move.layers + 1), range(move.kv)
        return Region(
            self.src.side(layers, kvs, self._from, move.src_head),
            self.dst.side(range(move.layers), kvs, self._to, move.dst_head),
            move.heads,
            move.tokens,
            move.row_bytes,
        )

    def expected(self) -> list[torch.Tensor]:
        """All bytes of the destination's allocations after the move: everything else as it is now."""
        move, after = self.move, [whole.clone() for whole in self.dst.whole]
        now, self.dst.memory = (
            self.dst.memory,
            tuple(
                whole[GUARD + move.dst.misaligned :][: memory.numel()]
                for whole, memory in zip(after, self.dst.memory, strict=True)
            ),
        )
        for layer, kv in product(range(move.layers), range(move.kv)):
            source, target = self.src.view(layer + 1, kv), self.dst.view(layer, kv)
            for (page, token), (to_page, to_token) in zip(self._from, self._to, strict=True):
                for i, head in product(range(move.tokens), range(move.heads)):
                    target[to_page, to_token + i, move.dst_head + head] = source[page, token + i, move.src_head + head]
        self.dst.memory = now
        return after


def pools(*orders: str, pages: int, heads: int, separate: tuple[str, ...] = ()) -> tuple[PoolShape, ...]:
    return tuple(PoolShape(order, pages, heads, separate) for order in orders)


def _orders() -> list[Move]:
    """Every order to every other, half of the heads, separate allocations in turn."""
    separate = [(), ("layer",), ("layer", "kv")]
    moves: list[Move] = []
    for number, (src, dst) in enumerate(product(NAMES, repeat=2)):
        left = PoolShape(src, 4, 4, separate[number % 3])
        right = PoolShape(dst, 4, 3, separate[number // 3 % 3])
        moves.append(Move(left, right, 32, 4, heads=2, src_head=2, dst_head=1, seed=number))
    return moves


def _widths() -> list[Move]:
    """Rows that are and are not powers of two, from 1 byte to many tiles, of elements of 1, 2, 4 and 8 bytes."""
    widths = [1, 2, 3, 6, 8, 12, 16, 24, 48, 64, 82, 128, 256, 512, 656, 1024, 1152, 2048]
    src, dst = PoolShape(NHD, 4, 3, ("layer",)), PoolShape(HND, 8, 2)
    return [Move(src, dst, row, 4, src_head=1, layers=1, units=4 if row < 512 else 2, seed=row) for row in widths]


def _contiguous() -> list[Move]:
    """Tokens that follow each other on both sides: the rows may be cut anew."""
    return [
        Move(PoolShape(HND, 8, 3), PoolShape(PACKED, 4, 2), row, 4, src_head=1, layers=1, units=units, seed=row)
        for row, units in [(1, 5), (3, 5), (12, 5), (82, 3), (132, 3), (656, 2), (1024, 1)]
    ]


def _even() -> list[Move]:
    """Units that follow each other at one distance, as on the wire: gathers, scatters and plain copies."""
    src, dst = PoolShape(NHD, 4, 3), PoolShape(PACKED, 4, 2)
    return [
        Move(src, dst, row, 4, src_head=1, layers=1, kv=1, seed=row, taken=taken)
        for taken in [("scattered", "even"), ("even", "scattered"), ("even", "even"), ("backwards", "even")]
        for row in (16, 82, 192, 512)
    ] + [
        Move(PoolShape(NHD, 1, 3), PoolShape(PACKED, 1, 2), row, 1, layers=1, units=11, taken=taken)
        for taken in [("scattered", "even"), ("even", "backwards")]
        for row in (48, 3)
    ]


def _misaligned() -> list[Move]:
    """A pool that starts off a 16-byte border, at either end."""
    src, dst = PoolShape(NHD, 4, 3), PoolShape(PACKED, 4, 2)
    return [
        Move(
            replace(src, misaligned=left),
            replace(dst, misaligned=right),
            row,
            4,
            src_head=1,
            layers=1,
            kv=1,
            units=4,
            seed=left + right,
        )
        for left, right in [(1, 0), (0, 1), (2, 4), (4, 0), (0, 8), (8, 8), (4, 2), (3, 5), (16, 32)]
        for row in (32, 128)
    ]


def _pages() -> list[Move]:
    """Page sizes that differ; units of their common divisor, one-unit tiles and tiles over many units."""
    return [
        Move(
            PoolShape(src_order, src, 2),
            PoolShape(dst_order, dst, 2),
            row,
            int(np.gcd(src, dst)),
            units=units,
            layers=1,
        )
        for (src, dst), (src_order, dst_order) in zip(
            [(1, 64), (3, 16), (16, 24), (24, 3), (64, 16), (64, 64)],
            [(NHD, HND), (HND, NHD), (NHD, NHD), (PAGE_FIRST, HND), (PACKED, NHD), (HND, HND)],
            strict=True,
        )
        for row, units in ((16, 12), (128, 3))
    ]


def _sizes() -> list[Move]:
    """One of everything, and none of something."""
    one = Move(PoolShape(NHD, 1, 1), PoolShape(HND, 1, 1), 16, 1, heads=1, layers=1, kv=1, units=1)
    return [one, replace(one, units=0), replace(one, layers=0), replace(one, units=70), replace(one, layers=5, kv=2)]


def _whole() -> list[Move]:
    """What a tile of 32 KiB takes whole units of: head slices that fill their share of it or not, a last tile of fewer,
    rows of one grain and of many, narrow words, pages of one token, and tokens that lie together, whose bytes are a
    power of two and what is left."""
    rows = [(256, 64), (256, 16), (256, 24), (656, 24), (1024, 3), (8192, 1)]
    moves = [
        Move(PoolShape(NHD, tokens, 2), PoolShape(HND, tokens, 2), row, tokens, layers=1, kv=1, seed=row + tokens)
        for row, tokens in rows
    ]
    ends = [("scattered", "even"), ("even", "scattered"), ("even", "backwards")]
    moves += [replace(moves[0], taken=taken, units=3, layers=2) for taken in ends]
    narrow = [replace(moves[1], src=replace(moves[1].src, misaligned=off), row_bytes=64 * off) for off in (4, 1)]
    together = [
        Move(PoolShape(HND, tokens, 1), PoolShape(HND, tokens, 1), row, tokens, heads=1, layers=1, kv=1, units=units)
        for row, tokens, units in [(1152, 16, 5), (1152, 32, 3), (656, 64, 2)]
    ]
    return [*moves, *narrow, replace(moves[1], units=19, heads=1), replace(moves[0], units=2), *together]


WHOLE = _whole()

MOVES = [*_orders(), *_widths(), *_contiguous(), *_even(), *_misaligned(), *_pages(), *_sizes()]

#: Several regions in one launch: rows of all widths, words and alignments, one-unit and span tiles, and nothing.
TOGETHER = {
    "widths": _widths()[::2],
    "contiguous": _contiguous(),
    "even": _even()[::3],
    "alignments": _misaligned()[1:8],
    "orders": _orders()[::4],
    "pages": _pages()[::2],
    "with-nothing": [_sizes()[1], _misaligned()[0], _sizes()[2], _widths()[6], _sizes()[1]],
    "only-nothing": [_sizes()[1], _sizes()[2]],
}


def ids(moves: Sequence[Move]) -> list[str]:
    return [f"{number}-{move}" for number, move in enumerate(moves)]


def assert_moved(
    opened: Sequence[OpenMove], expected: Sequence[list[torch.Tensor]], sources: Sequence[list[torch.Tensor]]
) -> None:
    """Every byte of every destination, guards and neighbours included; and the sources are as they were."""
    for each, after, before in zip(opened, expected, sources, strict=True):
        for got, wanted in zip(each.dst.whole, after, strict=True):
            assert torch.equal(got, wanted), each.move
        for got, wanted in zip(each.src.whole, before, strict=True):
            assert torch.equal(got, wanted), f"{each.move}: the source was written"


def run(moves: Sequence[Move], mover) -> None:
    """Open the moves, hand their regions to `mover` in one call, and compare every byte."""
    opened = [move.open() for move in moves]
    expected = [each.expected() for each in opened]
    sources = [[whole.clone() for whole in each.src.whole] for each in opened]
    mover([each.region for each in opened])
    assert_moved(opened, expected, sources)


#: Bytes of the sparse pool: more than 2**31 words of 8 bytes.
SPARSE_BYTES = 20 << 30


@dataclass(frozen=True)
class FarMove:
    """Rows of a pool of SPARSE_BYTES whose offsets need more than 32 bits, counted in bytes or in words of 8."""

    name: str
    offset: int = 0
    units: tuple[int, ...] = (0,)
    head_bytes: int = 1 << 12
    token_bytes: int = 1 << 14
    heads: int = 2
    tokens: int = 2
    row_bytes: int = 64

    def __str__(self) -> str:
        return f"{self.name}-{self.row_bytes}B"

    def starts(self) -> list[int]:
        """Of every row, in the order unit, head, token."""
        loops = product(self.units, range(self.heads), range(self.tokens))
        return [self.offset + unit + head * self.head_bytes + token * self.token_bytes for unit, head, token in loops]

    def run(self, sparse: torch.Tensor, mover) -> None:
        """Move the rows out of the sparse pool, and others into it. Python's integers say where they lie."""
        assert max(self.starts()) > 1 << 31
        random = np.random.default_rng(len(self.name))
        nbytes = len(self.starts()) * self.row_bytes
        far, near = self._sides(sparse), PoolShape(PACKED, self.tokens, self.heads)
        row = np.arange(self.row_bytes)
        rows = np.array(self.starts())[:, None] + row
        around = np.unique(rows + np.arange(-GUARD, GUARD + 1)[:, None, None] if self.offset else rows)
        memory = sparse.numpy()
        for inwards in (False, True):
            packed = PoolMemory(near, 1, 1, len(self.units), self.row_bytes, random)
            side = packed.side([0], [0], [(page, 0) for page in range(len(self.units))], 0)
            memory[around] = random.integers(0, 256, around.size, dtype=np.uint8)
            inside, sent = packed.memory[0].numpy().copy(), memory[rows].copy()
            before = memory[around].copy()
            source, target = (side, far) if inwards else (far, side)
            mover([Region(source, target, self.heads, self.tokens, self.row_bytes)])
            if inwards:
                after = memory[around].copy()
                memory[around] = before
                memory[rows] = inside.reshape(rows.shape)
                assert np.array_equal(memory[around], after)
            else:
                assert np.array_equal(packed.memory[0].numpy(), sent.reshape(-1))
                assert np.array_equal(memory[around], before)
            assert nbytes == inside.size

    def _sides(self, sparse: torch.Tensor) -> Side:
        zero, offset = np.zeros(1, np.int64), np.array([self.offset], np.int64)
        return Side.of((sparse,), zero, offset, np.array(self.units, np.int64), self.head_bytes, self.token_bytes)


_PAGE = 1 << 17
FAR = [
    FarMove("page-times-stride-past-2G-bytes", units=(16_390 * _PAGE, 3 * _PAGE)),
    FarMove("page-times-stride-past-2G-words", units=(150_000 * _PAGE, 139_999 * _PAGE)),
    FarMove("unaligned-page-past-2G-bytes", units=(30_001 * (_PAGE + 1), 149_999 * (_PAGE + 1)), row_bytes=3),
    FarMove("plane", offset=19 << 30),
    FarMove("head", head_bytes=17 << 30),
    FarMove("token", token_bytes=17 << 30, units=(0, _PAGE)),
    FarMove("token-of-one-unit", token_bytes=17 << 30, row_bytes=16384, heads=1),
    FarMove("token-of-whole-units", token_bytes=5 << 30, units=(_PAGE, 0, 3 * _PAGE), tokens=4, row_bytes=1024),
    FarMove("unaligned-token", token_bytes=(9 << 30) + 1, row_bytes=3),
]
