"""Legs are the boxes that ranks of one fleet write to ranks of another. Only this module reasons about ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from math import gcd

import msgspec

from kvmover.errors import PlanError
from kvmover.fields import settle
from kvmover.layout.component import Component
from kvmover.layout.fleet import Coordinate, Fleet, Shard
from kvmover.layout.positions import Positions, Stripe, common, normal, tokens_of
from kvmover.layout.span import Span


class Replicas(StrEnum):
    """A policy for source ranks that hold the same bytes: STRIPE shares the pages out, ELECT lets one rank send all."""

    STRIPE = "stripe"
    ELECT = "elect"


class Leg(msgspec.Struct, frozen=True):
    """The box that one source rank writes to one destination rank, in whole-model and whole-request coordinates."""

    src_rank: int
    dst_rank: int
    layers: Span
    heads: Span
    positions: Positions

    @property
    def tokens(self) -> int:
        """The number of positions that move, each with all layers and heads of the leg."""
        return tokens_of(self.positions)

    def nbytes(self, component: Component) -> int:
        """Returns the payload in bytes: K and V, or the latent, at the component's dtype."""
        return self.layers.count * component.kv * self.heads.count * self.tokens * component.row_bytes


@dataclass(frozen=True)
class Plan:
    """A move of positions [start, stop) of a request's component from fleet `src` to fleet `dst`.

    Positions are the component's own, `component.wanted(tokens)`. Every destination element is written by exactly one
    leg. Raises PlanError for an empty range or one beyond the component's states. With 8 heads, TP4 to TP2:

    >>> plan = Plan(Component.attention(1, 8, 128, "bfloat16"), Fleet(tp=4), Fleet(tp=2), 0, 64)
    >>> [(leg.src_rank, leg.dst_rank, leg.heads.triple()) for leg in plan.legs()]
    [(0, 0, [0, 2, 1]), (1, 0, [2, 2, 1]), (2, 1, [4, 2, 1]), (3, 1, [6, 2, 1])]
    """

    component: Component
    src: Fleet
    dst: Fleet
    start: int
    stop: int
    replicas: Replicas = Replicas.STRIPE

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"positions [{self.start}, {self.stop}) of a request are not a range of tokens")
        settle(self, "plan", PlanError, replicas=Replicas)
        states = self.component.states
        if states and self.stop > states:
            name = self.component.name
            raise PlanError(f"positions [{self.start}, {self.stop}) of {name}, which has {states} a request")
        for shards in (self._src_shards, self._dst_shards):
            _ = shards[0]  # any rank will do: an error of one is an error of all

    def src_shard(self, rank: int) -> Shard:
        """Returns the shard of this request that a source rank holds."""
        return self._src_shards[rank]

    def dst_shard(self, rank: int) -> Shard:
        """Returns the shard of this request that a destination rank holds."""
        return self._dst_shards[rank]

    @cached_property
    def _src_shards(self) -> _Shards:
        return _Shards(self.src, self.component, self.stop)

    @cached_property
    def _dst_shards(self) -> _Shards:
        return _Shards(self.dst, self.component, self.stop)

    def legs(self) -> Iterator[Leg]:
        """Yields all legs, by destination rank."""
        return (leg for rank in range(self.dst.size) for leg in self.legs_into(rank))

    def legs_into(self, dst_rank: int) -> Iterator[Leg]:
        """Yields the legs that end at one destination rank, by source rank."""
        return (leg for rank in self.sources_of(dst_rank) if (leg := self.leg(rank, dst_rank)))

    def sources_of(self, dst_rank: int) -> list[int]:
        """Returns the source ranks that write to `dst_rank` for some request: a relation of the two fleets."""
        return [
            rank
            for rank in _overlapping(self.component, self.src, self.dst_shard(dst_rank))
            if self.replicas is Replicas.ELECT or self._deal(rank, dst_rank) is not None
        ]

    def destinations_of(self, src_rank: int) -> list[int]:
        """Returns the destination ranks that `src_rank` writes to for some request: `sources_of` from the other end."""
        shard = self.src_shard(src_rank)
        return [
            rank
            for rank in _overlapping(self.component, self.dst, shard)
            if self.replicas is Replicas.ELECT or self._deal(src_rank, rank) is not None
        ]

    def leg(self, src_rank: int, dst_rank: int) -> Leg | None:
        """Returns the leg from `src_rank` to `dst_rank`; None if it is empty."""
        src, dst = self._src_shards[src_rank], self._dst_shards[dst_rank]
        layers = src.layers if src.layers is dst.layers else _both(src.layers, dst.layers)
        heads = src.heads if src.heads is dst.heads else _both(src.heads, dst.heads)
        if not layers.count or not heads.count or src.positions is None or dst.positions is None:
            return None
        positions = common(self._share(src_rank, dst_rank, src.positions), dst.positions)
        return Leg(src_rank, dst_rank, layers, heads, positions) if positions else None

    def _share(self, src_rank: int, dst_rank: int, held: Stripe) -> Positions:
        """Returns the positions of `held` that `src_rank`, among its replicas, writes to `dst_rank`."""
        whole = held.clip(self.start, self.stop)
        copy = self.src.replica(self.component, src_rank)
        if copy.count == 1:
            return whole
        if self.replicas is Replicas.ELECT:
            ranks = _overlapping(self.component, self.dst, self.src_shard(src_rank))
            takers = [rank for rank in ranks if (to := self.dst_shard(rank).positions) and common(whole, to)]
            return whole if dst_rank in takers and takers.index(dst_rank) % copy.count == copy.index else ()
        deal = self._deal(src_rank, dst_rank)
        if deal is None or not whole:
            return ()
        page = self.src.page_rows(self.component)
        unit = (held.step, held.width) if held.count > 1 else (page, page)
        return _dealt(whole, held.start, unit, deal)

    def _deal(self, src_rank: int, dst_rank: int) -> _Deal | None:
        """Returns the share of `src_rank` among its replicas for `dst_rank` and its replicas; None if another rank
        serves it.

        `s` sources and `d` destinations form gcd(s, d) groups: each destination is served by s / gcd sources, and the
        remainders of its division go round by destination, so all sources send the same within one page. Each box of
        the destination begins its round with another source: four copies of one state serve four boxes.
        """
        src, dst = self.src.replica(self.component, src_rank), self.dst.replica(self.component, dst_rank)
        groups = gcd(src.count, dst.count)
        parts, takers = src.count // groups, dst.count // groups
        if src.index // parts != dst.index // takers:
            return None
        return _Deal((src.index - dst.box) % parts, parts, dst.index % takers, takers)


