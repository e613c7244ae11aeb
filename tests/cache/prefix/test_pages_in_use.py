"""A page id is in one place: who brings one that the tree has, or one twice, is refused, and nothing has changed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from engine import Engine, row

from kvmover.cache.prefix import (
    FULL,
    ROOT,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    SlidingWindow,
    State,
    Tier,
    WriteBack,
    WriteThrough,
    forest,
)
from kvmover.cache.prefix.hashes import chain
from kvmover.cache.prefix.pages_in_use import PagesInUse


def filled(**more) -> PrefixTree:
    """Pages 0 to 3 hold [1, 2, 3, 4]."""
    prefixes = PrefixTree(1, **more)
    prefixes.insert([1, 2, 3, 4], range(4))
    return prefixes


REFUSED: dict[str, Callable[[PrefixTree], object]] = {
    "of another prefix": lambda tree: tree.insert([7, 8], [9, 2]),
    "of another place of the prefix": lambda tree: tree.insert([1, 2, 3, 4, 5], [0, 1, 2, 3, 0]),
    "of the place before": lambda tree: tree.insert([1, 2], [1, 0]),
    "twice": lambda tree: tree.insert([7, 8], [9, 9]),
    "twice, once where the tree has its own": lambda tree: tree.insert([1, 2, 3, 4, 5], [9, 1, 2, 3, 9]),
    "twice where the tree has its own": lambda tree: tree.insert([1, 2], [9, 9]),
    "below pages of the tree": lambda tree: tree.insert([1, 2, 3, 4, 5], [3], first_page=4),
    "inside a node": lambda tree: tree.insert([1, 2, 7], [0, 1, 3]),
    "in an extension": lambda tree: tree.extend(tree.lock(tree.match([1, 2, 3, 4]).best_node), [5], [2]),
    "in an extension of nothing": lambda tree: tree.extend(tree.lock(ROOT), [9, 9], [5, 5]),
    "of 32 bits": lambda tree: tree.insert([7], [1 << 31]),
    "with a sign": lambda tree: tree.insert([7], row(-1)),
}


@pytest.mark.parametrize(
    "kind", [{}, {"tiers": WriteThrough()}, {"sink": lambda _: None}], ids=["plain", "tiers", "told"]
)
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_an_id_that_the_tree_has_or_that_comes_twice_is_refused(call: Callable, kind: dict) -> None:
    prefixes = filled(**kind)
    with pytest.raises(PrefixError, match=r"page \d+ of full on the device is given twice|page ids have"):
        call(prefixes)
    prefixes.check()
    assert len(prefixes) == 1
    assert prefixes.match([1, 2, 3, 4]).page_ids.tolist() == [0, 1, 2, 3]
    assert prefixes.insert([7, 8], [9, 10]).page_ids().tolist() == []
    if not prefixes._forest.locked_paths:
        assert sorted(prefixes.evict(99).page_ids().tolist()) == [0, 1, 2, 3, 9, 10]


def test_an_id_may_come_again_in_its_own_place_and_after_it_came_back() -> None:
    prefixes = filled()
    assert len(prefixes.insert([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]).page_ids()) == 0
    assert prefixes.insert([1, 2], [8, 1]).page_ids().tolist() == [8]
    assert prefixes.insert([6], [8]).page_ids().tolist() == []
    assert prefixes.evict(2).page_ids().tolist() == [4, 3]
    prefixes.insert([7, 8], [3, 4])
    prefixes.check()


def test_ids_of_windows_and_states_are_in_one_place_too() -> None:
    prefixes = PrefixTree(1, components=(SlidingWindow(3), State()))
    prefixes.insert([1, 2, 3], range(3), held={"swa": [0, 1, 2], "state": [0]})
    for held in ({"swa": [3, 3]}, {"swa": [9, 2]}, {"state": [0]}, {"swa": [4, 5], "state": [0]}):
        with pytest.raises(PrefixError, match=r"page \d of (swa|state) on the device is given twice"):
            prefixes.insert([4, 5], [8, 9], held=held)
        prefixes.check()
    assert not len(prefixes.insert([1, 2, 3], range(3), held={"swa": [0, 1, 2], "state": [0]}).actions)
    prefixes.insert([4, 5], [8, 9], held={"swa": [3, 4], "state": [1]})
    prefixes.check()


def test_ids_of_copies_under_way_are_nobody_elses() -> None:
    mine = Engine(PrefixTree(1, tiers=WriteThrough()))
    node = mine.insert([1, 2]).node
    backup = mine.backup(node)
    assert backup.legs[0].dst_page_ids.tolist() == [0, 1]
    for ids in ([0], [5]):
        with pytest.raises(PrefixError, match=r"page \d of full on the host is given twice"):
            mine.tree.begin_fetch([7, 8], 0, [*ids, 5])
        mine.tree.check()
    mine.end(backup.op)
    mine.evict(2)
    load = mine.tree.begin_load(node, {FULL: [40, 41]})
    with pytest.raises(PrefixError, match="page 41 of full on the device is given twice"):
        mine.tree.insert([7], [41])
    with pytest.raises(PrefixError, match="page 41 of full on the device is given twice"):
        mine.tree.insert([1, 2], [41, 40])
    assert not mine.tree.insert([1, 2], [40, 41]).actions, "who waits for a load may bring its ids early"
    mine.tree.check()
    assert not mine.tree.end(load.op).actions
    mine.tree.check()
    assert mine.tree.match([1, 2]).page_ids.tolist() == [40, 41]


def test_room_for_an_eviction_is_free_and_what_is_left_of_it_is_the_callers() -> None:
    for general in (False, True):
        prefixes = filled(tiers=WriteBack())
        prefixes._straight = None if general else prefixes._straight
        prefixes.evict(1, room=[5, 6])
        for room in ([5], [7, 7]):
            with pytest.raises(PrefixError, match=r"page \d of full on the host is given twice"):
                prefixes.evict(1, room=room)
        assert sorted(prefixes.ids(FULL, Tier.HOST)) == [5]
        prefixes.evict(1, room=[6, 7])
        prefixes.check()
        with pytest.raises(PrefixError):
            prefixes.evict(1, "conv", room=[8])
        prefixes.evict(9, room=[8, 7])
        prefixes.check()


def test_after_a_refused_load_its_ids_are_free() -> None:
    mine = Engine(PrefixTree(1, components=(State(),), tiers=WriteThrough()))
    node = mine.insert([1, 2], {"state": 1}).node
    mine.backed(node)
    mine.evict(2)
    mine.insert([5, 6], {"state": 1})
    with pytest.raises(PrefixError, match="page 1 of state on the device is given twice"):
        mine.tree.begin_load(node, {FULL: [40, 41], "state": [1]})
    mine.tree.check()
    mine.tree.insert([8, 9], [40, 41])


@pytest.mark.parametrize("count", [0, -1, -(2**63), 2**63, 2**64, -(2**100), np.int64(3)])
@pytest.mark.parametrize("kind", [{}, {"tiers": WriteThrough()}, {"tiers": WriteBack()}, {"components": (State(),)}])
def test_an_eviction_of_any_number_gives_up_that_many_or_all(count: int, kind: dict) -> None:
    prefixes = filled(**kind)
    due = min(4, max(0, int(count)))
    freed = len(prefixes.evict(count).page_ids())
    assert freed == (due if "components" not in kind else 4 * bool(due))
    assert len(prefixes.evict_host(count).page_ids(FULL, Tier.HOST)) == 0
    prefixes.check()


@pytest.mark.parametrize("count", [2.5, 2.0, "2", None, True])
def test_an_eviction_of_no_number_is_refused(count: object) -> None:
    for kind in ({}, {"tiers": WriteThrough()}):
        prefixes = filled(**kind)
        for call in (prefixes.evict, prefixes.evict_host):
            with pytest.raises(PrefixError, match=r"pages to give up = .*; it must be a whole number"):
                call(count)  # type: ignore[arg-type]
        assert len(prefixes.match([1, 2, 3, 4]).page_ids) == 4


@pytest.mark.parametrize("tokens", [row(-1), row(5, -1, 6)])
def test_a_number_below_0_is_no_token_in_rows_of_32_bits_either(tokens: np.ndarray) -> None:
    prefixes = PrefixTree(1)
    for call in (lambda: prefixes.match(tokens), lambda: prefixes.insert(tokens, range(len(tokens)))):
        with pytest.raises(PrefixError, match="have 32 bits and no sign, got -1"):
            call()
    prefixes.insert(tokens.view(np.uint32), range(len(tokens)))
    with pytest.raises(ValueError, match="got -1"):
        chain(b"", tokens, 1)


def test_a_tree_of_no_number_of_tokens_a_page_is_refused() -> None:
    for page_tokens in (2.0, True, "2", 1 << 31, 1 << 62):
        with pytest.raises(PrefixError, match=r"page_tokens = .* whole number|fewer than 2\*\*31"):
            PrefixTree(page_tokens)  # type: ignore[arg-type]


def test_namespaces_that_differ_by_salt_are_told_apart_and_the_salt_is_not_told() -> None:
    one, other = PrefixNamespace("m", salt="secret of a"), PrefixNamespace("m", salt="secret of b")
    assert repr(one) != repr(other)
    assert "secret" not in repr(one)
    assert "salt=''" in repr(PrefixNamespace("m"))
    prefixes = PrefixTree(1)
    with pytest.raises(PrefixError) as told:
        prefixes.match(prefixes.key([1], one), namespace=other)
    assert repr(one) in str(told.value)
    assert repr(other) in str(told.value)


@pytest.mark.parametrize("seed", range(8))
def test_both_definitions_of_pages_in_use_answer_alike(seed: int) -> None:
    rng, made = random.Random(seed), [PagesInUse()]
    if forest.C_CORE is not None:
        made.append(forest.C_CORE.PagesInUse())
    for _ in range(300):
        ids = np.array([rng.choice([rng.randrange(70), rng.randrange(1 << 17), (1 << 31) - 1, 1 << 31])
                        for _ in range(rng.randrange(4))], "<u4").tobytes()  # fmt: skip
        call = rng.choice(["claim", "claim", "release"])
        told = []
        for each in made:
            try:
                told.append(getattr(each, call)(ids))
            except ValueError as error:
                told.append(str(error))
        assert all(each == told[0] for each in told)
        assert all(len(each) == len(made[0]) for each in made)
        assert all(all((page in each) == (page in made[0]) for page in range(70)) for each in made)


@pytest.mark.parametrize("ids", [(1, 9), (1, 1), (2, 1 << 31)])
def test_of_ids_that_cannot_be_released_together_none_is(ids: tuple[int, ...]) -> None:
    for made in (PagesInUse(), *((forest.C_CORE.PagesInUse(),) if forest.C_CORE is not None else ())):
        assert made.claim(np.array([1, 2, 3], "<u4").tobytes()) == -1
        with pytest.raises(ValueError, match=f"page {ids[1]} is not in use"):
            made.release(np.array(ids, "<u4").tobytes())
        assert (len(made), 1 in made, 2 in made, 3 in made) == (3, True, True, True)
        made.release(np.array([3, 1], "<u4").tobytes())
        assert (len(made), 2 in made) == (1, True)
