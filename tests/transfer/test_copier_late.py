"""The half of a copier that runs on a GPU, on one that is late: nothing is done before its stream comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvmover.kernels import bulk, cpu, launch
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.cuda_driver import CudaError
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.region import Region, Side
from kvmover.transfer.memory.chunk_tables import ChunkCopy, ChunkTables
from kvmover.transfer.memory.copier import Copier
from kvmover.transfer.memory.work import Work
from kvmover.transfer.protocol.chunks import Stretch
from tests.perf import make_believe_gpu
from tests.perf.make_believe_gpu import DRIVER, GPU, STREAM, OnGpu

UNITS, UNIT = 16, 1024


@dataclass
class LateGpu:
    """A GPU with one stream beside the default one, which is nobody's here. `given`: the work that is left to do."""

    given: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    current: int = 0

    def passes(self, number: int | None = None) -> None:
        """The stream comes to so much of its work; None: to all of it."""
        for _ in range(len(self.given) if number is None else number):
            self.given.pop(0)()


class LateEvent:
    """Passed when the stream comes to it."""

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu, self.passed = gpu, True

    def record(self, _stream: object = None) -> None:
        self.passed = False
        self.gpu.given.append(partial(setattr, self, "passed", True))

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            self.gpu.passes(1)


class LateStream:
    """The one stream: waiting for it has all of its work done."""

    device = GPU

    def __init__(self, gpu: LateGpu, handle: int) -> None:
        self.gpu, self.cuda_stream = gpu, handle

    def record_event(self) -> LateEvent:
        event = LateEvent(self.gpu)
        event.record()
        return event

    def synchronize(self) -> None:
        self.gpu.passes()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGpu]:
    """Copies and launches wait for the stream, and those on the default stream are refused by an assertion."""
    late = LateGpu()

    @contextmanager
    def on_stream(stream: LateStream) -> Iterator[None]:
        before, late.current = late.current, stream.cuda_stream
        yield
        late.current = before

    copy_ = torch.Tensor.copy_

    def late_copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy_(self, src)
        assert late.current == STREAM
        late.given.append(lambda: copy_(self, src))
        return self

    caches: list[Any] = [launch.choose, launch.architecture, bulk.unavailable]
    for cache in caches:
        cache.cache_clear()
    make_believe_gpu.install(lambda *given: monkeypatch.setattr(*given, raising=False))
    for name, value in {
        "Stream": lambda *_: LateStream(late, STREAM),
        "current_stream": lambda *_: LateStream(late, late.current),
        "stream": on_stream,
        "Event": lambda **_: LateEvent(late),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "_rings", launch._Rings())
    monkeypatch.setattr(DRIVER, "captured_by", late.given)
    monkeypatch.setattr(DRIVER, "fails", "")
    yield late
    for cache in caches:
        cache.cache_clear()


