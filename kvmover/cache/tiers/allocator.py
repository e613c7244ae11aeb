"""A PageAllocator holds the free page ids of a rank's pools, and carries out the tree's decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Protocol

from kvmover.cache.prefix import (
    FULL,
    ActionList,
    CopyLeg,
    CopyOut,
    FreePages,
    InvariantBroken,
    LockHandle,
    PrefixTree,
    Tier,
    WriteBack,
)
from kvmover.cache.tiers.agreement import PartialWork
from kvmover.cache.tiers.layerwise_copier import Batch, LayerwiseCopier
from kvmover.cache.tiers.tiered_pool import TieredPool
from kvmover.errors import TierError


class DevicePages(Protocol):
    """The free device pages of one component, for an engine that allocates them itself."""

    def __len__(self) -> int:
        """Return the number of free ids."""
        ...

    def take(self, count: int) -> list[int]:
        """Return `count` ids. Raises TierError, and takes no id, if fewer are free."""
        ...

    def give(self, ids: Iterable[int]) -> None:
        """Free ids."""
        ...

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the pool's pages of these ids, in order."""
        ...

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """Note that a further component's ids are being loaded, each beside a page of attention KV."""
        ...

    def check(self, others: Collection[int]) -> None:
        """Raise InvariantBroken unless each page is free or in `others`."""
        ...


class FreeList:
    """The free ids of `pages` ids from 0, the pool's own pages."""

    def __init__(self, name: str, pages: int) -> None:
        self._name, self.pages = name, pages
        self._heap = list(range(pages))  # ascending, which is a heap
        self._ids = set(self._heap)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, page: int) -> bool:
        return page in self._ids

    def take(self, count: int) -> list[int]:
        """Return the lowest free ids. Raises TierError, and takes no id, if fewer are free."""
        if count > len(self._ids):
            raise TierError(f"{count} pages of {self._name}, of which {len(self._ids)} are free")
        taken = [heappop(self._heap) for _ in range(count)]
        assert len(self._ids.intersection(taken)) == count, f"{taken} are taken of {self._name}, and not all are free"
        self._ids.difference_update(taken)
        return taken

    def claim(self, ids: Iterable[int]) -> None:
        """Take these ids. Raises TierError, and takes none, for an id that is not free."""
        claimed = list(ids)
        if missing := set(claimed) - self._ids:
            raise TierError(f"pages {sorted(missing)} of {self._name} are claimed, and are not free")
        self._ids.difference_update(claimed)
        self._heap = sorted(self._ids)

    def give(self, ids: Iterable[int]) -> None:
        """Free ids. Raises TierError, and frees no id, if one is free, repeated or out of range."""
        pages, new = list(ids), set[int]()
        for page in pages:
            if page in self._ids or page in new or not 0 <= page < self.pages:
                raise TierError(f"page {page} of {self._name} comes back, and is free already or outside {self.pages}")
            new.add(page)
        self._ids |= new
        for page in pages:
            heappush(self._heap, page)
        assert len(self._heap) == len(self._ids), f"{self._name} has {len(self._heap)} pages, {len(self._ids)} by id"

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """Return `ids`."""
        return ids

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """Ignore the call."""

    def check(self, others: Collection[int]) -> None:
        """Raise InvariantBroken unless each page is once free or in `others`."""
        if sorted(self._heap) != sorted(self._ids):
            raise InvariantBroken(f"free pages of {self._name} are {sorted(self._ids)}, in order {sorted(self._heap)}")
        pages = sorted([*self._ids, *others])
        if pages != list(range(self.pages)):
            twice = sorted(page for page, times in Counter(pages).items() if times > 1)
            lost = sorted(set(range(self.pages)) - set(pages))
            raise InvariantBroken(
                f"of {self.pages} pages of {self._name} {lost} are lost, and {twice} are in two places"
            )


