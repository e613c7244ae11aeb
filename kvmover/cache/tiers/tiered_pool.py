"""A TieredPool is a component of one rank on all tiers: a device pool, a host pool, and its part of stored pages."""

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
    """Return the tokens of a page of tree and storage: a pool's page of all context-parallel ranks."""
    return fleet.page_tokens * fleet.cp


def part_of(component: Component, fleet: Fleet, rank: int) -> PagePart:
    """Return the part of every page that `rank` holds.

    Raises TierError for several states, or positions dealt in blocks, whose parts depend on the request's length;
    LayoutError for a rank without a part.
    """
    if fleet.cp > 1 and fleet.cp_order is CpOrder.BLOCK:
        raise TierError(f"{fleet.cp} ranks that share positions in blocks hold other tokens of a page in each request")
    if component.states > 1:
        raise TierError(f"{component.name} has {component.states} states a request: a page is one")
    return PagePart.held(component, fleet, rank, page_tokens(fleet))


@dataclass(frozen=True, slots=True)
class HostTier:
    """A component's host pool of `pages` in `order`; only the packed order is stored as it lies.

    `share`: the ranks that hold the same pages. `reach`: the processes that may map this rank's own.
    """

    pages: int
    order: str = PACKED_ORDER
    share: Share = SOLE
    reach: Reach = Reach.OWN

    def __post_init__(self) -> None:
        settle(self, "host tier", TierError, reach=Reach)


@dataclass(frozen=True, slots=True, eq=False)
class TieredPool:
    """A component's pools on device and host, which hold the same box, in any two orders.

    `name`: the tree's component whose page ids the pools use, perhaps with others (attention KV and index keys: FULL).
    `rule`: the pages that a prefix needs. Raises TierError for a pool that does not hold `part`.
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
        """Make the tiered pool of `rank`, with a host pool allocated here; `device` stays the caller's.

        The rule is the component's: window, last state, or all pages. Raises TierError for a wrong device pool, and for
        host memory that cannot be had.
        """
        rule = LAST_PAGE if component.states else Rule(component.window)
        return cls.holding(part_of(component, fleet, rank), device, host, name, rule)

    @classmethod
    def holding(
        cls, part: PagePart, device: Pool, host: HostTier, name: str = FULL, rule: Rule = ALL_PAGES
    ) -> TieredPool:
        """Make it from the rank's `part` of every page. Raises as `of`."""
        box = part.box
        shard = Shard(box.layers, box.heads, box.tokens)
        spec = PoolSpec.dense(part.component, shard, host.pages, box.tokens.tokens, host.order)
        pool = host_pool(spec, host.share, device.tensors[0].device, host.reach)
        return cls(name, part, device, pool, rule, host.share)

    @property
    def packed(self) -> bool:
        """Returns True if host pages are in storage's order."""
        return self.host.spec.is_packed

    def address(self, page: int) -> int:
        """Return the address of a host page, in the packed order."""
        return self.host.tensors[0].data_ptr() + page * self.host.spec.stride_bytes("page")

    def mine(self, ids: Sequence[int]) -> list[int]:
        """Return the places in a batch that this rank is to copy."""
        return [place for place in range(len(ids)) if self.share.mine(place)]
