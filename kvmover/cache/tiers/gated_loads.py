"""GatedLoads bring host pages to the device for engines that wait layer by layer.

For the tree the pages are on the device from the beginning, so a second request with the same prefix starts at once
too. Readers wait at the gates first. Both copies stay locked until every rank has copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmover.cache.prefix import FULL, InvariantBroken, LockHandle, Tier
from kvmover.cache.tiers.agreement import CollectiveOps
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.layerwise_copier import LayerGate
from kvmover.cache.tiers.tier_metrics import TierCount, TierMeter, TierStage
from kvmover.cache.tiers.tier_storage import Stopwatch


@dataclass(slots=True, eq=False)
class GatedLoad:
    """A load: locks of both copies, and its gate, None once all layers have landed."""

    handles: Sequence[LockHandle]
    gate: LayerGate | None = None


@dataclass(slots=True)
class GatedLoads:
    """The gated loads of one rank. `reused` gets a node and the first page loaded on its path."""

    allocator: PageAllocator
    collectives: CollectiveOps
    meter: TierMeter
    reused: Callable[[int, int], None]
    open: list[GatedLoad] = field(default_factory=list[GatedLoad])

    def begin(self, node: int) -> int | None:
        """Begin to load the path to `node`, on all ranks in one order. Returns the number of attention KV pages; None
        without room.

        Raises StaleHandle if `node` is gone, PrefixError without a host copy.
        """
        allocator, tree = self.allocator, self.allocator.tree
        # Pages of further components are locked once they have their place.
        handles = allocator.lock_for_load(node)
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
            if leg.component != FULL:
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
        """Wait before layer `layer` reads the pool: on a GPU the current stream does, else the host."""
        for load in self.open:
            if load.gate is not None:
                load.gate.wait(layer)

    @property
    def closed(self) -> bool:
        """Returns True if a reader has to wait."""
        return any(load.gate is not None for load in self.open)

    def check(self) -> None:
        """Raise InvariantBroken for more loads than open operations."""
        if len(self.open) > len(self.collectives.open):
            raise InvariantBroken(f"{len(self.open)} loads are open, of {len(self.collectives.open)} operations")

    def _ended(self, load: GatedLoad) -> None:
        self.open.remove(load)
        self._unlock(load.handles)

    def _unlock(self, handles: Sequence[LockHandle]) -> None:
        for handle in handles:
            self.allocator.tree.unlock(handle)
