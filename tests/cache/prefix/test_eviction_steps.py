"""An eviction in steps takes the same pages as in one call, and no step many of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import FULL, EvictionGranularity, PrefixTree, SlidingWindow, forest
from kvmover.cache.prefix.runs_of_ids import id_runs, id_runs_in_python


def leaves(count: int, pages: int, **shape: Any) -> PrefixTree:
    """Prompts that share no page."""
    tree = PrefixTree(1, **shape)
    for leaf in range(count):
        first = leaf * pages
        tree.insert([1 + leaf, *range(10**6 + first, 10**6 + first + pages - 1)], range(first, first + pages))
    return tree


@pytest.mark.parametrize(
    ("count", "pages", "wanted", "steps"),
    [(600, 1, 550, [128, 128, 128, 128, 38]), (3, 400, 550, [550]), (300, 100, 14_700, [8192, 6508])],
    ids=["small leaves", "large leaves", "more than a step's pages"],
)
@pytest.mark.parametrize("shape", [{}, {"grain": EvictionGranularity.NODE}], ids=["pages", "nodes"])
def test_steps_evict_what_one_call_does(count: int, pages: int, wanted: int, steps: list[int], shape: dict) -> None:
    whole, stepped = leaves(count, pages, **shape), leaves(count, pages, **shape)
    freed = [step.page_ids() for step in stepped.evict_in_steps({FULL: wanted})]
    assert sorted(np.concatenate(freed).tolist()) == sorted(whole.evict(wanted).page_ids().tolist())
    assert stepped.sizes() == whole.sizes()
    stepped.check()
    if not shape and NATIVE is not None and forest.C_CORE is not None:
        assert [len(step) for step in freed] == steps


def test_locked_pages_end_the_steps_and_windows_that_went_along_count() -> None:
    tree = leaves(300, 1, components=(SlidingWindow(1),))
    for leaf in range(300):
        tree.insert([1 + leaf], [], first_page=1, held={"swa": [leaf]})
    handles = [tree.lock(tree.match([1 + leaf]).device_node) for leaf in range(10)]
    freed = list(tree.evict_in_steps({FULL: 1000, "swa": 1000}))
    assert sum(len(step.page_ids()) for step in freed) == sum(len(step.page_ids("swa")) for step in freed) == 290
    assert max(len(step.page_ids()) for step in freed) == (32 if tree._straight is None else 128)
    for handle in handles:
        tree.unlock(handle)
    (step,) = tree.evict_in_steps({FULL: 4, "swa": 6})
    assert (len(step.page_ids()), len(step.page_ids("swa"))) == (4, 6)
    tree.check()


def test_a_step_gives_up_the_windows_of_few_nodes() -> None:
    tree = leaves(100, 1, components=(SlidingWindow(1),))
    for leaf in range(100):
        tree.insert([1 + leaf], [], first_page=1, held={"swa": [leaf]})
    steps = [len(step.page_ids("swa")) for step in tree.evict_in_steps({"swa": 100})]
    assert steps == ([32, 32, 32, 4] if tree._straight is None else [100])
    tree.check()


@pytest.mark.parametrize("ids", [[], [5], [5, 6, 7], [5, 6, 7, 3, 4, 9], [1, 3, 5, 7, 9], [3, 2, 1]])
def test_runs_of_ids_are_slices_if_they_are_few(ids: list[int]) -> None:
    row = np.array(ids, np.int32)
    for most in (1, 2, 3, 4, 8):
        runs = id_runs(row, most)
        assert runs == id_runs_in_python(row, most)
        assert not runs or [page for run in runs for page in range(run.start, run.stop)] == ids
