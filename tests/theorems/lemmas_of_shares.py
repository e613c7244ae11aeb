"""Lemmas of shares: heads, layers, ranks and their replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvmover.layout.fleet import Coordinate, Fleet, Replica, _replica
from kvmover.layout.span import Span
from tests.theorems.given import assume, lemma, whole
from tests.theorems.symbols import claim, times


@lemma("deal")
def some_part_holds_each() -> None:
    """Each of the heads dealt to some ranks is held by a rank."""
    heads, ranks = whole(1), whole(1)
    head = whole(0, heads)
    rank = ((head + 1) * ranks - 1) // heads
    share = Span.share(heads, ranks, rank)
    claim(share.start <= head)
    claim(head < share.start + share.count)


@lemma("deal", bound=32)
def parts_do_not_overlap() -> None:
    """Where there are as many heads as ranks or more, no head is held by two ranks."""
    ranks = whole(1)
    heads, left = whole(ranks), whole(0, ranks)
    right = whole(left + 1, ranks)
    one, other = Span.share(heads, ranks, left), Span.share(heads, ranks, right)
    claim(one.start + one.count <= other.start)


@lemma("deal")
def parts_are_balanced() -> None:
    """Shares differ by at most one head, and none is empty."""
    ranks = whole(1)
    heads, rank = whole(ranks), whole(0, ranks)
    count = Span.share(heads, ranks, rank).count
    claim(heads // ranks <= count)
    claim(count <= heads // ranks + 1)


@lemma("deal")
def more_ranks_than_heads_hold_one_each() -> None:
    """Where there are more ranks than heads, each rank holds one head."""
    heads = whole(1)
    ranks = whole(heads + 1)
    claim(Span.share(heads, ranks, whole(0, ranks)).count == 1)


def replica(heads: Any, ranks: Any, rank: Any) -> Replica:
    """Returns the copy that a rank of one stage holds."""
    fleet: Any = SimpleNamespace(tp=ranks, cp=1, coordinate=lambda tp: Coordinate(tp, 0, 0))
    component: Any = SimpleNamespace(heads=heads, cp_parts=lambda cp: 1)
    return _replica.__wrapped__(fleet, component, rank)


@lemma("replicas", bound=24)
def equal_shares_are_equal_boxes() -> None:
    """Two ranks hold the same head if and only if their boxes are equal."""
    heads = whole(1)
    ranks = whole(heads + 1)
    one, other = whole(0, ranks), whole(0, ranks)
    same = Span.share(heads, ranks, one).start == Span.share(heads, ranks, other).start
    claim(same == (replica(heads, ranks, one).box == replica(heads, ranks, other).box))


@lemma("replicas")
def a_rank_is_one_of_its_copies() -> None:
    """A rank's copy is counted from 0, and less than the number of copies."""
    heads, ranks = whole(1), whole(1)
    copy = replica(heads, ranks, whole(0, ranks))
    claim(copy.index >= 0)
    claim(copy.index < copy.count)


@lemma("replicas", bound=24)
def each_copy_is_of_one_rank() -> None:
    """For each copy of a rank's box there is a rank, so that copies are numbered without gaps, each once."""
    heads, ranks = whole(1), whole(1)
    rank = whole(0, ranks)
    copy = replica(heads, ranks, rank)
    number = whole(0, copy.count)
    found = replica(heads, ranks, rank - copy.index + number)
    claim(found.box == copy.box)
    claim(found.index == number)
    claim(found.count == copy.count)


@lemma("ranks", bound=8)
def coordinates_are_ranks() -> None:
    """A rank is at one coordinate, and a coordinate is of one rank."""
    tp, pp, cp = whole(1), whole(1), whole(1)
    at = Coordinate(whole(0, tp), whole(0, pp), whole(0, cp))
    fleet: Any = SimpleNamespace(tp=tp, pp=pp, cp=cp, size=tp * pp * cp)
    rank = Fleet.rank(fleet, at)
    stage = at.pp * cp + at.cp
    times(rank, stage * tp + at.tp, 1)
    found = (rank // tp, rank % tp)
    claim(found[0] == stage)
    claim(found[1] == at.tp)
    claim(stage // cp == at.pp)
    claim(stage % cp == at.cp)
    assume(rank < fleet.size)
    back = Fleet.coordinate(fleet, rank)
    claim(back.tp == at.tp)
    claim(back.pp == at.pp)
    claim(back.cp == at.cp)
