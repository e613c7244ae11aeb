"""PageAllocator has the page ids of a rank's pools that nobody uses, and carries out what the tree decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Protocol

from kvmover.cache.prefix import (
    FULL,
    ActionList,
    CopyLeg,
    CopyOut,
    FreePages,
    InvariantBroken,
    PrefixTree,
    Tier,
    WriteBack,
)
from kvmover.cache.tiers.agreement import PartialWork
from kvmover.cache.tiers.layerwise_copier import Batch, LayerwiseCopier
from kvmover.cache.tiers.tiered_pool import TieredPool
from kvmover.errors import TierError


class DevicePages(Protocol):
    """Free pages of one component on the device. An engine that deals them itself is asked for them by this."""

    def __len__(self) -> int:
        """Pages that `take` has."""
        ...

    def take(self, count: int) -> list[int]:
        """Ids for the tree. Raises TierError where there are fewer, and takes none."""
        ...

    def give(self, ids: Iterable[int]) -> None:
        """The tree uses these no more."""
        ...

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """The pages of the pool that these ids stand for, in order."""
        ...

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """These ids of a further component are being loaded, each beside a page of attention KV, in order."""
        ...

    def check(self, others: Collection[int]) -> None:
        """Raise InvariantBroken unless each page is free or one of `others`."""
        ...


class FreeList:
    """Page ids that nobody uses, of `pages` ids from 0, which are the pool's own."""

    def __init__(self, name: str, pages: int) -> None:
        self._name, self.pages = name, pages
        self._heap = list(range(pages))
        self._ids = set(self._heap)
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, page: int) -> bool:
        return page in self._ids

    def take(self, count: int) -> list[int]:
        """Raises TierError where there are fewer, and takes none."""
        if count > len(self._ids):
            raise TierError(f"{count} pages of {self._name}, of which {len(self._ids)} are free")
        taken = [heappop(self._heap) for _ in range(count)]
        self._ids.difference_update(taken)
        return taken

    def claim(self, ids: Iterable[int]) -> None:
        """Take these, which are free."""
        self._ids.difference_update(ids)
        self._heap = sorted(self._ids)

    def give(self, ids: Iterable[int]) -> None:
        """Raises TierError for an id that is free already, or no page."""
        for page in ids:
            if page in self._ids or not 0 <= page < self.pages:
                raise TierError(f"page {page} of {self._name} comes back, and is free already or outside {self.pages}")
            self._ids.add(page)
            heappush(self._heap, page)

    def places(self, ids: Sequence[int]) -> Sequence[int]:
        """See DevicePages."""
        return ids

    def loaded(self, ids: Sequence[int], beside: Sequence[int]) -> None:
        """See DevicePages: a page here is found by its own id."""

    def check(self, others: Collection[int]) -> None:
        """Raise InvariantBroken unless each page is free or one of `others`, which the tree and the caller have."""
        if sorted(self._heap) != sorted(self._ids):
            raise InvariantBroken(f"free pages of {self._name} are {sorted(self._ids)}, in order {sorted(self._heap)}")
        pages = sorted([*self._ids, *others])
        if pages != list(range(self.pages)):
            twice = sorted(page for page, times in Counter(pages).items() if times > 1)
            lost = sorted(set(range(self.pages)) - set(pages))
            raise InvariantBroken(
                f"of {self.pages} pages of {self._name} {lost} are lost, and {twice} are in two places"
            )


#: Host pages offered to each eviction of a tree that writes back, however few it asks for: a tree with further
#: components evicts whole leaves, and drops one that finds no room.
_ROOM_PAGES = 512


