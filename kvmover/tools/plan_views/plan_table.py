"""A table of a plan has every leg, and a line for each reason behind a route."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from kvmover.observe.formats import bytes_in_words
from kvmover.plan.explain import Explained
from kvmover.plan.fleet_text import FleetText
from kvmover.plan.legs import Plan
from kvmover.plan.recode import form_text
from kvmover.tools.plan_views.plan_words import (
    cache_in_words,
    extent_in_words,
    fleet_in_words,
    positions_in_words,
    ranks_in_words,
    span_in_words,
)
from kvmover.tools.tables import Column, Sheet, console

#: Most legs printed one by one.
MOST_LEGS = 32


def print_plan(
    plan: Plan, src: FleetText, dst: FleetText, legs: Sequence[Explained], most_legs: int = MOST_LEGS
) -> None:
    """Print the plan on stdout. Above `most_legs` legs, equal legs share a line."""
    out = console()
    model = plan.component
    total = bytes_in_words(sum(each.nbytes for each in legs))
    out.print(
        f"{model.name}: {model.layers} layers, {cache_in_words(model)} {model.dtype},"
        f" {extent_in_words(model, plan.stop - plan.start)}, {total} in {len(legs)} leg{'s' if len(legs) > 1 else ''}"
    )
    out.print(f"from  {fleet_in_words(src)}\nto    {fleet_in_words(dst)}")
    out.print(_table(legs) if len(legs) <= most_legs else _folded(legs))
    for line in reasons(legs):
        out.print(line, soft_wrap=True)
    if line := conversion(plan, src, dst, legs):
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


_FOLDED = (
    Column("legs"),
    Column("from", "left", folds_at=24),
    Column("to", "left", folds_at=24),
    Column("bytes each"),
    Column("route", "left"),
    Column("descriptors: direct"),
    Column("packed"),
)


def _folded(legs: Sequence[Explained]) -> Sheet:
    """Returns a line for legs of one size and route, the most bytes first: in large fleets thousands are alike."""
    groups: defaultdict[tuple[int, str, int, int], list[Explained]] = defaultdict(list)
    for each in legs:
        groups[each.nbytes, each.choice.route.value, each.choice.runs, each.chunks].append(each)
    table = Sheet(_FOLDED)
    for (nbytes, route, runs, chunks), held in sorted(groups.items(), key=lambda item: -item[0][0] * len(item[1])):
        table.add(
            f"{len(held):,}",
            ranks_in_words(sorted({each.leg.src_rank for each in held})),
            ranks_in_words(sorted({each.leg.dst_rank for each in held})),
            bytes_in_words(nbytes),
            route,
            f"{runs:,}",
            f"{chunks:,}",
        )
    return table


_SUMS = (
    Column("component", "left"),
    Column("dtype", "left"),
    Column("layers"),
    Column("rows of the request"),
    Column("bytes"),
    Column("legs"),
)


def print_sums(plans: Sequence[tuple[Plan, Sequence[Explained]]]) -> None:
    """Print a line for each component of a model, and their total bytes."""
    table, total = Sheet(_SUMS), 0
    for plan, legs in plans:
        component, nbytes = plan.component, sum(each.nbytes for each in legs)
        total += nbytes
        table.add(
            component.name,
            component.dtype,
            str(component.layers),
            extent_in_words(component, plan.stop - plan.start),
            bytes_in_words(nbytes),
            f"{len(legs):,}",
        )
    out = console()
    out.print(table)
    out.print(f"together: {bytes_in_words(total)}")


def conversion(plan: Plan, src: FleetText, dst: FleetText, legs: Sequence[Explained]) -> str:
    """Describe the conversion between the two fleets' stored forms; empty if the forms are equal."""
    held, kept = (form_text(end.stored(plan.component)) for end in (src, dst))
    if held == kept or not legs:
        return ""
    whole = sum(each.leg.nbytes(plan.component) for each in legs)
    return (
        f"stored as {held}, there as {kept}: {bytes_in_words(sum(each.nbytes for each in legs))} travel of"
        f" {bytes_in_words(whole)}, as {form_text(legs[0].carried)}, and a number is off by at most"
        f" {max(each.error for each in legs):.3g} of the largest that shares its scale"
    )


def reasons(legs: Sequence[Explained]) -> list[str]:
    """Returns a line for each distinct choice, with its number of legs, the most frequent first."""
    counts = Counter(each.choice.why() for each in legs)
    return [f"{count} x {why}" for why, count in counts.most_common()]
