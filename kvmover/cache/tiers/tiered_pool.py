"""A TieredPool has a component of one rank on all tiers: a device pool, a host pool, and its part of stored pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmover.cache.prefix import ALL_PAGES, FULL, LAST_PAGE, Rule
from kvmover.cache.tiers.errors import TierError
from kvmover.cache.tiers.hostmem import SOLE, Share, host_pool
from kvmover.kernels.region import Region, Side
from kvmover.layout import PACKED_ORDER, Component, Fleet, Pool, PoolSpec, Span
from kvmover.layout.fleet import CpOrder
from kvmover.store import PagePart


def page_tokens(fleet: Fleet) -> int:
    """Tokens of one page of the tree and of storage: of all context-parallel ranks together, each of which has a page
    of its own pool for it.
    """
    return fleet.page_tokens * fleet.cp


def part_of(component: Component, fleet: Fleet, rank: int) -> PagePart:
    """The part of every page that `rank` holds, by the fleet's coordinates, TP, PP and CP: there is no other source.

    Raises TierError for pages dealt in blocks, whose parts depend on the length of the request.
    """
    whole = page_tokens(fleet)
    if fleet.cp > 1 and fleet.cp_order is CpOrder.BLOCK:
        raise TierError(f"{fleet.cp} ranks that share positions in blocks hold other tokens of a page in each request")
    if component.states > 1:
        raise TierError(f"{component.name} has {component.states} states a request: a page is one")
    part = PagePart.of(component, fleet.shard(component, rank, whole), whole)
    if part is None:
        raise TierError(f"rank {rank} of {fleet} holds nothing of a page of {whole} tokens of {component.name}")
    return part


@dataclass(frozen=True, slots=True)
class HostTier:
    """What a component gets on the host: `pages`, whose axes nest in `order`; only the packed order goes to storage as
    it lies. `share`: who else holds the same pages.
    """

    pages: int
    order: str = PACKED_ORDER
    share: Share = SOLE


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
        part = part_of(component, fleet, rank)
        shard = fleet.shard(component, rank, page_tokens(fleet))
        spec = PoolSpec.dense(component, shard, host.pages, component.page_tokens(fleet.page_tokens), host.order)
        rule = LAST_PAGE if component.states else Rule(component.window)
        return cls(name, part, device, host_pool(spec, host.share, device.tensors[0].device), rule, host.share)

    @property
    def packed(self) -> bool:
        """Whether a page on the host lies as storage wants it."""
        spec = self.host.spec
        shape = dict(zip(spec.layout.axes, spec.layout.shape, strict=True))
        order = PACKED_ORDER.split()
        inner = 1
        for axis in reversed(order):
            if shape[axis] > 1 and spec.layout.stride_of(axis) != inner:
                return False
            inner *= shape[axis]
        return not spec.separate

    def address(self, page: int) -> int:
        """Of a page on the host, in the packed order."""
        return self.host.tensors[0].data_ptr() + page * self.part.nbytes

    def mine(self, ids: Sequence[int]) -> list[int]:
        """Places in a batch of host pages that are this rank's to copy."""
        return [place for place in range(len(ids)) if self.share.mine(place)]


def region(src: Pool, dst: Pool, src_ids: Sequence[int], dst_ids: Sequence[int], layers: Span) -> Region:
    """The pages of a copy between two pools of one part, of its `layers` alone (numbers within the part)."""
    spec = src.spec
    heads, row_bytes = spec.layout.extent_of("head"), spec.component.row_bytes
    if spec.stride_bytes("head") == dst.spec.stride_bytes("head") == row_bytes:
        heads, row_bytes = 1, row_bytes * heads
    sides = _side(src, src_ids, layers), _side(dst, dst_ids, layers)
    return Region(*sides, heads, spec.page_tokens, row_bytes)


def _side(pool: Pool, ids: Sequence[int], layers: Span) -> Side:
    spec, table = pool.spec, np.asarray(ids, np.int64)
    if table.size and not 0 <= int(table.min()) <= int(table.max()) < spec.pages:
        raise TierError(f"page ids {int(table.min())} to {int(table.max())} of a pool of {spec.pages} pages")
    planes = np.asarray(spec.planes(), np.int64).reshape(spec.layout.extent_of("layer"), -1, 2)
    chosen = planes[layers.start : layers.stop].reshape(-1, 2)
    return Side(
        pool.tensors,
        np.ascontiguousarray(chosen[:, 0]),
        np.ascontiguousarray(chosen[:, 1]),
        table * spec.stride_bytes("page"),
        spec.stride_bytes("head"),
        spec.stride_bytes("token"),
    )
