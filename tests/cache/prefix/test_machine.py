"""All operations in any order, against a model of whole prefixes: same answers, each page in one place, true events."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import ClassVar

import pytest
from engine import Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Copy, Model

from kvmover.cache.prefix import (
    FIFO,
    FULL,
    HAZARD,
    LFU,
    PRIORITY,
    ActionList,
    CopyOut,
    DeviceOnly,
    EvictionGranularity,
    FreePages,
    KeyUnits,
    LockHandle,
    PrefixTree,
    SlidingWindow,
    StaleHandle,
    State,
    Tier,
    TierCopy,
    WriteBack,
    WriteThrough,
)
from kvmover.cache.prefix.hashes import chain
from tests.proofs import tries

PAGES = 40
#: `KVMOVER_HISTORIES=50` runs fifty times as many.
MORE = int(os.environ.get("KVMOVER_HISTORIES", "1"))
#: Prompts are fronts of a few texts, which share fronts, with a tail of their own or none.
TEXTS = [[0] * 14, [0] * 6 + [1] * 8, [0] * 6 + [1] * 4 + [0] * 4, [1] * 14]
tokens_of = st.builds(
    lambda text, cut, tail: text[:cut] + tail,
    st.sampled_from(TEXTS),
    st.integers(2, 14) | st.just(14),
    st.just([]) | st.lists(st.integers(0, 2), max_size=3),
)


class Machine(RuleBasedStateMachine):
    """One kind of tree. Every rule does to the model what it asks of the tree, and compares what comes back."""

    shape: ClassVar[dict] = {}
    page_tokens: ClassVar[int] = 2

    @initialize()
    def begin(self) -> None:
        self.tree = PrefixTree(self.page_tokens, sink=lambda event: self.model.hear(event), **self.shape)
        self.model = Model(self.tree)
        self.engine = Engine(self.tree, PAGES)
        self.handles: list[LockHandle] = []
        #: The last matches: best node, prompt, and how much of it that was.
        self.answers: list[tuple[int, list[int], int]] = []
        self.components = [component.name for component in self.tree.config.components]
        self.hosted = not isinstance(self.tree.config.tiers, DeviceOnly)

    # What the caller does with an outcome

    def gave_up(self, outcome: ActionList) -> None:
        """An eviction: the model forgets what was freed, and says whether it might be."""
        for action in outcome.actions:
            if isinstance(action, CopyOut):
                (leg,) = action.legs
                device = {page: prefix for prefix, page in self.model.at[FULL, Tier.DEVICE].items()}
                for src, dst in zip(leg.src_page_ids.tolist(), leg.dst_page_ids.tolist(), strict=True):
                    self.model.at[FULL, Tier.HOST][device[src]] = dst
        for action in sorted(outcome.actions, key=lambda a: isinstance(a, FreePages) and a.component == FULL):
            if isinstance(action, FreePages):
                self.model.freed(action.component, action.tier, action.page_ids.tolist())
        self.engine.apply(outcome)

    def take(self, count: int, name: str = FULL, tier: Tier = Tier.DEVICE) -> list[int] | None:
        """Pages, after an eviction where it takes one."""
        short = count - len(self.engine.free[name, tier])
        if short > 0:
            self.gave_up(self.tree.evict(short, name) if tier is Tier.DEVICE else self.tree.evict_host(short, name))
        return self.engine.take(count, name, tier) if count <= len(self.engine.free[name, tier]) else None

    # Rules

    @rule(tokens=tokens_of)
    def match(self, tokens: list[int]) -> None:
        looked, nodes = self.tree.look(tokens), len(self.tree)
        match, model, raw, tokens = self.tree.match(tokens), self.model, tokens, self.units(tokens)
        assert (looked.tokens, looked.best_tokens) == (match.tokens, match.best_tokens)
        assert len(self.tree) <= nodes, "who asks splits nothing"
        assert self.tree.page_ids(match.device_node).tolist() == match.page_ids.tolist() == looked.page_ids.tolist()
        self.answers = [*self.answers[-5:], (match.best_node, raw, match.best_tokens)]
        device, both = (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)
        usable, best = model.usable(tokens, device), model.usable(tokens, both)
        assert match.tokens == usable * model.page
        assert match.best_tokens == best * model.page
        assert match.full_tokens == model.full(tokens) * model.page
        assert match.tokens <= match.best_tokens <= match.full_tokens <= len(tokens)
        prefixes = model.prefixes(tokens)
        assert match.page_ids.tolist() == [model.at[FULL, Tier.DEVICE][prefix] for prefix in prefixes[:usable]]
        for name, ids in match.held:
            if match.tokens and isinstance(model.components[name], State):
                assert ids.tolist() == [model.at[name, Tier.DEVICE][prefixes[usable - 1]]]
            elif match.tokens:
                mine = model.at[name, Tier.DEVICE]
                there = [mine[prefix] for prefix in prefixes[:usable] if prefix in mine]
                assert there[-min(len(ids), model.page) :] == ids.tolist()[-min(len(ids), model.page) :]
        for load in match.loads:
            mine = model.at[load.component, Tier.HOST]
            assert load.host_page_ids.tolist() == [mine[prefixes[place]] for place in load.positions.tolist()]

    @rule(tokens=tokens_of, window=st.integers(0, 7), state=st.integers(0, 1), reuse=st.sampled_from([0, 1, 2]))
    def insert(self, tokens: list[int], window: int, state: int, reuse: int) -> None:
        units = self.units(tokens)
        pages = len(units) // self.page_tokens
        match = self.tree.match(tokens)
        handle = self.tree.lock(match.device_node)
        self.model.lock(handle.number, tuple(units[: match.tokens]), Tier.DEVICE)
        first = min(reuse, 1) * len(match.page_ids)
        below = pages - first if reuse == 2 and first else pages
        taken = self.wanted(pages, first, min(window, below), min(state, below))
        if taken is not None:
            held = {name: ids for name, ids in taken.items() if name != FULL}
            if window % 2:
                held = dict(reversed(held.items()))
            spare = self.model.insert(units, first, taken, pages)
            if reuse == 2 and first:
                kept = self.tree.extend(handle, tokens[match.tokens :], taken[FULL], held=held)
                mine = self.model.at[FULL, Tier.DEVICE]
                due = [mine[prefix] for prefix in self.model.prefixes(units)[first:]]
                assert kept.kept_page_ids.tolist() == due
                self.model.lock(kept.handle.number, tuple(units[: kept.tokens]), Tier.DEVICE)
                del self.model.locks[handle.number]
                handle = kept.handle
            else:
                kept = self.tree.insert(tokens, taken[FULL], first_page=first, held=held)
            self.came_back(kept, spare, taken)
            assert kept.tokens == pages * self.page_tokens
        self.unlock_now(handle)

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 9))
    def lock_late(self, which: int) -> None:
        """What a match said a while ago: it is gone, or ends where it did."""
        node, raw, tokens = self.answers[which % len(self.answers)]
        units = self.units(raw)[:tokens]
        words, page = self.model.words(tuple(units)) if units else ([], 1)
        try:
            hashes = self.tree.page_hashes(node)
            needs = self.tree.lock_needs(node)
        except StaleHandle:
            with pytest.raises(StaleHandle):
                self.tree.lock(node)
            return
        assert hashes == chain(b"", words, page)
        before = {name: self.tree.sizes(name).protected for name in needs}
        handle = self.tree.lock(node)
        assert needs == {name: self.tree.sizes(name).protected - pages for name, pages in before.items()}
        self.tree.unlock(handle)

    def units(self, tokens: list[int]) -> list:
        """What the tree counts: tokens, or pairs of neighbours."""
        return list(pairwise(tokens)) if self.tree.config.units is KeyUnits.BIGRAM else tokens

    def wanted(
        self, pages: int, first: int, window: int, state: int, tier: Tier = Tier.DEVICE
    ) -> dict[str, list[int]] | None:
        """Ids of all components for an insert, or None where a pool has too few."""
        counts = {FULL: pages - first}
        for name in self.components:
            one = isinstance(self.model.components[name], State)
            counts[name] = min(state, pages) if one else min(window, pages)
        taken = {}
        for name, count in counts.items():
            got = self.take(count, name, tier)
            if got is None:
                for other, ids in taken.items():
                    self.put_back(ids, other, tier)
                return None
            taken[name] = got
        return taken

    def came_back(self, kept: ActionList, spare: dict[str, set[int]], taken: dict[str, list[int]]) -> None:
        for name, ids in taken.items():
            assert set(kept.page_ids(name).tolist()) == spare.get(name, set())
            self.engine.give(ids, name)
        self.engine.apply(kept)

    @rule(tokens=tokens_of)
    def lock(self, tokens: list[int]) -> None:
        match = self.tree.match(tokens)
        self.keep(self.tree.lock(match.best_node), self.units(tokens)[: match.best_tokens])

    @precondition(lambda self: self.hosted)
    @rule(tokens=tokens_of)
    def lock_host(self, tokens: list[int]) -> None:
        match, host, tokens = self.tree.match(tokens), self.model.at[FULL, Tier.HOST], self.units(tokens)
        backed = [prefix for prefix in self.model.prefixes(tokens[: match.best_tokens]) if prefix in host]
        if not self.model.back:
            self.keep(self.tree.lock_host(match.host_node), list(max(backed, default=(), key=len)))
        elif backed and len(backed[-1]) == match.best_tokens:
            self.keep(self.tree.lock_host(match.host_node), tokens[: match.best_tokens])

    def keep(self, handle: LockHandle, tokens: list[int]) -> None:
        self.handles.append(handle)
        self.model.lock(handle.number, tuple(tokens), handle.tier)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        self.unlock_now(self.handles.pop(which % len(self.handles)))

    def unlock_now(self, handle: LockHandle) -> None:
        self.tree.unlock(handle)
        del self.model.locks[handle.number]

    @rule(pages=st.integers(1, 6), which=st.integers(0, 2), room=st.integers(0, 4))
    def evict(self, pages: int, which: int, room: int) -> None:
        name = [FULL, *self.components][which % (1 + len(self.components))]
        before = self.tree.sizes(name).evictable
        space = self.engine.free[FULL, Tier.HOST][:room] if self.model.back else []
        outcome = self.tree.evict(pages, name, room=space)
        self.gave_up(outcome)
        freed = len(outcome.page_ids(name))
        assert freed >= min(pages, before) or self.model.back
        if not self.components and self.tree.config.grain is EvictionGranularity.PAGE:
            assert freed <= pages

    @rule(tokens=tokens_of, room=st.integers(0, 4))
    def demote(self, tokens: list[int], room: int) -> None:
        """What leaves the device is on the host, and nobody's end has lost what it stands on."""
        node = self.tree.match(tokens).device_node
        space = self.engine.free[FULL, Tier.HOST][:room] if self.model.back else []
        device, host = self.model.at[FULL, Tier.DEVICE], self.model.at[FULL, Tier.HOST]
        before = dict(device)
        self.gave_up(self.tree.demote(node, room=space))
        assert before.keys() - device.keys() <= host.keys()
        assert self.hosted or before == device

    @precondition(lambda self: self.hosted)
    @rule(pages=st.integers(1, 6), which=st.integers(0, 2))
    def evict_host(self, pages: int, which: int) -> None:
        name = [FULL, *self.components][which % (1 + len(self.components))]
        before = self.tree.sizes(name, Tier.HOST).evictable
        outcome = self.tree.evict_host(pages, name)
        self.gave_up(outcome)
        assert len(outcome.page_ids(name, Tier.HOST)) >= min(pages, before)

    @precondition(lambda self: isinstance(self.tree.config.tiers, WriteThrough))
    @rule(tokens=tokens_of)
    def backup(self, tokens: list[int]) -> None:
        self.copy(tokens, Tier.HOST)

    @precondition(lambda self: self.hosted)
    @rule(tokens=tokens_of)
    def load(self, tokens: list[int]) -> None:
        if not self.tree.match(tokens).waits:
            self.copy(tokens, Tier.DEVICE)

    def copy(self, tokens: list[int], dst: Tier) -> None:
        """Begin one, unless making room for it changed what it needs."""
        match, tree, model = self.tree.match(tokens), self.tree, self.model
        node, path = match.best_node, tuple(self.units(tokens)[: match.best_tokens])
        handle = tree.lock(node)
        model.lock(handle.number, path, Tier.DEVICE)
        ask, begin = (tree.backup_needs, tree.begin_backup) if dst is Tier.HOST else (tree.load_needs, tree.begin_load)
        needs = ask(node)
        if not needs:
            self.unlock_now(handle)
            return
        taken = {name: self.take(count, name, dst) for name, count in needs.items()}
        if needs == ask(node) and None not in taken.values():
            transfer = begin(node, taken)
            self.engine.transfers[transfer.op] = transfer
            model.copies[transfer.op] = self.copied(transfer, path)
        else:
            for name, ids in taken.items():
                self.put_back(ids or [], name, dst)
        self.unlock_now(handle)

    def copied(self, transfer: TierCopy, path: tuple[int, ...]) -> Copy:
        """The model's record: where every id of the copy belongs."""
        pages = {}
        for leg in transfer.legs:
            prefixes = [path[: (place + 1) * self.page_tokens] for place in leg.positions.tolist()]
            source = self.model.at[leg.component, transfer.src]
            assert leg.src_page_ids.tolist() == [source[prefix] for prefix in prefixes]
            pages[leg.component] = list(zip(prefixes, leg.dst_page_ids.tolist(), strict=True))
        firsts = [place for leg in transfer.legs for place in leg.positions.tolist()]
        first = min(firsts, default=len(path) // self.page_tokens)
        return Copy(transfer.op, transfer.dst, pages, first, path)

    def put_back(self, ids: list[int], name: str, tier: Tier) -> None:
        self.engine.give(ids, name, tier)
        self.engine.free[name, tier] += ids

    @precondition(lambda self: self.engine.transfers)
    @rule(which=st.integers(0, 99), done=st.none() | st.integers(0, 7))
    def end(self, which: int, done: int | None) -> None:
        op = sorted(self.engine.transfers)[which % len(self.engine.transfers)]
        copy, transfer = self.model.copies[op], self.engine.transfers[op]
        pages = len(copy.path) // self.page_tokens
        landed = pages if done is None else min(pages, transfer.first_page + done)
        due = self.model.end(copy, landed)
        outcome = self.engine.end(op, done)
        got = {
            (a.component, a.tier, page)
            for a in outcome.actions
            if isinstance(a, FreePages)
            for page in a.page_ids.tolist()
        }
        # Ids that waited belong to no list of the caller's any more.
        assert got == set(due)

    @precondition(lambda self: self.hosted)
    @rule(
        tokens=tokens_of,
        done=st.none() | st.integers(0, 5),
        between=tokens_of,
        want=st.integers(0, 3),
        window=st.integers(0, 5),
    )
    def fetch(self, tokens: list[int], done: int | None, between: list[int], want: int, window: int) -> None:
        """Storage is read below what the host has, or, where pages are written back, below what any tier has."""
        model, units = self.model, self.units(tokens)
        prefixes = model.prefixes(units)
        above = (Tier.DEVICE, Tier.HOST) if model.back else (Tier.HOST,)
        first = next((i for i, prefix in enumerate(prefixes) if not model.has(FULL, prefix, above)), len(prefixes))
        taken = self.wanted(len(prefixes), first, window, window % 2, Tier.HOST)
        if taken is None or not all(model.has(FULL, prefix, above) for prefix in prefixes[:first]):
            for name, ids in (taken or {}).items():
                self.put_back(ids, name, Tier.HOST)
            return
        held = {name: ids for name, ids in taken.items() if name != FULL}
        op = self.tree.begin_fetch(tokens, first, taken[FULL], held)
        self.engine.fetches[op] = taken
        model.lock(-op, tuple(units[: first * self.page_tokens]), Tier.HOST)
        self.gave_up(self.tree.evict(want))
        self.gave_up(self.tree.evict_host(want))
        self.tree.match(between)
        self.tree.check()
        del model.locks[-op]
        count = len(taken[FULL]) if done is None else min(done, len(taken[FULL]))
        spare = {FULL: model.land(units, first, taken[FULL][:count]) | set(taken[FULL][count:])}
        for name, ids in held.items():
            spare[name] = model.land_held(name, prefixes, ids) if count == len(taken[FULL]) else set(ids)
        outcome = self.engine.end(op, done)
        assert {name: set(outcome.page_ids(name, Tier.HOST).tolist()) for name in taken} == spare

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "tree"):
            self.model.consistent()
            self.tree.check()
            self.model.hear_all(self.tree.resident())
            self.locked_pages_are_those_of_the_model()
            for (name, tier), mine in self.model.at.items():
                sizes = self.tree.sizes(name, tier)
                assert sizes.evictable + sizes.protected == len(mine), (name, tier)
                waiting = sum(
                    len(copy.pages.get(name, []))
                    for copy in self.model.copies.values()
                    if copy.dst is tier and copy.landed is not None
                )
                free, owned = self.engine.free[name, tier], self.engine.owned[name, tier]
                assert len(set(free) | set(owned) | set(mine.values())) + waiting == PAGES
                assert len(free) + len(owned) + len(mine) + waiting == PAGES

    def locked_pages_are_those_of_the_model(self) -> None:
        handles = [handle for handle in self.handles if handle.tier is Tier.DEVICE]
        found, locks = self.tree.locked_pages(handles), [self.model.locks[handle.number] for handle in handles]
        kept = {prefix for lock in locks for prefix in self.model.prefixes(lock.prefix)}
        assert found[FULL] == len(kept & self.model.at[FULL, Tier.DEVICE].keys())
        for name in self.components:
            held = {page for lock in locks for page in lock.held.get(name, ())}
            assert found[name] >= len(held & set(self.model.at[name, Tier.DEVICE].values()))

    def teardown(self) -> None:
        """Everything ends: nothing is locked, and everything comes back."""
        if not hasattr(self, "tree"):
            return
        for op in sorted(self.engine.transfers):
            self.model.end(self.model.copies[op], 0)
            self.engine.end(op, 0)
        for handle in self.handles:
            self.tree.unlock(handle)
        assert all(self.tree.sizes(name).protected == 0 for name in (FULL, *self.components))
        self.engine.apply(self.tree.reset())
        assert all(sorted(free) == list(range(PAGES)) for free in self.engine.free.values())


