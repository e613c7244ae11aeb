"""A fleet's ranks hold every layer, head and position of a request: the split ones once, the replicated ones evenly."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import LayoutError
from kvmover.layout import Component, Coordinate, CpOrder, Fleet, Span

COMPONENT = Component.attention(12, 8, 16, "bfloat16")


def held(fleet: Fleet, cp: int, tokens: int) -> list[int]:
    """The positions that a context-parallel rank holds, by the words of the order and nothing else."""
    if fleet.cp_order == "token":
        return [position for position in range(tokens) if position % fleet.cp == cp]
    pages = [list(range(first, first + fleet.page_tokens)) for first in range(0, tokens, fleet.page_tokens)]
    if fleet.cp_order == "page":
        mine = pages[cp :: fleet.cp]
    else:
        mine = pages[cp * len(pages) // fleet.cp : (cp + 1) * len(pages) // fleet.cp]
    return [position for page in mine for position in page]


def test_every_rank_has_one_coordinate_and_every_coordinate_one_rank() -> None:
    for tp, pp, cp in product(range(1, 5), repeat=3):
        fleet = Fleet(tp=tp, pp=pp, cp=cp)
        assert fleet.size == tp * pp * cp
        grid = product(range(pp), range(cp), range(tp))
        for rank, (at_pp, at_cp, at_tp) in enumerate(grid):
            assert fleet.coordinate(rank) == Coordinate(tp=at_tp, pp=at_pp, cp=at_cp)
            assert fleet.rank(Coordinate(tp=at_tp, pp=at_pp, cp=at_cp)) == rank == (at_pp * cp + at_cp) * tp + at_tp


@pytest.mark.parametrize("order", list(CpOrder))
def test_the_positions_of_all_context_ranks_are_the_request_and_none_is_held_twice(order: CpOrder) -> None:
    for cp, page, tokens in product(range(1, 5), (1, 3, 16), (1, 2, 3, 15, 16, 17, 48, 100)):
        fleet = Fleet(cp=cp, page_tokens=page, cp_order=order)
        everything: list[int] = []
        for rank in range(cp):
            stripe = fleet.shard(COMPONENT, rank, tokens).positions
            positions = list(stripe or ())
            assert positions == held(fleet, rank, tokens), (cp, page, tokens, rank)
            assert (stripe is None) == (not positions)
            everything += [position for position in positions if position < tokens]
            assert all(position < -(-tokens // page) * page for position in positions)
        assert sorted(everything) == list(range(tokens))


@given(
    st.integers(1, 32), st.integers(1, 16), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4), st.integers(1, 99)
)
def test_the_shards_of_any_fleet_cover_the_component(
    layers: int, heads: int, tp: int, pp: int, cp: int, tokens: int
) -> None:
    component = Component.attention(max(layers, pp), heads, 1, "int8")
    fleet = Fleet(tp=tp, pp=pp, cp=cp, page_tokens=4)
    copies = np.zeros((component.layers, heads, tokens), int)
    for rank in range(fleet.size):
        shard = fleet.shard(component, rank, tokens)
        at = fleet.coordinate(rank)
        assert shard.layers == Span.share(component.layers, pp, at.pp)
        assert shard.heads == Span.share(heads, tp, at.tp)
        positions = [position for position in shard.positions or () if position < tokens]
        copies[np.ix_(list(shard.layers), list(shard.heads), positions)] += 1
    per_head = copies[0, :, 0]
    assert (copies == per_head[None, :, None]).all()
    assert per_head.min() >= 1
    assert per_head.max() == 1 if heads >= tp else per_head.max() - per_head.min() <= 1


def test_legal_sizes_follow_the_formulas_of_the_design() -> None:
    for total, tp in product((1, 2, 4, 8, 16), repeat=2):
        component = Component.attention(1, total, 1, "int8")
        heads, replicas = max(1, total // tp), max(1, tp // total)
        for rank in range(tp):
            assert Fleet(tp=tp).shard(component, rank, 1).heads == Span((rank // replicas) * heads, heads)


def test_a_rank_that_holds_nothing_of_a_short_request_says_so() -> None:
    fleet = Fleet(cp=4, page_tokens=16)
    assert [fleet.shard(COMPONENT, rank, 17).positions is None for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("order", list(CpOrder))
def test_every_context_rank_holds_all_states_and_a_part_of_the_windowed_tokens(order: CpOrder) -> None:
    states = Component.state("states", 4, 2, 8, "float32", states=5)
    sliding = Component.sliding(4, 2, 8, 3, "float16")
    for cp, page, tokens in product(range(1, 5), (1, 3, 16), (1, 17, 100)):
        fleet = Fleet(tp=2, pp=2, cp=cp, page_tokens=page, cp_order=order)
        for rank in range(fleet.size):
            at, shard = fleet.coordinate(rank), fleet.shard(states, rank, tokens)
            assert shard.positions is not None
            assert list(shard.positions) == [0, 1, 2, 3, 4], (fleet, rank, tokens)
            assert (shard.layers, shard.heads) == (Span(2 * at.pp, 2), Span(at.tp, 1))
            windowed = fleet.shard(sliding, rank, tokens)
            assert list(windowed.positions or ()) == held(fleet, at.cp, tokens), "a window changes what is wanted only"


def test_sizes_in_bytes_are_those_of_the_dtype() -> None:
    llama = Component.attention(80, 8, 128, "bfloat16")
    assert (llama.element_bytes, llama.row_bytes, llama.token_bytes) == (2, 256, 327_680)
    latent = Component.mla(61, 576, "bfloat16")
    assert (latent.kv, latent.heads, latent.row_bytes, latent.token_bytes) == (1, 1, 1152, 70_272)
    assert Component.mla(61, 656, "float8_e4m3fn").row_bytes == 656


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fleet(tp=0), "fleet has tp = 0"),
        (lambda: Fleet(pp=-1), "fleet has pp = -1"),
        (lambda: Fleet(cp=0), "fleet has cp = 0"),
        (lambda: Fleet(page_tokens=0), "fleet has page_tokens = 0"),
        (lambda: Fleet(tp=2).coordinate(2), "rank 2 is outside a fleet of 2"),
        (lambda: Fleet(tp=2).coordinate(-1), "rank -1 is outside a fleet of 2"),
        (lambda: Fleet(pp=13).shard(COMPONENT, 0, 1), "13 pipeline stages for 12 layers of attention"),
        (lambda: Fleet().shard(COMPONENT, 0, 0), "tokens = 0; a request has at least 1"),
        (lambda: Fleet().shard(COMPONENT, 0, -3), "tokens = -3; a request has at least 1"),
        (lambda: Fleet().shard(Component.state("s", 1, 1, 1, "int8"), 0, 0), "tokens = 0; a request has at least 1"),
        (lambda: Component.attention(1, 0, 8, "int8"), "component attention has heads = 0"),
        (lambda: Component.attention(0, 1, 8, "int8"), "component attention has layers = 0"),
        (lambda: Component.mla(1, 0, "int8"), "component mla has dim = 0"),
        (lambda: Component("x", 1, -1, 1, 1, "int8"), "component x has kv = -1"),
        (lambda: Component.mla(1, 8, "bf16"), "unknown dtype 'bf16'; known are bfloat16"),
    ],
    ids=[
        "tp",
        "pp",
        "cp",
        "page",
        "rank-after-last",
        "rank-before-first",
        "stages",
        "no-tokens",
        "negative-tokens",
        "states-of-no-tokens",
        "heads",
        "layers",
        "dim",
        "kv",
        "dtype",
    ],
)
def test_an_impossible_fleet_or_component_is_refused_with_its_values(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
