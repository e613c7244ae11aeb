"""Legs between any two fleets, as docs/protocol.md derives them: token by token, where the code has progressions."""

from __future__ import annotations

from math import gcd
from typing import Any


def held(at: tuple[int, int, int], fleet: Any, page: int, stop: int, shared: bool) -> list[int]:
    """Positions below the end of the last page, in the order in which the context-parallel rank holds them."""
    cp, parts, pages = at[1], fleet.cp if shared else 1, -(-stop // page)
    if parts > 1 and fleet.cp_order == "token":
        return [i for i in range(stop) if i % parts == cp]
    first, last = (cp % parts) * pages // parts, (cp % parts + 1) * pages // parts
    mine = range(first, last) if fleet.cp_order == "block" else range(cp % parts, pages, parts)
    return [i * page + token for i in mine for token in range(page)]


def copies(at: tuple[int, int, int], fleet: Any, heads: int, shared: bool) -> tuple[int, int, int]:
    """(number of the box, index of the copy, copies) of the rank at (pp, cp, tp)."""
    pp, cp, tp = at
    h, parts = min(heads, fleet.tp), fleet.cp if shared else 1
    columns = [other for other in range(fleet.tp) if other * h // fleet.tp == tp * h // fleet.tp]
    index = cp // parts * len(columns) + tp - columns[0]
    return pp * h + tp * h // fleet.tp, index, fleet.cp // parts * len(columns)


def part(extent: int, parts: int, r: int) -> set[int]:
    first = r * extent // parts
    return set(range(first, first + max(1, (r + 1) * extent // parts - first)))


def sent(ranks: tuple[int, int], fleets: tuple[Any, Any], component: Any, wanted: range, replicas: str) -> list[int]:
    """Positions that the rank of the first fleet sends to the rank of the second."""
    src, dst = fleets
    n, m = (coordinates(rank, fleet) for rank, fleet in zip(ranks, fleets, strict=True))
    shared, heads = not component.states, component.heads
    size = src.page_tokens if shared else 1
    mine = held(n, src, size, wanted.stop, shared)
    both = common(n, m, fleets, component, wanted)
    _, i, s = copies(n, src, heads, shared)
    box, j, d = copies(m, dst, heads, shared)
    if s == 1 or not both:
        return both
    if replicas == "elect":
        order = sorted(range(dst.size), key=lambda rank: coordinates(rank, dst))
        takers = [rank for rank in order if common(n, coordinates(rank, dst), fleets, component, wanted)]
        return both if takers.index(ranks[1]) % s == i else []
    a, b = s // gcd(s, d), d // gcd(s, d)
    if i // a != j // b:
        return []
    writer, turn = (i - box) % a, j % b
    gaps = [k for k in range(1, len(mine)) if mine[k] != mine[k - 1] + 1]
    width = gaps[0] if gaps else size
    pages = [mine[k : k + width] for k in range(0, len(mine), width)]
    kept = [[token for token in page if token in wanted] for page in pages]
    full = [page for page in kept if len(page) == width]
    cut = sorted((page for page in kept if 0 < len(page) < width), key=lambda page: -len(page))
    chosen = [page for k, page in enumerate(full) if (turn * len(full) + k) % a == writer]
    chosen += [page for k, page in enumerate(cut, len(full)) if (b * k + turn) % a == writer]
    return sorted(set(both).intersection(token for page in chosen for token in page))


def coordinates(rank: int, fleet: Any) -> tuple[int, int, int]:
    """(pp, cp, tp): `rank = (pp * CP + cp) * TP + tp`."""
    return rank // (fleet.tp * fleet.cp), rank // fleet.tp % fleet.cp, rank % fleet.tp


def common(
    n: tuple[int, int, int], m: tuple[int, int, int], fleets: tuple[Any, Any], component: Any, wanted: range
) -> list[int]:
    """Wanted positions that two ranks hold, if their layers and heads meet."""
    src, dst = fleets
    layers = part(component.layers, src.pp, n[0]) & part(component.layers, dst.pp, m[0])
    if not layers or not part(component.heads, src.tp, n[2]) & part(component.heads, dst.tp, m[2]):
        return []
    shared = not component.states
    here, there = (
        set(held(at, fleet, fleet.page_tokens if shared else 1, wanted.stop, shared))
        for at, fleet in ((n, src), (m, dst))
    )
    return sorted(here & there & set(wanted))
