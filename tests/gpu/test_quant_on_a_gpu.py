"""Packing to fp8 on a real GPU equals the definition on the CPU, bit for bit: hardware casts and integer arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
from quant_cases import (  # pyright: ignore[reportMissingImports]
    CASES,
    DIMS,
    DTYPES,
    IDS,
    TOGETHER,
    Case,
    OpenCase,
    flat,
)
from row_moves import GUARD  # pyright: ignore[reportMissingImports]

from kvmover.kernels import quant
from kvmover.kernels.quant_reference import QuantRegion, dequantize, quantize
from kvmover.kernels.region import Side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


@pytest.fixture(params=["hardware", "integers"])
def casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to convert give the same bits; before sm_90 there is only one."""
    if request.param == "hardware" and not quant.casts(torch.device("cuda")):
        pytest.skip("this GPU has no conversion to e4m3 in one rounding")
    if request.param == "integers":
        monkeypatch.setattr(quant, "casts", lambda device: 0)
    return request.param


class _OnGpu:
    """The allocations of a case on the GPU, guards and misalignment included."""

    def __init__(self, opened: OpenCase) -> None:
        self.opened = opened
        self.wholes = [[whole.cuda() for whole in pool.whole] for pool in opened.pools]

    @property
    def region(self) -> QuantRegion:
        region, pools = self.opened.region, zip(self.opened.pools, self.wholes, strict=True)
        memories = [
            tuple(
                whole[GUARD + pool.shape.misaligned :][: memory.numel()]
                for whole, memory in zip(wholes, pool.memory, strict=True)
            )
            for pool, wholes in pools
        ]
        wide, narrow, scales = (
            replace(side, memory=memory) for (_, side, _), memory in zip(region.sides, memories, strict=True)
        )
        return replace(region, wide=wide, narrow=narrow, scales=scales)

    def bytes(self) -> list[torch.Tensor]:
        return [whole.cpu() for wholes in self.wholes for whole in wholes]


def run(cases: Sequence[Case], verb: Callable[[Sequence[QuantRegion]], None], packs: bool) -> None:
    """One launch for all cases; every byte of every pool is compared."""
    opened = [OpenCase(case) for case in cases]
    if not packs:  # random scales would mostly be no scales
        for each in opened:
            each.restore(each.expected(True))
            each.put(0, torch.full((len(each.get(0)), each.row_bytes[0]), 0xEE, dtype=torch.uint8))
    on_gpu = [_OnGpu(each) for each in opened]
    verb([each.region for each in on_gpu])
    torch.cuda.synchronize()
    for each in on_gpu:
        for got, want in zip(each.bytes(), each.opened.expected(packs), strict=True):
            assert torch.equal(got, want), each.opened.case


@pytest.mark.parametrize("case", CASES[::3], ids=IDS[::3])
def test_a_case_equals_the_definition(case: Case) -> None:
    run([case], quant.pack, True)
    run([case], quant.unpack, False)


@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER.keys())
def test_regions_of_different_rows_share_a_launch_under_a_budget(cases: list[Case]) -> None:
    run(cases, partial(quant.pack, sms=3), True)
    run(cases, partial(quant.unpack, sms=3), False)


def _assert_equal(wide: torch.Tensor) -> None:
    """Pack dense rows and bring them back."""
    region, fp8, scales = flat(wide, device="cuda")
    quant.pack([region])
    want, factors = quantize(wide)
    assert torch.equal(scales.cpu().view(torch.float32), factors)
    assert torch.equal(fp8.cpu().view(want.shape), want)
    region.wide.memory[0].fill_(0xEE)
    quant.unpack([region])
    back = dequantize(want, factors, wide.dtype).view(torch.uint8).view(-1)
    assert torch.equal(region.wide.memory[0].cpu(), back)


@each_dtype
def test_every_bit_pattern_packs_and_unpacks_as_defined(dtype: torch.dtype, casts: str) -> None:
    """In order, a row's numbers are of one magnitude, and every mantissa is rounded; shuffled, of all magnitudes."""
    bits = np.arange(1 << 16).astype(np.uint16)
    shuffled = np.random.default_rng(0).permutation(bits)
    _assert_equal(torch.from_numpy(np.concatenate([bits, shuffled]).view(np.int16)).view(dtype).view(-1, 64))


@each_dtype
@pytest.mark.parametrize("dim", DIMS)
def test_random_rows_of_all_magnitudes_pack_and_unpack_as_defined(dim: int, dtype: torch.dtype, casts: str) -> None:
    """A third normal numbers, a third scaled from subnormal to infinity, a third any bits, and rows of one kind."""
    random = torch.Generator().manual_seed(dim)
    normal = torch.randn(3000, dim, generator=random)
    normal[1000:2000] *= 2.0 ** torch.randint(-140, 128, (1000, 1), generator=random)
    rows = normal.to(dtype)
    rows[2000:] = torch.randint(-(1 << 15), 1 << 15, (1000, dim), generator=random).to(torch.int16).view(dtype)
    for number, value in enumerate((0.0, -0.0, float("nan"), float("inf"), torch.finfo(dtype).max, 448.0)):
        rows[number] = value
    rows[10, 0], rows[11, -1] = float("inf"), float("nan")
    _assert_equal(rows)


@each_dtype
def test_every_fp8_number_unpacks_as_defined_at_any_scale(dtype: torch.dtype, casts: str) -> None:
    scales = torch.tensor([2.0**-126, 3.3e-39, 2.0**-24, 1 / 3, 1.0, 100.0, 146.0, 1e30, 7e35], dtype=torch.float32)
    fp8 = torch.arange(256).to(torch.uint8).repeat(len(scales), 1)
    region, *_ = flat(torch.zeros(len(scales), 256, dtype=dtype), fp8, scales, device="cuda")
    quant.unpack([region])
    want = dequantize(fp8, scales, dtype).view(torch.uint8).view(-1)
    assert torch.equal(region.wide.memory[0].cpu(), want)


def test_addresses_beyond_two_to_the_31_elements_are_reached() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    pool = torch.zeros(9 << 30, dtype=torch.uint8, device="cuda")
    starts = np.array([0, 4 << 30, (8 << 30) + 4096, (9 << 30) - 4096], np.int64)
    rows = torch.randn(4 * 16, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for start, page in zip(starts.tolist(), rows.view(torch.uint8).view(4, 4096), strict=True):
        pool[start : start + 4096] = page.cuda()
    region, fp8, scales = flat(rows, device="cuda")
    zero, pages = np.zeros(1, np.int64), np.arange(4)
    far = Side.of((pool,), zero, zero, starts, 0, 256)
    narrow, factors = (
        replace(side, units=pages * 16 * width, token_bytes=width)
        for side, width in ((region.narrow, 128), (region.scales, 4))
    )
    quant.pack([replace(region, wide=far, narrow=narrow, scales=factors, tokens=16)])
    want, wanted = quantize(rows)
    assert torch.equal(fp8.cpu().view(want.shape), want)
    assert torch.equal(scales.cpu().view(torch.float32), wanted)
