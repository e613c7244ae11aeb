"""The engine that copies for a mover: the one that was named, else the row mover; and engines that are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kvmover.errors import LayoutError
from kvmover.kernels import bulk, digest, rows
from kvmover.kernels.copy_engine import CopyEngine, EngineUnavailable
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.launch import Shift
from kvmover.kernels.region import Region, Side
from kvmover.regions import CopyStream
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.memory.chunk_tables import ChunkCopy
from kvmover.transfer.memory.copier import Copier
from kvmover.transfer.memory.work import Programs, Work
from kvmover.transfer.protocol.chunks import Stretch

GPU = torch.device("cuda", 0)
PROGRAMS = Programs(object(), object(), rest_digest=object())  # pyright: ignore


def region() -> Region:
    zero, memory = np.zeros(1, np.int64), torch.zeros(1 << 12, dtype=torch.uint8)
    src, dst = (Side.of((memory,), zero, zero, np.array([first]), 0, 256) for first in (0, 2048))
    return Region(src, dst, 1, 4, 256)


REGION = region()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a copier on a GPU would launch."""
    noted: list[str] = []

    def ready(said: str) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: noted.append(said))

    def digested(*_: object, using: object, reads: object = None, **__: object) -> SimpleNamespace:
        known = PROGRAMS.digest if reads is None else PROGRAMS.rest_digest
        return ready(f"digest reads {reads}, {'known' if using is known else 'new'}")

    def moved(_: object, sms: int | None, using: object, engine: str = "rows") -> SimpleNamespace:
        assert using is PROGRAMS.move
        return ready(f"{engine} by {sms} SMs")

    monkeypatch.setattr(bulk, "unavailable", lambda engine, device: None)
    monkeypatch.setattr(bulk, "prepare", moved)
    monkeypatch.setattr(rows, "prepare", moved)
    monkeypatch.setattr(digest, "prepare", digested)
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, pin_memory: empty(*size, dtype=dtype))
    return noted


@pytest.mark.parametrize("engine", list(CopyEngine))
def test_the_named_engine_copies_and_by_choice_the_row_mover(engine: CopyEngine, calls: list[str]) -> None:
    Copier(GPU, 8, engine)._launch(Work([REGION], programs=PROGRAMS))
    assert calls == [f"{'rows' if engine is CopyEngine.AUTO else engine} by 8 SMs"]


def test_a_copier_says_in_its_log_that_an_engine_is_experimental(
    calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for engine in CopyEngine:
        Copier(GPU, 8, engine)
    assert [record.getMessage() for record in caplog.records] == [
        f"engine = {engine} is experimental: no GPU has measured it"
        for engine in ("green_context", "ring", "tensor_ring", "copy_3d")
    ]


@pytest.mark.parametrize(
    ("engine", "end", "launched"),
    [
        (CopyEngine.AUTO, "src", ["digest reads None, known"]),  # one pass over what is read
        (CopyEngine.ROWS, "src", ["digest reads None, known"]),
        (CopyEngine.BULK, "src", ["ring by 8 SMs", "digest reads src, known"]),
        (CopyEngine.AUTO, "dst", ["digest reads None, known"]),
        (CopyEngine.GREEN, "dst", ["green_context by 8 SMs", "digest reads dst, known"]),
    ],
)
def test_a_digest_is_fused_with_the_row_mover_alone(
    engine: CopyEngine, end: Any, launched: list[str], calls: list[str]
) -> None:
    logicals = [Logical(np.zeros(1, np.int64), np.zeros(1, np.int64))]
    Copier(GPU, 8, engine)._launch(Work([REGION], logicals, end, programs=PROGRAMS))
    assert calls == launched


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("engine", list(CopyEngine))
def test_a_chunk_takes_its_part_of_the_tables_of_its_request(
    engine: CopyEngine, digests: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines have no tables, and a chunk of several pieces has one of its own."""
    shift, given = Shift(3, 0, 256), list[tuple[object, ...]]()

    def launched(*_: object) -> list[tuple[SimpleNamespace, Shift]]:
        return [(SimpleNamespace(outputs=outputs, run=lambda *to: given.append(to)), shift) for outputs in ((), (1,))]

    tables: Any = SimpleNamespace(launches=launched)
    monkeypatch.setattr(CopyStream, "launch", lambda self, regions, move: move(regions) or object())
    stretch = Stretch((0,), 3, None, None, np.zeros(4, np.int64))
    chunk = ChunkCopy(lambda staged: Work([REGION]), 256, digests, tables, lambda: stretch, PROGRAMS)
    copier = Copier(GPU, 8, engine)
    copier.copy(chunk, lambda digest: None)
    if engine in (CopyEngine.AUTO, CopyEngine.ROWS):
        assert calls == []
        (plain, digesting), totals = given, [total for _, *rest in given for total in rest]
        assert plain == (shift,)
        assert digesting[0] == shift
        assert [int(total) for total in totals] == [0] * digests  # pyright: ignore
    else:
        assert given == []
        assert calls == [f"{engine} by 8 SMs"]
    calls.clear()
    given.clear()
    copier.copy(structs.replace(chunk, stretch=lambda: None), lambda digest: None)
    assert given == []
    assert calls == [f"{'rows' if engine is CopyEngine.AUTO else engine} by 8 SMs"]


@pytest.mark.parametrize("total", [0, 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_digest_of_a_gpu_is_the_sum_modulo_two_to_the_64th(
    total: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel adds into a signed number, and a peer compares it with the host's."""
    found = list[int | None]()
    on_device = torch.from_numpy(np.array([total], np.uint64).view(np.int64))
    event = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(CopyStream, "launch", lambda self, regions, move: (move(regions), event)[1])
    copier = Copier(GPU, 8, CopyEngine.ROWS)
    copier._queue(lambda: on_device, found.append)
    copier.poll()
    assert found == [total]


def test_an_engine_that_the_device_lacks_is_refused_at_once_and_nothing_changes(calls: list[str], monkeypatch) -> None:
    copier = Copier(GPU, 8, CopyEngine.ROWS)
    monkeypatch.setattr(bulk, "unavailable", lambda engine, device: "it is of another age")
    with pytest.raises(EngineUnavailable, match="ring, which is experimental: it is of another age"):
        copier.configure(4, CopyEngine.BULK)
    assert (copier.sms, copier.engine) == (8, CopyEngine.ROWS)
    with pytest.raises(EngineUnavailable, match="green_context, which is experimental: it is of another age"):
        Copier(GPU, 8, CopyEngine.GREEN)
    copier.configure(4, CopyEngine.AUTO)
    assert (copier.sms, copier.engine) == (4, CopyEngine.AUTO)


def test_on_the_cpu_no_engine_may_be_named() -> None:
    with pytest.raises(EngineUnavailable, match="rows: what lies on the CPU is copied by the host"):
        Copier(torch.device("cpu"), None, CopyEngine.ROWS)


def test_an_unknown_engine_is_refused_with_those_there_are() -> None:
    assert MoverConfig(engine="copy_3d").engine is CopyEngine.BOXES  # pyright: ignore
    with pytest.raises(LayoutError, match="engine.*warp drive.*auto.*rows.*green_context.*ring.*copy.*copy_3d"):
        replace(MoverConfig(), engine="warp drive")  # pyright: ignore
