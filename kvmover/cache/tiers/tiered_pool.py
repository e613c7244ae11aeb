"""TieredPool: one component as one rank holds it on all tiers: its pool on the device, its pool on the host, and its
part of every page in storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmover.cache.prefix import FULL
from kvmover.cache.tiers.errors import TierError
from kvmover.cache.tiers.hostmem import SOLE, Share, host_pool
from kvmover.cache.tiers.rules import ALL_PAGES, LAST_PAGE, Rule
from kvmover.layout import PACKED_ORDER, Component, Fleet, Pool, PoolSpec
from kvmover.layout.fleet import CpOrder
from kvmover.store import PagePart


def page_tokens(fleet: Fleet) -> int:
    """Tokens of one page of the tree and of storage: of all context-parallel ranks together, each of which has a page
    of its own pool for it.
    """
    return fleet.page_tokens * fleet.cp


def part_of(component: Component, fleet: Fleet, rank: int) -> PagePart:
    """The part of every page that `rank` holds, by the fleet's coordinates, TP, PP and CP: there is no other source.

    Raises TierError for pages dealt in blocks, whose parts depend on the length of the request, and LayoutError for a
    rank that holds nothing.
    """
    if fleet.cp > 1 and fleet.cp_order is CpOrder.BLOCK:
        raise TierError(f"{fleet.cp} ranks that share positions in blocks hold other tokens of a page in each request")
    if component.states > 1:
        raise TierError(f"{component.name} has {component.states} states a request: a page is one")
    return PagePart.held(component, fleet, rank, page_tokens(fleet))


@dataclass(frozen=True, slots=True, eq=False)
class TieredPool:
    """`name`: the component of the tree whose page ids it goes by. Several may go by one: attention KV and the index
    keys of sparse attention both go by FULL, the temporal and convolution states by one state's.

    `device` and `host` hold the same box, in any two orders. `rule` says which pages a prefix needs.
    """

    name: str
    part: PagePart
    device: Pool
    host: Pool
    rule: Rule = ALL_PAGES
    share: Share = SOLE

    def __post_init__(self) -> None:
        component, box = self.part.component, self.part.box
        for tier, spec in (("device", self.device.spec), ("host", self.host.spec)):
            held = tuple(spec.layout.extent_of(axis) for axis in ("layer", "head", "token"))
            due = box.layers.count, box.heads.count, box.tokens.tokens
            if spec.component != component or held != due:
                raise TierError(
                    f"the {tier}'s pool of {spec.component.name} holds {held} layers, heads and tokens a page,"
                    f" the part of {component.name} is {due}"
                )

    @classmethod
    def of(
        cls,
        component: Component,
        fleet: Fleet,
        rank: int,
        device: Pool,
        host_pages: int,
        *,
        name: str = FULL,
        order: str = PACKED_ORDER,
        share: Share = SOLE,
    ) -> TieredPool:
        """With a host pool of its own, whose axes nest in `order`; only the packed order goes to storage as it lies.

        The rule is the component's: its window, its last state, or all pages.
        """
        part = part_of(component, fleet, rank)
        shard = fleet.shard(component, rank, page_tokens(fleet))
        spec = PoolSpec.dense(component, shard, host_pages, component.page_tokens(fleet.page_tokens), order)
        rule = LAST_PAGE if component.states else Rule(component.window)
        return cls(name, part, device, host_pool(spec, share, device.tensors[0].device), rule, share)

    @property
    def packed(self) -> bool:
        """Whether a page on the host lies as storage wants it."""
        return self.host.spec.is_packed

    def address(self, page: int) -> int:
        """Of a page on the host, in the packed order."""
        return self.host.tensors[0].data_ptr() + page * self.host.spec.stride_bytes("page")

    def mine(self, ids: Sequence[int]) -> list[int]:
        """Places in a batch of host pages that are this rank's to copy."""
        return [place for place in range(len(ids)) if self.share.mine(place)]
