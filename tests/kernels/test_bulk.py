"""Bulk moves without a GPU: what runs and copies they are, the engine for them, and what the driver is handed."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bulk_cases import MEMORY, any_moves, between, copied, line
from hypothesis import given, settings
from hypothesis import strategies as st
from row_moves import MOVES, NHD, PACKED, Move, PoolShape, ids, run

from kvmover.kernels import bulk, crossover, cuda_driver, experimental, reference
from kvmover.kernels.copy_engine import EXPERIMENTAL, CopyEngine
from kvmover.kernels.crossover import Crossover
from kvmover.kernels.region import Region, RegionError, Side, copies, mean_copy, merged


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_merged_runs_are_the_same_bytes(move: Move) -> None:
    def moved(regions: list[Region]) -> None:
        longer = [merged(region) for region in regions]
        assert [region.nbytes for region in longer] == [region.nbytes for region in regions]
        assert all(merged(region) is region for region in longer)
        reference.move(longer)

    run([move], moved)


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_copies_are_the_same_bytes(move: Move) -> None:
    run([move], copied)


@settings(max_examples=60)
@given(move=any_moves())
def test_copies_of_any_move_are_the_same_bytes(move: Move) -> None:
    run([move], copied)


@settings(max_examples=80)
@given(
    starts=st.permutations(range(8)).flatmap(lambda p: st.tuples(st.just(p), st.permutations(range(8)))),
    planes=st.integers(1, 3),
)
def test_pages_that_follow_each_other_are_one_copy(starts: tuple[list[int], list[int]], planes: int) -> None:
    sides = [
        Side.of((MEMORY,), np.zeros(planes, np.int64), offset, np.array(pages) * 4096, 4096, 4096)
        for pages, offset in zip(starts, (np.arange(planes) * (9 << 12), np.arange(planes) * (8 << 12)), strict=True)
    ]
    region = merged(Region(*sides, 1, 1, 4096))
    src, dst, sizes = copies(region)
    assert sizes.sum() == region.nbytes
    assert np.isclose(mean_copy(region), sizes.mean())
    follows = (src[:-1] + sizes[:-1] == src[1:]) & (dst[:-1] + sizes[:-1] == dst[1:])
    assert not follows[np.arange(1, len(src)) % (len(src) // planes) != 0].any()


def test_no_copy_spans_two_allocations_that_touch() -> None:
    whole = torch.zeros(8192, dtype=torch.uint8)
    planes, zero = np.arange(2), np.zeros(2, np.int64)
    side = Side.of((whole[:4096], whole[4096:]), planes, zero, np.zeros(1, np.int64), 0, 0)
    assert [len(each) for each in copies(Region(side, side, 1, 1, 4096))] == [2, 2, 2]


@pytest.mark.parametrize(
    ("src", "dst", "copies", "nbytes", "engine"),
    [
        ("cpu", "meta", 16, 28 << 10, CopyEngine.COPY),
        ("cpu", "meta", 16, (28 << 10) - 16, CopyEngine.ROWS),
        ("cpu", "meta", 15, 4104, CopyEngine.COPY),
        ("cpu", "meta", 4096, 4104, CopyEngine.ROWS),
        ("meta", "cpu", 4096, 4104, CopyEngine.COPY),
        ("meta", "meta", 16, 1 << 20, CopyEngine.ROWS),
    ],
)
def test_an_engine_is_chosen_by_direction_number_of_copies_and_size(
    src: str, dst: str, copies: int, nbytes: int, engine: CopyEngine
) -> None:
    assert bulk.choose(between(src, dst, nbytes, units=copies)) is engine


def test_copies_are_counted_by_what_is_contiguous_on_both_sides() -> None:
    assert bulk.choose(between("cpu", "meta", 2048, apart=1, units=64)) is CopyEngine.COPY
    assert bulk.choose(between("cpu", "meta", 64 << 10, offset=8, units=16)) is CopyEngine.COPY
    assert bulk.choose(between("cpu", "meta", 16 << 10, offset=8, units=16)) is CopyEngine.ROWS
    starts = np.repeat(np.arange(16) * 4, 2) * (8 << 10) + np.tile([0, 8 << 10], 16)
    pairs = Region(line(8 << 10, starts), line(8 << 10, starts, "meta"), 1, 1, 8 << 10)
    assert mean_copy(pairs) == 16 << 10
    assert bulk.choose(pairs) is CopyEngine.ROWS
    assert bulk.choose(pairs, Crossover(from_host=((17, 1 << 20),), to_host=())) is CopyEngine.COPY
    assert bulk.choose(pairs, Crossover(from_host=((16, 16 << 10),), to_host=())) is CopyEngine.COPY
    assert bulk.choose(replace(pairs, src=line(8 << 10, starts[::-1])), Crossover(((17, 1 << 20),), ())) is (
        CopyEngine.ROWS
    )


def test_what_is_known_of_a_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    region = between("meta", "cpu", 1024)
    assert bulk.choose(region) is CopyEngine.COPY
    monkeypatch.setattr(crossover, "_known", {})
    crossover.keep(torch.device("meta"), Crossover(from_host=(), to_host=((4, 2048),)))
    assert bulk.choose(region) is CopyEngine.ROWS
    assert bulk.choose(between("cpu", "meta", 1024, units=64)) is CopyEngine.COPY


@settings(max_examples=60)
@given(
    ends=st.sampled_from([("cpu", "meta"), ("meta", "cpu"), ("meta", "meta")]),
    run_bytes=st.integers(1, 1 << 16).map(lambda words: words * 8),
    apart=st.integers(1, 2),
)
def test_no_engine_is_chosen_that_is_experimental_and_within_a_device_the_row_mover_is(
    ends: tuple[str, str], run_bytes: int, apart: int
) -> None:
    chosen = bulk.choose(between(*ends, run_bytes, apart))
    assert chosen not in EXPERIMENTAL
    assert chosen is CopyEngine.ROWS or "cpu" in ends


def test_missing_engines_have_a_reason_and_lists_of_copies_a_replacement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, reason = torch.device("cuda", 0), bulk.unavailable.__wrapped__
    monkeypatch.setattr(cuda_driver, "library", lambda: SimpleNamespace())
    assert "CUDA 12.8" in str(reason(CopyEngine.COPY, device))
    assert "CUDA 12.8" in str(reason(CopyEngine.BOXES, device))
    assert reason(CopyEngine.ROWS, device) is reason(CopyEngine.LOOP, device) is None
    assert reason(CopyEngine.AUTO, torch.device("cpu")) is None
    assert reason(CopyEngine.ROWS, torch.device("cpu")) == "what lies on the CPU is copied by the host"
    monkeypatch.setattr(bulk, "unavailable", reason)
    here = bulk._here.__wrapped__
    with caplog.at_level(logging.INFO):
        assert (here(CopyEngine.COPY, device), here(CopyEngine.ROWS, device)) == (CopyEngine.LOOP, CopyEngine.ROWS)
    assert [record.getMessage() for record in caplog.records] == [
        f"copy_each in place of copy: {reason(CopyEngine.COPY, device)}"
    ]


@pytest.mark.parametrize("engine", [each for each in CopyEngine if each is not CopyEngine.AUTO])
def test_no_engine_of_a_gpu_is_taken_for_memory_of_the_host_which_stays_as_it_is(engine: CopyEngine) -> None:
    zero = np.zeros(1, np.int64)
    sides = (Side.of((torch.full((64,), fill, dtype=torch.uint8),), zero, zero, zero, 16, 16) for fill in (7, 9))
    region = Region(*sides, 1, 1, 64)
    before = region.dst.memory[0].clone()
    with pytest.raises(bulk.EngineUnavailable, match=f"{engine.value}.*: what lies on the CPU is copied by the host"):
        bulk.move([region], engine=engine)
    assert torch.equal(region.dst.memory[0], before)
    bulk.move([], engine=engine)
    bulk.move([region])
    assert not torch.equal(region.dst.memory[0], before)


def test_an_engine_that_was_named_and_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, rows_of_24 = torch.device("cuda", 0), between("meta", "meta", 24)
    monkeypatch.setattr(bulk, "unavailable", lambda engine, device: None)
    refused = "ring, which is experimental: rows aligned to 8 bytes; bulk copies take multiples of 16"
    with pytest.raises(bulk.EngineUnavailable, match=refused):
        bulk.check_engine(CopyEngine.BULK, device, [between("meta", "meta", 4096), rows_of_24])
    for engine in CopyEngine:
        bulk.check_engine(engine, device, [] if engine in experimental.RINGS else [rows_of_24])
    monkeypatch.setattr(bulk, "unavailable", lambda engine, device: "the driver is of 1999")
    for engine in CopyEngine:
        kind = ", which is experimental" if engine in EXPERIMENTAL else ""
        with pytest.raises(bulk.EngineUnavailable, match=f"^{engine.value}{kind}: the driver is of 1999$"):
            bulk.check_engine(engine, device)


def test_what_overlaps_is_refused_before_an_engine_is_chosen() -> None:
    memory, zero = torch.zeros(4096, dtype=torch.uint8, device="meta"), np.zeros(1, np.int64)
    side = Side.of((memory,), zero, zero, np.arange(4) * 1024, 1024, 1024)
    overlapping = Region(side, side, 1, 1, 1024)
    with pytest.raises(RegionError, match="share the byte"):
        bulk.prepare([overlapping])


def test_both_ends_on_the_host_are_copied_by_the_host() -> None:
    run(MOVES[::5], bulk.move)
    bulk.move([])


def test_bad_input_is_refused_before_anything_moves() -> None:
    good = Move(PoolShape(NHD, 4, 2), PoolShape(PACKED, 4, 2), 32, 4).open().region
    before = [tensor.clone() for tensor in good.dst.memory]
    far = replace(good, dst=replace(good.dst, units=good.dst.units + (1 << 20)))
    with pytest.raises(RegionError, match="destination plane 0"):
        bulk.move([good, far])
    with pytest.raises(RegionError, match="destination on meta"):
        bulk.move([good, between("cpu", "meta", 32, units=1)])
    with pytest.raises(ValueError, match="budget of 0"):
        bulk.move([good], sms=0)
    assert all(torch.equal(a, b) for a, b in zip(before, good.dst.memory, strict=True))


class FakeDriver:
    """Copies at once, and notes how it was asked to. CUDA 12 has one more parameter than CUDA 13."""

    def __init__(self, version: int, result: int = 0) -> None:
        self.counts: list[int] = []
        self.attributes: list[list[int]] = []
        self.streams: list[int | None] = []
        self.result = result
        if version == 13:
            self.cuMemcpyBatchAsync_v2 = self._batch
        self.cuMemcpyBatchAsync = self._batch_of_cuda_12

    def _batch_of_cuda_12(self, *arguments: Any) -> int:
        *most, failed, stream = arguments
        assert failed is not None
        return self._batch(*most, stream)

    def _batch(self, *arguments: Any) -> int:
        *lists, count, attributes, indices, attribute_count, stream = arguments
        assert self._words(indices, ctypes.c_size_t, count.value) == [0] * count.value
        assert attribute_count.value == 1
        self.counts.append(count.value)
        self.attributes.append(self._words(attributes, ctypes.c_int32, 6))
        self.streams.append(stream.value)
        for copy in zip(*(self._words(each, ctypes.c_int64, count.value) for each in lists), strict=True):
            ctypes.memmove(*copy)
        return self.result

    @staticmethod
    def _words(pointer: ctypes.c_void_p, kind: Any, count: int) -> list[int]:
        assert pointer.value is not None
        return list((kind * count).from_address(pointer.value))


@pytest.mark.parametrize("version", [12, 13])
def test_a_batch_is_handed_over_in_calls_that_the_driver_survives(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    fake = FakeDriver(version)
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)
    src = np.random.default_rng(0).integers(0, 256, (10_000, 16), dtype=np.uint8)
    dst = np.zeros_like(src)
    at, to = np.random.default_rng(1).permutation(10_000), np.arange(10_000)
    cuda_driver.copy_batch(src.ctypes.data + 16 * at, dst.ctypes.data + 16 * to, np.full(10_000, 16), 77)
    assert np.array_equal(dst, src[at])
    assert fake.counts == [4096, 4096, 1808]
    assert fake.streams == [77] * 3
    assert fake.attributes == [[cuda_driver.ORDER_STREAM, 0, 0, 0, 0, 1]] * 3


def test_long_copies_do_not_ask_to_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(13)
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)
    for nbytes in (cuda_driver.OVERLAP_BYTES, cuda_driver.OVERLAP_BYTES + 1):
        memory = np.zeros(2 * nbytes, np.uint8)
        at = np.array([memory.ctypes.data])
        cuda_driver.copy_batch(at, at + nbytes, np.array([nbytes]), 77)
    assert [words[-1] for words in fake.attributes] == [1, 0]


def test_what_the_driver_refuses_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "library", lambda: FakeDriver(13, result=1))
    nothing = np.zeros(1, np.int64)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with CUDA error 1"):
        cuda_driver.copy_batch(nothing, nothing, nothing, 77)


def test_importing_needs_neither_cupy_nor_a_gpu() -> None:
    code = "import sys; sys.modules['cupy'] = None; import kvmover.kernels.bulk"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
