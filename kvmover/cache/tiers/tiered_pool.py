"""A TieredPool has a component of one rank on all tiers: a device pool, a host pool, and its part of stored pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmover.cache.prefix import ALL_PAGES, FULL, LAST_PAGE, Rule
from kvmover.cache.tiers.host_memory import SOLE, Reach, Share, host_pool
from kvmover.errors import TierError
from kvmover.fields import settle
from kvmover.layout import PACKED_ORDER, Component, Fleet, Pool, PoolSpec
from kvmover.layout.fleet import CpOrder, Shard
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


@dataclass(frozen=True, slots=True)
class HostTier:
    """What a component gets on the host: `pages`, whose axes nest in `order`; only the packed order goes to storage as
    it lies. `share`: who else holds the same pages. `reach`: who may map those of this rank alone.
    """

    pages: int
    order: str = PACKED_ORDER
    share: Share = SOLE
    reach: Reach = Reach.OWN

    def __post_init__(self) -> None:
        settle(self, "host tier", TierError, reach=Reach)


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
        host: HostTier,
        name: str = FULL,
    ) -> TieredPool:
        """The part of `rank`, with a host pool that is allocated here; `device` stays the caller's.

        The rule is the component's: its window, its last state, or all pages. Raises TierError for a device's pool that
        holds another part, and for host memory that cannot be had.
        """
        rule = LAST_PAGE if component.states else Rule(component.window)
        return cls.holding(part_of(component, fleet, rank), device, host, name, rule)

    @classmethod
    def holding(
        cls, part: PagePart, device: Pool, host: HostTier, name: str = FULL, rule: Rule = ALL_PAGES
    ) -> TieredPool:
        """As `of`, for an engine that says itself which `part` of every page the rank holds."""
        box = part.box
        shard = Shard(box.layers, box.heads, box.tokens)
        spec = PoolSpec.dense(part.component, shard, host.pages, box.tokens.tokens, host.order)
        pool = host_pool(spec, host.share, device.tensors[0].device, host.reach)
        return cls(name, part, device, pool, rule, host.share)

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