class _Shards(dict[int, Shard]):
    """A fleet's shards by rank, computed on first use: a rank needs those of its peers, not of the whole fleet."""

    def __init__(self, fleet: Fleet, component: Component, extent: int) -> None:
        super().__init__()
        self._fleet, self._component, self._extent = fleet, component, extent

    def __missing__(self, rank: int) -> Shard:
        shard = self[rank] = self._fleet.shard_of_rows(self._component, rank, self._extent)
        return shard


@dataclass(frozen=True, slots=True)
class _Deal:
    """Writer `index` of `parts`, serving destination `turn` of `turns` that all want the same pages."""

    index: int
    parts: int
    turn: int
    turns: int


def _dealt(whole: Positions, origin: int, unit: tuple[int, int], deal: _Deal) -> Positions:
    """Returns the writer's share of `whole`: pages from `origin` on, `unit` = (distance, tokens), perhaps cut at the
    ends.

    Full pages of every destination are dealt first, then cut ones: in falling order of size, round after round, so no
    writer is more than one page ahead.
    """
    step, width = unit
    first, last = (whole[0].start - origin) // step, (whole[-1].stop - 1 - origin) // step

    def page(number: int) -> Positions:
        return common(whole, Stripe(origin + number * step, 1, width, width))

    cut = sorted((n for n in sorted({first, last}) if tokens_of(page(n)) < width), key=lambda n: -tokens_of(page(n)))
    full_from = first + (first in cut)
    full = max(0, last + 1 - (last in cut) - full_from)
    mine = full_from + (deal.index - deal.turn * full) % deal.parts
    rounds = len(range(mine, full_from + full, deal.parts))
    pieces = [Stripe(origin + mine * step, rounds, deal.parts * step, width)] if rounds else []
    for place, number in enumerate(cut):
        if (deal.turns * (full + place) + deal.turn - deal.index) % deal.parts == 0:
            pieces += page(number)
    return normal(pieces)


@lru_cache(maxsize=4096)
def _both(one: Span, other: Span) -> Span:
    """Returns `one & other`. Cached: two fleets have few pairs of spans, and every request needs all of them."""
    return one & other


def _overlapping(component: Component, fleet: Fleet, shard: Shard) -> list[int]:
    """Returns the ranks of `fleet` that hold any of the layers and heads of `shard`."""
    stages = [pp for pp in range(fleet.pp) if Span.share(component.layers, fleet.pp, pp) & shard.layers]
    columns = [tp for tp in range(fleet.tp) if Span.share(component.heads, fleet.tp, tp) & shard.heads]
    return [fleet.rank(Coordinate(tp, pp, cp)) for pp in stages for cp in range(fleet.cp) for tp in columns]
