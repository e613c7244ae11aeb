"""Pins in any order with requests, evictions and time, on two ranks whose clocks disagree: nothing pinned goes early,
nothing stays for ever, neighbours keep their share, and both ranks have the same pins.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmover.cache.hints import HintAction, HintDesk, HintMet, PinHint, PinLimits, Pins
from kvmover.cache.prefix import FULL, PRIORITY, LockHandle, PrefixTree, SlidingWindow, State

MORE = int(os.environ.get("KVMOVER_HISTORIES", "1"))
PAGES = 24
TEXTS = [[0] * 12, [0] * 6 + [1] * 6, [0] * 6 + [1] * 3 + [2] * 3, [1] * 12]
prompts = st.builds(lambda text, cut: text[:cut], st.sampled_from(TEXTS), st.integers(1, 12))
names = st.sampled_from(["a", "b", "c", "d"])


class OneRank:
    """A tree of pages of one token, the engine's pool, and what is pinned by the words of the test."""

    def __init__(self, shape: dict[str, Any], lag_s: float) -> None:
        self.tree, self.lag_s = PrefixTree(1, **shape), lag_s
        self.names = [FULL, *(component.name for component in self.tree.config.components)]
        self.free = {name: set(range(PAGES)) for name in self.names}
        self.pins = Pins(self.tree, dict.fromkeys(self.names, PAGES), PinLimits(share=0.5, longest_s=50.0, most=3))
        self.desk = HintDesk(self.tree, self.pins)
        self.locks: list[LockHandle] = []

    def apply(self, outcome: Any) -> None:
        for action in outcome.actions:
            mine, back = self.free[action.component], set(action.page_ids.tolist())
            assert not mine & back
            mine |= back

    def take(self, name: str, count: int) -> list[int] | None:
        if count > len(self.free[name]):
            self.apply(self.tree.evict(count - len(self.free[name]), name))
        if count > len(self.free[name]):
            return None
        return [self.free[name].pop() for _ in range(count)]

    def serve(self, prompt: list[int]) -> bool:
        counts = {name: 1 if name == "state" else len(prompt) for name in self.names}
        taken = {name: self.take(name, count) for name, count in counts.items()}
        if None in taken.values():
            for name, ids in taken.items():
                self.free[name] |= set(ids or [])
            return False
        held = {name: ids for name, ids in taken.items() if name != FULL}
        kept = self.tree.insert(prompt, taken[FULL] or [], held=held)  # type: ignore[arg-type]
        self.apply(kept)
        return True


class PinMachine(RuleBasedStateMachine):
    shape: ClassVar[dict[str, Any]] = {}

    @initialize()
    def begin(self) -> None:
        self.now_s = 1000.0
        self.ranks = [OneRank(self.shape, lag_s) for lag_s in (0.0, 7.0)]
        #: By name: the prefix, and when its time is over by the clock of the rank that is behind.
        self.pinned: dict[str, tuple[list[int], float]] = {}

    @rule(prompt=prompts)
    def serve(self, prompt: list[int]) -> None:
        answers = [rank.serve(prompt) for rank in self.ranks]
        assert answers[0] == answers[1]

    @rule(prompt=prompts, name=names, ttl_s=st.sampled_from([0.0, 5.0, 20.0, 51.0]))
    def pin(self, prompt: list[int], name: str, ttl_s: float) -> None:
        action = HintAction(name, PinHint(ttl_s))
        answers = [rank.desk.carry_out(action, rank.tree.key(prompt), self.now_s - rank.lag_s) for rank in self.ranks]
        assert answers[0] == answers[1]
        if isinstance(answers[0], HintMet):
            self.pinned.pop(name, None)
            if ttl_s:
                self.pinned[name] = prompt[: answers[0].tokens], self.now_s + ttl_s

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        """The ranks agree at the next request: over is what is over on both, and each has its own clock."""
        self.now_s += seconds
        rows = [rank.pins.over(self.now_s - rank.lag_s) for rank in self.ranks]
        ended = [rank.pins.end([min(pair) for pair in zip(*rows, strict=True)]) for rank in self.ranks]
        assert ended[0] == ended[1]
        for name in ended[0]:
            assert self.pinned.pop(name)[1] <= self.now_s
        assert all(until_s > self.now_s for _, until_s in self.pinned.values())

    @rule(pages=st.integers(1, PAGES + 4))
    def a_large_request_comes(self, pages: int) -> None:
        before = [rank.pins.pages for rank in self.ranks]
        ended = [rank.pins.give_way(pages) for rank in self.ranks]
        assert ended[0] == ended[1]
        assert not ended[0] or PAGES - before[0] < pages
        assert min(pages, PAGES) + self.ranks[0].pins.pages <= PAGES
        for name in ended[0]:
            del self.pinned[name]

    @rule(count=st.integers(1, PAGES), which=st.integers(0, 2))
    def evict(self, count: int, which: int) -> None:
        for rank in self.ranks:
            rank.apply(rank.tree.evict(count, rank.names[which % len(rank.names)]))

    @rule(prompt=prompts)
    def lock(self, prompt: list[int]) -> None:
        for rank in self.ranks:
            if len(rank.locks) < 3:
                rank.locks.append(rank.tree.lock(rank.tree.match(prompt).device_node))

    @rule()
    def unlock(self) -> None:
        for rank in self.ranks:
            if rank.locks:
                rank.tree.unlock(rank.locks.pop(0))

    @invariant()
    def everything_holds(self) -> None:
        for rank in getattr(self, "ranks", []):
            rank.tree.check()
            rank.pins.check()
            assert len(rank.pins) == len(self.pinned)
            for prefix, _ in self.pinned.values():
                assert rank.tree.look(prefix).tokens == len(prefix), "a pinned prefix is gone"
            sizes = rank.tree.sizes()
            if not rank.locks:
                assert sizes.protected == rank.pins.pages <= PAGES // 2

    def teardown(self) -> None:
        for rank in getattr(self, "ranks", []):
            for handle in rank.locks:
                rank.tree.unlock(handle)
            rank.pins.forget()
            rank.apply(rank.tree.reset())
            assert all(len(free) == PAGES for free in rank.free.values())


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one component": (20, {}),
    "by priority": (8, {"policy": PRIORITY}),
    "windows and states": (16, {"components": (SlidingWindow(3), State())}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_history_of_pins(kind: str) -> None:
    examples, shape = KINDS[kind]
    run_state_machine_as_test(
        type("Kind", (PinMachine,), {"shape": shape}),
        settings=settings(
            max_examples=examples * MORE,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
