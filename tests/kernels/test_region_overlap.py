"""A call whose sources and destinations share a byte is refused; one that only seems to is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmover.kernels import reference, rows
from kvmover.kernels.region import Region, RegionError, Side, check_apart

POOL = torch.arange(4096, dtype=torch.int32).view(torch.uint8)[:4096]


def side(units: list[int], offset: int = 0, head_bytes: int = 0, token_bytes: int = 16) -> Side:
    zero = np.zeros(1, np.int64)
    return Side.of((POOL,), zero, zero + offset, np.array(units, np.int64), head_bytes, token_bytes)


def test_a_page_onto_itself_or_its_neighbour_half_is_refused():
    for units in ([0], [32]):
        region = Region(side([0]), side(units), 1, 4, 16)
        for move in (reference.move, rows.move):
            before = POOL.clone()
            with pytest.raises(RegionError, match="share the byte"):
                move([region])
            assert torch.equal(POOL, before)


def test_another_page_of_the_pool_is_fine():
    check_apart([Region(side([0]), side([64]), 1, 4, 16)])


def test_another_head_of_the_same_page_is_fine():
    """Their bytes interleave: only row by row they are apart."""
    check_apart([Region(side([0], token_bytes=64), side([16], token_bytes=64), 1, 4, 16)])


def test_one_region_may_not_write_what_another_reads():
    first, second = Region(side([0]), side([128]), 1, 4, 16), Region(side([512]), side([0]), 1, 4, 16)
    check_apart([first])
    check_apart([second])
    with pytest.raises(RegionError, match="share the byte"):
        check_apart([first, second])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4), st.integers(1, 3))
def test_it_refuses_exactly_what_shares_a_byte_or_begins_where_another_does(pairs: list[tuple[int, int]], tokens: int):
    regions = [Region(side([16 * s], token_bytes=32), side([16 * d], token_bytes=32), 1, tokens, 16) for s, d in pairs]
    read = {16 * s + 32 * t + b for s, _ in pairs for t in range(tokens) for b in range(16)}
    written = {16 * d + 32 * t + b for _, d in pairs for t in range(tokens) for b in range(16)}
    if read & written or len({d for _, d in pairs}) < len(pairs):
        with pytest.raises(RegionError):
            check_apart(regions)
    else:
        check_apart(regions)
