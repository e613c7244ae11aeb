"""A store by `hazard` evicts as a tree does: the ends of prompts first, and conversations that seldom go on."""

from __future__ import annotations

from itertools import count, takewhile
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.cache.prefix import HAZARD, PageOrder, chain
from kvmover.errors import StoreError
from kvmover.store import PagePart, PageStore, Policy
from kvmover.store.index import Index
from kvmover.store.stored import StoredObject
from tests.cache.prefix.test_hazard import DEVICE_PAGES, conversations

WHOLE = PagePart.whole(GQA, PAGE)


def read(index: Index, prompts: int) -> int:
    """The pages read of conversations, from a store of `DEVICE_PAGES` that is given the others."""
    numbers, found, key = count(), 0, WHOLE.key(SPACE)
    for now, prompt in enumerate(conversations(1, prompts), 1):
        pages = chain(b"", prompt, 1)
        index.asked(pages)
        here = len(list(takewhile(index.__contains__, pages)))
        index.use(pages[:here], now)
        found += here
        absent = [page for page in pages if page not in index]
        while (short := len(index) + len(absent) - DEVICE_PAGES) > 0:
            kept = index.use(pages, 0)
            rows = index.coldest(64, short * 4096, kept)
            index.remove_placed(index.placed(rows))
        places = [next(numbers) for _ in absent]
        index.add(
            StoredObject("a", 80 + at * 152, at * 4096, 64, page, key, now)
            for at, page in zip(places, absent, strict=True)
        )
        index.use(absent, now)
    return found


def test_conversations_that_go_on_stay_and_others_go() -> None:
    assert read(Index(PageOrder(HAZARD)), 1500) > 1.2 * read(Index(), 1500)


def test_the_end_of_a_prompt_goes_first(tmp_path: Path) -> None:
    pages = pages_of(6)
    with PageStore.open(tmp_path, SPACE, Policy(quota_bytes=8 * WHOLE.nbytes, eviction="hazard")) as store:
        rank = Rank(store, WHOLE)
        assert all(r.ok for r in rank.put(pages))
        assert all(r.ok for r in rank.put(pages_of(4, "more")))
        assert rank.exists(pages) == [True] * 4 + [False] * 2
        assert all(r.ok for r in rank.get(pages[:4]))


def test_pages_found_on_opening_go_before_those_that_were_used(tmp_path: Path) -> None:
    policy = Policy(quota_bytes=6 * WHOLE.nbytes, eviction="hazard")
    with PageStore.open(tmp_path, SPACE, policy) as store:
        Rank(store, WHOLE).put(pages_of(5))
        store.flush()
    with PageStore.open(tmp_path, SPACE, policy) as store:
        rank = Rank(store, WHOLE)
        assert all(r.ok for r in rank.get(pages_of(5)[:2]))
        assert all(r.ok for r in rank.put(pages_of(4, "more")))
        assert rank.exists(pages_of(5)) == [True] * 2 + [False] * 3


def test_what_is_no_directory_refuses_it_before_it_is_opened() -> None:
    with pytest.raises(StoreError, match="eviction = 'hazard' is of directories"):
        PageStore.open("keeper:///nowhere", SPACE, Policy(eviction="hazard"))
    with pytest.raises(StoreError, match="it is one of lru, hazard"):
        Policy(eviction="mru")
