"""A pool on a GPU that another process exports is written by kernels of this one, also when its owner is killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

from kvmover.kernels.cuda_exports import exported, imported
from kvmover.kernels.region import Region, Side

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda", 0)
NBYTES, ROWS, ROW_BYTES = 64 << 20, 1 << 16, 512
ANSWER_S = 60


def own(pipe: Connection) -> None:
    """Poisoned memory; what it holds is said whenever that is asked."""
    memory = torch.full((NBYTES,), 0xA5, dtype=torch.uint8, device=DEVICE)
    pipe.send(exported(memory.data_ptr(), DEVICE))
    while pipe.recv():
        pipe.send(memory.cpu())


@pytest.fixture
def owner() -> Iterator[tuple[BaseProcess, Connection]]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=own, args=(there,))
    process.start()
    yield process, here
    process.kill()
    process.join()


def answer(pipe: Connection) -> torch.Tensor:
    assert pipe.poll(ANSWER_S)
    return pipe.recv()


def rows_into(whole: torch.Tensor, source: torch.Tensor) -> list[Region]:
    """Every second row of 512 bytes, from dense ones."""
    units = np.arange(ROWS, dtype=np.int64)
    src = Side.of((source,), np.zeros(1, np.int64), np.zeros(1, np.int64), units * ROW_BYTES, 0, 0)
    dst = Side.of((whole,), np.zeros(1, np.int64), np.zeros(1, np.int64), units * 2 * ROW_BYTES, 0, 0)
    return [Region(src, dst, 1, 1, ROW_BYTES)]


def test_rows_land_in_the_pool_of_the_other_process_and_nowhere_else(owner: tuple[BaseProcess, Connection]):
    from kvmover.kernels import rows

    pipe = owner[1]
    assert pipe.poll(ANSWER_S)
    export = pipe.recv()
    whole = imported(export, DEVICE).tensor(export.offset, NBYTES)
    source = torch.randint(0, 256, (ROWS * ROW_BYTES,), dtype=torch.uint8, device=DEVICE)
    rows.move(rows_into(whole, source), sms=8)
    torch.cuda.synchronize()
    pipe.send(True)
    there = answer(pipe).view(ROWS, 2, ROW_BYTES)
    assert torch.equal(there[:, 0], source.cpu().view(ROWS, ROW_BYTES))
    assert bool((there[:, 1] == 0xA5).all())


def test_an_owner_that_is_killed_under_a_copy_harms_neither_the_copy_nor_this_process(
    owner: tuple[BaseProcess, Connection],
):
    from kvmover.kernels import rows

    process, pipe = owner
    assert pipe.poll(ANSWER_S)
    export = pipe.recv()
    whole = imported(export, DEVICE).tensor(export.offset, NBYTES)
    source = torch.randint(0, 256, (ROWS * ROW_BYTES,), dtype=torch.uint8, device=DEVICE)
    regions = rows_into(whole, source)
    for number in range(200):
        rows.move(regions, sms=8)
        if number == 100:
            process.kill()
    process.join()
    for _ in range(20):
        rows.move(regions, sms=8)
    torch.cuda.synchronize()
    assert torch.equal(whole[:ROW_BYTES], source[:ROW_BYTES])
    assert int(torch.ones(1000, device=DEVICE).sum()) == 1000, "the context is whole"
