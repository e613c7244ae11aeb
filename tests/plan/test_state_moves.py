"""A hybrid model's request lands byte for byte: rows, windows, index keys, temporal and convolution states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvmover.kernels import reference
from kvmover.kernels.region import Region
from kvmover.layout import Fleet, Pool
from kvmover.plan import Held, Leg, Replicas
from kvmover.plan.lower import box, packed_place, pool_place, units_of
from kvmover.regions import BoundMemory, bound
from tests.plan.hybrid_rank import CHANNELS_OUT, TOKENS, WIDTH_OUT, ConvOrder, HybridRank, conv_components, whole_model
from tests.plan.leg_cases import BOTH, plan_of

Stages = tuple[list[Region], list[Region]]
Route = Callable[[Leg, HybridRank, HybridRank, str], Stages]


def memory(pool: Pool) -> BoundMemory:
    return BoundMemory(pool.tensors)


def direct(leg: Leg, src: HybridRank, dst: HybridRank, name: str) -> Stages:
    """Pool to pool."""
    source, target = src.pools[name], dst.pools[name]
    here, there = (Held(rank.pools[name].spec, rank.shard(rank.pools[name].spec.component)) for rank in (src, dst))
    straight: list[Region] = []
    for units in units_of(leg, here, there):
        places = pool_place(here, leg, units.src, src.pages[name]), pool_place(there, leg, units.dst, dst.pages[name])
        straight.append(bound(box(source.spec.component, leg, units, *places), memory(source), memory(target)))
    return straight, []


def packed(leg: Leg, src: HybridRank, dst: HybridRank, name: str) -> Stages:
    """Gathers, and scatters from what was gathered."""
    source, target = src.pools[name], dst.pools[name]
    component = source.spec.component
    here, there = (Held(rank.pools[name].spec, rank.shard(component)) for rank in (src, dst))
    gathers: list[Region] = []
    scatters: list[Region] = []
    for units in units_of(leg, here, there):
        wire = packed_place(component, leg, units, 0)
        gather = box(component, leg, units, pool_place(here, leg, units.src, src.pages[name]), wire)
        scatter = box(component, leg, units, wire, pool_place(there, leg, units.dst, dst.pages[name]))
        staging = BoundMemory((torch.full((gather.nbytes,), 0xAB, dtype=torch.uint8),))
        gathers.append(bound(gather, memory(source), staging))
        scatters.append(bound(scatter, staging, memory(target)))
    return gathers, scatters


def land(src: list[HybridRank], dst: list[HybridRank], replicas: Replicas, route: Route) -> None:
    """Every leg of every component, in one call a stage."""
    stages: Stages = [], []
    for component in src[0].components:
        plan = plan_of(component, src[0].fleet, dst[0].fleet, range(TOKENS), replicas)
        for leg in plan.legs():
            for stage, regions in zip(
                stages, route(leg, src[leg.src_rank], dst[leg.dst_rank], component.name), strict=True
            ):
                stage.extend(regions)
    for regions in stages:
        reference.move(regions)


def check(fleets: tuple[Fleet, Fleet], orders: tuple[ConvOrder, ConvOrder], replicas: Replicas, route: Route) -> None:
    """Compare every byte of every rank of the destination, its convolution states as one allocation."""
    components = conv_components(*orders)
    sides = [
        [HybridRank.of(fleet, rank, order, components, pool_order, seed) for rank in range(fleet.size)]
        for fleet, order, pool_order, seed in zip(fleets, orders, ("NHD", "HND"), (100, 200), strict=True)
    ]
    src, dst = sides
    expected = [HybridRank.of(fleets[1], rank, orders[1], components, "HND", 200) for rank in range(fleets[1].size)]
    whole = whole_model(7)
    for rank in (*src, *expected):
        rank.put(whole)
    land(src, dst, replicas, route)
    for got, want in zip(dst, expected, strict=True):
        for ours, theirs in zip(got.memory(), want.memory(), strict=True):
            assert torch.equal(ours, theirs), got.rank


FLEETS = {
    "tp2-to-tp4pp2": (Fleet(tp=2, page_tokens=4), Fleet(tp=4, pp=2, page_tokens=6)),
    "tp4pp2-to-tp1cp3": (Fleet(tp=4, pp=2, page_tokens=6), Fleet(cp=3, page_tokens=4)),
    "cp4-to-tp2cp2": (Fleet(cp=4, page_tokens=4), Fleet(tp=2, cp=2, page_tokens=3)),
    "tp2cp2-to-tp2": (Fleet(tp=2, cp=2, page_tokens=16), Fleet(tp=2, page_tokens=16)),
}


@pytest.mark.parametrize("route", [direct, packed])
@pytest.mark.parametrize("replicas", BOTH)
@pytest.mark.parametrize("fleets", FLEETS.values(), ids=FLEETS)
def test_a_hybrid_request_lands_byte_for_byte_and_touches_nothing_else(
    fleets: tuple[Fleet, Fleet], replicas: Replicas, route: Route
) -> None:
    check(fleets, (CHANNELS_OUT, CHANNELS_OUT), replicas, route)


@pytest.mark.parametrize("route", [direct, packed])
@pytest.mark.parametrize(
    "orders",
    [(WIDTH_OUT, WIDTH_OUT), (CHANNELS_OUT, WIDTH_OUT), (WIDTH_OUT, CHANNELS_OUT)],
    ids=lambda orders: f"{orders[0].name}-{orders[1].name}",
)
def test_convolution_states_land_whichever_of_channels_and_steps_is_outermost(
    orders: tuple[ConvOrder, ConvOrder], route: Route
) -> None:
    check(FLEETS["tp2-to-tp4pp2"], orders, Replicas.STRIPE, route)


@pytest.mark.parametrize("order", [CHANNELS_OUT, WIDTH_OUT], ids=lambda order: order.name)
def test_q_and_k_heads_that_are_copied_stand_beside_v_heads_that_are_split(order: ConvOrder) -> None:
    check((Fleet(tp=8, page_tokens=4), Fleet(tp=2, page_tokens=4)), (order, order), Replicas.STRIPE, direct)
    check((Fleet(tp=2, page_tokens=4), Fleet(tp=8, page_tokens=4)), (order, order), Replicas.STRIPE, packed)