class Pages:
    """Pages of a pool, and an arena that they are packed into: random bytes and zeros, on the GPU."""

    def __init__(self, seed: int = 0) -> None:
        self.ids = np.random.default_rng(seed).permutation(2 * UNITS)[:UNITS]
        generator = torch.Generator().manual_seed(seed)
        plain = torch.randint(0, 256, (2 * UNITS * UNIT,), dtype=torch.uint8, generator=generator)
        self.pool = plain.as_subclass(OnGpu)
        self.arena = torch.zeros(2 * UNITS * UNIT, dtype=torch.uint8, device=GPU)

    def region(self, first: int, count: int, at: int) -> Region:
        """The gather of some units, in order, to a place of the arena."""
        zero, places = np.zeros(1, np.int64), np.arange(count) * UNIT + at
        src = Side.of((self.pool,), zero, zero, self.ids[first : first + count] * UNIT, 0, 256)
        return Region(src, Side.of((self.arena,), zero, zero, places, 0, 256), 1, UNIT // 256, 256)

    def work(self, first: int, count: int, at: int, digests: bool = False) -> Work:
        marks = [self.logical(first, count)] if digests else None
        return Work([self.region(first, count, at)], marks)

    def logical(self, first: int, count: int) -> Logical:
        return Logical(np.zeros(1, np.int64), np.arange(first, first + count) * 4)

    def wanted(self, first: int, count: int) -> torch.Tensor:
        """The bytes that these units have in the pool."""
        pages = make_believe_gpu.on_host(self.pool).view(-1, UNIT)
        return pages[torch.from_numpy(self.ids[first : first + count])].flatten()

    def digest(self, first: int, count: int) -> int:
        """The digest of these units, as the definition has it."""
        region = make_believe_gpu._host(self.region(first, count, 0))
        return cpu.digest([region], [self.logical(first, count)], "src")

    def packed(self, at: int, count: int) -> torch.Tensor:
        return make_believe_gpu.on_host(self.arena)[at : at + count * UNIT]


def test_a_copy_is_reported_once_its_stream_has_passed_it(gpu: LateGpu) -> None:
    pages, copier, said = Pages(), Copier(GPU, 8), list[int | None]()
    copier.run(pages.work(0, 4, 0), said.append)
    while gpu.given:
        copier.poll()
        assert copier.busy
        assert said == []
        gpu.passes(1)
    copier.poll()
    assert not copier.busy
    assert said == [None]
    assert torch.equal(pages.packed(0, 4), pages.wanted(0, 4))


@pytest.mark.parametrize("engine", [CopyEngine.AUTO, CopyEngine.ROWS, CopyEngine.COPY])
def test_a_digest_comes_with_its_copy_as_a_number_without_sign(gpu: LateGpu, engine: CopyEngine) -> None:
    seeds = [seed for seed in range(20) if Pages(seed).digest(2, 5) >= 1 << 63]
    assert seeds
    pages, copier, said = Pages(seeds[0]), Copier(GPU, 8, engine), list[int | None]()
    copier.run(pages.work(2, 5, UNIT, True), said.append)
    assert gpu.given
    copier.settle()
    assert said == [pages.digest(2, 5)]
    assert torch.equal(pages.packed(UNIT, 5), pages.wanted(2, 5))


def test_copies_are_reported_in_order_and_one_that_is_late_holds_up_no_earlier_one(gpu: LateGpu) -> None:
    pages, copier, said, ends = Pages(), Copier(GPU, None), list[int](), list[int]()
    for number in range(3):
        copier.run(pages.work(4 * number, 4, 4 * number * UNIT), lambda _, n=number: said.append(n))
        ends.append(len(gpu.given))
    for number in range(3):
        gpu.passes(ends[number] - (ends[number - 1] if number else 0))
        copier.poll()
        assert said == list(range(number + 1))
        assert copier.busy == (number < 2)
    assert torch.equal(pages.packed(0, 12), pages.wanted(0, 12))


@pytest.mark.parametrize("digests", [False, True])
def test_chunks_take_their_part_of_tables_that_went_up_once(gpu: LateGpu, digests: bool) -> None:
    """The arena holds a chunk at another place than the one before; a fourth has other lists."""
    pages, tables, copier, said = Pages(), ChunkTables(), Copier(GPU, 8), list[int | None]()
    uploads, staged, lists = [], [3 * UNIT, 9 * UNIT, 15 * UNIT], pages.ids * UNIT

    def copied(first: int, at: int, source: Any) -> None:
        stretch = Stretch((0,), first, source, None, np.arange(UNITS) * 4)
        work = partial(_staged_work, pages, first, digests)
        copier.copy(ChunkCopy(work, at, digests, tables, lambda: stretch, None), said.append)
        uploads.append(sum(kept is not None for kept in tables._kept.values()))

    for number, at in enumerate(staged):
        copied(4 * number, at, lists)
    kept = next(iter(tables._kept.values()))
    copied(12, 21 * UNIT, lists.copy())
    assert next(iter(tables._kept.values())) is not kept, "lists that grew go up anew"
    copier.settle()
    for number, at in enumerate([*staged, 21 * UNIT]):
        assert torch.equal(pages.packed(at, 4), pages.wanted(4 * number, 4))
    assert said == [pages.digest(4 * n, 4) if digests else None for n in range(4)]
    assert uploads == [1] * 4


def _staged_work(pages: Pages, first: int, digests: bool, at: int) -> Work:
    return pages.work(first, 4, at, digests)


@pytest.mark.parametrize("engine", [CopyEngine.AUTO, CopyEngine.COPY])
def test_a_chunk_without_a_part_has_a_table_of_its_own(gpu: LateGpu, engine: CopyEngine) -> None:
    pages, copier, said = Pages(), Copier(GPU, 8, engine), list[int | None]()
    asked = list[int]()
    chunk = ChunkCopy(
        partial(_staged_work, pages, 4, True), 2 * UNIT, True, ChunkTables(), lambda: asked.append(1), None
    )
    copier.copy(chunk, said.append)
    assert len(asked) == (engine is CopyEngine.AUTO), "of the copy engine no table is asked for"
    copier.settle()
    assert said == [pages.digest(4, 4)]
    assert torch.equal(pages.packed(2 * UNIT, 4), pages.wanted(4, 4))


@pytest.mark.parametrize("shared", [False, True], ids=["own table", "shared table"])
@pytest.mark.parametrize("engine", [CopyEngine.AUTO, CopyEngine.COPY])
def test_after_a_launch_that_fails_nothing_of_its_copy_is_under_way(
    gpu: LateGpu, engine: CopyEngine, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told may use the memory at once. The copy engine has begun to copy when the digest's launch fails."""
    pages, copier, said = Pages(), Copier(GPU, 8, engine), list[int | None]()
    stretch = Stretch((0,), 4, pages.ids * UNIT, None, np.arange(UNITS) * 4)
    chunk = ChunkCopy(
        partial(_staged_work, pages, 4, True),
        4 * UNIT,
        True,
        ChunkTables(),
        lambda: stretch if shared else None,
        None,
    )
    copier.run(pages.work(0, 4, 0), said.append)
    with monkeypatch.context() as patch:
        patch.setattr(DRIVER, "fails", "cuLaunchKernel")
        with pytest.raises(CudaError, match="cuLaunchKernel"):
            copier.copy(chunk, said.append)
    assert gpu.given == [], "what was launched before it may still write"
    assert pages.packed(4 * UNIT, 4).any() == (engine is CopyEngine.COPY)
    copier.poll()
    assert said == [None], "the copy before it has ended, and this one never began"
    assert not copier.busy
    copier.copy(chunk, said.append)
    copier.settle()
    assert said == [None, pages.digest(4, 4)]
    assert torch.equal(pages.packed(0, 8), pages.wanted(0, 8))


def test_a_table_that_finds_no_memory_costs_its_copy_alone(gpu: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, copier, said = Pages(), Copier(GPU, 8), list[int | None]()
    copier.run(pages.work(0, 4, 0), said.append)
    with monkeypatch.context() as patch:
        patch.setattr(launch.Upload, "to_device", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            copier.run(pages.work(4, 4, 4 * UNIT), said.append)
    copier.settle()
    assert said == [None]
    assert torch.equal(pages.packed(0, 4), pages.wanted(0, 4))
    assert not pages.packed(4 * UNIT, 4).any()


def test_settings_hold_for_later_copies_and_an_end_waits_for_all(gpu: LateGpu) -> None:
    pages, copier, said = Pages(), Copier(GPU, 8), list[int | None]()
    copier.run(pages.work(0, 4, 0), said.append)
    copier.configure(None, CopyEngine.COPY)
    copier.run(pages.work(4, 4, 4 * UNIT), said.append)
    assert copier.busy
    copier.settle()
    assert gpu.given == []
    assert not copier.busy
    assert said == [None, None]
    assert torch.equal(pages.packed(0, 8), pages.wanted(0, 8))
