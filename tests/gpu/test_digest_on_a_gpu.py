"""Triton and torch give one digest on random data, on a real GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kvmover.kernels import digest
from kvmover.kernels.digest_reference import Logical
from kvmover.kernels.digest_reference import digest as defined
from kvmover.kernels.launch import RowConfig
from kvmover.kernels.region import Region, Side

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODULUS = 1 << 64


@dataclass(frozen=True)
class Case:
    """`heads` heads of `head_bytes` from scattered pages of `tokens` tokens to packed ones, `in_row` heads in a row."""

    head_bytes: int
    heads: int
    tokens: int
    in_row: int = 1
    misaligned: int = 0
    pages: int = 37
    planes: int = 5

    def regions(self) -> tuple[Region, Region]:
        """The same move on the CPU and on the GPU: a pool of one head more, and pages in any order."""
        row, extra = self.head_bytes * self.in_row, self.head_bytes * (self.heads + 1)
        plane = 2 * self.pages * self.tokens * extra
        generator = torch.Generator().manual_seed(row)
        pool = torch.randint(0, 256, (self.planes * plane,), dtype=torch.uint8, generator=generator)
        packed = torch.zeros(self.planes * self.pages * self.tokens * self.heads * self.head_bytes, dtype=torch.uint8)
        table = np.random.default_rng(row).permutation(2 * self.pages)[: self.pages].astype(np.int64)
        allocation, planes = np.zeros(self.planes, np.int64), np.arange(self.planes, dtype=np.int64)
        dense = self.tokens * self.heads * self.head_bytes
        found: list[Region] = []
        for device in ("cpu", "cuda"):
            memory = [_on(device, tensor, self.misaligned) for tensor in (pool, packed)]
            src = Side.of((memory[0],), allocation, planes * plane, table * self.tokens * extra, row, extra)
            units = np.arange(self.pages, dtype=np.int64) * (dense * self.planes)
            strides = (row * self.tokens, row) if self.in_row < self.heads else (row, row)
            dst = Side.of((memory[1],), allocation, planes * dense, units, *strides)
            found.append(Region(src, dst, self.heads // self.in_row, self.tokens, row))
        return found[0], found[1]

    @property
    def logical(self) -> Logical:
        positions = np.random.default_rng(self.tokens).permutation(1000)[: self.pages].astype(np.int64) * self.tokens
        return Logical(np.arange(self.planes) * 3, positions, 4, heads_in_row=self.in_row)


def _on(device: str, tensor: torch.Tensor, misaligned: int) -> torch.Tensor:
    whole = torch.zeros(tensor.numel() + misaligned, dtype=torch.uint8, device=device)
    whole[misaligned:] = tensor.to(device)
    return whole[misaligned:]


CASES = {
    "256B-page64": Case(256, 2, 64),
    "256B-page1": Case(256, 2, 1, pages=301),
    "256B-page16-8-heads-in-a-row": Case(256, 8, 16, in_row=8),
    "1152B-page64": Case(1152, 1, 64),
    "1152B-page1": Case(1152, 1, 1, pages=301),
    "656B-page16": Case(656, 1, 16),
    "132B-page64": Case(132, 1, 64),
    "132B-3-heads-in-a-row": Case(132, 3, 5, in_row=3),
    "64B-page3-misaligned-by-4": Case(64, 2, 3, misaligned=4),
    "256B-misaligned-by-1": Case(256, 2, 16, misaligned=1),
    "6B-2-heads-in-a-row": Case(6, 2, 4, in_row=2),
    "3B-page1": Case(3, 3, 1),
}


@pytest.mark.parametrize("sms", [None, 4], ids=lambda sms: f"sms-{sms}")
@pytest.mark.parametrize("name", CASES)
def test_triton_has_the_digest_of_the_definition_and_moves_the_bytes(name: str, sms: int | None) -> None:
    case = CASES[name]
    on_cpu, on_gpu = case.regions()
    wanted = defined([on_cpu], [case.logical], "src")
    moved, read = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    digest.move_and_digest([on_gpu], [case.logical], moved, sms=sms)
    digest.digest([on_gpu], [case.logical], "dst", read, sms=sms)
    assert (int(moved) % MODULUS, int(read) % MODULUS) == (wanted, wanted)
    back = replace(on_cpu.dst, memory=tuple(tensor.cpu() for tensor in on_gpu.dst.memory))
    back = replace(back, memory=tuple(_on("cpu", tensor, case.misaligned) for tensor in back.memory))
    assert defined([replace(on_cpu, dst=back)], [case.logical], "dst") == wanted


@pytest.mark.parametrize("config", [RowConfig(4096, 4), RowConfig(16384, 8), RowConfig(16384, 4)], ids=str)
def test_all_shapes_in_one_launch_add_up(config: RowConfig) -> None:
    pairs = [case.regions() for case in CASES.values()]
    logicals = [case.logical for case in CASES.values()]
    each = torch.zeros(len(pairs), dtype=torch.int64, device="cuda")
    digest.move_and_digest([gpu for _, gpu in pairs], logicals, each, config)
    wanted = [defined([cpu], [logical], "src") for (cpu, _), logical in zip(pairs, logicals, strict=True)]
    assert [value % MODULUS for value in each.tolist()] == wanted
    together = torch.zeros(1, dtype=torch.int64, device="cuda")
    digest.digest([gpu for _, gpu in pairs], logicals, "dst", together, config)
    assert int(together) % MODULUS == sum(wanted) % MODULUS


def test_a_flipped_bit_on_the_device_is_seen() -> None:
    case = CASES["256B-page64"]
    _, region = case.regions()
    outs = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    digest.move_and_digest([region], [case.logical], outs[0])
    region.dst.memory[0][12345] ^= 8
    digest.digest([region], [case.logical], "dst", outs[1])
    assert int(outs[0]) != int(outs[1])
