"""Straight steps answer what the general way does: whatever the calls, both trees stay the same."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import cast

import numpy as np
import pytest
from engine import said
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmover.cache.prefix import (
    LFU,
    ROOT,
    EvictionGranularity,
    LockHandle,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    SlidingWindow,
    State,
    WriteThrough,
)
from kvmover.cache.prefix.eviction_policy import Recency
from tests.steps_of import calls_of

PAGE = 2
#: `KVMOVER_HISTORIES=50` runs fifty times as many.
MORE = int(os.environ.get("KVMOVER_HISTORIES", "1"))
#: Prompts are fronts of a few texts, with a tail of their own or none.
TEXTS = [[0] * 60, [0] * 20 + [1] * 40, [0] * 20 + [1] * 10 + [0] * 30]
tokens_of = st.builds(
    lambda text, cut, tail: text[:cut] + tail,
    st.sampled_from(TEXTS),
    st.integers(0, 60),
    st.just([]) | st.lists(st.integers(0, 2), max_size=5),
)
namespace_of = st.sampled_from([PrefixNamespace(), PrefixNamespace(salt="b")])


def pair() -> tuple[PrefixTree, PrefixTree]:
    """Two plain trees, of which the second has been told to go the general way."""
    straight, general = PrefixTree(PAGE), PrefixTree(PAGE)
    assert straight._straight is not None  # no public sight of it
    general._straight = None
    return straight, general


class BothWays(RuleBasedStateMachine):
    """Every call is made of both trees. Page ids are new ones each time; a tree never looks at them."""

    @initialize()
    def begin(self) -> None:
        self.trees = pair()
        self.page = 0
        self.nodes: list[int] = [ROOT]
        self.handles: list[tuple[LockHandle, LockHandle]] = []

    def both(self, call) -> list:
        """What both answer, as data; or what they refuse, in the same words."""
        answers, told = [], []
        for tree in self.trees:
            try:
                answers.append(call(tree))
                told.append(said(answers[-1]))
            except PrefixError as error:
                told.append((type(error), str(error)))
        assert told[0] == told[1]
        return answers

    def fresh(self, count: int) -> np.ndarray:
        self.page += count
        return np.arange(self.page - count, self.page, dtype=np.int32)

    @rule(tokens=tokens_of, namespace=namespace_of, limit=st.none() | st.integers(-1, 70))
    def match(self, tokens: list[int], namespace: PrefixNamespace, limit: int | None) -> None:
        for match in self.both(lambda tree: tree.match(tokens, namespace=namespace, limit_tokens=limit))[:1]:
            self.nodes = [*self.nodes[-5:], match.device_node]

    @rule(tokens=tokens_of, namespace=namespace_of)
    def look(self, tokens: list[int], namespace: PrefixNamespace) -> None:
        self.both(lambda tree: tree.look(tokens, namespace=namespace))

    @rule(which=st.integers(0, 5))
    def lock(self, which: int) -> None:
        node = self.nodes[which % len(self.nodes)]
        locked = []
        for tree in self.trees:
            with suppress(PrefixError):
                locked.append(tree.lock(node))
        assert len(locked) in (0, 2)
        if locked:
            self.handles.append((locked[0], locked[1]))

    @rule(which=st.integers(0, 50), twice=st.booleans())
    def unlock(self, which: int, twice: bool) -> None:
        if self.handles:
            handles = self.handles.pop(which % len(self.handles))
            for _ in range(2 if twice else 1):
                refused = []
                for tree, handle in zip(self.trees, handles, strict=True):
                    try:
                        tree.unlock(handle)
                    except PrefixError as error:
                        refused.append(type(error))
                assert len(refused) in (0, 2)

    @rule(tokens=tokens_of, namespace=namespace_of, first=st.integers(0, 12), more=st.sampled_from([0, 0, 0, 0, 1]))
    def insert(self, tokens: list[int], namespace: PrefixNamespace, first: int, more: int) -> None:
        ids = self.fresh(max(0, len(tokens) // PAGE - first) + more)
        for kept in self.both(lambda tree: tree.insert(tokens, ids, first_page=first, namespace=namespace))[:1]:
            self.nodes = [*self.nodes[-5:], kept.node]

    @rule(tokens=tokens_of, namespace=namespace_of)
    def insert_again(self, tokens: list[int], namespace: PrefixNamespace) -> None:
        """The ids that the tree has, so that none comes back, but for one in their midst."""
        ids = self.fresh(len(tokens) // PAGE)
        known = self.both(lambda tree: tree.look(tokens, namespace=namespace))[0].page_ids
        ids[: len(known)] = known
        if len(known) > 1:
            ids[len(known) // 2] = self.fresh(1)[0]
        self.both(lambda tree: tree.insert(tokens, ids, namespace=namespace))

    @rule(pages=st.integers(-1, 12))
    def evict(self, pages: int) -> None:
        self.both(lambda tree: tree.evict(pages))

    @rule(which=st.integers(0, 5))
    def read(self, which: int) -> None:
        """What looks at the bytes of a node that may have been trimmed."""
        node = self.nodes[which % len(self.nodes)]
        self.both(lambda tree: tree.page_ids(node))
        self.both(lambda tree: tree.page_hashes(node))
        self.both(lambda tree: tree.lock_needs(node))

    @rule()
    def compare(self) -> None:
        straight, general = ([described(node) for node in tree._forest] for tree in self.trees)
        assert straight == general
        assert order_of(self.trees[0]) == order_of(self.trees[1])
        for tree in self.trees:
            tree.check()

    @invariant()
    def same_sums(self) -> None:
        if hasattr(self, "trees"):
            straight, general = self.trees
            assert (straight.sizes(), len(straight)) == (general.sizes(), len(general))

    def teardown(self) -> None:
        if hasattr(self, "trees"):
            self.compare()


def order_of(tree: PrefixTree) -> list[int]:
    order = cast("Recency", tree._forest.device.order)  # no public sight of it
    return [node.id for node in order]


def described(node) -> tuple[object, ...]:
    parent = node.parent.id
    return node.id, parent, node.start, node.end, node.tokens, node.pages, node.locks, node.used, node.device_children


def test_both_ways_give_the_same_answers_and_leave_the_same_tree() -> None:
    run_state_machine_as_test(
        BothWays,
        settings=settings(
            max_examples=60 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_leaf_that_is_evicted_page_by_page_is_copied_once_at_most() -> None:
    """Its bytes stay as they are until somebody looks at them."""
    tree = PrefixTree(PAGE)
    tree.insert(list(range(2_000)), np.arange(1_000))
    (node,) = tree._forest
    whole = node.tokens
    assert [tree.evict(1).page_ids().tolist() for _ in range(400)] == [[999 - i] for i in range(400)]
    assert node.tokens is whole
    assert tree.match(list(range(2_000))).page_ids.tolist() == list(range(600))
    assert len(node.tokens) == 600 * PAGE * 4
    tree.check()


@pytest.mark.parametrize(
    "other",
    [
        {"policy": LFU},
        {"components": (State(),), "tiers": WriteThrough()},
        {"grain": EvictionGranularity.NODE},
    ],
    ids=lambda shape: next(iter(shape)),
)
def test_another_tree_goes_the_general_way(other: dict) -> None:
    assert PrefixTree(PAGE, **other)._straight is None


#: Calls of Python's functions in match, lock, insert, unlock and an eviction of one page; by the further components.
MOST_CALLS = {(): 30, (SlidingWindow(64),): 38, (SlidingWindow(64, "short"), SlidingWindow(128, "long"), State()): 44}


@pytest.mark.parametrize("components", MOST_CALLS, ids=len)
def test_a_request_takes_few_calls(components: tuple[SlidingWindow | State, ...]) -> None:
    tree = PrefixTree(16, components=components)
    if tree._forest.columns.evict_nodes is None:
        pytest.skip("steps with further components are the C core's")
    pages = {each.name: -(-each.reach_tokens // 16) for each in components}

    def serve(tokens: list[int], first: int) -> None:
        key = tree.key(tokens)
        match = tree.match(key)
        handle = tree.lock(match.device_node)
        held = {name: np.arange(first * count, first * count + count) for name, count in pages.items()}
        assert match.tokens == min(first * 16, 320)
        tree.insert(key, np.arange(first, first + 20), first_page=match.tokens // 16, held=held)
        tree.unlock(handle)
        tree.evict(first // 20)

    serve(list(range(320)), 0)
    assert calls_of(lambda: serve([*range(320), *range(1000, 1320)], 20)) <= MOST_CALLS[components]
    tree.check()
