"""Lemmas of plans: context-parallel orders, the deal of pages among replicas, and units."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

from kvmover.layout.fleet import CpOrder, Fleet
from kvmover.layout.positions import Stripe
from kvmover.plan import legs
from kvmover.plan.units import _cut_run
from tests.theorems.given import assume, lemma, whole
from tests.theorems.lemmas_of_sets import holds
from tests.theorems.symbols import claim, divides, exact, gcd, is_symbolic, length, numbers, ordered, times


def positions(order: CpOrder, ranks: Any, width: Any, rank: Any, extent: Any) -> Stripe | None:
    """Returns the positions of a context-parallel rank."""
    fleet: Any = SimpleNamespace(cp=ranks, cp_order=order, page_rows=lambda component: width)
    component: Any = SimpleNamespace(cp_parts=lambda cp: cp)
    return Fleet._positions(fleet, component, rank, extent)


@lemma("orders", bound=24)
def a_token_in_turn_is_at_one_rank() -> None:
    """Of tokens dealt in turn, each is at one rank, where as many stand before it as there were turns before."""
    ranks, extent, turn = whole(1), whole(1), whole(0)
    rank, at = whole(0, ranks), whole(0, ranks)
    token = turn * ranks + at
    assume(token < extent)
    count = length(numbers(rank, extent, ranks))
    for other in (0, count, count - 1):
        ordered(turn, other, ranks)
    held = positions(CpOrder.TOKEN, ranks, 1, rank, extent)
    if rank != at:
        claim(held is None or holds((held,), token) == 0)
        return
    assert held is not None, "a rank that holds a token holds positions"
    claim(holds((held,), token) == 1)
    claim(held.index(token) == turn)


@lemma("orders", bound=8)
def a_page_in_turn_is_at_one_rank() -> None:
    """Of pages dealt in turn, each is at one rank, where as many stand before it as there were turns before."""
    ranks, width, extent, turn = whole(1), whole(1), whole(1), whole(0)
    rank, at, slot = whole(0, ranks), whole(0, ranks), whole(0, width)
    page = turn * ranks + at
    token = page * width + slot
    assume(token < extent)
    pages = -(-extent // width)
    for one, other in ((page, pages), (page, 0), (turn, 0)):
        ordered(one, other, width)
    claim(page < pages)
    count = length(numbers(rank, pages, ranks))
    for other in (0, count, count - 1):
        ordered(turn, other, ranks)
        ordered(turn, other, ranks * width)
    ordered(rank, at, width)
    ordered(rank + 1, at, width)
    ordered(ranks, 1, width)
    ordered(ranks, at + 1, width)
    ordered(ranks, rank + 1, width)
    held = positions(CpOrder.PAGE, ranks, width, rank, extent)
    if rank != at:
        claim(held is None or holds((held,), token) == 0)
        return
    assert held is not None, "a rank that holds a token holds positions"
    claim(holds((held,), token) == 1)
    claim(held.index(token) == turn * width + slot)


@lemma("orders", bound=8)
def a_page_of_blocks_is_at_one_rank() -> None:
    """Of pages dealt in blocks, each is at one rank, in its place in the block."""
    ranks, width, extent, page = whole(1), whole(1), whole(1), whole(0)
    rank, slot = whole(0, ranks), whole(0, width)
    token = page * width + slot
    assume(token < extent)
    pages = -(-extent // width)
    ordered(page, pages, width)
    claim(page < pages)
    first, stop = rank * pages // ranks, (rank + 1) * pages // ranks
    for border in (first, stop):
        ordered(page, border, width)
        ordered(page + 1, border, width)
    ordered(stop, first + 1, width)
    held = positions(CpOrder.BLOCK, ranks, width, rank, extent)
    here = first <= page and page < stop
    claim((0 if held is None else holds((held,), token)) == int(here))
    if here:
        assert held is not None, "a rank that holds a token holds positions"
        claim(held.index(token) == (page - first) * width + slot)


@lemma("orders", bound=32)
def blocks_hold_each_page_once() -> None:
    """Of pages dealt in blocks, each is in one, and a block begins where the last one ended."""
    ranks, pages = whole(1), whole(1)
    page, rank = whole(0, pages), whole(0, ranks)
    at = ((page + 1) * ranks - 1) // pages
    claim(at < ranks)
    claim(at * pages // ranks <= page)
    claim(page < (at + 1) * pages // ranks)
    claim(rank * pages // ranks <= (rank + 1) * pages // ranks)


def given_deal() -> legs._Deal:
    """Returns a source of a group, which serves one of its destinations."""
    parts, turns = whole(1), whole(1)
    return legs._Deal(whole(0, parts), parts, whole(0, turns), turns)


def writer_of_full(deal: legs._Deal, page: Any, pages: Any, step: Any, token: Any) -> Any:
    """Returns the source that writes page `page` of `pages` full ones, whose starts are `step` apart."""
    parts = deal.parts
    rounds, writer = divmod(page + deal.turn * pages, parts)
    before, mine = divmod(deal.index - deal.turn * pages, parts)
    turns_on, behind = divmod(page - mine, parts)
    for near in (0, -1):
        ordered(turns_on, rounds + before + near, parts)
    times(page - mine, parts * turns_on + behind, step)
    for other in (0, 1, parts - 1):
        ordered(behind, other, step)
    count = length(numbers(mine, pages, parts))
    for other in (0, count, count - 1):
        ordered(turns_on, other, parts)
        ordered(turns_on, other, parts * step)
    divides((page - mine) * step + token, parts * step, turns_on, behind * step + token)
    return writer


def writer_of_cut(deal: legs._Deal, place: Any) -> Any:
    """Returns the source that writes a cut page, with `place` pages before it."""
    number = deal.turns * place + deal.turn
    rounds, writer = divmod(number, deal.parts)
    if writer >= deal.index:
        divides(number - deal.index, deal.parts, rounds, writer - deal.index)
    else:
        divides(number - deal.index, deal.parts, rounds - 1, writer - deal.index + deal.parts)
    return writer


@lemma("deal of pages", bound=64, drawn=20000)
def a_full_page_has_one_writer() -> None:
    """A page that all of a group's sources hold whole is written by one of them to each destination."""
    deal, width = given_deal(), whole(1)
    step, pages, origin = whole(width), whole(1), whole(0)
    page, token = whole(0, pages), whole(0, width)
    held = (Stripe(origin, pages, step, width),)
    for one, other in ((page, pages - 1), (page, 0), (pages, 1)):
        ordered(one, other, step)
    ordered(deal.parts, 1, step)
    writer = writer_of_full(deal, page, pages, step, token)
    mine = legs._dealt(held, origin, (step, width), deal)
    claim(holds(mine, origin + page * step + token) == int(deal.index == writer))


