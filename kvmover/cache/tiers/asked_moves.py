"""AskedMoves are what somebody asks of prefixes that no request waits for: down to the host, up from below, or stored.

Nothing else pays for them: what is demoted is in nobody's use, what is stored was on its way there or waits like all
else, and what is brought up takes free pages of the device alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmover.cache.prefix import RadixKey, StaleHandle, Tier
from kvmover.cache.tiers.agreement import CollectiveOps
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.backup import Backups
from kvmover.cache.tiers.gated_loads import GatedLoads
from kvmover.cache.tiers.metrics import TierCount, TierMeter
from kvmover.cache.tiers.restore_driver import Restore

#: Prefixes that may be on their way up at a time.
MOST_BROUGHT = 8


@dataclass(slots=True)
class AskedMoves:
    """Of one rank. `prefetch` begins a restore as far as the host."""

    allocator: PageAllocator
    collectives: CollectiveOps
    backups: Backups
    loads: GatedLoads
    meter: TierMeter
    prefetch: Callable[[RadixKey], Restore]
    #: Ends of paths that are to leave the device once they are on the host.
    _leaving: deque[int] = field(default_factory=deque[int])
    _coming: list[Restore] = field(default_factory=list[Restore])

    @property
    def open(self) -> int:
        """What has been asked for and is not done."""
        return len(self._leaving) + len(self._coming)

    def demote(self, node: int) -> bool:
        """See HintedTiers. Raises StaleHandle for a node that is gone."""
        if self.backups.writes_back or self.allocator.tree.is_backed(node):
            return self._give_up(node) > 0
        self.backups.back_up(node)
        self._leaving.append(node)
        return True

    def bring(self, key: RadixKey) -> bool:
        """See HintedTiers."""
        if len(self._coming) >= MOST_BROUGHT:
            return False
        self._coming.append(self.prefetch(key))
        return True

    def poll(self) -> None:
        """Go on with what has come to the host."""
        for _ in range(len(self._leaving)):
            node = self._leaving.popleft()
            try:
                if self.allocator.tree.is_backed(node):
                    self._give_up(node)
                elif self.collectives.open:
                    self._leaving.append(node)
                else:
                    self.meter.dropped["demote", "never came to the host"] += 1
            except StaleHandle:
                self.meter.dropped["demote", "evicted before it was demoted"] += 1
        for restore in [each for each in self._coming if each.done]:
            self._coming.remove(restore)
            self._load(restore)

    def forget(self) -> None:
        """The tree has nothing any more."""
        self._leaving.clear()

    def _give_up(self, node: int) -> int:
        given = self.allocator.demote(node)
        pages = len(given.page_ids())
        self.meter.counts[TierCount.DEMOTED_PAGES] += pages
        return pages

    def _load(self, restore: Restore) -> None:
        """Onto free pages of the device; where there are too few it stays on the host."""
        allocator, tree = self.allocator, self.allocator.tree
        assert restore.handle is not None
        tree.unlock(restore.handle)
        restore.handle = None
        found = tree.match(restore.key)
        if found.best_tokens == found.tokens or found.waits:
            return
        needs = tree.load_needs(found.best_node)
        if all(len(allocator.free[name, Tier.DEVICE]) >= count for name, count in needs.items()):
            self.loads.begin(found.best_node)
