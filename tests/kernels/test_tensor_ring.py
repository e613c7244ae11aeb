"""TensorBoxes of tensor copies: the bytes that their maps name, which rows are boxes, and what the driver is asked for.

The driver is a stand-in, compiled from NVIDIA's own declaration of the call: it refuses what the header forbids.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bulk_cases import ALIGNED, AT, MEMORY, Locate, any_moves, emulate, locate, named
from fake_driver import HEADERS, fake_driver
from hypothesis import given
from row_moves import HND, NHD, PACKED, SCRAMBLED, Move, PoolShape, ids, run

from kvmover.kernels import bulk, cuda_driver, experimental
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.experimental import RING, NoBox, Pieces, TensorBoxes, tensor_boxes
from kvmover.kernels.region import Region, Side, merged
from tests.proofs import family, searched

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=family(HEADERS, few=["newest"]))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_driver("tensor_maps.c", request.param, tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(cuda_driver, "library", lambda: library)
    experimental._maps.cache_clear()
    return library


def encoded(driver: ctypes.CDLL) -> int:
    return ctypes.c_uint.in_dll(driver, "encoded").value


SLICE = Move(PoolShape(NHD, 64, 4), PoolShape(PACKED, 64, 2), 256, 64, src_head=1)
WITH_BOXES = [
    SLICE,
    replace(SLICE, src=PoolShape(PACKED, 64, 2), dst=PoolShape(NHD, 64, 4), src_head=0, dst_head=2),
    Move(PoolShape(NHD, 16, 4), PoolShape(NHD, 16, 3), 656, 16, dst_head=1),  # at a pitch on both sides
    Move(PoolShape(SCRAMBLED, 16, 2), PoolShape(HND, 16, 2), 48, 16),  # pages lie inside of a token's pitch
    Move(PoolShape(NHD, 16, 2, ("layer", "kv")), PoolShape(PACKED, 4, 2), 1024, 4, layers=3),
    Move(PoolShape(NHD, 512, 2), PoolShape(PACKED, 512, 1), 16, 512, heads=1, units=2),  # of more rows than a box has
    Move(PoolShape(NHD, 40, 2), PoolShape(PACKED, 40, 1), 2048, 40, heads=1, units=2),  # more bytes than a stage has
    Move(PoolShape(NHD, 8, 2), PoolShape(PACKED, 8, 1), 256, 8, heads=1, taken=("even", "backwards")),
]


@pytest.mark.parametrize("move", WITH_BOXES, ids=ids(WITH_BOXES))
def test_maps_name_every_byte_once(move: Move, how: Locate) -> None:
    assert isinstance(tensor_boxes(merged(move.open().region), RING.stage_bytes), TensorBoxes)
    run([move], partial(emulate, how=how, shape=RING, of=Pieces.BOXES))


@pytest.mark.parametrize("move", ALIGNED[::4], ids=ids(ALIGNED[::4]))
def test_boxes_and_runs_are_the_same_bytes(move: Move) -> None:
    run([move], partial(emulate, how=locate, of=Pieces.BOXES))


def test_boxes_and_runs_share_a_launch(how: Locate) -> None:
    several = [*WITH_BOXES[:5], *ALIGNED[::9]]
    run(several, partial(emulate, how=how, shape=RING, blocks=7, of=Pieces.BOXES))


@searched(few=20, many=300)
@given(move=any_moves().filter(lambda move: move.row_bytes % 16 == 0))
def test_any_move_of_aligned_rows_lands_by_boxes(move: Move) -> None:
    run([move], partial(emulate, how=locate, of=Pieces.BOXES))


def test_a_head_slice_of_a_page_is_one_box() -> None:
    region = SLICE.open().region
    found = tensor_boxes(merged(region), RING.stage_bytes)
    assert isinstance(found, TensorBoxes)
    assert (found.row_bytes, found.rows, found.count, found.nbytes) == (256, 64, 1, 16384)
    assert (found.src is None, found.dst is None) == (False, True)
    launch = experimental.describe([region], RING, Pieces.BOXES)
    pages_heads_and_planes = 5 * 2 * 4
    assert launch.table[AT.COUNT] == pages_heads_and_planes
    assert launch.tiles == pages_heads_and_planes // 2  # a stage holds two
    assert experimental.describe([region], RING).table[AT.COUNT] == 64 * pages_heads_and_planes


def test_a_map_is_a_plane_as_rows_of_its_pitch() -> None:
    """An NHD pool of 4 heads of 256 B: rows of 1,024 B, boxes of 64 rows of 256 B; head 1 begins at word 32."""
    opened = SLICE.open()
    table = experimental.describe([opened.region], RING, Pieces.BOXES).table
    side, planes = opened.region.src, opened.region.src.planes
    for plane in range(4):
        place = int(table[AT.SRC + AT.ADDRESSES]) + plane * experimental.MAP_WORDS
        address, width, height, pitch, box = table[place : place + 5].tolist()
        assert (address, width, pitch) == (planes.addresses[plane], 128, 1024)
        assert (box & 0xFFFFFFFF, box >> 32) == (32, 64)
        assert height == (planes.sizes[plane] - planes.offset[plane]) // 1024
    units = int(table[AT.SRC + AT.LIST])
    assert (table[units : units + 5] >> 32).tolist() == (side.units // 1024).tolist()
    assert (table[units : units + 5] & 0xFFFFFFFF).tolist() == [32] * 5
    assert (table[AT.SRC + AT.HEAD_STRIDE], table[AT.MAPPED]) == (32, experimental.SRC_MAPPED)


def test_maps_are_encoded_once_for_planes_that_stay(driver: ctypes.CDLL) -> None:
    opened = SLICE.open()
    before = encoded(driver)
    for units in (slice(5), slice(1, 3)):
        some = (replace(side, units=side.units[units]) for side in (opened.region.src, opened.region.dst))
        experimental.describe([Region(*some, 2, 64, 256)], RING, Pieces.BOXES)
    assert encoded(driver) - before == 4


def region(pitch: int, row: int, tokens: int, units: tuple[int, ...] = (0,), heads: int = 1, step: int = 0) -> Region:
    """Rows at a pitch, gathered. Nothing is touched: the memory has no bytes for them."""
    zero, starts = np.zeros(1, np.int64), np.array(units, np.int64)
    src = Side.of((MEMORY,), zero, zero, starts, step, pitch)
    packed = np.arange(len(units)) * heads * tokens * row
    return Region(src, Side.of((MEMORY,), zero, zero, packed, tokens * row, row), heads, tokens, row)


@pytest.mark.parametrize(
    ("given", "rows", "count"),
    [
        (region(1024, 256, 64), 64, 1),
        (region(1024, 256, 256), 128, 2),  # 32 KiB are a stage
        (region(64, 16, 1024), 256, 4),
        (region(4096, 2048, 48), 16, 3),
        (region(4096, 2048, 17 * 3), 3, 17),  # 16 rows would fit, 3 are what divides a unit
        (region(1024, 256, 64, (256, 1024 + 768)), 64, 1),
        (region(512, 256, 16, (0,), 4, 64 * 512), 16, 1),  # heads beyond tokens, K beside V in a row
        (region((1 << 35) - 16, 16, 2), 2, 1),
    ],
)
def test_rows_at_a_pitch_are_boxes_of_what_divides_a_unit(given: Region, rows: int, count: int) -> None:
    found = tensor_boxes(given, RING.stage_bytes)
    assert isinstance(found, TensorBoxes)
    assert (found.rows, found.count) == (rows, count)
    assert found.rows <= 256
    assert found.nbytes <= RING.stage_bytes


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (region(256, 256, 64), NoBox.ONE_ROW),
        (region(1024, 256, 1, (0, 4096)), NoBox.ONE_ROW),
        (region(1032, 256, 64), NoBox.ALIGNMENT),
        (region(1024, 256, 64, (8,)), NoBox.ALIGNMENT),
        (region(4096, 2064, 64), NoBox.WIDE),
        (region(128, 256, 4), NoBox.OVERLAP),
        (region(0, 256, 4), NoBox.OVERLAP),
        (region(1 << 35, 256, 4), NoBox.FAR),
        (region(1024, 256, 64, (0, 800)), NoBox.SPLIT),
        (region(1024, 256, 64, (512,), 4, 256), NoBox.SPLIT),
        (region(1024, 256, 64, (-1024,)), NoBox.OUTSIDE),
        (region(16, 16, 64, ((1 << 35) - 16,), 1), NoBox.ONE_ROW),
        (region(32, 16, 64, (32 * ((1 << 31) - 63),)), NoBox.OUTSIDE),
        (region(1024, 256, 257), NoBox.ALONE),
    ],
)
def test_what_is_no_box_has_a_reason(given: Region, reason: NoBox) -> None:
    assert tensor_boxes(given, RING.stage_bytes) is reason


def test_the_first_row_that_coordinates_do_not_reach_is_the_next() -> None:
    found = tensor_boxes(region(32, 16, 64, (32 * ((1 << 31) - 64),)), RING.stage_bytes)
    assert isinstance(found, TensorBoxes)
    assert found.src is not None
    assert int(found.src.starts[0]) >> 32 == (1 << 31) - 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": 8},
        {"dims": (128, 0)},
        {"dims": (128, (1 << 32) + 1)},
        {"pitches": (1032,)},
        {"pitches": (1 << 40,)},
        {"box": (257, 1)},
        {"box": (32, 257)},
        {"box": (33, 1)},
        {"dims": (2,) * 6, "pitches": (1024,) * 5, "box": (2,) * 6},
    ],
    ids=str,
)
def test_what_the_driver_cannot_encode_is_an_error(wrong: dict[str, object]) -> None:
    good = {"address": 1 << 20, "dims": (128, 64), "pitches": (1024,), "box": (32, 64)}
    assert len(experimental.encode_map(**good)) == experimental.MAP_WORDS  # pyright: ignore
    with pytest.raises(cuda_driver.CudaError, match="cuTensorMapEncodeTiled of .* failed with CUDA error 1"):
        experimental.encode_map(**good | wrong)  # pyright: ignore


def test_the_tensor_ring_is_an_engine_where_the_machine_has_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = bulk.unavailable.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert reason(CopyEngine.TENSOR, CUDA) == "cuda:0 is sm_89, bulk copies came with sm_90"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(experimental, "cannot_compile", lambda _: None)
    assert reason(CopyEngine.TENSOR, CUDA) is None
    monkeypatch.setattr(cuda_driver, "library", lambda: SimpleNamespace())
    assert "CUDA 12" in str(reason(CopyEngine.TENSOR, CUDA))
    assert reason(CopyEngine.BULK, CUDA) is None


def test_a_prepared_move_uploads_its_maps_with_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to launch is the ring's, whose table begins at a multiple of 64 bytes on the device, as maps do."""
    seen: list[np.ndarray] = []
    keep = SimpleNamespace(to_device=lambda table: seen.append(table) or torch.from_numpy(table))
    monkeypatch.setattr(experimental.Upload, "here", lambda _: keep)
    opened = SLICE.open()
    experimental.prepared(CopyEngine.TENSOR, [opened.region], CUDA, 4, None)
    piece = locate(seen[0], 0, 0, 0, AT.SRC)
    assert len(named(seen[0], piece)) == 64
    assert piece[2] * 8 % 64 == 0