@lemma("deal of pages", bound=64, drawn=20000)
def a_cut_page_has_one_writer() -> None:
    """A token of a range that begins and ends within pages is written by one source of a group, cut pages last."""
    deal, width, origin = given_deal(), whole(1), whole(0)
    before, further = whole(0), whole(0)
    head, tail = whole(0, width), whole(0, width)
    last = before if further == 0 else before + further
    assume(last != before or head <= tail)
    start, stop = origin + before * width + head, origin + last * width + tail + 1
    page, slot = whole(before, last + 1), whole(0, width)
    token = origin + page * width + slot
    for one, other in combinations((page, before, last, page + 1), 2):
        ordered(one, other, width)
    assume(start <= token and token < stop)
    sizes = {before: min(width, stop - origin - before * width) - head, last: tail + 1}
    if last == before:
        sizes = {before: tail + 1 - head}
    cut = sorted((each for each in sizes if sizes[each] < width), key=lambda each: -sizes[each])
    full_from = before + (before in cut)
    full = max(0, last + 1 - (last in cut) - full_from)
    if page in cut:
        writer = writer_of_cut(deal, full + cut.index(page))
    else:
        writer = writer_of_full(deal, page - full_from, full, width, slot)
    ordered(deal.parts, 1, width)
    mine = legs._dealt((Stripe(start, 1, stop - start, stop - start),), origin, (width, width), deal)
    claim(holds(mine, token) == int(deal.index == writer))


