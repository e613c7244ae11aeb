"""Everything in any order, with real bytes: what comes back from any tier is what was computed, and no page is lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rig import EAGER, HYBRID, Rank

from kvmover.cache.prefix import FULL, Tier, WriteBack, WriteThrough
from kvmover.cache.tiers import ControllerConfig, Inclusion, RestorePhase, Store
from kvmover.cache.tiers.tier_policy import TierPolicy, Wait
from tests.store.segments import condemn, segments_of

MORE = int(os.environ.get("KVMOVER_HISTORIES", "1"))
TEXTS = [[0] * 33, [0] * 12 + [1] * 21, [0] * 12 + [1] * 8 + [0] * 13, [1] * 33]
prompts = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 33))


class Machine(RuleBasedStateMachine):
    """`shape` and `policy` are those of one kind of controller. Garbage fills every free page before each restore."""

    shape: ClassVar[dict] = {}
    policy: ClassVar[TierPolicy] = EAGER
    storage: ClassVar[bool] = True

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name) if self.storage else None
        self.mine = Rank(root, pages=(12, 18), setup=ControllerConfig(self.policy, group_layers=2), **self.shape)
        self.open: list = []

    @rule(prompt=prompts)
    def restore(self, prompt) -> None:
        if len(self.open) < 3:
            self.mine.poison_free()
            self.open.append((prompt, self.mine.controller.restore(prompt)))

    @rule(which=st.integers(0, 2))
    def finish(self, which) -> None:
        if which < len(self.open) and self.open[which][1].done:
            prompt, restore = self.open.pop(which)
            if restore.phase is RestorePhase.READY:
                self.mine.look_at(prompt, restore)
                assert sum(restore.lost.values()) == restore.reusable_tokens - restore.tokens
                self.mine.compute(prompt, restore)

    @rule(which=st.integers(0, 2))
    def abort(self, which) -> None:
        if which < len(self.open) and not self.open[which][1].done:
            self.mine.controller.abort(self.open.pop(which)[1])

    @rule(count=st.integers(1, 6))
    def polls(self, count) -> None:
        for _ in range(count):
            self.mine.controller.poll()

    @rule()
    def breathe(self) -> None:
        """The storage thread gets to do something."""
        self.mine.controller.worker.wait(0.001)
        self.mine.controller.poll()

    @rule(prompt=prompts, tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def serve(self, prompt, tier) -> None:
        """A whole request; then tiers are emptied, so that the next one comes from the host or from storage."""
        self.mine.serve(prompt)
        self.mine.controller.wait()
        for name in self.mine.model:
            self.evict(100, Tier.DEVICE, list(self.mine.model).index(name))
            if tier is Tier.HOST:
                self.evict(100, Tier.HOST, list(self.mine.model).index(name))
        self.mine.poison_free()

    @rule(pages=st.integers(1, 20), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), number=st.integers(0, 2))
    def evict(self, pages, tier, number) -> None:
        names = list(self.mine.model)
        tree, name = self.mine.tree, names[number % len(names)]
        self.mine.allocator.apply(tree.evict(pages, name) if tier is Tier.DEVICE else tree.evict_host(pages, name))

    @rule(prompt=prompts)
    def demote(self, prompt) -> None:
        found = self.mine.tree.look(prompt)
        if found.tokens:
            self.mine.controller.demote(found.device_node)

    @rule(prompt=prompts)
    def publish(self, prompt) -> None:
        found = self.mine.tree.look(prompt)
        if found.best_tokens:
            self.mine.controller.publish(found.best_node)

    @rule(prompt=prompts)
    def bring(self, prompt) -> None:
        self.mine.controller.bring(self.mine.tree.key(prompt))

    @rule(prompt=prompts, cut=st.integers(0, 33))
    def split(self, prompt, cut) -> None:
        self.mine.tree.match([*prompt[:cut], 7])

    @rule(prompt=prompts)
    def spoil(self, prompt) -> None:
        """A page goes bad in storage."""
        store = self.mine.store
        for page_hash in self.mine.hashes(prompt)[-1:] if store else ():
            entry = segments_of(store).catalog.index.get(page_hash)
            if entry:
                condemn(store, entry.objects[0])

    @rule()
    def clear(self) -> None:
        if self.mine.store:
            self.mine.store.clear()

    @invariant()
    def consistent(self) -> None:
        self.mine.tree.check()

    def teardown(self) -> None:
        controller = self.mine.controller
        controller.wait()
        for prompt, restore in self.open:
            self.mine.look_at(prompt, restore)
            controller.release(restore)
        self.mine.conserved()
        self.mine.close()
        self.folder.cleanup()


def run(machine, examples: int) -> None:
    chosen = settings(
        max_examples=examples * MORE,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=MORE == 1,
        database=None,
    )
    run_state_machine_as_test(machine, settings=chosen)


class Hybrid(Machine):
    shape: ClassVar[dict] = {"model": HYBRID}


class Back(Machine):
    shape: ClassVar[dict] = {"tiers": WriteBack()}
    storage = False


class Exclusive(Machine):
    shape: ClassVar[dict] = {"tiers": WriteBack()}
    policy = TierPolicy(Store.BACKED, Wait(), 1, 1, 1.0, inclusion=Inclusion.EXCLUSIVE)

    @invariant()
    def no_page_is_on_both_tiers(self) -> None:
        """Once nothing is under way."""
        controller = self.mine.controller
        if controller.idle:
            controller.poll()
            assert not self.mine.tree.sizes(FULL, Tier.HOST).protected


class Selective(Machine):
    shape: ClassVar[dict] = {"tiers": WriteThrough(after_hits=2)}
    policy = TierPolicy(Store.REUSED, Wait(), 1, 1, 0.5, 6)


def test_a_model_with_attention_alone() -> None:
    run(Machine, 15)


def test_a_hybrid_model() -> None:
    run(Hybrid, 15)


def test_a_tree_that_writes_back() -> None:
    run(Back, 10)


def test_exclusive_tiers_whose_evictions_are_stored() -> None:
    run(Exclusive, 15)


def test_a_tree_that_writes_through_what_is_hit_twice_and_stores_what_is_reused() -> None:
    run(Selective, 10)
