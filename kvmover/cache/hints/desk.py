"""A HintDesk carries hints out on one rank's prefix tree and tiers, or refuses them with a reason."""

from __future__ import annotations

from typing import Protocol

from kvmover.cache.hints.actions import (
    DemoteHint,
    HintAction,
    HintAnswer,
    HintMet,
    HintRefusal,
    HintRefused,
    PinHint,
    PrefetchHint,
    RetainHint,
)
from kvmover.cache.hints.pins import Pins, Prefix
from kvmover.cache.prefix import NO_IDS, PRIORITY, ROOT, LockHandle, PrefixTree, RadixKey


class HintedTiers(Protocol):
    """A mover of pages between tiers on demand; a Controller is one."""

    @property
    def stores(self) -> bool:
        """True if there is storage to write to."""
        ...

    def publish(self, node: int) -> bool:
        """Begin to store the path to `node`. Returns False for a tree that copies on eviction alone."""
        ...

    def demote(self, node: int) -> bool:
        """Begin to move the end of the path to `node` from device to host. Returns False if no page can go."""
        ...

    def bring(self, key: RadixKey) -> bool:
        """Begin to bring a prompt up from storage and host. Returns False if too many are on their way."""
        ...


class HintDesk:
    """A desk for one rank, without `tiers` if it has the device alone. Ranks get the same hints in the same order.

    >>> from kvmover.cache.hints import PinLimits
    >>> tree = PrefixTree(page_tokens=2)
    >>> kept = tree.insert([1, 2, 3, 4], [10, 11])
    >>> desk = HintDesk(tree, Pins(tree, {"full": 16}, PinLimits()))
    >>> desk.carry_out(HintAction("session", PinHint(30.0)), tree.key([1, 2, 3, 4, 5]), now_s=0.0)
    HintMet(tokens=4)
    >>> desk.carry_out(HintAction("session", DemoteHint()), tree.key([1, 2, 3, 4, 5]), now_s=0.0).why
    <HintRefusal.NO_HOST: 'no_host'>
    """

    def __init__(self, tree: PrefixTree, pins: Pins[LockHandle], tiers: HintedTiers | None = None) -> None:
        self._tree, self.pins, self.tiers = tree, pins, tiers

    def carry_out(self, action: HintAction, key: RadixKey, now_s: float, largest: int = 0) -> HintAnswer:
        """Apply `action` to the longest cached prefix of `key`, and return the answer.

        For pins alone: `now_s`, this rank's clock, and `largest`, as in `Pins.pin`.
        """
        hint = action.hint
        if isinstance(hint, PinHint):
            if not hint.ttl_s:
                return self.pins.unpin(action.name)
            found = self._tree.match(key)
            return self.pins.pin(action.name, Prefix(found.device_node, found.tokens), hint.ttl_s, now_s, largest)
        if isinstance(hint, RetainHint):
            return self._retain(action.name, hint.priority, key)
        if isinstance(hint, PrefetchHint):
            return self._prefetch(action.name, key)
        if isinstance(hint, DemoteHint):
            return self._demote(action.name, key)
        return self._share(action.name, key)

    def _retain(self, name: str, priority: int, key: RadixKey) -> HintAnswer:
        policy = self._tree.config.policy
        if policy is not PRIORITY:
            return HintRefused(
                HintRefusal.NO_PRIORITIES, f"{name}: pages go by {policy.name} here, which has no priorities"
            )
        found = self._tree.match(key)
        if not found.tokens:
            return _absent(name)
        pages = found.tokens // self._tree.config.page_tokens
        self._tree.insert(
            key.front(found.tokens), NO_IDS, first_page=pages, counted_tokens=found.tokens, priority=priority
        )
        return HintMet(found.tokens)

    def _prefetch(self, name: str, key: RadixKey) -> HintAnswer:
        if self.tiers is None:
            return HintRefused(HintRefusal.NO_HOST, f"{name}: there is nothing below the device to prefetch from")
        if not self.tiers.bring(key):
            return HintRefused(HintRefusal.BUSY, f"{name}: as many prefixes as may be are being prefetched")
        return HintMet(key.tokens)

    def _demote(self, name: str, key: RadixKey) -> HintAnswer:
        if self.tiers is None:
            return HintRefused(HintRefusal.NO_HOST, f"{name}: there is no host memory to move a prefix to")
        found = self._tree.look(key)
        if found.device_node == ROOT:
            return _absent(name)
        if not self.tiers.demote(found.device_node):
            return HintRefused(HintRefusal.IN_USE, f"{name}: all of its {found.tokens} tokens are in use, or pinned")
        return HintMet(found.tokens)

    def _share(self, name: str, key: RadixKey) -> HintAnswer:
        if self.tiers is None or not self.tiers.stores:
            return HintRefused(HintRefusal.NO_STORE, f"{name}: there is no page store that is written to")
        found = self._tree.look(key)
        if found.best_node == ROOT:
            return _absent(name)
        if not self.tiers.publish(found.best_node):
            return HintRefused(
                HintRefusal.NO_STORE, f"{name}: pages are stored here as they are evicted, and not before"
            )
        return HintMet(found.best_tokens)


def _absent(name: str) -> HintRefused:
    return HintRefused(HintRefusal.ABSENT, f"{name}: no whole page of the prefix is cached")
