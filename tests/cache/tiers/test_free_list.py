"""A FreeList takes all ids of a call or none."""

from __future__ import annotations

import pytest

from kvmover.cache.tiers import FreeList
from kvmover.errors import TierError


@pytest.mark.parametrize("ids", [(1, 5), (1, 9), (1, 2, 1)])
def test_ids_of_which_one_cannot_be_free_change_nothing(ids: tuple[int, ...]) -> None:
    free = FreeList("kv", 8)
    assert free.take(4) == [0, 1, 2, 3]
    with pytest.raises(TierError, match=f"page {ids[-1]} of kv comes back"):
        free.give(ids)
    free.check([0, 1, 2, 3])
    free.give((3, 1))
    free.check([0, 2])
    assert free.take(2) == [1, 3]


def test_all_free_ids_may_be_taken_and_not_one_more() -> None:
    free = FreeList("kv", 8)
    with pytest.raises(TierError, match="9 pages of kv, of which 8 are free"):
        free.take(9)
    free.check([])
    assert free.take(8) == list(range(8))
    assert len(free) == 0
    with pytest.raises(TierError, match="1 pages of kv, of which 0 are free"):
        free.take(1)
    free.give((0,))
    assert free.take(1) == [0]


def test_named_ids_are_taken_all_or_none() -> None:
    free = FreeList("kv", 8)
    free.claim((2, 5))
    free.check([2, 5])
    for ids in ((3, 5), (3, 8)):
        with pytest.raises(TierError, match=rf"pages \[{ids[1]}\] of kv are claimed, and are not free"):
            free.claim(ids)
        free.check([2, 5])
    assert free.take(4) == [0, 1, 3, 4]
