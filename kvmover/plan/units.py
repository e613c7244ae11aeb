"""Units are a leg's tokens, cut so that each piece lies inside one page on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.layout.positions import Positions, Stripe

Offsets = npt.NDArray[np.int64]


class Units(msgspec.Struct, frozen=True, eq=False):
    """Equal pieces of `tokens` consecutive tokens each, by their place on both sides.

    `src`, `dst` [unit] int64: the piece's first token as an index into the rank's positions of the request, in order.
    """

    tokens: int
    src: Offsets
    dst: Offsets

    def __len__(self) -> int:
        return len(self.src)

    def slice(self, start: int, stop: int) -> Units:
        """Returns units [start, stop), as a view."""
        if stop - start == self.src.size:
            return self
        return Units(self.tokens, self.src[start:stop], self.dst[start:stop])


class Paging(msgspec.Struct, frozen=True):
    """One rank's paging of a request: its positions, in order, and the tokens of a page."""

    held: Stripe
    page_tokens: int


def cut(positions: Positions, src: Paging, dst: Paging) -> tuple[Units, ...]:
    """Cut `positions`, held by both sides, at every page border of either.

    Full pieces have gcd(P_src, P_dst) tokens, fewer where the two sides' pages start out of step. Remainders at the
    ends of a run form groups of their own, without padding. Longest pieces first. Cached, so the arrays are read-only:
    ranks of a fleet differ in heads and layers far more often than in positions.
    """
    if len(positions) == 1 and positions[0].count == 1:
        run = positions[0]
        at = src.held.index(run.start), dst.held.index(run.start)
        return _cut_run(run.width, *at, src.page_tokens, dst.page_tokens)
    return _cut_runs(positions, src, dst)


@lru_cache(maxsize=1024)
def _cut_run(width: int, at_src: int, at_dst: int, src_page: int, dst_page: int) -> tuple[Units, ...]:
    """Cut one run, the common case, in plain integers: arrays of one element cost more than their sum."""
    piece = gcd(src_page, dst_page, at_src - at_dst)
    first = min(-at_src % piece, width)
    full, rest = divmod(width - first, piece)
    groups: dict[int, list[tuple[int, int]]] = {}
    for tokens, begin, count in ((piece, first, full), (first, 0, first > 0), (rest, width - rest, rest > 0)):
        if count:
            groups.setdefault(tokens, []).append((begin, count))
    return tuple(
        _unit_group(tokens, *(_evenly(at, tokens, groups[tokens]) for at in (at_src, at_dst)))
        for tokens in sorted(groups, reverse=True)
    )


def _unit_group(tokens: int, src: Offsets, dst: Offsets) -> Units:
    src.flags.writeable = dst.flags.writeable = False
    return Units(tokens, src, dst)


def _evenly(at: int, tokens: int, parts: list[tuple[int, int]]) -> Offsets:
    """Returns first tokens of `count` pieces of `tokens` each from `at + begin` on, for each (begin, count)."""
    found = [np.arange(at + begin, at + begin + count * tokens, tokens, dtype=np.int64) for begin, count in parts]
    return found[0] if len(found) == 1 else np.concatenate(found)


@lru_cache(maxsize=1024)
def _cut_runs(positions: Positions, src: Paging, dst: Paging) -> tuple[Units, ...]:
    """Cut any number of runs, joined where both sides store them one after the other."""
    starts, widths = _runs(positions)
    at_src, at_dst = _index(src.held, starts), _index(dst.held, starts)
    joined = (at_src[1:] == at_src[:-1] + widths[:-1]) & (at_dst[1:] == at_dst[:-1] + widths[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    widths, at_src, at_dst = np.add.reduceat(widths, heads), at_src[heads], at_dst[heads]
    piece = gcd(src.page_tokens, dst.page_tokens, int(np.gcd.reduce(at_src - at_dst)))
    first = np.minimum(-at_src % piece, widths)
    full = (widths - first) // piece
    rest = widths - first - full * piece
    groups: dict[int, list[tuple[Offsets, Offsets]]] = {}
    for tokens, source, target in (
        *_whole(piece, full, at_src + first, at_dst + first),
        *_ragged(first, at_src, at_dst),
        *_ragged(rest, at_src + widths - rest, at_dst + widths - rest),
    ):
        groups.setdefault(tokens, []).append((source, target))
    return tuple(
        _unit_group(tokens, *(np.concatenate(side) for side in zip(*groups[tokens], strict=True)))
        for tokens in sorted(groups, reverse=True)
    )


def _runs(positions: Positions) -> tuple[Offsets, Offsets]:
    """Returns first position and width of every run, in order."""
    starts = np.concatenate([np.arange(s.count, dtype=np.int64) * s.step + s.start for s in positions])
    widths = np.concatenate([np.full(s.count, s.width, np.int64) for s in positions])
    order = np.argsort(starts, kind="stable")
    return starts[order], widths[order]


def _index(held: Stripe, positions: Offsets) -> Offsets:
    """Returns `Stripe.index` of many positions, which must be held."""
    run, token = np.divmod(positions - held.start, held.step)
    return run * held.width + token


def _whole(piece: int, counts: Offsets, src: Offsets, dst: Offsets) -> Iterator[tuple[int, Offsets, Offsets]]:
    """Yields every run's full pieces, one after the other."""
    total = int(counts.sum())
    if total:
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        steps = (np.arange(total, dtype=np.int64) - begins) * piece
        yield piece, np.repeat(src, counts) + steps, np.repeat(dst, counts) + steps


def _ragged(lengths: Offsets, src: Offsets, dst: Offsets) -> Iterator[tuple[int, Offsets, Offsets]]:
    """Yields pieces shorter than a full one, grouped by length."""
    for tokens in np.unique(lengths[lengths > 0]).tolist():
        same = lengths == tokens
        yield tokens, src[same], dst[same]
