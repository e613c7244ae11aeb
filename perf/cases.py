"""The moves that the kernel benchmarks measure: models, fleets and page sizes as regions on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvmover.kernels.region import Region, Side
from kvmover.layout import Component, Fleet, PoolSpec
from kvmover.plan import Box, BoxSide, Held, Plan
from kvmover.plan.lower import box, packed_place, pool_place, units_of

LLAMA = Component.attention(80, 8, 128, "bfloat16")
QWEN = Component.attention(94, 4, 128, "bfloat16")
DEEPSEEK = Component.mla(61, 576, "bfloat16")
DEEPSEEK_V32 = Component.mla(61, 656, "uint8")
INDEX_KEYS = Component("index keys", 61, 1, 1, 132, "uint8")


@dataclass(frozen=True, slots=True)
class Case:
    """One source rank's leg to one destination rank, `tokens` tokens, pages scattered unless `contiguous`."""

    name: str
    component: Component
    src_tp: int
    dst_tp: int
    page_tokens: int
    order: str = "NHD"
    tokens: int = 32768
    contiguous: bool = False

    def text(self) -> str:
        pages = "contiguous" if self.contiguous else "scattered"
        return f"{self.name}, TP{self.src_tp} to TP{self.dst_tp}, {self.order}, page {self.page_tokens}, {pages}"


CASES = (
    Case("Llama-3-70B", LLAMA, 2, 8, 64),
    Case("Llama-3-70B", LLAMA, 2, 8, 64, contiguous=True),
    Case("Llama-3-70B", LLAMA, 2, 8, 16),
    Case("Llama-3-70B", LLAMA, 2, 8, 1),
    Case("Llama-3-70B", LLAMA, 2, 8, 64, order="HND"),
    Case("Llama-3-70B", LLAMA, 8, 2, 64),
    Case("Llama-3-70B", LLAMA, 8, 2, 16),
    Case("Llama-3-70B", LLAMA, 8, 2, 1),
    Case("Qwen3-235B", QWEN, 4, 2, 64),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 64),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 16),
    Case("DeepSeek-V3 MLA", DEEPSEEK, 1, 1, 1),
    Case("V3.2 rows of 656 B", DEEPSEEK_V32, 1, 1, 64),
    Case("V3.2 keys of 132 B", INDEX_KEYS, 1, 1, 64),
)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A case on the device. `pages` [page] int64; `pool` one tensor a layer and kv; `packed` the wire's buffer."""

    case: Case
    gather: list[Region]
    scatter: list[Region]
    pool: tuple[torch.Tensor, ...]
    packed: torch.Tensor
    pages: npt.NDArray[np.int64]
    held: Held
    leg_heads: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.gather)


def build(case: Case, device: str = "cuda") -> Move:
    """Random bytes in a pool of exactly the request's pages, and regions for both directions."""
    component = case.component
    src, dst = (Fleet(tp=tp, page_tokens=case.page_tokens) for tp in (case.src_tp, case.dst_tp))
    plan = Plan(component, src, dst, 0, case.tokens)
    leg = plan.leg(0, 0)
    assert leg is not None
    pages = case.tokens // case.page_tokens
    held, there = (
        Held(PoolSpec.dense(component, shard, pages, case.page_tokens, case.order, ("layer", "kv")), shard)
        for shard in (plan.src_shard(0), plan.dst_shard(0))
    )
    size = held.spec.allocation_bytes
    pool = tuple(
        torch.randint(-(2**62), 2**62, (-(-size // 8),), dtype=torch.int64, device=device).view(torch.uint8)[:size]
        for _ in range(held.spec.allocations)
    )
    table = np.arange(pages, dtype=np.int64)
    if not case.contiguous:
        np.random.default_rng(0).shuffle(table)
    packed = torch.zeros(leg.nbytes(component), dtype=torch.uint8, device=device)
    boxes: list[tuple[Box, Box]] = []
    used = 0
    for units in units_of(leg, held, there):
        place, wire = pool_place(held, leg, units.src, table), packed_place(component, leg, units, used)
        boxes.append((box(component, leg, units, place, wire), box(component, leg, units, wire, place)))
        used += boxes[-1][0].nbytes
    gather = [_region(there_, pool, (packed,)) for there_, _ in boxes]
    scatter = [_region(back, (packed,), pool) for _, back in boxes]
    first = held.shard.heads.index(leg.heads.start)
    return Move(case, gather, scatter, pool, packed, table, held, (first, leg.heads.count))


def _region(b: Box, src: tuple[torch.Tensor, ...], dst: tuple[torch.Tensor, ...]) -> Region:
    def side(place: BoxSide, memory: tuple[torch.Tensor, ...]) -> Side:
        return Side.of(memory, place.allocation, place.offset, place.units, place.head_bytes, place.token_bytes)

    return Region(side(b.src, src), side(b.dst, dst), b.heads, b.tokens, b.row_bytes)


def moves(cases: tuple[Case, ...] = CASES) -> Iterator[Move]:
    """One at a time: together they would not fit."""
    for case in cases:
        yield build(case)
        torch.cuda.empty_cache()