THROUGH, BACK, BIGRAM = WriteThrough(), WriteBack(), KeyUnits.BIGRAM
NODE = EvictionGranularity.NODE
WINDOW, STATE = SlidingWindow(3), State()
#: (histories of hypothesis, tokens of a page, what the tree is made for)
KINDS: dict[str, tuple[int, int, dict]] = {
    "one tier": (12, 1, {}),
    "by hits": (6, 2, {"policy": LFU}),
    "write-through": (16, 2, {"tiers": THROUGH}),
    "write-through by nodes": (8, 2, {"tiers": THROUGH, "grain": NODE}),
    "write-through by age, pairs of tokens": (8, 2, {"tiers": THROUGH, "policy": FIFO, "units": BIGRAM}),
    "write-back": (16, 1, {"tiers": BACK}),
    "write-back by priority": (8, 1, {"tiers": BACK, "policy": PRIORITY}),
    "write-back by hazard, whole nodes": (8, 1, {"tiers": BACK, "policy": HAZARD, "grain": NODE}),
    "write-back with windows and states": (12, 1, {"tiers": BACK, "components": (WINDOW, STATE)}),
    "windows and states": (12, 2, {"components": (SlidingWindow(5), STATE)}),
    "states and windows by hits": (12, 1, {"components": (STATE, WINDOW), "policy": LFU}),
    "windows, written through": (16, 2, {"components": (WINDOW, STATE), "tiers": THROUGH}),
    "states and windows, written through": (12, 2, {"components": (STATE, WINDOW), "tiers": THROUGH}),
    "windows of pairs, written through": (8, 1, {"components": (WINDOW,), "tiers": THROUGH, "units": BIGRAM}),
}


