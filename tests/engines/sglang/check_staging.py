"""SGLang's staging kernels and our movers give the same bytes on shapes that both can do, in Triton's interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels are bound when they are defined

from collections.abc import Callable
from importlib import import_module
from typing import Any

import bench  # noqa: F401  imports the engine without torchvision
import numpy as np
import pytest
import torch

from kvmover.kernels import reference, rows
from kvmover.kernels.region import Region, Side

staging: Any = import_module("sglang.srt.disaggregation.common.staging_buffer")

#: layers, heads of the pool, head dim, page tokens, pages of the request: 256-byte rows, narrow rows, and token pages.
SHAPES = [(2, 4, 64, 16, 4), (1, 2, 128, 1, 37), (3, 8, 8, 16, 3)]
BLOCK = 1024
POISON = 0x77

Move = Callable[..., None]


class Case:
    """A pool of one tensor a layer and K/V, twice as large as the request, whose pages are scattered in it."""

    def __init__(self, shape: tuple[int, int, int, int, int], heads: slice) -> None:
        self.layers, self.heads, self.dim, self.page, self.count = shape
        self.sent, self.first = heads.stop - heads.start, heads.start
        self.planes = 2 * self.layers
        generator = torch.Generator().manual_seed(3)
        tokens = 2 * self.count * self.page
        self.pool = [self.random(generator, tokens * self.heads * self.dim * 2) for _ in range(self.planes)]
        self.pages = torch.randperm(2 * self.count, generator=generator)[: self.count]
        self.per = self.count * self.page * self.sent * self.dim
        self.generator = generator

    @staticmethod
    def random(generator: torch.Generator, nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)

    def pointers(self, pool: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in pool])

    def pool_side(self, pool: list[torch.Tensor]) -> Side:
        row = self.dim * 2
        units = self.pages.numpy() * self.page * self.heads * row + self.first * row
        planes = np.arange(self.planes)
        return Side.of(tuple(pool), planes, np.zeros(self.planes, np.int64), units, row, self.heads * row)

    def packed_side(self, packed: torch.Tensor) -> Side:
        """[K layers, then V layers][token][head][dim], as SGLang stages it."""
        row = self.dim * 2
        units = np.arange(self.count) * self.page * self.sent * row
        planes = np.arange(self.planes) * self.per * 2
        return Side.of((packed,), np.zeros(self.planes, np.int64), planes, units, row, self.sent * row)

    def region(self, src: Side, dst: Side) -> Region:
        return Region(src, dst, self.sent, self.page, self.dim * 2)

    @property
    def grid(self) -> tuple[int, int]:
        return self.planes, -(-self.per // BLOCK)


@pytest.fixture(params=[reference.move, rows.move], ids=["torch", "triton"])
def move(request: pytest.FixtureRequest) -> Move:
    return request.param


@pytest.fixture(params=[(shape, part) for shape in SHAPES for part in ("all", "second half")], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    shape, part = request.param
    return Case(shape, slice(0 if part == "all" else shape[1] // 2, shape[1]))


def test_a_gather_into_staging_gives_the_same_bytes(case: Case, move: Move) -> None:
    theirs = torch.full((case.planes * case.per,), POISON, dtype=torch.int16)
    staging._fused_gather_to_staging_kernel[case.grid](
        case.pointers(case.pool),
        case.pages,
        theirs,
        case.count * case.page,
        case.heads * case.dim,
        case.first * case.dim,
        case.per,
        case.sent * case.dim,
        case.page,
        BLOCK,
    )
    ours = torch.full((theirs.nbytes,), POISON, dtype=torch.uint8)
    move([case.region(case.pool_side(case.pool), case.packed_side(ours))])
    assert torch.equal(ours, theirs.view(torch.uint8))


def test_a_scatter_from_staging_gives_the_same_pool_and_spares_its_neighbours(case: Case, move: Move) -> None:
    packed = case.random(case.generator, case.planes * case.per * 2)
    theirs, ours = ([torch.full_like(tensor, POISON) for tensor in case.pool] for _ in range(2))
    staging._fused_scatter_from_staging_kernel[case.grid](
        case.pointers(theirs),
        case.pages,
        packed.view(torch.int16),
        torch.tensor([case.first * case.dim]),
        case.count * case.page,
        case.heads * case.dim,
        case.per,
        case.sent * case.dim,
        case.page,
        case.planes,
        BLOCK,
    )
    move([case.region(case.packed_side(packed), case.pool_side(ours))])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
