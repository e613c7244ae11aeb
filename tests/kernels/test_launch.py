"""What the row mover tells the kernel: one launch, the widest words, and 64-bit offsets."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from row_moves import FAR, HND, MOVES, NHD, TOGETHER, FarMove, Move, PoolShape, ids

from kvmover.kernels import rows
from kvmover.kernels.config import RowConfig
from kvmover.kernels.region import Region, RegionError, Side
from kvmover.kernels.upload import Upload

FIELDS = rows.FIELDS.value


class Counter:
    """Stands in for the kernel: counts launches and keeps what each was given."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[tuple[object, ...]] = []
        self.options: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, ...]):  # noqa: ANN204
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
    nbytes = 2 * 3 * 16 * row_bytes
    memory = tuple(torch.zeros(nbytes, dtype=torch.uint8) for _ in range(allocations))
    planes = np.arange(2 * layers) % allocations
    units = np.arange(3) * 2 * 16 * row_bytes
    dense = Side(memory, planes, np.zeros_like(planes), units, 16 * row_bytes, row_bytes)
    apart = Side(memory, planes, np.zeros_like(planes), units, row_bytes, 2 * row_bytes)
    return Region(dense, apart, 2, 16, row_bytes)


@pytest.mark.parametrize("layers", [1, 2, 80])
def test_one_launch_however_many_layers(kernel: Counter, layers: int) -> None:
    rows.move([layers_of(layers), layers_of(layers, 1152, allocations=2 * layers)])
    assert len(kernel.grids) == 1


def test_one_launch_for_all_components_and_destinations(kernel: Counter) -> None:
    regions = [layers_of(80, row_bytes) for row_bytes in (256, 1152, 132, 3) for _ in range(3)]
    rows.move(regions, sms=4)
    assert len(kernel.grids) == 1
    _, count, tiles = kernel.arguments[0]
    assert count == 12
    assert tiles == rows.describe(regions, RowConfig().block_bytes).tiles


def test_no_launch_for_nothing(kernel: Counter) -> None:
    rows.move([])
    rows.move([each.open().region for each in TOGETHER["only-nothing"]])
    assert not kernel.grids


@pytest.mark.parametrize(
    ("sms", "programs"), [(None, 1000), (1, 8), (3, 24), (124, 992), (125, 1000), (500, 1000)], ids=str
)
def test_the_budget_is_the_grid(sms: int | None, programs: int) -> None:
    assert RowConfig().programs(1000, sms, torch.device("cpu")) == programs


def test_the_budget_and_the_configuration_reach_the_launch(kernel: Counter) -> None:
    rows.move([layers_of(80)], RowConfig(block_bytes=1024, warps=8, programs_per_sm=2), sms=3)
    assert kernel.grids == [(6,)]
    assert kernel.options[0]["BLOCK"] == 1024
    assert kernel.options[0]["num_warps"] == 8


