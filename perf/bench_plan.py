"""Time from two fleets to kernel arguments on one source rank, against listing every token row as peers do.

Case: Llama-3-70B (80 layers, 8 KV heads of 128, bfloat16), 32k tokens, TP8 to TP2. Target: under 1 ms a rank, packed.
"""

from __future__ import annotations

import numpy as np

from kvmover.layout import Component, Fleet, PoolSpec
from kvmover.plan import Plan
from kvmover.plan.lower import Held, box, coalesced_runs, count_runs, packed_place, pool_place, units_of
from perf.command_line import options
from perf.record import interleaved, write

TOKENS = 32768
ROUNDS = 15


def main() -> None:
    options(__doc__).parse_args()
    rows: list[dict[str, object]] = []
    for layers in (80, 8):
        for page_tokens in (64, 16, 1):
            rows += _case(layers, page_tokens)
    for row in rows:
        print(
            f"{row['layers']:>3} layers, page {row['page_tokens']:>2}: {row['what']:<32}"
            f" {row['median_us']:>10.1f} us ({row['p10_us']:.1f} to {row['p90_us']:.1f}),"
            f" {row['of_every_row']:>9.5f} of listing every row"
        )
    print(f"wrote {write('bench_plan', rows)}")


def _case(layers: int, page_tokens: int) -> list[dict[str, object]]:
    component = Component.attention(layers, 8, 128, "bfloat16")
    src, dst = Fleet(tp=8, page_tokens=page_tokens), Fleet(tp=2, page_tokens=page_tokens)
    table = np.random.default_rng(0).permutation(TOKENS // page_tokens)

    def ends() -> tuple[Plan, Held, Held]:
        plan = Plan(component, src, dst, 0, TOKENS)
        held = [
            Held(PoolSpec.dense(component, shard, TOKENS // page_tokens, page_tokens, "NHD", ("layer", "kv")), shard)
            for shard in (plan.src_shard(3), plan.dst_shard(0))
        ]
        return plan, held[0], held[1]

    def packed() -> None:
        plan, here, there = ends()
        (leg,) = [leg for rank in plan.destinations_of(3) if (leg := plan.leg(3, rank))]
        for units in units_of(leg, here, there):
            place = pool_place(here, leg, units.src, table)
            box(component, leg, units, place, packed_place(component, leg, units, 0))

    def route() -> None:
        plan, here, there = ends()
        leg = plan.leg(3, 0)
        assert leg is not None
        count_runs(leg, here, there, units_of(leg, here, there))

    def every_row() -> None:
        plan, here, there = ends()
        leg = plan.leg(3, 0)
        assert leg is not None
        for units in units_of(leg, here, there):
            places = pool_place(here, leg, units.src, table), pool_place(there, leg, units.dst, table)
            coalesced_runs([box(component, leg, units, *places)])

    cases = {
        "plan and lower, packed": packed,
        "count the runs of going direct": route,
        "list every row, direct": every_row,
    }
    spreads = interleaved(cases, ROUNDS if layers == 8 or page_tokens == 64 else 5)
    whole = spreads["list every row, direct"].median
    return [
        {
            "layers": layers,
            "page_tokens": page_tokens,
            "tokens": TOKENS,
            "what": what,
            "median_us": round(spread.median * 1e6, 1),
            "p10_us": round(spread.low * 1e6, 1),
            "p90_us": round(spread.high * 1e6, 1),
            "of_every_row": round(spread.median / whole, 6),
        }
        for what, spread in spreads.items()
    ]


if __name__ == "__main__":
    main()
