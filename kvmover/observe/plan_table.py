"""A plan as a table for people: every leg, and one line for each reason behind a route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvmover.observe.console import console
from kvmover.observe.tables import Column, Sheet
from kvmover.observe.words import (
    bytes_in_words,
    cache_in_words,
    fleet_in_words,
    positions_in_words,
    ranks_in_words,
    span_in_words,
)
from kvmover.plan.legs import Plan
from kvmover.plan.text import Explained, FleetText


def print_plan(plan: Plan, src: FleetText, dst: FleetText, legs: Sequence[Explained]) -> None:
    """Print the plan on stdout."""
    out = console()
    model = plan.component
    total = sum(each.nbytes for each in legs)
    out.print(
        f"{model.name}: {model.layers} layers, {cache_in_words(model)} {model.dtype},"
        f" {plan.stop:,} tokens, {bytes_in_words(total)} in {len(legs)} leg{'s' if len(legs) > 1 else ''}"
    )
    out.print(f"from  {fleet_in_words(src)}\nto    {fleet_in_words(dst)}")
    out.print(_table(legs))
    for line in reasons(legs):
        out.print(line, soft_wrap=True)
    senders = {each.leg.src_rank for each in legs}
    if idle := [rank for rank in range(plan.src.size) if rank not in senders]:
        out.print(f"source ranks that send nothing: {ranks_in_words(idle)}", soft_wrap=True)


_COLUMNS = (
    *(Column(heading) for heading in ("from", "to", "layers", "heads")),
    Column("positions", "left", folds_at=36),
    Column("bytes"),
    Column("route", "left"),
    Column("descriptors: direct"),
    Column("packed"),
)


def _table(legs: Sequence[Explained]) -> Sheet:
    table = Sheet(_COLUMNS, keys=2)
    for each in legs:
        leg = each.leg
        table.add(
            str(leg.src_rank),
            str(leg.dst_rank),
            span_in_words(leg.layers),
            span_in_words(leg.heads),
            positions_in_words(leg.positions),
            bytes_in_words(each.nbytes),
            each.choice.route.value,
            f"{each.choice.runs:,}",
            f"{each.chunks:,}",
        )
    return table


def reasons(legs: Sequence[Explained]) -> list[str]:
    """One line for each distinct choice, with the number of legs it decides, the most frequent first."""
    counts = Counter(each.choice.why() for each in legs)
    return [f"{count} x {why}" for why, count in counts.most_common()]
