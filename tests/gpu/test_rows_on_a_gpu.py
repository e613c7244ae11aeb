"""The row mover on a real GPU equals the definition on the CPU, byte for byte, on random data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmover.kernels import reference, rows
from kvmover.kernels.region import Region, Side
from kvmover.layout import Component, CpOrder, Fleet, PoolSpec
from kvmover.plan import BoxSide, Held, Plan
from kvmover.plan.lower import box, packed_place, pool_place, units_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COMPONENTS = {
    "gqa-bf16": Component.attention(5, 4, 128, "bfloat16"),
    "gqa-fp8": Component.attention(3, 6, 64, "float8_e4m3fn"),
    "mla-bf16": Component.mla(7, 576, "bfloat16"),
    "mla-656B": Component.mla(7, 656, "uint8"),
    "keys-132B": Component("keys", 7, 1, 1, 132, "uint8"),
    "odd-3B": Component("odd", 2, 2, 3, 3, "uint8"),
}
ORDERS = {"NHD": "NHD", "HND": "HND", "page-first": "page-layer-kv-token-head-dim"}


def _fleets() -> dict[str, tuple[Fleet, Fleet]]:
    return {
        "tp1to2-page64": (Fleet(page_tokens=64), Fleet(tp=2, page_tokens=64)),
        "tp2to1-page1": (Fleet(tp=2, page_tokens=1), Fleet(page_tokens=1)),
        "tp1to2-page16to48": (Fleet(page_tokens=16), Fleet(tp=2, page_tokens=48)),
        "cp2-tokens": (Fleet(cp=2, page_tokens=16, cp_order=CpOrder.TOKEN), Fleet(page_tokens=16)),
    }


class _End:
    """A pool with random bytes, `misaligned` bytes off its allocation, and a scattered page table."""

    def __init__(self, plan: Plan, rank: int, source: bool, order: str, misaligned: int, seed: int) -> None:
        fleet, shard = (plan.src, plan.src_shard(rank)) if source else (plan.dst, plan.dst_shard(rank))
        assert shard.positions is not None
        pages = -(-shard.positions.tokens // fleet.page_tokens)
        spec = PoolSpec.dense(plan.component, shard, 2 * pages + 1, fleet.page_tokens, order, ("layer",))
        self.held = Held(spec, shard)
        self.table = np.random.default_rng(seed).permutation(2 * pages + 1)[:pages].astype(np.int64)
        generator = torch.Generator().manual_seed(seed)
        size = spec.allocation_bytes + misaligned
        self.cpu = tuple(
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)[misaligned:]
            for _ in range(spec.allocations)
        )
        self.gpu = tuple(_on_gpu(tensor, misaligned) for tensor in self.cpu)


def _on_gpu(tensor: torch.Tensor, misaligned: int) -> torch.Tensor:
    whole = torch.zeros(tensor.numel() + misaligned, dtype=torch.uint8, device="cuda")
    whole[misaligned:] = tensor.cuda()
    return whole[misaligned:]


def _regions(
    plan: Plan, src: _End, dst: _End, packed: torch.Tensor, memory: str
) -> tuple[list[Region], list[Region], list[Region]]:
    """Gather, scatter and relayout of the first leg, on the memory named `cpu` or `gpu`."""
    leg = plan.leg(0, 0)
    assert leg is not None
    moves: tuple[list[Region], list[Region], list[Region]] = ([], [], [])
    used = 0
    for units in units_of(leg, src.held, dst.held):
        here = pool_place(src.held, leg, units.src, src.table), getattr(src, memory)
        there = pool_place(dst.held, leg, units.dst, dst.table), getattr(dst, memory)
        wire = packed_place(plan.component, leg, units, used), (packed,)
        for move, (one, other) in zip(moves, ((here, wire), (wire, there), (here, there)), strict=True):
            b = box(plan.component, leg, units, one[0], other[0])
            move.append(Region(_side(b.src, one[1]), _side(b.dst, other[1]), b.heads, b.tokens, b.row_bytes))
        used += moves[0][-1].nbytes
    return moves


def _side(place: BoxSide, memory: tuple[torch.Tensor, ...]) -> Side:
    return Side.of(memory, place.allocation, place.offset, place.units, place.head_bytes, place.token_bytes)


@pytest.mark.parametrize("misaligned", [0, 8, 1])
@pytest.mark.parametrize("orders", ["NHD-NHD", "NHD-HND", "HND-page-first"])
@pytest.mark.parametrize("fleets", _fleets())
@pytest.mark.parametrize("component", COMPONENTS)
def test_gather_scatter_and_relayout_equal_the_definition(
    component: str, fleets: str, orders: str, misaligned: int
) -> None:
    src_order, dst_order = orders.split("-", 1)
    src_fleet, dst_fleet = _fleets()[fleets]
    plan = Plan(COMPONENTS[component], src_fleet, dst_fleet, 5, 301)
    src = _End(plan, 0, True, ORDERS[src_order], misaligned, 1)
    dst = _End(plan, 0, False, ORDERS[dst_order], misaligned, 2)
    leg = plan.leg(0, 0)
    assert leg is not None
    nbytes = leg.nbytes(plan.component)
    packed = {"cpu": torch.full((nbytes + 64,), 0xEE, dtype=torch.uint8)}
    packed["gpu"] = packed["cpu"].cuda()
    on_cpu, on_gpu = (_regions(plan, src, dst, packed[memory], memory) for memory in ("cpu", "gpu"))
    for sms, number in ((None, 0), (3, 1), (None, 2)):
        reference.move(on_cpu[number])
        rows.move(on_gpu[number], sms=sms)
        torch.cuda.synchronize()
        assert torch.equal(packed["gpu"].cpu(), packed["cpu"])
        for gpu, cpu in zip((*src.gpu, *dst.gpu), (*src.cpu, *dst.cpu), strict=True):
            assert torch.equal(gpu.cpu(), cpu)


def test_a_launch_does_not_wait_for_the_device() -> None:
    """Twenty launches at once: the pinned ring holds eight, so only reuse may wait, and the bytes stay right."""
    pool = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    outs = [torch.zeros(1 << 16, dtype=torch.uint8, device="cuda") for _ in range(20)]
    for number, out in enumerate(outs):
        units = np.random.default_rng(number).permutation(256)[:16].astype(np.int64) * 4096
        zero = np.zeros(1, np.int64)
        src = Side.of((pool,), zero, zero, units, 0, 256)
        dst = Side.of((out,), zero, zero, np.arange(16, dtype=np.int64) * 4096, 0, 256)
        rows.move([Region(src, dst, 1, 16, 256)])
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        units = np.random.default_rng(number).permutation(256)[:16]
        assert torch.equal(out.view(16, 4096), pool.view(256, 4096)[torch.from_numpy(units).cuda()])


def test_addresses_beyond_two_to_the_31_words_are_reached() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    pool = torch.zeros(20 << 30, dtype=torch.uint8, device="cuda")
    starts = np.array([0, 5 << 30, (17 << 30) + 4096, (20 << 30) - 4096], np.int64)
    for number, start in enumerate(starts.tolist()):
        pool[start : start + 4096] = number + 1
    out = torch.zeros(4 * 4096, dtype=torch.uint8, device="cuda")
    zero = np.zeros(1, np.int64)
    src, dst = Side.of((pool,), zero, zero, starts, 0, 256), Side.of((out,), zero, zero, np.arange(4) * 4096, 0, 256)
    rows.move([Region(src, dst, 1, 16, 256)])
    assert out.view(4, 4096).float().mean(dim=1).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_prepared_launch_replays_from_a_cuda_graph() -> None:
    """The table is uploaded before: what is captured is the kernel alone, and moves what the pool holds on replay."""
    pool = torch.zeros(64 * 4096, dtype=torch.uint8, device="cuda")
    out = torch.zeros(16 * 4096, dtype=torch.uint8, device="cuda")
    pages = np.random.default_rng(0).permutation(64)[:16].astype(np.int64)
    zero = np.zeros(1, np.int64)
    src = Side.of((pool,), zero, zero, pages * 4096, 0, 256)
    dst = Side.of((out,), zero, zero, np.arange(16, dtype=np.int64) * 4096, 0, 256)
    prepared = rows.prepare([Region(src, dst, 1, 16, 256)])
    assert prepared is not None
    prepared.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run()
    for _ in range(3):
        pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, device="cuda"))
        out.fill_(0xEE)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(16, 4096), pool.view(64, 4096)[torch.from_numpy(pages).cuda()])