@pytest.mark.parametrize(
    ("row_bytes", "misaligned", "word", "vec"),
    [(256, 0, 8, 2), (1152, 0, 8, 2), (656, 0, 8, 2), (256, 8, 8, 1), (24, 0, 8, 1), (256, 4, 4, 1), (12, 0, 4, 1)]
    + [(256, 2, 2, 1), (82, 0, 2, 1), (256, 1, 1, 1), (256, 5, 1, 1), (3, 0, 1, 1)],
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


def test_tiles_span_units_only_where_one_unit_would_leave_them_empty() -> None:
    spans = {
        (row_bytes, tokens, units): rows.RowShape.of(
            Move(PoolShape(NHD, tokens, 2), PoolShape(HND, tokens, 2), row_bytes, tokens, units=units).open().region, 16384
        ).span
        for row_bytes, tokens, units in [(256, 64, 2), (256, 16, 2), (256, 16, 1), (1152, 24, 2), (1152, 1, 9), (2048, 64, 2)]
    }
    assert list(spans.values()) == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("moves", TOGETHER.values(), ids=TOGETHER.keys())
@pytest.mark.parametrize("block_bytes", [256, 16384])
def test_the_table_holds_every_address_and_every_tile_once(moves: list[Move], block_bytes: int) -> None:
    work = [region for move in moves if (region := move.open().region).nbytes]
    if not work:
        return
    launch = rows.describe(work, block_bytes)
    assert launch.table.dtype == np.int64
    assert launch.regions == len(work)
    header = launch.table[: len(work) * FIELDS].reshape(len(work), FIELDS)
    tiles = [0]
    for region, fields in zip(work, header.tolist(), strict=True):
        shape = launch.shapes[fields[14]]
        assert fields[1:5] == [region.units, region.planes, region.heads, region.tokens]
        for side, plane_at, unit_at, head, token in (
            (region.src, fields[5], fields[7], fields[9], fields[10]),
            (region.dst, fields[6], fields[8], fields[11], fields[12]),
        ):
            assert np.array_equal(launch.table[plane_at : plane_at + region.planes], side.addresses())
            words = launch.table[unit_at : unit_at + region.units]
            assert np.array_equal(words * shape.word_bytes, side.units)
            assert region.heads == 1 or head * shape.word_bytes == side.head_bytes
            assert region.tokens == 1 or token * shape.word_bytes == side.token_bytes
        in_piece = region.tokens * region.row_bytes * (region.units if shape.span else 1)
        tile_bytes = block_bytes // 16 * shape.vec * shape.word_bytes
        assert (fields[13] - 1) * tile_bytes < in_piece <= fields[13] * tile_bytes
        tiles.append(fields[13] * region.planes * region.heads * (1 if shape.span else region.units))
    assert header[:, 0].tolist() == list(accumulate(tiles))[:-1]
    assert launch.tiles == sum(tiles)
    assert len(set(launch.shapes)) == len(launch.shapes)


@pytest.mark.parametrize("far", FAR, ids=str)
def test_the_table_holds_offsets_past_32_bits(far: FarMove, sparse: torch.Tensor) -> None:
    one = np.zeros(1, np.int64)
    side = Side((sparse,), one, one + far.offset, np.array(far.units), far.head_bytes, far.token_bytes)
    region = Region(side, side, far.heads, far.tokens, far.row_bytes)
    region.check()
    launch = rows.describe([region], 16384)
    word = launch.shapes[0].word_bytes
    fields = launch.table.tolist()
    starts = [
        fields[fields[5]] + word * (unit + head * fields[9] + token * fields[10])
        for unit in fields[fields[7] :][: len(far.units)]
        for head in range(far.heads)
        for token in range(far.tokens)
    ]
    assert starts == [sparse.data_ptr() + start for start in far.starts()]


def test_more_words_than_32_bits_count_are_refused(sparse: torch.Tensor) -> None:
    zero = np.zeros(1, np.int64)
    here, there = (Side((sparse,), zero, zero + first, zero, 0, 3) for first in (0, 8 << 30))
    fits, too_many = (Region(here, there, 1, tokens, 3) for tokens in (1 << 29, 1 << 30))
    too_many.check()
    assert rows.describe([fits], 16384).tiles == 3 << 19
    with pytest.raises(RegionError, match=f"{3 << 30} bytes in words of 1"):
        rows.describe([too_many], 16384)


def test_more_tiles_than_32_bits_count_are_refused() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    planes, units = np.zeros(1 << 16, np.int64), np.zeros(1 << 15, np.int64)
    side = Side((memory,), planes, planes, units, 0, 0)
    with pytest.raises(RegionError, match=f"{1 << 31} tiles in one launch"):
        rows.describe([Region(side, side, 1, 1, 16)], 16)


def test_tables_for_the_cpu_are_not_copied() -> None:
    table = np.arange(5)
    assert Upload(torch.device("cpu")).to_device(table).data_ptr() == table.ctypes.data


def test_the_moves_of_these_tests_reach_every_word_and_both_kinds_of_tile() -> None:
    shapes = [rows.RowShape.of(region, 1024) for region in map(region_of, MOVES) if region.nbytes]
    assert {(shape.word_bytes, shape.vec) for shape in shapes} == {(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)}
    assert {shape.span for shape in shapes} == {0, 1}
    assert {shape.grains > 1 for shape in shapes if not shape.span} == {True, False}
    assert len(set(ids(MOVES))) == len(MOVES)


def region_of(move: Move) -> Region:
    return move.open().region
