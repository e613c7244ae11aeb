"""The reference moves every row where a loop over coordinates puts it, and touches nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_moves import FAR, MOVES, TOGETHER, FarMove, Move, ids, run

from kvmover.kernels import reference
from kvmover.kernels.region import Region, Side


@pytest.mark.parametrize("move", MOVES, ids=ids(MOVES))
def test_a_move_lands_where_a_loop_over_coordinates_puts_it(move: Move) -> None:
    run([move], reference.move)


@pytest.mark.parametrize("moves", TOGETHER.values(), ids=TOGETHER.keys())
def test_several_regions_move_together(moves: list[Move]) -> None:
    run(moves, reference.move)


@pytest.mark.parametrize("move", MOVES[::7], ids=ids(MOVES)[::7])
def test_a_temporary_smaller_than_the_move_changes_nothing(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TEMPORARY_BYTES", 64)
    run([move], reference.move)


def flat(memory: torch.Tensor, starts: list[int], planes: int = 1) -> Side:
    zeros = np.zeros(planes, np.int64)
    return Side.of((memory,), zeros, zeros, np.array(starts, np.int64), 0, 0)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0, 64], [128, 192]), ([64, 0], [128, 192]), ([0, 128], [192, 64]), ([0], [128])],
    ids=["dense", "dense-destination", "scattered", "one-row"],
)
def test_pages_move_within_one_pool(src: list[int], dst: list[int]) -> None:
    memory = torch.arange(256).to(torch.uint8)
    expected = memory.clone()
    for at, to in zip(src, dst, strict=True):
        expected[to : to + 64] = memory[at : at + 64]
    reference.move([Region(flat(memory, src), flat(memory, dst), 1, 1, 64)])
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("offset", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("base", [0, 3, 4, 8])
@pytest.mark.parametrize("starts", [[0, 64], [0, 96], [64, 0]], ids=["dense", "strided", "backwards"])
def test_views_of_memory_at_any_offset_of_any_storage_can_be_moved(base: int, offset: int, starts: list[int]) -> None:
    buffer = np.random.default_rng(0).integers(0, 256, 512, dtype=np.uint8)
    first = -buffer.ctypes.data % 16 + base
    view = torch.from_numpy(buffer[first:])[offset:][:160]
    for into_view in (True, False):
        other = torch.randint(0, 256, (160,), dtype=torch.uint8)
        src, dst = (other, view) if into_view else (view, other)
        expected = dst.clone()
        for at, to in zip([0, 64], starts, strict=True):
            expected[to : to + 64] = src[at : at + 64]
        reference.move([Region(flat(src, [0, 64]), flat(dst, starts), 1, 1, 64)])
        assert torch.equal(dst, expected)


@pytest.mark.parametrize("far", FAR, ids=str)
def test_offsets_past_32_bits_reach_the_right_bytes(far: FarMove, sparse: torch.Tensor) -> None:
    far.run(sparse, reference.move)
