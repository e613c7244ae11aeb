"""The caller's part of a prefix tree: pools that notice a page freed twice, and the carrying out of actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvmover.cache.prefix import (
    FULL,
    ActionList,
    CopyOut,
    FreePages,
    Inserted,
    LockHandle,
    Match,
    PrefixTree,
    Tier,
    TierCopy,
)

Pool = tuple[str, Tier]


class Engine:
    """A tree with its pools. `pages` is the size of each; ids are taken in order, so that tests can name them."""

    def __init__(self, tree: PrefixTree, pages: int = 64) -> None:
        self.tree, self.pages = tree, pages
        names = [FULL, *(component.name for component in tree.config.components)]
        self.free = {(name, tier): list(range(pages)) for name in names for tier in (Tier.DEVICE, Tier.HOST)}
        #: Ids that the caller holds: requests that run, staging, copies under way.
        self.owned: dict[Pool, list[int]] = {pool: [] for pool in self.free}
        self.transfers: dict[int, TierCopy] = {}
        #: Host ids of each fetch, by component.
        self.fetches: dict[int, dict[str, list[int]]] = {}

    def take(self, count: int, component: str = FULL, tier: Tier = Tier.DEVICE) -> list[int]:
        pool = self.free[component, tier]
        assert count <= len(pool), f"{component} {tier.name}: {count} of {len(pool)}"
        ids = pool[:count]
        del pool[:count]
        self.owned[component, tier] += ids
        return ids

    def give(self, ids: Iterable[int], component: str = FULL, tier: Tier = Tier.DEVICE) -> None:
        """The ids are the tree's now, or a record's."""
        for page in ids:
            self.owned[component, tier].remove(page)

    def apply(self, outcome: ActionList) -> ActionList:
        for action in outcome.actions:
            if isinstance(action, FreePages):
                pool = action.component, action.tier
                for page in action.page_ids.tolist():
                    assert page not in self.free[pool], f"{pool}: page {page} is free already"
                    assert page not in self.owned[pool], f"{pool}: page {page} is the caller's"
                    self.free[pool].append(page)
            else:
                assert isinstance(action, CopyOut)
                for leg in action.legs:
                    self.take_out(leg.component, leg.dst_page_ids.tolist())
        return outcome

    def take_out(self, component: str, ids: Sequence[int]) -> None:
        for page in ids:
            self.free[component, Tier.HOST].remove(page)

    def insert(self, tokens: Sequence[int], held: dict[str, int] | None = None, **more: object) -> Inserted:
        """Insert with fresh pages for all from `first_page` on; `held` says how many trailing ids to bring."""
        first = int(str(more.get("first_page", 0)))
        units = len(tokens) - (int(self.tree.config.units) - 1 if len(tokens) else 0)
        ids = self.take(units // self.tree.config.page_tokens - first)
        others = {name: self.take(count, name) for name, count in (held or {}).items()}
        # The tree's from here on, but for what it gives back.
        self.give(ids)
        for name, taken in others.items():
            self.give(taken, name)
        return self.applied(self.tree.insert(tokens, ids, held=others, **more))  # type: ignore[arg-type]

    def applied(self, inserted: Inserted) -> Inserted:
        self.apply(inserted)
        return inserted

    def evict(self, pages: int, component: str = FULL) -> list[int]:
        return self.apply(self.tree.evict(pages, component)).page_ids(component).tolist()

    def evict_host(self, pages: int, component: str = FULL) -> list[int]:
        return self.apply(self.tree.evict_host(pages, component)).page_ids(component, Tier.HOST).tolist()

    def backup(self, node: int) -> TierCopy:
        return self._begin(Tier.HOST, node)

    def load(self, node: int) -> TierCopy:
        return self._begin(Tier.DEVICE, node)

    def _begin(self, dst: Tier, node: int) -> TierCopy:
        tree = self.tree
        needs = tree.backup_needs(node) if dst is Tier.HOST else tree.load_needs(node)
        ids = {name: self.take(count, name, dst) for name, count in needs.items()}
        transfer = tree.begin_backup(node, ids) if dst is Tier.HOST else tree.begin_load(node, ids)
        self.transfers[transfer.op] = transfer
        return transfer

    def fetch(self, tokens: Sequence[int], first_page: int) -> int:
        ids = self.take(len(tokens) // self.tree.config.page_tokens - first_page, FULL, Tier.HOST)
        op = self.tree.begin_fetch(tokens, first_page, ids)
        self.fetches[op] = {FULL: ids}
        return op

    def end(self, op: int, pages_done: int | None = None) -> ActionList:
        """The record lets go of its ids: what comes back is freed, the rest is the tree's or waits with another."""
        if op in self.fetches:
            for name, ids in self.fetches.pop(op).items():
                self.give(ids, name, Tier.HOST)
        elif op in self.transfers:
            transfer = self.transfers.pop(op)
            for leg in transfer.legs:
                if (leg.component, transfer.dst) in self.owned:
                    self.give(leg.dst_page_ids.tolist(), leg.component, transfer.dst)
        return self.apply(self.tree.end(op, pages_done))

    def backed(self, node: int) -> None:
        """Copy a path to the host, at once."""
        if self.tree.backup_needs(node):
            self.end(self.backup(node).op)

    def conserved(self) -> None:
        """Every page is free, in the tree or the caller's, and in one of these only; and the tree is consistent."""
        self.tree.check()
        for (name, tier), free in self.free.items():
            sizes = self.tree.sizes(name, tier)
            owned = self.owned[name, tier]
            assert len(set(free)) == len(free)
            assert not set(free) & set(owned)
            assert len(free) + sizes.evictable + sizes.protected + len(owned) == self.pages, (name, tier, sizes)


def ids(match: Match) -> list[int]:
    return match.page_ids.tolist()


def hits(tree: PrefixTree, tokens: Sequence[int]) -> tuple[int, int]:
    """(tokens on the device, further tokens that a load-back would bring)."""
    match = tree.match(tokens)
    return match.tokens, match.best_tokens - match.tokens


def needs(match: Match) -> dict[str, list[int]]:
    """Positions to load, by component."""
    return {load.component: load.positions.tolist() for load in match.loads}


def locked(tree: PrefixTree, tokens: Sequence[int]) -> LockHandle:
    return tree.lock(tree.match(tokens).best_node)


def row(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def said(answer: object) -> object:
    """An answer as data that can be compared."""
    if isinstance(answer, np.ndarray):
        return answer.tolist()
    if isinstance(answer, ActionList):
        fields = {name: said(getattr(answer, name)) for name in answer.__struct_fields__ if name != "actions"}
        return fields, [said(each) for each in answer.actions]
    if isinstance(answer, tuple | list):
        return [said(each) for each in answer]
    if hasattr(answer, "__struct_fields__"):
        return {name: said(getattr(answer, name)) for name in answer.__struct_fields__}
    return answer
