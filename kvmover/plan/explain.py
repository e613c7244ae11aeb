"""The explanation of a plan: each leg's bytes, runs and cost by each route, also as plain data for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import msgspec

from kvmover.layout.codec import error_of
from kvmover.layout.component import Component
from kvmover.layout.fleet import Fleet, Shard
from kvmover.layout.pool import PoolSpec
from kvmover.layout.span import EMPTY
from kvmover.plan.calibration import Calibration
from kvmover.plan.cost import BY_WIRE, Choice, Costs, Route
from kvmover.plan.fleet_text import FleetText
from kvmover.plan.legs import Leg, Plan
from kvmover.plan.lower import Held, count_runs, units_of
from kvmover.plan.recode import form_text, forms_of


@dataclass(frozen=True, slots=True)
class Explained:
    """A leg with its cost by each route, pages assumed scattered in both pools.

    `nbytes`: on the wire. `carried`: the component in its form on the wire. `error`: the largest error of a number on
    arrival, as in `layout.codec.CodecPart.error`.
    """

    leg: Leg
    nbytes: int
    choice: Choice
    chunks: int
    carried: Component
    error: float


def explain(
    plan: Plan, src: FleetText, dst: FleetText, costs: Costs, among: frozenset[Route] = BY_WIRE
) -> Iterator[Explained]:
    """Yields every leg of `plan` between dense pools of these orders and forms, with its route of `among`.

    Where the forms differ only the packed route is considered.
    """
    for leg in plan.legs():
        held = _held(plan, src, plan.src_shard(leg.src_rank))
        kept = _held(plan, dst, plan.dst_shard(leg.dst_rank))
        forms = forms_of(held, kept, leg.layers)
        carried = forms.wire if forms else held.spec.component
        error = error_of(held.spec.component.form, kept.spec.component.form) if forms else 0.0
        nbytes = leg.nbytes(carried)
        runs = count_runs(leg, held, kept, units_of(leg, held, kept))
        choice = costs.choose(nbytes, runs, among & {Route.PACKED} if forms else among)
        yield Explained(leg, nbytes, choice, costs.chunks(nbytes), carried, error)


def _held(plan: Plan, end: FleetText, shard: Shard) -> Held:
    rows = end.fleet.page_rows(plan.component)
    return Held(PoolSpec.dense(end.stored(plan.component), shard, -(-plan.stop // rows), rows, end.order), shard)


def ranks_as_data(plan: Plan, fleet: Fleet) -> list[dict[str, object]]:
    """Returns each rank's layers and heads, [start, count, step], and positions, with a width, cut to the request."""
    rows: list[dict[str, object]] = []
    for rank in range(fleet.size):
        at, shard = fleet.coordinate(rank), fleet.shard_of_rows(plan.component, rank, plan.stop)
        positions = shard.positions.clip(0, plan.stop) if shard.positions else ()
        rows.append(
            {
                "rank": rank,
                "tp": at.tp,
                "pp": at.pp,
                "cp": at.cp,
                "layers": (shard.layers or EMPTY).triple(),
                "heads": (shard.heads or EMPTY).triple(),
                "positions": [stripe.quad() for stripe in positions],
            }
        )
    return rows


def link_as_data(link: Calibration, base: Costs) -> dict[str, object]:
    """Returns the additions of `kvmover plan --calibration`: costs used, and measured numbers, null if assumed."""
    return {"costs": asdict(link.costs(base)), "calibration": msgspec.to_builtins(link)}


def plan_as_data(plan: Plan, legs: list[Explained]) -> dict[str, object]:
    """Returns the JSON of `kvmover plan`, which is a contract."""
    return {
        "src": {"ranks": ranks_as_data(plan, plan.src)},
        "dst": {"ranks": ranks_as_data(plan, plan.dst)},
        "legs": [
            {
                "src_rank": each.leg.src_rank,
                "dst_rank": each.leg.dst_rank,
                "layers": each.leg.layers.triple(),
                "heads": each.leg.heads.triple(),
                "positions": [stripe.quad() for stripe in each.leg.positions],
                "bytes": each.nbytes,
                "route": each.choice.route.value,
                "descriptors_direct": each.choice.runs,
                "descriptors_packed": each.chunks,
                "stored_as": form_text(each.carried),
                "error": each.error,
            }
            for each in legs
        ],
        "total_bytes": sum(each.nbytes for each in legs),
    }
