"""GatedLoads bring what the host has to the device for engines that wait layer by layer.

For the tree the pages are on the device from the beginning on, so a second request with the same prefix starts at once
too. Whoever reads them waits at the gates first. Until every rank has copied, both copies stay locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmover.cache.prefix import FULL, InvariantBroken, LockHandle, Tier
from kvmover.cache.tiers.agreement import CollectiveOps
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.layerwise_copier import LayerGate
from kvmover.cache.tiers.metrics import TierCount, TierMeter, TierStage
from kvmover.cache.tiers.storage import Stopwatch


@dataclass(slots=True, eq=False)
class GatedLoad:
    """One load: the locks of both copies, and the gate of its layers, which is None once they are all there."""

    handles: Sequence[LockHandle]
    gate: LayerGate | None = None


@dataclass(slots=True)
class GatedLoads:
    """Of one rank. `reused` hears of a node, and from which page on its path is loaded."""

    allocator: PageAllocator
    collectives: CollectiveOps
    meter: TierMeter
    reused: Callable[[int, int], None]
    open: list[GatedLoad] = field(default_factory=list[GatedLoad])

    def begin(self, node: int) -> int | None:
        """Bring the path to `node` to the device: how many pages of attention KV come. None: there is no room for them.

        Every rank begins the same loads in the same order. Raises StaleHandle for a node that is gone, and PrefixError
        for one that has no copy on the host.
        """
        allocator, tree = self.allocator, self.allocator.tree
        # Locked first, for room is made by an eviction; what further components bring is locked once it has its place.
        others = [component.name for component in tree.config.components]
        handles = [tree.lock_host(node), tree.lock(node, skip=others)]
        needs = tree.load_needs(node)
        ids = allocator.take_all(needs, Tier.DEVICE)
        if ids is None:
            self._unlock(handles)
            return None
        transfer = tree.begin_load(node, ids)
        batches, watch = allocator.batches(transfer.legs, Tier.DEVICE), Stopwatch()
        load = GatedLoad(handles)
        collective = self.collectives.begin(lambda agreed: self._ended(load))
        allocator.apply(tree.end(transfer.op))
        for leg in transfer.legs:
            if leg.component in others:
                beside = tree.page_ids(node)[leg.positions]
                allocator.free[leg.component, Tier.DEVICE].loaded(leg.dst_page_ids.tolist(), beside.tolist())
        handles.append(tree.lock(node))
        self.open.append(load)

        def done() -> None:
            load.gate = None
            self.meter.stages[TierStage.LOAD].add(watch.seconds)
            self.meter.counts[TierCount.LOADED_PAGES] += sum(len(batch.host_ids) for batch in batches)
            self.meter.counts[TierCount.LOADED_BYTES] += sum(batch.nbytes for batch in batches)
            collective.done(1)

        load.gate = allocator.copies.begin(batches, Tier.DEVICE, done)
        self.reused(node, transfer.first_page)
        return needs.get(FULL, 0)

    def wait(self, layer: int) -> None:
        """Before layer `layer` of the rank reads the pool: on a GPU its current stream waits, else the host does."""
        for load in self.open:
            if load.gate is not None:
                load.gate.wait(layer)

    @property
    def closed(self) -> bool:
        """Whether a reader has to wait for something."""
        return any(load.gate is not None for load in self.open)

    def check(self) -> None:
        """Raise InvariantBroken where there are more loads than operations of all ranks. O(loads)."""
        if len(self.open) > len(self.collectives.open):
            raise InvariantBroken(f"{len(self.open)} loads are open, of {len(self.collectives.open)} operations")

    def _ended(self, load: GatedLoad) -> None:
        """On all ranks."""
        self.open.remove(load)
        self._unlock(load.handles)

    def _unlock(self, handles: Sequence[LockHandle]) -> None:
        for handle in handles:
            self.allocator.tree.unlock(handle)