@lemma("deal of pages", bound=24)
def no_source_is_more_than_a_page_ahead() -> None:
    """Two sources of a group write as many full pages to a destination, or one more."""
    parts, pages = whole(1), whole(1)
    one, other = (length(numbers(whole(0, parts), pages, parts)) for _ in range(2))
    for near in (-1, 0, 1):
        ordered(one - other, near, parts)
    claim(one <= other + 1)


@lemma("deal of pages")
def an_elected_source_is_one() -> None:
    """Of equal sources, the one elected for a destination is one, and the next destination's is the next."""
    count, place = whole(1), whole(0)
    index = whole(0, count)
    claim((place % count == index) == ((place + count) % count == index))
    claim(place % count < count)


@lemma("deal of pages", bound=10)
def sources_of_a_group_are_its_writers() -> None:
    """Sources of a group have the writers' numbers, each one, whatever box the destination has."""
    parts, group, box = whole(1), whole(0), whole(0)
    one, other = whole(0, parts), whole(0, parts)
    first, second = (divmod(group * parts + each - box, parts) for each in (one, other))
    ordered(first[0], second[0], parts)
    claim((first[1] == second[1]) == (one == other))


def inside_a_page(start: Any, page_tokens: Any, multiple: Any, tokens: Any) -> None:
    """Claim that a unit lies in one page. `multiple`: pages are that many units."""
    page, place = divmod(start // tokens, multiple)
    exact(page_tokens, tokens, multiple)
    times(page_tokens, tokens * multiple, page)
    exact(start, tokens, start // tokens)
    times(start // tokens, page * multiple + place, tokens)
    ordered(place, 0, tokens)
    ordered(place, multiple - 1, tokens)
    claim(page * page_tokens <= start)
    claim(start + tokens <= (page + 1) * page_tokens)


@lemma("units", bound=8)
def units_cover_a_run_once() -> None:
    """The units of a run hold each of its tokens once, and each of full length lies in one page of both sides."""
    width, at_src, at_dst, src_page, dst_page = whole(1), whole(0), whole(0), whole(1), whole(1)
    token = whole(0, width)
    most = gcd(src_page, dst_page)
    piece = gcd(most, at_src - at_dst)
    first = min(-at_src % piece, width)
    full, rest = divmod(width - first, piece)
    place, within = divmod(token - first, piece)
    for other in (0, full, full - 1):
        ordered(place, other, piece)
    claim(first <= width)
    held = [token < first, place >= 0 and place < full, width - rest <= token]
    claim(sum(held) == 1)
    if held[1]:
        exact(at_src + first, piece, -(-at_src // piece))
        exact(at_dst + first, piece, -(-at_src // piece) - (at_src - at_dst) // piece)
        inside_a_page(at_src + first + place * piece, src_page, src_page // most * (most // piece), piece)
        inside_a_page(at_dst + first + place * piece, dst_page, dst_page // most * (most // piece), piece)
    if not is_symbolic(width):
        groups = _cut_run.__wrapped__(width, at_src, at_dst, src_page, dst_page)
        starts = [(at, group.tokens) for group in groups for at in group.src.tolist()]
        claim(sum(at - at_src <= token < at - at_src + tokens for at, tokens in starts) == 1)
        begins = (token - within) if held[1] else 0 if held[0] else width - rest
        claim((at_src + begins, piece if held[1] else first if held[0] else rest) in starts)
