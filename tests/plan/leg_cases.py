"""Plans to try, and what must hold for all of them: everything wanted is written once, by a rank that holds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from hypothesis import strategies as st

from kvmover.layout import Component, CpOrder, Fleet, Shard, Stripe
from kvmover.plan import Leg, Plan, Replicas

PAGES = (1, 3, 16, 24, 64)
BOTH = list(Replicas)


def heads_of(heads: int, layers: int = 1) -> Component:
    return Component("rows", layers, 1, heads, 1, "int8")


@lru_cache(4096)
def tokens_in(stripe: Stripe) -> np.ndarray:
    runs = stripe.start + np.arange(stripe.count) * stripe.step
    return (runs[:, None] + np.arange(stripe.width)).reshape(-1)


def positions_of(stripes: Iterable[Stripe]) -> np.ndarray:
    parts = [tokens_in(stripe) for stripe in stripes]
    return np.concatenate(parts) if parts else np.zeros(0, int)


@dataclass
class Box:
    """A shard or a leg as arrays: `mask` [position] over the whole request."""

    layers: slice
    heads: slice
    mask: np.ndarray

    @classmethod
    def of(cls, shard: Shard | Leg, positions: Iterable[Stripe], start: int, stop: int) -> Box:
        assert shard.layers.step == shard.heads.step == 1
        held = positions_of(positions)
        mask = np.zeros(stop, bool)
        mask[held[(held >= start) & (held < stop)]] = True
        layers, heads = shard.layers, shard.heads
        return cls(slice(layers.start, layers.stop), slice(heads.start, heads.stop), mask)


def boxes(plan: Plan, fleet: Fleet) -> list[Box]:
    shards = (fleet.shard_of_rows(plan.component, rank, plan.stop) for rank in range(fleet.size))
    return [Box.of(shard, (shard.positions,) if shard.positions else (), plan.start, plan.stop) for shard in shards]


def within(inner: slice, outer: slice) -> bool:
    return outer.start <= inner.start < inner.stop <= outer.stop


def check(plan: Plan) -> list[Leg]:
    """All legs, after proving that they write everything once, send only what is owned, and agree with each other."""
    legs = list(plan.legs())
    sources, targets = boxes(plan, plan.src), boxes(plan, plan.dst)
    extents = (plan.component.layers, plan.component.heads, plan.stop)
    written = [np.zeros(extents, np.uint8) for _ in targets]
    for leg in legs:
        source = sources[leg.src_rank]
        box = Box.of(leg, leg.positions, plan.start, plan.stop)
        sent = positions_of(leg.positions)
        assert leg.tokens == len(sent) == box.mask.sum() > 0, f"{leg}: a position twice, or outside the range"
        assert within(box.layers, source.layers), f"{leg}: layers that the source does not hold"
        assert within(box.heads, source.heads), f"{leg}: heads that the source does not hold"
        assert source.mask[sent].all(), f"{leg}: positions that the source does not hold"
        written[leg.dst_rank][box.layers, box.heads] += box.mask
    for rank, (box, copies) in enumerate(zip(targets, written, strict=True)):
        wanted = np.zeros(extents, np.uint8)
        wanted[box.layers, box.heads] = box.mask
        assert np.array_equal(copies, wanted), f"{plan}: rank {rank} is written {copies.max()} times or not at all"
    assert len({(leg.src_rank, leg.dst_rank) for leg in legs}) == len(legs)
    return legs


def replica_groups(plan: Plan) -> Iterator[list[int]]:
    """Source ranks that hold the same box."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in range(plan.src.size):
        shard = plan.src_shard(rank)
        groups[shard.layers, shard.heads, shard.positions].append(rank)
    return (ranks for ranks in groups.values() if len(ranks) > 1)


def check_balance(plan: Plan, legs: list[Leg]) -> None:
    """STRIPE: replicas send the same within one page. ELECT: none is idle while another serves two."""
    sent, served = np.zeros(plan.src.size, int), np.zeros(plan.src.size, int)
    for leg in legs:
        sent[leg.src_rank] += leg.nbytes(plan.component)
        served[leg.src_rank] += 1
    for ranks in replica_groups(plan):
        if plan.replicas is Replicas.STRIPE:
            shard = plan.src_shard(ranks[0])
            page_tokens = plan.src.page_rows(plan.component)
            page = page_tokens * shard.layers.count * shard.heads.count * plan.component.kv * plan.component.row_bytes
            assert np.ptp(sent[ranks]) <= page, f"{plan}: replicas {ranks} send {sent[ranks]} bytes, a page is {page}"
        else:
            assert np.ptp(served[ranks]) <= 1, f"{plan}: replicas {ranks} serve {served[ranks]} ranks"


def check_relations(plan: Plan, legs: list[Leg]) -> None:
    """sources_of, destinations_of, legs_into and leg say the same, pair by pair."""
    by_pair = {(leg.src_rank, leg.dst_rank): leg for leg in legs}
    sources = [plan.sources_of(rank) for rank in range(plan.dst.size)]
    destinations = [plan.destinations_of(rank) for rank in range(plan.src.size)]
    for src, dst in product(range(plan.src.size), range(plan.dst.size)):
        assert (src in sources[dst]) == (dst in destinations[src]), (plan, src, dst)
        leg = plan.leg(src, dst)
        assert leg == by_pair.get((src, dst)), (plan, src, dst)
        assert leg is None or src in sources[dst], (plan, src, dst)
    for ranks in (*sources, *destinations):
        assert ranks == sorted(set(ranks))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    tp = draw(st.integers(1, 16))
    pp, cp = draw(st.sampled_from([at for at in product(range(1, 5), repeat=2) if tp * at[0] * at[1] <= 32]))
    page = draw(st.sampled_from(PAGES))
    return Fleet(tp, pp, cp, page, draw(st.sampled_from(CpOrder)), draw(own_pages()))


def own_pages() -> st.SearchStrategy[dict[str, int]]:
    """A size of their own for the pages of `rows`: some fleets need it for rows of several tokens."""
    return st.fixed_dictionaries({"rows": st.sampled_from(PAGES)})


#: What makes a component a full, a sliding or a state one.
KINDS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"window": st.integers(1, 120)}),
    st.fixed_dictionaries({"states": st.integers(1, 9)}),
    st.fixed_dictionaries({"row_tokens": st.integers(2, 9)}),
)


def plan_of(component: Component, src: Fleet, dst: Fleet, tokens: range, replicas: Replicas) -> Plan:
    """The plan for what `component` wants of `tokens`, or of as many more as make a row."""
    wanted = component.wanted(tokens) or component.wanted(range(tokens.start, tokens.start + component.row_tokens))
    src, dst = (replace(fleet, pages=()) if component.states else fleet for fleet in (src, dst))
    return Plan(component, src, dst, wanted.start, wanted.stop, replicas)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers, kv, heads = draw(st.integers(4, 7)), draw(st.integers(1, 2)), draw(st.integers(1, 16))
    component = Component("rows", layers, kv, heads, 3, "bfloat16", **draw(KINDS))
    start = draw(st.one_of(st.just(0), st.integers(0, 150)))
    tokens = range(start, start + draw(st.integers(1, 250)))
    return plan_of(component, draw(fleets()), draw(fleets()), tokens, draw(st.sampled_from(BOTH)))
