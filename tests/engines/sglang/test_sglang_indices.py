"""Page ids stand for the token indices that they were given, whatever else is kept, moved and forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import PrefixError
from kvmover.engines.sglang.device_indices import DeviceIndices
from kvmover.engines.sglang.index_table import HostIndices, IndexTable, index_table


def tokens_of(pages: list[int], page_tokens: int) -> torch.Tensor:
    return torch.tensor([page * page_tokens + token for page in pages for token in range(page_tokens)])


def on_device(page_tokens: int) -> DeviceIndices:
    return DeviceIndices(page_tokens, torch.device("cpu"), torch.from_numpy)


def on_host(page_tokens: int) -> HostIndices:
    return HostIndices(page_tokens, 512)


by_c = pytest.mark.skipif(NATIVE is None, reason="the C core was not built")
each_table = pytest.mark.parametrize("table", [on_device, pytest.param(on_host, marks=by_c)])


@each_table
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
def test_a_history_of_pages_is_read_back_as_it_was_written(
    page_tokens: int, table: Callable[[int], IndexTable]
) -> None:
    indices = table(page_tokens)
    chance, known = random.Random(page_tokens), dict[int, int]()
    for step in range(400):
        fresh = [1 + 1000 * step + number for number in range(chance.randrange(20))]
        ids = indices.keep(tokens_of(fresh, page_tokens)).tolist()
        assert not known.keys() & set(ids)
        known |= zip(ids, fresh, strict=True)
        some = chance.sample(sorted(known), min(len(known), chance.randrange(15)))
        if step % 5 == 0:
            moved = [5_000_000 + 1000 * step + number for number in range(len(some))]
            indices.replace(np.array(some, np.int32), tokens_of(moved, page_tokens))
            known |= zip(some, moved, strict=True)
        assert (
            indices.of(np.array(some, np.int32)).tolist()
            == tokens_of([known[name] for name in some], page_tokens).tolist()
        )
        if step % 3 == 0:
            pages = indices.forget(np.array(some, np.int32)).tolist()
            assert pages == [known.pop(name) for name in some]
        assert len(indices) == len(known)
    # The table has grown on the way.
    assert len(known) > 1024


def test_pages_that_are_kept_together_follow_each_other_while_others_come_and_go() -> None:
    indices = on_device(1)
    chance, rows, together = random.Random(3), list[np.ndarray](), 0
    for _ in range(2000):
        rows.append(indices.keep(torch.arange(chance.randrange(1, 200))))
        together += bool((np.diff(rows[-1]) == 1).all())
        if len(rows) > 100:  # the oldest goes, but for a third of it, which stays until the end
            oldest = rows.pop(0)
            indices.forget(oldest[len(oldest) // 3 :])
    assert together > 1500


@each_table
def test_a_part_of_a_row_is_kept_where_it_ends_within_a_page(table: Callable[[int], IndexTable]) -> None:
    indices = table(4)
    kept = indices.keep(tokens_of([7, 3, 9, 5], 4).to(torch.int32), 4, 14)
    assert indices.of(kept).tolist() == tokens_of([3, 9], 4).tolist()
    assert len(indices.keep(tokens_of([7], 4), 0, 3)) == 0
    assert len(indices) == 2


@each_table
def test_more_than_is_kept_cannot_be_forgotten(table: Callable[[int], IndexTable]) -> None:
    indices = table(4)
    kept = indices.keep(tokens_of([1, 2], 4))
    indices.forget(kept)
    with pytest.raises(PrefixError, match="2 pages to forget, of 0 that are kept"):
        indices.forget(kept)


@by_c
def test_an_id_outside_the_table_and_a_row_that_is_too_short_are_refused() -> None:
    table = index_table(4, torch.device("cpu"), torch.from_numpy, 8)
    for ids in ([8], [-1]):
        with pytest.raises(ValueError, match=f"page {ids[0]} is not in a table of 8"):
            table.replace(np.array(ids, np.int32), torch.arange(4))
    with pytest.raises(ValueError, match="7 items are not 2 pages"):
        table.replace(np.array([1, 2], np.int32), torch.arange(7))
