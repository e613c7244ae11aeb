"""A TransferTable gives the time of a request's KV between two fleets, by its number of tokens.

A planner needs it in place of one bandwidth: unlike layouts take unlike routes, and ranks send side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmover.layout import Component
from kvmover.plan import Costs, Plan, Route
from kvmover.plan.cost import BY_WIRE
from kvmover.plan.explain import explain
from kvmover.plan.fleet_text import FleetText

Times = npt.NDArray[np.float64]


class TransferPoint(NamedTuple):
    """A request of `tokens` tokens: its bytes on all wires, microseconds, and the route of most bytes."""

    tokens: int
    nbytes: int
    us: float
    route: Route


@dataclass(frozen=True, slots=True)
class TransferTable:
    """Points by ascending tokens, with linear interpolation of times and bytes."""

    points: tuple[TransferPoint, ...]

    def us(self, tokens: npt.ArrayLike) -> Times:
        """Returns the microseconds of requests of `tokens` tokens each."""
        return self._at(tokens, [point.us for point in self.points])

    def nbytes(self, tokens: npt.ArrayLike) -> Times:
        """Returns the bytes, on all wires, of requests of `tokens` tokens each."""
        return self._at(tokens, [point.nbytes for point in self.points])

    def _at(self, tokens: npt.ArrayLike, values: Sequence[float]) -> Times:
        return np.interp(np.asarray(tokens, np.float64), [point.tokens for point in self.points], values)

    def line(self) -> tuple[float, float]:
        """Fit a line: returns bytes a microsecond, and the fixed microseconds of a request.

        Least squares of relative errors, for simulators that know a bandwidth and a latency but no layouts.
        """
        took, nbytes = (np.array([getattr(point, name) for point in self.points]) for name in ("us", "nbytes"))
        rows = np.stack([np.ones(len(took)), nbytes], axis=1) / took[:, None]
        latency_us, byte_us = np.linalg.lstsq(rows, np.ones(len(took)), rcond=None)[0]
        return 1 / max(float(byte_us), 1e-12), max(0.0, float(latency_us))


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The costs of a link between two ranks, its routes, and a request's fixed time in microseconds."""

    costs: Costs
    among: frozenset[Route] = BY_WIRE
    request_us: float = 0.0


def transfer_table(
    components: Sequence[Component], src: FleetText, dst: FleetText, link: LinkCosts, longest_tokens: int
) -> TransferTable:
    """Build the table for requests of 1 to `longest_tokens` tokens, alone on their wires.

    A rank's legs follow each other; ranks work side by side, so the slowest counts. Raises LayoutError if the fleets do
    not fit the components.
    """
    step = max(src.fleet.page_tokens, dst.fleet.page_tokens)
    sizes = {1, longest_tokens, *(step << n for n in range(longest_tokens.bit_length()) if step << n < longest_tokens)}
    points: list[TransferPoint] = []
    for tokens in sorted(sizes):
        busy, routed = Counter[tuple[str, int]](), Counter[Route]()
        for component in components:
            if rows := component.wanted(range(tokens)):
                plan = Plan(component, src.fleet, dst.fleet, rows.start, rows.stop)
                for each in explain(plan, src, dst, link.costs, link.among):
                    for end in (("src", each.leg.src_rank), ("dst", each.leg.dst_rank)):
                        busy[end] += each.choice.us  # pyright: ignore[reportArgumentType]
                    routed[each.choice.route] += each.nbytes
        slowest_us, route = max(busy.values(), default=0), max(routed, key=routed.__getitem__, default=Route.DIRECT)
        points.append(TransferPoint(tokens, routed.total(), slowest_us + link.request_us, route))
    return TransferTable(tuple(points))


def rank_token_bytes(components: Sequence[Component], end: FleetText, tokens: int) -> float:
    """Returns bytes a token on the rank that holds most of a request of `tokens` tokens: its load for a hit."""
    most = 0
    for rank in range(end.fleet.size):
        held = 0
        for component in components:
            shard, kept = end.fleet.shard(component, rank, tokens), end.stored(component)
            rows = min(shard.positions.tokens, component.extent(tokens)) if shard.positions else 0
            held += shard.layers.count * shard.heads.count * kept.kv * kept.row_bytes * rows
        most = max(most, held)
    return most / tokens