class PageAllocator:
    """Free page ids of one rank. An id is free here, the tree's, a record's or the caller's; none is returned twice.

    `device_pages`: of components whose pages on the device the engine deals.
    """

    def __init__(
        self,
        tree: PrefixTree,
        tiered_pools: Sequence[TieredPool],
        copies: LayerwiseCopier,
        device_pages: Mapping[str, DevicePages] = MappingProxyType({}),
    ) -> None:
        self.tree, self.tiered_pools, self.copies = tree, tuple(tiered_pools), copies
        #: Hears of what was evicted to the host, once it is there.
        self.copied_out: Callable[[CopyOut], None] = lambda action: None
        #: Hears of pages of attention KV on the host before they can be used again.
        self.host_freed: Callable[[list[int]], None] = lambda ids: None
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
        """What of this tree's copies is of use where some rank alone has brought it."""
        return PartialWork.DROPPED if self.tree.config.components else PartialWork.KEPT

    def take(self, name: str, tier: Tier, count: int) -> list[int] | None:
        """Ids, from what was used least recently where none are free; None where that does not do."""
        pool = self.free[name, tier]
        if count > len(pool):
            self.evict(name, tier, count - len(pool))
        return pool.take(count) if count <= len(pool) else None

    def take_all(self, counts: Mapping[str, int], tier: Tier) -> dict[str, list[int]] | None:
        """The same for several components: all or none."""
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
        """Ids that nobody uses any more. Raises TierError for one that is free, or none of the pool's."""
        ids = list(ids)
        if tier is Tier.HOST and name == FULL:
            self.host_freed(ids)
        self.free[name, tier].give(ids)

    def room(self, name: str, tier: Tier) -> int:
        """Ids that `take` could get."""
        return len(self.free[name, tier]) + self.tree.sizes(name, tier).evictable

    def apply(self, outcome: ActionList) -> None:
        """Carry out, in order, and the device's attention KV last: an engine may find other components by it.

        Copies are over when this returns, so that what they read can be used again.
        """
        for action in sorted(outcome.actions, key=_is_attention_on_the_device):
            if isinstance(action, FreePages):
                self.give(action.component, action.tier, action.page_ids.tolist())
            else:
                for leg in action.legs:
                    if leg.component in self.host:
                        self.host[leg.component].claim(leg.dst_page_ids.tolist())
                self.copies.at_once(self.batches(action.legs, Tier.HOST), Tier.HOST)
                self.copied_out(action)

    def batches(self, legs: Sequence[CopyLeg], dst: Tier) -> list[Batch]:
        """What this rank copies: on the way to the host its share of what many hold together."""
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
        """Raise InvariantBroken unless every page is in one place. `out`: pages that the caller has. O(pages)."""
        for (name, tier), free in self.free.items():
            free.check([*self.tree.ids(name, tier), *out.get((name, tier), ())])

    def drop_second_copies(self) -> None:
        """Of a tree that writes back, while nobody reads from the host: no page is on both tiers then.

        What the host has of pages on the device is protected there, and goes first of all.
        """
        doubles = self.tree.sizes(FULL, Tier.HOST).protected
        if doubles:
            self.apply(self.tree.evict_host(doubles))

    def evict(self, name: str, tier: Tier, pages: int) -> ActionList:
        """Free at least `pages` ids, or all that may go. What was done is said, and has been done."""
        if tier is Tier.HOST:
            given = self.tree.evict_host(pages, name)
        else:
            given = self.tree.evict(pages, name, room=self._room(name, pages))
        self.apply(given)
        return given

    def demote(self, node: int) -> ActionList:
        """Move the end of a path to the host: see `PrefixTree.demote`. What was done is said, and has been done."""
        given = self.tree.demote(node, room=self._room(FULL, len(self.tree.page_ids(node))))
        self.apply(given)
        return given

    def evict_pools(self, pages: Mapping[str, int]) -> ActionList:
        """Free so many device pages of each component, or all that may go: what goes with one counts for the others."""
        given = self.tree.evict_pools(pages, room=self._room(FULL, pages.get(FULL, 0)))
        self.apply(given)
        return given

    def _room(self, name: str, pages: int) -> list[int]:
        """Free pages of the host for a tree that writes back as it evicts."""
        if not isinstance(self.tree.config.tiers, WriteBack):
            return []
        host = self.host[FULL]
        coming = min(pages, self.tree.sizes(name).evictable)  # the host gives up nothing for what stays
        if coming > len(host):
            self.apply(self.tree.evict_host(coming - len(host)))
        room = host.take(min(max(pages, _ROOM_PAGES), len(host)))
        host.give(room)  # what a copy takes of it is claimed when it is carried out
        return room


def _is_attention_on_the_device(action: FreePages | CopyOut) -> bool:
    return isinstance(action, FreePages) and action.component == FULL and action.tier is Tier.DEVICE
