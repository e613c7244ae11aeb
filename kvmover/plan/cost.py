"""A cost model estimates each route's time on a given wire, and chooses the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvmover.errors import PlanError
from kvmover.fields import member, settle


class Route(StrEnum):
    """A way of a leg's bytes: DIRECT is written from pool to pool; PACKED is gathered, written once a chunk, and
    scattered; MAPPED is copied from pool to pool by a rank that has mapped the other rank's pool.
    """

    DIRECT = "direct"
    PACKED = "packed"
    MAPPED = "mapped"


#: Routes of any two ranks, and of two ranks on one host whose pools lie in shared memory.
BY_WIRE = frozenset({Route.DIRECT, Route.PACKED})
BY_HOST = frozenset(Route)


class Posting(StrEnum):
    """A transport's way to share time between posting descriptors and moving their bytes.

    AHEAD: a NIC moves posted bytes while the next are posted, so the slower of the two counts. SOCKET: the kernel sends
    them meanwhile, but all that is posted shares the wire and ends together: UCX's tcp between hosts. INLINE: the core
    that posts also copies, so they add up. UCX's cma is INLINE: 1024 runs of 32 KiB were posted in 3.87 ms, where
    posting 1024 tiny runs takes 1.51 ms and one run of 32 MiB 2.28 ms. So is its tcp on one host: 8192 runs of 2 KiB in
    32 ms, 18 ms and 5 ms.
    """

    AHEAD = "ahead"
    SOCKET = "socket"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a transfer's parts. Rates in bytes a microsecond (1,000 is 1 GB/s), times in microseconds.

    The formulas are in DESIGN.md, section 6, "Costs". `descriptor_us`: software's time to post one; a NIC's message
    rate is far higher: 1.08 us for 4 KiB, 1.8 us for 16 KiB descriptors on 400 Gb/s (uccl#677, vllm#53825).
    `pool_chunk_bytes`: largest chunk from pool to pool, which takes no arena; 0: `chunk_bytes`. `latency_us`: the way
    there and back, which every route pays once: the request for the KV, then the last bytes; 10,000 us between regions.
    """

    descriptor_us: float
    wire_rate: float
    gather_rate: float
    scatter_rate: float
    chunk_us: float
    chunk_bytes: int
    posting: Posting = Posting.AHEAD
    pool_chunk_bytes: int = 0
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("descriptor_us", "wire_rate", "gather_rate", "scatter_rate", "chunk_us", "chunk_bytes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise PlanError(f"costs with {name} = {value}; it must be positive")
        for name in ("pool_chunk_bytes", "latency_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"costs with {name} = {getattr(self, name)}; it must not be negative")
        settle(self, "costs", PlanError, posting=Posting)

    def direct_us(self, nbytes: int, runs: int) -> float:
        """Returns the time of `nbytes` in `runs` descriptors: 1 MiB in 2048 runs by RDMA is max(21, 2048) us."""
        wire_us, post_us = nbytes / self.wire_rate, runs * self.descriptor_us
        return self.latency_us + (wire_us + post_us if self.posting is Posting.INLINE else max(wire_us, post_us))

    def packed_us(self, nbytes: int, chunks: int) -> float:
        """Returns the time of the packed route: one chunk through gather, wire and scatter, and for each further chunk
        the slowest of these and of `chunk_us`.

        With INLINE posting the core gathers, writes and answers for one chunk after the other: at 100 us a chunk and
        all rates 4 GB/s, 2 chunks of 8 MiB take 8.6 ms there, and 2.1 ms more to scatter the last.
        """
        first = min(nbytes, self.chunk_bytes)
        gather_us, wire_us, scatter_us = first / self.gather_rate, first / self.wire_rate, first / self.scatter_rate
        more, notes_us = nbytes / first - 1, chunks * self.chunk_us
        if self.posting is Posting.INLINE:
            core_us = (1 + more) * (gather_us + wire_us) + notes_us
            return self.latency_us + max(core_us, gather_us + wire_us + more * scatter_us) + scatter_us
        once_us, slowest_us = gather_us + wire_us + scatter_us, max(gather_us, wire_us, scatter_us)
        return self.latency_us + max(once_us + more * slowest_us, gather_us + notes_us + scatter_us)

    def mapped_us(self, nbytes: int) -> float:
        """Returns the time of one copy with strides at both ends, at the slower of the gather and scatter rates.

        The wire's rate is its floor: between processes of one host the wire is a copy by the same cores.
        """
        return self.latency_us + nbytes / max(min(self.gather_rate, self.scatter_rate), self.wire_rate)

    def us(self, route: Route, nbytes: int, runs: int) -> float:
        """Returns the time of `nbytes` that lie in `runs` runs by `route`. Raises PlanError for an unknown route."""
        route = member(Route, route, "route", PlanError)
        if route is Route.PACKED:
            return self.packed_us(nbytes, self.chunks(nbytes))
        return self.direct_us(nbytes, runs) if route is Route.DIRECT else self.mapped_us(nbytes)

    def cut_bytes(self, route: Route) -> int:
        """Returns the largest chunk, in bytes, that goes by `route`. Raises PlanError for an unknown route."""
        route = member(Route, route, "route", PlanError)
        return self.chunk_bytes if route is Route.PACKED else self.pool_chunk_bytes or self.chunk_bytes

    @property
    def window_bytes(self) -> float:
        """The most bytes of packed chunks that are under way to a rank: one chunk on the wire, one behind it, and as
        much as the latency hides.

        Writes through sockets share the wire: of 8 chunks that UCX's tcp had at once, all ended together, and 7 were
        scattered behind the last instead of meanwhile. A NIC moves one after the other, so AHEAD has no such bound.
        """
        if self.posting is Posting.AHEAD:
            return math.inf
        return 2 * self.chunk_bytes + self.latency_us * self.wire_rate

    def chunks(self, nbytes: int) -> int:
        """Returns the number of packed chunks of `nbytes`, rounded up."""
        return -(-nbytes // self.chunk_bytes)

    def choose(self, nbytes: int, runs: int, among: frozenset[Route] = BY_WIRE) -> Choice:
        """Returns the fastest route of `among` for `nbytes` that lie in `runs` runs.

        Ties go to mapped, then direct, then packed: the route that needs fewer resources.
        """
        took = {route: self.us(route, nbytes, runs) for route in (Route.MAPPED, Route.DIRECT, Route.PACKED)}
        best = min((route for route in took if route in among), key=took.__getitem__)
        mapped = took[Route.MAPPED] if Route.MAPPED in among else None
        return Choice(best, nbytes, runs, took[Route.DIRECT], took[Route.PACKED], mapped)


@dataclass(frozen=True, slots=True)
class Choice:
    """A route with its estimates in microseconds; `mapped_us` is None where neither end can map the other."""

    route: Route
    nbytes: int
    runs: int
    direct_us: float
    packed_us: float
    mapped_us: float | None = None

    @property
    def us(self) -> float:
        """The estimated time of the chosen route."""
        took = {Route.DIRECT: self.direct_us, Route.PACKED: self.packed_us, Route.MAPPED: self.mapped_us}[self.route]
        return math.inf if took is None else took

    def why(self) -> str:
        """Returns one line: `packed: 131072 runs of 512 B would take 131.1 ms to post, the packed route 1.5 ms`."""
        run = self.nbytes // self.runs
        if self.route is Route.MAPPED and self.mapped_us is not None:
            return (
                f"mapped: one copy takes {self.mapped_us / 1e3:.1f} ms, {self.runs} runs of {run} B would take"
                f" {self.direct_us / 1e3:.1f} ms, the packed route {self.packed_us / 1e3:.1f} ms"
            )
        if self.route is Route.DIRECT:
            return (
                f"direct: {self.runs} runs of {run} B take {self.direct_us / 1e3:.1f} ms as they are,"
                f" the packed route would take {self.packed_us / 1e3:.1f} ms"
            )
        return (
            f"packed: {self.runs} runs of {run} B would take {self.direct_us / 1e3:.1f} ms to post,"
            f" the packed route takes {self.packed_us / 1e3:.1f} ms"
        )


#: GPU to GPU over 400 Gb/s RDMA. Packing with 8 SMs of an H200, its slowest row in kernels/tuned; 25 us a chunk are
#: assumed. 8 chunks fill the default arena: a source may have 4 of them at a time, and one that dies leaves 4.
RDMA = Costs(
    descriptor_us=1.0,
    wire_rate=50e3,
    gather_rate=160e3,
    scatter_rate=160e3,
    chunk_us=25.0,
    chunk_bytes=8 << 20,
)

#: Between processes of one host through UCX's cma: one system call a descriptor (7 to 10 us where the machine is busy,
#: 1.5 us where it is not), copies on the same cores. Packed chunks stay in the last-level cache; chunks from pool to
#: pool bypass it: 176 MB in chunks of 8 MiB took twice as long as in one, in chunks of 64 MiB a tenth longer.
HOST = Costs(
    descriptor_us=7.0,
    wire_rate=4e3,
    gather_rate=4e3,
    scatter_rate=4e3,
    chunk_us=100.0,
    chunk_bytes=8 << 20,
    posting=Posting.INLINE,
    pool_chunk_bytes=256 << 20,
)