#: Least host pages offered to an eviction of a tree that writes back: with further components it evicts whole leaves,
#: and drops a leaf that finds no room.
_ROOM_PAGES = 512


@dataclass(frozen=True, slots=True)
class PageListeners:
    """The functions that an allocator calls with host pages.

    `copied_out`: with an eviction's copies, once they are on the host. `host_freed`: with pages of attention KV that
    were freed, before they can be used again.
    """

    copied_out: Callable[[CopyOut], None] = lambda action: None
    host_freed: Callable[[list[int]], None] = lambda ids: None


class PageAllocator:
    """The free page ids of one rank. Each id is in one place: free here, or with the tree, a record or the caller.

    `device_pages`: those that the engine allocates. Raises TierError if pools do not fit the tree's components.
    """

    def __init__(
        self,
        tree: PrefixTree,
        tiered_pools: Sequence[TieredPool],
        copies: LayerwiseCopier,
        device_pages: Mapping[str, DevicePages] = MappingProxyType({}),
        listeners: PageListeners | None = None,
    ) -> None:
        self.tree, self.tiered_pools, self.copies = tree, tuple(tiered_pools), copies
        self.listeners = listeners or PageListeners()
        names = [FULL, *(component.name for component in tree.config.components)]
        self.free: dict[tuple[str, Tier], DevicePages] = {}
        self.host: dict[str, FreeList] = {}
        for name in names:
            mine = [tiered_pool for tiered_pool in tiered_pools if tiered_pool.name == name]
            if not mine:
                raise TierError(f"no pool for the tree's component {name!r}")
            for tier, pools in ((Tier.DEVICE, [h.device for h in mine]), (Tier.HOST, [h.host for h in mine])):
                sizes = sorted({pool.spec.pages for pool in pools})
                if len(sizes) > 1:
                    raise TierError(
                        f"pools of {name!r} that share page ids have {sizes} pages on the {tier.name.lower()}"
                    )
                if tier is Tier.DEVICE and name in device_pages:
                    self.free[name, tier] = device_pages[name]
                    continue
                free = self.free[name, tier] = FreeList(f"{name} on the {tier.name.lower()}", sizes[0])
                if tier is Tier.HOST:
                    self.host[name] = free
        if unknown := {tiered_pool.name for tiered_pool in tiered_pools} - set(names):
            raise TierError(f"pools for {sorted(unknown)}, and the tree has {names}")

    @property
    def partial(self) -> PartialWork:
        """Returns DROPPED if the tree has further components."""
        return PartialWork.DROPPED if self.tree.config.components else PartialWork.KEPT

    def take(self, name: str, tier: Tier, count: int) -> list[int] | None:
        """Return ids, evicting least recently used pages for them; None without room."""
        pool = self.free[name, tier]
        if count > len(pool):
            self.evict(name, tier, count - len(pool))
        taken = pool.take(count) if count <= len(pool) else None
        assert taken is None or len(taken) == count, f"{len(taken or ())} pages of {name} for {count}"
        return taken

    def take_all(self, counts: Mapping[str, int], tier: Tier) -> dict[str, list[int]] | None:
        """Return ids of several components; None, and takes no id, without room."""
        taken: dict[str, list[int]] = {}
        for name, count in counts.items():
            ids = self.take(name, tier, count)
            if ids is None:
                for other, given in taken.items():
                    self.give(other, tier, given)
                return None
            taken[name] = ids
        return taken

    def give(self, name: str, tier: Tier, ids: Iterable[int]) -> None:
        """Free ids. Raises TierError if one is free or outside the pool."""
        ids = list(ids)
        self.free[name, tier].give(ids)
        if tier is Tier.HOST and name == FULL:
            self.listeners.host_freed(ids)

    def lock_for_load(self, node: int) -> list[LockHandle]:
        """Lock the path to `node` before room is made for it by eviction: host copies of all components, and attention
        KV wherever it is. Unlock it once it is loaded.

        Raises StaleHandle if the node is gone, PrefixError without a host copy.
        """
        others = [component.name for component in self.tree.config.components]
        return [self.tree.lock_host(node), self.tree.lock(node, skip=others)]

    def room(self, name: str, tier: Tier) -> int:
        """Return the number of ids that `take` could get."""
        return len(self.free[name, tier]) + self.tree.sizes(name, tier).evictable

    def apply(self, outcome: ActionList) -> None:
        """Carry out actions, attention KV's device pages last: an engine may find other components by them. Waits for
        copies.
        """
        for action in sorted(outcome.actions, key=_is_attention_on_the_device):
            if isinstance(action, FreePages):
                self.give(action.component, action.tier, action.page_ids.tolist())
            else:
                for leg in action.legs:
                    if leg.component in self.host:
                        self.host[leg.component].claim(leg.dst_page_ids.tolist())
                self.copies.at_once(self.batches(action.legs, Tier.HOST), Tier.HOST)
                self.listeners.copied_out(action)

    def batches(self, legs: Sequence[CopyLeg], dst: Tier) -> list[Batch]:
        """Return this rank's copies: towards the host, only its share."""
        found: list[Batch] = []
        for leg in legs:
            src, to = leg.src_page_ids.tolist(), leg.dst_page_ids.tolist()
            for tiered_pool in self.tiered_pools:
                if tiered_pool.name == leg.component:
                    host, ids = (src, to) if dst is Tier.DEVICE else (to, src)
                    device = self.free[leg.component, Tier.DEVICE].places(ids)
                    places = tiered_pool.mine(host) if dst is Tier.HOST else list(range(len(host)))
                    found.append(Batch(tiered_pool, [host[i] for i in places], [device[i] for i in places]))
        return found

    def check(self, out: Mapping[tuple[str, Tier], Collection[int]]) -> None:
        """Raise InvariantBroken unless every page is in one place. `out`: the caller's."""
        for (name, tier), free in self.free.items():
            free.check([*self.tree.ids(name, tier), *out.get((name, tier), ())])

    def drop_second_copies(self) -> None:
        """Evict host pages also on the device, of a tree that writes back, while no load reads them."""
        doubles = self.tree.sizes(FULL, Tier.HOST).protected
        if doubles:
            self.apply(self.tree.evict_host(doubles))

    def evict(self, name: str, tier: Tier, pages: int) -> ActionList:
        """Free at least `pages` ids, or all that may go. Returns the actions done."""
        if tier is Tier.HOST:
            given = self.tree.evict_host(pages, name)
        else:
            given = self.tree.evict(pages, name, room=self._room(name, pages))
        self.apply(given)
        return given

    def demote(self, node: int) -> ActionList:
        """Move a path's end: see `PrefixTree.demote`. Returns the actions done."""
        given = self.tree.demote(node, room=self._room(FULL, len(self.tree.page_ids(node))))
        self.apply(given)
        return given

    def evict_pools(self, pages: Mapping[str, int]) -> ActionList:
        """Free so many device pages of each component, or all that may go; those that go along count. Returns the
        actions done.
        """
        given = self.tree.evict_pools(pages, room=self._room(FULL, pages.get(FULL, 0)))
        self.apply(given)
        return given

    def _room(self, name: str, pages: int) -> list[int]:
        """Return free host pages, evicting for them; [] unless the tree writes back."""
        if not isinstance(self.tree.config.tiers, WriteBack):
            return []
        host = self.host[FULL]
        coming = min(pages, self.tree.sizes(name).evictable)  # host pages are evicted only for pages that come
        if coming > len(host):
            self.apply(self.tree.evict_host(coming - len(host)))
        room = host.take(min(max(pages, _ROOM_PAGES), len(host)))
        host.give(room)  # `apply` claims the pages that a copy takes
        return room


def _is_attention_on_the_device(action: FreePages | CopyOut) -> bool:
    return isinstance(action, FreePages) and action.component == FULL and action.tier is Tier.DEVICE
