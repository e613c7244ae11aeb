"""Writes spans, positions, caches and fleets as tables and pictures of plans show them."""

from __future__ import annotations

from collections.abc import Iterable

from kvmover.layout import Component, CpOrder, Positions, Span
from kvmover.plan.fleet_text import FleetText


def span_in_words(span: Span) -> str:
    """Write a span as first and last: `0-39`, or one number."""
    if not span:
        return "none"
    last = span.stop - 1
    if span.count == 1:
        return str(span.start)
    return f"{span.start}-{last}" + (f" step {span.step}" if span.step > 1 else "")


def positions_in_words(positions: Positions) -> str:
    """Write positions as runs of tokens: `0-8191`, or `16 of every 64 from 0 to 8143`."""
    parts = [
        f"{s.start}-{s.stop - 1}" if s.count == 1 else f"{s.width} of every {s.step} from {s.start} to {s.stop - 1}"
        for s in positions
    ]
    return ", ".join(parts) or "none"


def cache_in_words(component: Component) -> str:
    """Write a token's cache in one layer: `8 heads of 128`, or `one latent of 576`."""
    heads = f"{component.heads} heads" if component.heads > 1 else "one head"
    one = "one latent" if component.row_tokens == 1 and not component.states else "one row"
    return f"{heads if component.kv > 1 or component.heads > 1 else one} of {component.dim}"


def extent_in_words(component: Component, positions: int) -> str:
    """Write the extent of a request: `8,192 tokens`, `2,048 rows of 4 tokens`, `1 state`."""
    if component.states:
        return f"{positions:,} state{'s' if positions > 1 else ''}"
    rows = f" rows of {component.row_tokens}" if component.row_tokens > 1 else ""
    return f"{positions:,}{rows} tokens"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Write ascending numbers; three or more in a row as the first and the last.

    >>> ranks_in_words([0, 2, 3, 8, 9, 10])
    '0, 2, 3, 8-10'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(word for each in words for word in each)


def fleet_in_words(text: FleetText) -> str:
    """Write a fleet: sizes above one, the page and the order: `tp 4, pages of 16, NHD`."""
    fleet = text.fleet
    sizes = [f"{name} {size}" for name, size in (("tp", fleet.tp), ("pp", fleet.pp), ("cp", fleet.cp)) if size > 1]
    if fleet.cp > 1 and fleet.cp_order is not CpOrder.PAGE:
        sizes[-1] += f" by {fleet.cp_order}"
    pages = [f"{rows} of {name}" for name, rows in fleet.pages]
    form = [] if text.form == "auto" else [text.form]
    pages = " and ".join([f"pages of {fleet.page_tokens}", *pages])
    return ", ".join([*(sizes or ["one rank"]), pages, text.order, *form])
