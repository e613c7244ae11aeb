"""What the row mover tells the kernel: one launch, the widest words, and 64-bit offsets."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from row_moves import FAR, HND, MOVES, NHD, TOGETHER, WHOLE, FarMove, Move, PoolShape, ids

from kvmover.kernels import convert, convert_overlaps, digest, rows, table
from kvmover.kernels.launch import RowConfig, RowKind, Upload, choose
from kvmover.kernels.region import Region, RegionError, Side
from kvmover.kernels.table import ONE_UNIT, SEVERAL_UNITS, TOKEN_UNITS, WHOLE_UNITS

#: Bytes of a tile under a budget of SMs, by the rule.
BUDGETED = choose(RowKind(256, 16384), 8, torch.device("cpu")).block_bytes

SIDES = {"src": rows.SRC.value, "dst": rows.DST.value}


class Counter:
    """Stands in for the kernel: counts launches and keeps what each was given."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[tuple[object, ...]] = []
        self.options: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return self.launch

    def launch(self, *arguments: object, **options: object) -> None:
        self.arguments.append(arguments)
        self.options.append(options)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(rows, "move_kernel", counter)
    return counter


def layers_of(layers: int, row_bytes: int = 256, allocations: int = 1) -> Region:
    """Keys and values of `layers` layers: 3 units of 2 heads of 16 tokens."""
    nbytes, each = 2 * 3 * 16 * row_bytes, -(-2 * layers // allocations)
    source, target = (
        tuple(torch.zeros(each * nbytes, dtype=torch.uint8) for _ in range(allocations)) for _ in range(2)
    )
    planes, at = np.arange(2 * layers) % allocations, np.arange(2 * layers) // allocations * nbytes
    units = np.arange(3) * 2 * 16 * row_bytes
    dense = Side.of(source, planes, at, units, 16 * row_bytes, row_bytes)
    apart = Side.of(target, planes, at, units, row_bytes, 2 * row_bytes)
    return Region(dense, apart, 2, 16, row_bytes)


@pytest.mark.parametrize("layers", [1, 2, 80])
def test_one_launch_however_many_layers(kernel: Counter, layers: int) -> None:
    rows.move([layers_of(layers), layers_of(layers, 1152, allocations=2 * layers)])
    assert len(kernel.grids) == 1


def test_one_launch_for_all_components_and_destinations(kernel: Counter) -> None:
    regions = [layers_of(80, row_bytes) for row_bytes in (256, 1152, 132, 3) for _ in range(3)]
    rows.move(regions, RowConfig(), sms=4)
    assert len(kernel.grids) == 1
    _, count, tiles, *shift = kernel.arguments[0]
    assert shift == [0, 0, 0]
    assert count == 12
    assert tiles == rows.describe(regions, RowConfig().block_bytes).tiles


def test_no_launch_for_nothing(kernel: Counter) -> None:
    rows.move([])
    rows.move([each.open().region for each in TOGETHER["only-nothing"]])
    assert not kernel.grids


@pytest.mark.parametrize(("sms", "programs"), [(None, 1000), (1, 1), (132, 132), (1000, 1000), (2000, 1000)], ids=str)
def test_the_budget_is_the_grid(sms: int | None, programs: int) -> None:
    assert RowConfig().programs(1000, sms, torch.device("cpu")) == programs


def test_the_budget_and_the_configuration_reach_the_launch(kernel: Counter) -> None:
    rows.move([layers_of(80)], RowConfig(block_bytes=1024, warps=8), sms=3)
    assert kernel.grids == [(3,)]
    assert kernel.options[0]["BLOCK"] == 1024
    assert kernel.options[0]["num_warps"] == 8


@pytest.mark.parametrize(
    ("row_bytes", "misaligned", "word", "vec"),
    [
        *((256, 0, 8, 2), (1152, 0, 8, 2), (656, 0, 8, 2), (256, 8, 8, 1), (24, 0, 8, 1), (256, 4, 4, 1)),
        *((12, 0, 4, 1), (256, 2, 2, 1), (82, 0, 2, 1), (256, 1, 1, 1), (256, 5, 1, 1), (3, 0, 1, 1)),
    ],
)
def test_words_are_as_wide_as_pool_and_row_allow(row_bytes: int, misaligned: int, word: int, vec: int) -> None:
    for left, right in ((misaligned, 0), (0, misaligned)):
        src, dst = PoolShape(NHD, 4, 4, misaligned=left), PoolShape(HND, 4, 2, misaligned=right)
        region = Move(src, dst, row_bytes, 4).open().region
        shape = rows.RowShape.of(region, 16384)
        assert (shape.word_bytes, shape.vec) == (word, vec)
        assert shape.grains * shape.grain * word == row_bytes
        assert shape.grain & (shape.grain - 1) == 0
        assert shape.grain % vec == 0


@pytest.mark.parametrize(
    ("row_bytes", "tokens", "units", "several"),
    [(256, 64, 2, 0), (256, 16, 2, 1), (256, 16, 1, 0), (1152, 24, 2, 0), (1152, 1, 9, 1), (2048, 64, 2, 0)],
)
def test_tiles_take_several_units_only_where_one_would_leave_them_empty(
    row_bytes: int, tokens: int, units: int, several: int
) -> None:
    pools = PoolShape(NHD, tokens, 2), PoolShape(HND, tokens, 2)
    region = Move(*pools, row_bytes, tokens, layers=1, kv=1, units=units).open().region
    assert bool(rows.RowShape.of(region, 16384).span) == bool(several)


def side_of(launch: table.Launch, fields: list[int], name: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Of a side: the planes' addresses, the units' offsets, listed in the table or as a first one and a stride, and the
    strides of heads and tokens, in words."""
    words = fields[SIDES[name] :]
    planes, units = fields[table.PLANES.value], fields[table.UNITS.value]
    addresses, place, length, first, stride, head, token = words[: table.SIDE_WORDS.value]
    listed = launch.table[place : place + units] if length else first + np.arange(units) * stride
    return launch.table[addresses : addresses + planes], listed, head, token


@pytest.mark.parametrize(
    ("row_bytes", "tokens", "whole"),
    [
        *[
            (256, 64, 2),
            (256, 16, 8),
            (256, 24, 4),
            (256, 20, 8),
            (256, 8, 0),
            (656, 24, 2),
            (656, 16, 4),
            (8192, 1, 4),
            (1024, 3, 8),
        ],
        *[(2048, 9, 2), (2048, 18, 1), (1024, 41, 1), (2048, 22, 0), (2048, 11, 0), (256, 33, 4), (1024, 5, 8)],
    ],
)
def test_a_tile_of_a_budget_takes_whole_units_where_they_fill_it(row_bytes: int, tokens: int, whole: int) -> None:
    """A head slice of 64 tokens of 256 B is half of a tile; of latents by pages of 16, 18 KiB, a tile takes two, and of
    pages of 32 one. Units below 4 KiB, above a tile and a third, or of which those that fit fill less of a tile than
    three quarters, are taken by the row, as ever."""
    pools = PoolShape(NHD, tokens, 2), PoolShape(NHD, tokens, 3)
    region = Move(*pools, row_bytes, tokens, layers=1, kv=1, units=9).open().region
    launch = rows.describe([region], BUDGETED)
    (shape,) = launch.shapes
    assert (shape.span == WHOLE_UNITS.value) == bool(whole)
    assert shape.tokens == (tokens if whole else 0)
    if whole:
        assert launch.tiles == -(-9 // whole) * region.heads
    assert rows.RowShape.of(region, RowConfig().block_bytes).span != WHOLE_UNITS.value


def test_units_of_another_length_are_not_moved_as_whole_ones() -> None:
    """Pages that begin out of step share fewer tokens: a kernel for whole pages has code for their rows too."""
    nhd = PoolShape(NHD, 64, 2)
    whole, fewer = (Move(nhd, nhd, 256, tokens, units=9).open().region for tokens in (64, 16))
    own, theirs = (rows.RowShape.of(each, BUDGETED) for each in (whole, fewer))
    assert own.serves(own, whole)
    assert not own.serves(theirs, fewer)
    assert own.of_any_units.serves(theirs, fewer)
    standing = rows.standing_program([whole], (1, 1), 8).shapes
    assert [shape.span for shape in standing] == [WHOLE_UNITS.value, SEVERAL_UNITS.value, SEVERAL_UNITS.value]
    launch = rows.describe([whole, fewer], BUDGETED, standing)
    assert launch.shapes == standing
    assert launch.header[:, table.SHAPE.value].tolist() == [0, 1]


@pytest.mark.parametrize("moves", TOGETHER.values(), ids=TOGETHER.keys())
@pytest.mark.parametrize("block_bytes", [256, 16384])
def test_the_table_holds_every_address_and_every_tile_once(moves: list[Move], block_bytes: int) -> None:
    work = [region for move in moves if (region := move.open().region).nbytes]
    if not work:
        return
    launch = rows.describe(work, block_bytes)
    assert launch.table.dtype == np.int64
    assert launch.regions == len(work)
    tiles = [0]
    for region, fields in zip(map(rows.recut, work), launch.header.tolist(), strict=True):
        shape, pieces = launch.shapes[fields[table.SHAPE.value]], fields[table.PIECES.value]
        loops = [fields[word.value] for word in (table.UNITS, table.PLANES, table.HEADS, table.TOKENS)]
        assert loops == [region.units, region.planes, region.heads, region.tokens]
        assert fields[table.GRAINS.value] * shape.grain * shape.word_bytes == region.row_bytes
        for name in SIDES:
            side: Side = getattr(region, name)
            addresses, words, head, token = side_of(launch, fields, name)
            assert np.array_equal(addresses, side.addresses())
            assert np.array_equal(words * shape.word_bytes, side.units)
            assert region.heads == 1 or head * shape.word_bytes == side.head_bytes
            assert region.tokens == 1 or token * shape.word_bytes == side.token_bytes
        in_piece = region.tokens * region.row_bytes * (region.units if shape.span else 1)
        tile_bytes = block_bytes // 16 * shape.vec * shape.word_bytes
        assert (pieces - 1) * tile_bytes < in_piece <= pieces * tile_bytes
        tiles.append(pieces * region.planes * region.heads * (1 if shape.span else region.units))
    assert launch.header[:, table.FIRST_TILE.value].tolist() == list(accumulate(tiles))[:-1]
    assert launch.tiles == sum(tiles)
    assert len(set(launch.shapes)) == len(launch.shapes)


@pytest.mark.parametrize("far", FAR, ids=str)
def test_the_table_holds_offsets_past_32_bits(far: FarMove, sparse: torch.Tensor) -> None:
    one = np.zeros(1, np.int64)
    side = Side.of((sparse,), one, one + far.offset, np.array(far.units), far.head_bytes, far.token_bytes)
    region = Region(side, side, far.heads, far.tokens, far.row_bytes)
    region.check()
    launch = rows.describe([region], 16384)
    word = launch.shapes[0].word_bytes
    (address,), units, head_words, token_words = side_of(launch, launch.header[0].tolist(), "src")
    starts = [
        int(address) + word * (unit + head * head_words + token * token_words)
        for unit in units.tolist()
        for head in range(far.heads)
        for token in range(far.tokens)
    ]
    assert starts == [sparse.data_ptr() + start for start in far.starts()]


def test_more_words_than_32_bits_count_are_refused(sparse: torch.Tensor) -> None:
    zero = np.zeros(1, np.int64)
    here, there = (Side.of((sparse,), zero, zero + first, zero, 0, 4) for first in (0, 8 << 30))
    fits, too_many = (Region(here, there, 1, tokens, 3) for tokens in (1 << 29, 1 << 30))
    too_many.check()
    assert rows.describe([fits], 16384).tiles == 3 << 19
    with pytest.raises(RegionError, match=f"{3 << 30} bytes in words of 1"):
        rows.describe([too_many], 16384)


def test_more_tiles_than_32_bits_count_are_refused() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    planes, units = np.zeros(1 << 15, np.int64), np.zeros(1 << 15, np.int64)
    side = Side.of((memory,), planes, planes, units, 0, 0)
    with pytest.raises(RegionError, match=f"{1 << 30} tiles in one launch"):
        rows.describe([Region(side, side, 1, 1, 16)], 16)


def test_tables_for_the_cpu_are_not_copied() -> None:
    table = np.arange(5)
    assert Upload(torch.device("cpu")).to_device(table).data_ptr() == table.ctypes.data


@pytest.mark.parametrize("row_bytes", [1, 3, 12, 82, 132, 656, 1152, 4096])
@pytest.mark.parametrize("tokens", [1, 5, 14, 64])
def test_contiguous_tokens_are_cut_anew_into_the_same_bytes(row_bytes: int, tokens: int) -> None:
    move = Move(PoolShape(HND, tokens, 2), PoolShape(HND, tokens, 2), row_bytes, tokens, units=2)
    region = move.open().region
    cut = rows.recut(region)
    assert cut.tokens * cut.row_bytes == tokens * row_bytes
    assert (cut.heads, cut.units, cut.planes, cut.nbytes) == (region.heads, region.units, region.planes, region.nbytes)
    for old, new in ((region.src, cut.src), (region.dst, cut.dst)):
        assert tokens == 1 or new.token_bytes == cut.row_bytes
        assert new.head_bytes == old.head_bytes
        assert np.array_equal(new.addresses(), old.addresses())
        assert new.units is old.units
    assert cut.alignment() >= region.alignment()


def test_rows_of_132_bytes_that_follow_each_other_move_in_the_widest_words() -> None:
    region = Move(PoolShape(HND, 64, 2), PoolShape(HND, 64, 2), 132, 64).open().region
    (shape,) = rows.describe([region], 16384).shapes
    assert (shape.word_bytes, shape.vec) == (8, 2)
    assert rows.RowShape.of(region, 16384).word_bytes == 4


def test_tokens_that_do_not_follow_each_other_keep_their_rows() -> None:
    region = Move(PoolShape(NHD, 16, 4), PoolShape(HND, 16, 2), 132, 16).open().region
    assert rows.recut(region) is region


def test_the_moves_of_these_tests_reach_every_word_and_both_kinds_of_tile() -> None:
    regions = [rows.recut(move.open().region) for move in MOVES if move.units * move.layers]
    shapes = [rows.RowShape.of(region, 1024) for region in regions]
    assert {(shape.word_bytes, shape.vec) for shape in shapes} == {(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)}
    assert {shape.span for shape in shapes} == {each.value for each in (ONE_UNIT, SEVERAL_UNITS, TOKEN_UNITS)}
    budgeted = [rows.RowShape.of(rows.recut(move.open().region), BUDGETED) for move in WHOLE]
    assert {shape.span for shape in budgeted} == {WHOLE_UNITS.value}
    assert {(shape.word_bytes, shape.vec) for shape in budgeted} == {(8, 2), (4, 1), (1, 1)}
    assert {shape.grains for shape in budgeted} == {1, 41}
    assert {(shape.src_kind, shape.dst_kind) for shape in shapes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {shape.grains > 1 for shape in shapes if not shape.span} == {True, False}
    assert len(set(ids(MOVES))) == len(MOVES)


def test_a_launch_uploads_one_offset_a_unit_of_the_pool_and_one_address_a_plane() -> None:
    """32k tokens of 80 layers in pages of 64, gathered: 6,832 bytes for 1.3 GB."""
    planes, pages = 160, 512
    none = np.zeros(planes, np.int64)
    memory = (torch.empty(0, dtype=torch.uint8),)
    scattered = np.random.default_rng(0).permutation(pages) * 65536
    pool, wire = (Side.of(memory, none, none, units, 256, 1024) for units in (scattered, np.arange(pages) * 16384))
    launch = rows.describe([Region(pool, wire, 1, 64, 256)], RowConfig().block_bytes)
    assert launch.table.nbytes == 8 * (rows.WORDS.value + 2 * planes + pages) == 6832


@pytest.mark.parametrize(
    ("module", "shape"), [(rows, rows.RowShape), (digest, digest.DigestShape), (convert, convert_overlaps.ColumnShape)]
)
def test_a_kernel_finds_each_field_of_a_shape_by_its_name(module: Any, shape: Any) -> None:
    names = {name: at.value for name, at in vars(module).items() if name.startswith("OF_")}
    assert names == {f"OF_{field.upper()}": at for at, field in enumerate(shape._fields)}