def machine(kind: str) -> type[Machine]:
    _, page_tokens, shape = KINDS[kind]
    return type("".join(filter(str.isalpha, kind.title())), (Machine,), {"shape": shape, "page_tokens": page_tokens})


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that nothing tells apart are joined: these prompts are too short for eight."""
    monkeypatch.setattr("kvmover.cache.prefix.match.SHORTEST_RUN", 2)


@pytest.mark.searched
@pytest.mark.parametrize("kind", KINDS)
def test_any_short_history(kind: str) -> None:
    run_state_machine_as_test(
        machine(kind),
        settings=settings(
            max_examples=KINDS[kind][0] * tries(plain=1, prove=2, night=2) * MORE // 2,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.searched
@pytest.mark.parametrize("seed", range(tries(plain=1, prove=2, night=2) * MORE))
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_history(kind: str, seed: int) -> None:
    """The same rules by dice: hypothesis tries what is odd, this comes to trees that are full and busy."""
    rng, mine = random.Random(seed), machine(kind)()
    mine.begin()

    def tokens() -> list[int]:
        text = rng.choice(TEXTS)[: rng.choice([14, 14, rng.randrange(15)])]
        return text + [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 2]))]

    def done() -> int | None:
        return rng.choice([None, None, rng.randrange(6)])

    turns = {
        "match": lambda: mine.match(tokens()),
        "insert": lambda: mine.insert(tokens(), rng.choice([3, 8]), rng.choice([0, 1, 1, 1]), rng.randrange(3)),
        "lock late": lambda: mine.lock_late(rng.randrange(9)) if mine.answers else None,
        "lock": lambda: mine.lock(tokens()) if len(mine.handles) < 3 else None,
        "unlock": lambda: mine.unlock(rng.randrange(9)) if mine.handles else None,
        "evict": lambda: mine.evict(rng.randrange(1, 4), rng.randrange(3), rng.choice([0, 4, 8])),
        "demote": lambda: mine.demote(tokens(), rng.choice([0, 4, 8])),
    }
    if mine.hosted:
        turns |= {
            "lock_host": lambda: mine.lock_host(tokens()) if len(mine.handles) < 3 else None,
            "evict_host": lambda: mine.evict_host(rng.randrange(1, 4), rng.randrange(3)),
            "load": lambda: mine.load(tokens()),
            "fetch": lambda: mine.fetch(tokens(), done(), tokens(), rng.choice([0, 0, 0, 3]), rng.randrange(6)),
            "end": lambda: mine.end(rng.randrange(9), done()) if mine.engine.transfers else None,
        }
    if isinstance(mine.tree.config.tiers, WriteThrough):
        turns |= {
            "backup": lambda: mine.backup(tokens()),
            "backup more": lambda: mine.backup(tokens()),
        }
    weights = [2 if name.startswith("evict") else 4 for name in turns]
    for _ in range(150):
        turns[rng.choices(list(turns), weights)[0]]()
        mine.everything_holds()
    mine.teardown()
