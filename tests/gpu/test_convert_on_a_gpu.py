"""Conversion on a real GPU equals the definition on the CPU, bit for bit: hardware casts and integer arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
from convert_cases import (  # pyright: ignore[reportMissingImports]
    CASES,
    ENDS,
    FORMS,
    IDS,
    TOGETHER,
    Case,
    OpenCase,
    assert_flat,
    coordinates,
    digests,
)
from row_moves import GUARD  # pyright: ignore[reportMissingImports]

from kvmover.kernels import convert, digest_reference
from kvmover.kernels.convert_reference import Conversion
from kvmover.kernels.digest_reference import End

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["hardware", "integers"])
def casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to convert give the same bits; before sm_90 there is only one."""
    if request.param == "hardware" and not convert.casts(torch.device("cuda")):
        pytest.skip("this GPU has no conversion to e4m3 in one rounding")
    if request.param == "integers":
        monkeypatch.setattr(convert, "casts", lambda device: 0)
    return request.param


class _OnGpu:
    """The allocations of a case on the GPU, guards and misalignment included."""

    def __init__(self, opened: OpenCase) -> None:
        self.opened = opened
        self.wholes = [[whole.cuda() for whole in pool.whole] for pool in opened.pools]

    @property
    def conversion(self) -> Conversion:
        found = self.opened.conversion
        src, dst = (
            replace(
                side,
                planes=replace(
                    side.planes,
                    memory=tuple(
                        whole[GUARD + pool.shape.misaligned :][: memory.numel()]
                        for whole, memory in zip(wholes, pool.memory, strict=True)
                    ),
                ),
            )
            for side, pool, wholes in zip((found.src, found.dst), self.opened.pools, self.wholes, strict=True)
        )
        return replace(found, src=src, dst=dst)

    def bytes(self) -> list[torch.Tensor]:
        return [whole.cpu() for wholes in self.wholes for whole in wholes]


def run(cases: Sequence[Case], sms: int | None = None) -> None:
    """One call for all cases; every byte of every pool is compared."""
    on_gpu = [_OnGpu(OpenCase(case)) for case in cases]
    convert.convert([each.conversion for each in on_gpu], sms=sms)
    torch.cuda.synchronize()
    for each in on_gpu:
        for got, want in zip(each.bytes(), each.opened.expected(), strict=True):
            assert torch.equal(got, want), each.opened.case


@pytest.mark.parametrize("case", CASES[::3], ids=IDS[::3])
def test_a_case_equals_the_definition(case: Case) -> None:
    run([case])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", CASES[1::3], ids=IDS[1::3])
def test_a_case_converts_and_digests_as_the_definitions_do(case: Case, end: End) -> None:
    if not digests(case, end):
        pytest.skip("these rows are digested by a launch of their own")
    opened, out = OpenCase(case), torch.tensor([5], dtype=torch.int64, device="cuda")
    on_gpu, marks, wanted = _OnGpu(opened), [coordinates(case, opened.conversion)], opened.expected()
    launch = convert.prepare_with_digest([on_gpu.conversion], marks, end, out)
    if launch is not None:
        launch.run()
    for got, want in zip(on_gpu.bytes(), wanted, strict=True):
        assert torch.equal(got, want)
    for whole, want in zip((whole for pool in opened.pools for whole in pool.whole), wanted, strict=True):
        whole.copy_(want)
    defined = digest_reference.digest([opened.conversion.at(end)], marks, end)
    assert (int(out[0]) - 5) % digest_reference.MODULUS == defined


@pytest.mark.parametrize("cases", TOGETHER.values(), ids=TOGETHER.keys())
def test_conversions_of_any_kinds_share_a_call_under_a_budget(cases: list[Case]) -> None:
    run(cases, sms=3)


@pytest.mark.parametrize("writes", ["fp8", "half", "nvfp4", "f16", "k-v"])
def test_every_pattern_of_bfloat16_is_converted_as_defined(writes: str, casts: str) -> None:
    bits = np.random.default_rng(0).permutation(np.arange(1 << 16).astype(np.uint16))
    rows = torch.from_numpy(bits.view(np.uint8)).view(-1, 128)
    assert_flat(FORMS[64]["bf16"], FORMS[64][writes], rows, 3.7, "cuda")


@pytest.mark.parametrize("reads", ["fp8", "nvfp4"])
@pytest.mark.parametrize("writes", ["bf16", "f16", "f32", "fp8", "nvfp4"])
def test_every_byte_of_a_narrow_form_is_converted_as_defined(reads: str, writes: str, casts: str) -> None:
    form = FORMS[64][reads]
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (4096, form.row_bytes), np.uint8))
    assert_flat(form, FORMS[64][writes], rows, 1 / 3, "cuda")
