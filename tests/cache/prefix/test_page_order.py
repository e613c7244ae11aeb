"""A PageOrder evicts pages that have hashes alone as a tree evicts its own, by the same rules."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvmover.cache.prefix import HAZARD, LRU, POLICIES, EvictionPolicy, PageOrder, chain, forest
from tests.cache.prefix.test_hazard import DEVICE_PAGES, conversations
from tests.cache.prefix.test_hazard import served as served_by_tree

CORES = [forest.PYTHON_CORE, *([forest.C_CORE] if forest.C_CORE else [])]


def nothing(_page: bytes) -> bool:
    return False


def pages_of(prompt: list[int]) -> list[bytes]:
    row = chain(b"", prompt, 1)
    return [bytes(each) for each in row]


def served(policy: EvictionPolicy, prompts: Iterable[list[int]], core: forest.TreeCore | None = None) -> list[int]:
    """The hits of each prompt in a cache of `DEVICE_PAGES`, which names them by their hashes."""
    order, found = PageOrder(policy, core), list[int]()
    for prompt in prompts:
        pages = pages_of(prompt)
        hits = next((at for at, page in enumerate(pages) if page not in order), len(pages))
        missing = sum(page not in order for page in pages)
        room = DEVICE_PAGES - len(order)
        if missing > room:
            gone = order.victims(missing - room, frozenset(pages).__contains__)
            assert len(gone) == missing - room
            for page in gone:
                order.discard(page)
        order.use(pages)
        assert len(order) <= DEVICE_PAGES
        found.append(min(hits, len(pages) - 1))
    return found


def test_by_recency_it_finds_what_a_tree_finds() -> None:
    prompts = list(conversations(3, 600))
    assert sum(served(LRU, prompts)) == served_by_tree(LRU, prompts)[0]


def test_by_hazard_conversations_that_go_on_stay() -> None:
    prompts = list(conversations(1, 2000))
    assert sum(served(HAZARD, prompts)) > 1.2 * sum(served(LRU, prompts))


@pytest.mark.skipif(forest.C_CORE is None, reason="the C core was not built")
@pytest.mark.parametrize("policy", [LRU, HAZARD], ids=lambda policy: policy.name)
def test_both_cores_evict_the_same(policy: EvictionPolicy) -> None:
    prompts = list(conversations(2, 700))
    python, c = (served(policy, prompts, core) for core in CORES)
    assert python == c


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_a_page_goes_after_all_behind_it(policy: EvictionPolicy, core: forest.TreeCore) -> None:
    order = PageOrder(policy, core)
    order.use([b"a", b"b", b"c"])
    order.use([b"a", b"b", b"d", b"e"])
    for _ in range(2):
        gone = order.victims(9, nothing)
        assert sorted(gone) == [b"a", b"b", b"c", b"d", b"e"]
        assert max(gone.index(b"c"), gone.index(b"d")) < gone.index(b"b") < gone.index(b"a")
        assert gone.index(b"e") < gone.index(b"d")


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_a_page_that_is_held_back_is_not_among_them(policy: EvictionPolicy, core: forest.TreeCore) -> None:
    order = PageOrder(policy, core)
    order.use([b"a", b"b", b"c"])
    order.use([b"x", b"y"])
    gone = order.victims(9, {b"c"}.__contains__)
    assert sorted(gone) == [b"a", b"b", b"x", b"y"]
    for page in gone:
        order.discard(page)
    assert (len(order), b"c" in order) == (1, True)
    assert order.victims(9, nothing) == [b"c"]


def test_the_oldest_prompt_goes_first_and_a_page_that_is_gone_is_forgotten() -> None:
    order = PageOrder(LRU)
    for name in (b"a", b"b", b"c"):
        order.use([name + b"1", name + b"2"])
    order.use([b"a1"])
    order.discard(b"b2")
    order.discard(b"unknown")
    assert order.victims(9, nothing) == [b"a2", b"b1", b"c2", b"c1", b"a1"]


def test_pages_that_were_asked_for_behind_others_come_behind_them() -> None:
    """A store is asked for a whole prompt, and later given what it did not have."""
    apart, behind = PageOrder(LRU), PageOrder(LRU)
    for order in (apart, behind):
        order.use([b"a", b"b"])
    behind.expect([b"a", b"b", b"c", b"d"])
    for order in (apart, behind):
        order.use([b"c", b"d"])
    assert apart.victims(9, nothing) == [b"b", b"a", b"d", b"c"]
    assert behind.victims(9, nothing) == [b"d", b"c", b"b", b"a"]
