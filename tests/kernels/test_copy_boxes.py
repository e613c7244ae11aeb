"""Boxes for the copy engine: the bytes they stand for, as few as can be, and the driver's calls; and green contexts.

The driver is a stand-in for host memory, compiled from NVIDIA's own declaration of the call in the header that Triton
brings, so a field at a wrong place moves wrong bytes here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bulk_cases import any_moves
from fake_driver import HEADERS, fake_driver
from hypothesis import given
from row_moves import HND, MOVES, NHD, PACKED, Move, PoolShape, ids, run

from kvmover.kernels import bulk, cuda_driver, experimental, launch
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.experimental import BOX, OPERAND, boxes
from kvmover.kernels.region import Region
from tests.proofs import searched

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=HEADERS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_driver("copy_boxes.c", request.param, tmp_path_factory.mktemp("driver"))


@pytest.fixture
def moved(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    """Moves regions as the copy engine would, on stream 77."""
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)

    def move(regions: Sequence[Region]) -> None:
        for region in regions:
            if region.nbytes:
                experimental.copy_boxes(boxes(region), 77)

    return move


def number(driver: ctypes.CDLL, name: str) -> int:
    return ctypes.c_uint.in_dll(driver, name).value


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_boxes_are_the_same_bytes(move: Move, moved) -> None:
    run([move], moved)


@searched(few=20, many=300)
@given(move=any_moves())
def test_boxes_of_any_move_are_its_bytes_once_each(move: Move) -> None:
    region = move.open().region
    if not region.nbytes:
        return
    found = boxes(region)
    assert found["extent"].prod(axis=1).sum() == region.nbytes
    for side in ("src", "dst"):
        assert (found[side]["pitch"] >= found["extent"][:, 0]).all()
        assert (found[side]["layer_rows"] >= found["extent"][:, 1]).all()


SLICES = Move(PoolShape(NHD, 64, 4), PoolShape(PACKED, 64, 2), 256, 64)
EVEN = Move(PoolShape(NHD, 4, 4), PoolShape(NHD, 4, 4), 64, 4, heads=1, layers=1, taken=("even", "even"))
AS_BOXES = {
    "a-box-a-page-and-head-of-all-planes": (SLICES, (256, 64, 4), 5 * 2),
    "of-one-plane": (replace(SLICES, src=replace(SLICES.src, separate=("layer", "kv"))), (256, 64, 1), 5 * 2 * 4),
    "runs-of-a-page": (Move(PoolShape(HND, 64, 2), PoolShape(HND, 64, 4), 256, 64), (2 * 64 * 256, 4, 1), 5),
    "pages-that-follow-each-other": (EVEN, (64, 5, 2), 4),
}


@pytest.mark.parametrize(("move", "extent", "count"), AS_BOXES.values(), ids=AS_BOXES.keys())
def test_what_is_at_one_distance_is_one_box(move: Move, extent: tuple[int, int, int], count: int) -> None:
    found = boxes(move.open().region)
    assert (found["extent"] == extent).all()
    assert len(found) == count


def test_the_structs_are_as_large_as_the_header_has_them() -> None:
    assert (OPERAND.itemsize, BOX.itemsize) == (40, 112)


def test_boxes_are_handed_over_in_calls_that_the_driver_survives(driver: ctypes.CDLL, moved, monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "BATCH_COPIES", 16)
    before = number(driver, "calls"), number(driver, "boxes")
    run([Move(PoolShape(NHD, 4, 4), PoolShape(PACKED, 4, 2), 32, 4)], moved)
    assert (number(driver, "calls") - before[0], number(driver, "boxes") - before[1]) == (3, 40)
    assert ctypes.c_void_p.in_dll(driver, "stream").value == 77


def test_a_stream_that_the_driver_refuses_is_an_error(driver: ctypes.CDLL, moved) -> None:
    found = boxes(MOVES[0].open().region)
    with pytest.raises(cuda_driver.CudaError, match="cuMemcpy3DBatchAsync failed with CUDA error 1"):
        experimental.copy_boxes(found, 1)


class FakeStream:
    """Notes what is queued, with its own name, in one list."""

    def __init__(self, name: str, handle: int, notes: list[str]) -> None:
        self.name, self.cuda_stream, self.device, self._notes = name, handle, CUDA, notes

    def wait_event(self, event: str) -> None:
        self._notes.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: FakeStream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"an event of {self.name}"


@pytest.mark.parametrize("legacy", [0, 1])
def test_boxes_leave_the_legacy_stream_and_keep_its_order(legacy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    current, own = FakeStream("current", legacy, notes), FakeStream("own", 5, notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(launch, "_own_stream", lambda device: own)
    monkeypatch.setattr(
        experimental, "copy_boxes", lambda found, stream: notes.append(f"{len(found)} boxes on {stream}")
    )
    region = Move(PoolShape(NHD, 4, 4), PoolShape(PACKED, 4, 2), 32, 4).open().region
    call = experimental.prepared(CopyEngine.BOXES, [region, region], CUDA, 8, None)
    call()
    assert notes == ["own waits for an event of current", "80 boxes on 5", "current waits for an event of own"]
    notes.clear()
    current.cuda_stream = 9
    call()
    assert notes == ["80 boxes on 9"]


def test_a_green_context_is_made_once_and_runs_the_unbudgeted_row_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import green_contexts

    from kvmover.kernels import rows

    notes: list[str] = []
    current, green = FakeStream("current", 9, notes), FakeStream("green", 5, notes)

    def create(**given: Any) -> SimpleNamespace:
        notes.append(f"made {given}")
        return SimpleNamespace(Stream=lambda: green)

    @contextmanager
    def on(stream: FakeStream):
        notes.append(f"on {stream.name}")
        yield
        notes.append(f"off {stream.name}")

    def prepared(regions: object, device: object, using: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: notes.append("rows without a budget"))

    monkeypatch.setattr(green_contexts, "GreenContext", SimpleNamespace(create=create))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(rows, "prepared", prepared)
    experimental._green_context.cache_clear()
    for _ in range(2):
        experimental.prepared(CopyEngine.GREEN, [MOVES[0].open().region], CUDA, 8, None)()
    experimental._green_context.cache_clear()
    each = ["green waits for current", "on green", "rows without a budget", "off green", "current waits for green"]
    assert notes == ["made {'num_sms': 8, 'device_id': 0}", *each, *each]


def test_a_machine_without_green_contexts_is_told_why() -> None:
    reason = bulk.unavailable.__wrapped__(CopyEngine.GREEN, CUDA)
    assert torch.cuda.is_available() or str(reason).startswith("no green context on cuda:0: ")
