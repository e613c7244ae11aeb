"""AskedMoves moves prefixes without a waiting request: down to the host, or up from storage and host.

Other requests do not pay for these moves: demoted pages are unused, their copies to the host are ordinary backups, and
prefetched pages take only free pages of the device.
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

#: The most prefixes on their way up at a time.
MOST_BROUGHT = 8


@dataclass(slots=True)
class AskedMoves:
    """The asked moves of one rank. `prefetch` begins a restore that ends on the host."""

    allocator: PageAllocator
    collectives: CollectiveOps
    backups: Backups
    loads: GatedLoads
    meter: TierMeter
    prefetch: Callable[[RadixKey], Restore]
    #: Nodes whose paths are to leave the device once they are on the host.
    _leaving: deque[int] = field(default_factory=deque[int])
    _coming: list[Restore] = field(default_factory=list[Restore])

    @property
    def open(self) -> int:
        """Moves that are not done."""
        return len(self._leaving) + len(self._coming)

    def demote(self, node: int) -> bool:
        """Demote a path: see HintedTiers. Raises StaleHandle for a node that is gone."""
        if self.backups.writes_back or self.allocator.tree.is_backed(node):
            return self._give_up(node) > 0
        self.backups.back_up(node)
        self._leaving.append(node)
        return True

    def bring(self, key: RadixKey) -> bool:
        """Prefetch a prompt: see HintedTiers."""
        if len(self._coming) >= MOST_BROUGHT:
            return False
        self._coming.append(self.prefetch(key))
        return True

    def poll(self) -> None:
        """Demote paths that have come to the host, and load prefixes that were prefetched to it."""
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
        """Drop pending demotions, after a reset of the tree."""
        self._leaving.clear()

    def _give_up(self, node: int) -> int:
        given = self.allocator.demote(node)
        pages = len(given.page_ids())
        self.meter.counts[TierCount.DEMOTED_PAGES] += pages
        return pages

    def _load(self, restore: Restore) -> None:
        """Load the prefix onto free device pages; if there are too few it stays on the host."""
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
