"""What a caller sees of a transfer: its configuration, a handle while it runs, and a Result when it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.errors import LayoutError, TransferFailed
from kvmover.plan.cost import RDMA, Costs, Route
from kvmover.plan.legs import Replicas


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """How a mover behaves. Sizes in bytes, times in seconds.

    `arena_bytes` is taken twice, for what is sent and for what arrives. `route` None lets `costs` choose a route for
    each pair of ranks. `sms`: multiprocessors a copy may take (None: all); 8 of an H200 pack
    three times as fast as a 400 Gb/s wire carries.
    """

    arena_bytes: int = 64 << 20
    deadline_s: float = 30.0
    drain_s: float = 2.0
    ping_s: float = 0.5
    costs: Costs = RDMA
    route: Route | None = None
    replicas: Replicas = Replicas.STRIPE
    sms: int | None = 8

    def __post_init__(self) -> None:
        for name in ("arena_bytes", "deadline_s", "drain_s", "ping_s"):
            if getattr(self, name) <= 0:
                raise LayoutError(f"mover config has {name} = {getattr(self, name)}; it must be positive")


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended on this rank. `reason` is None when it landed, else what went wrong, the same on both sides.

    `held`: a one-sided operation may still touch the pages, so they must not be reused; nothing else is ever held.
    `runs` is what going direct costs, `writes` what was posted. `nbytes` is payload.
    """

    reason: str | None
    seconds: float
    nbytes: int = 0
    runs: int = 0
    writes: int = 0
    routes: tuple[Route, ...] = ()
    peers: int = 0
    held: bool = False

    @property
    def landed(self) -> bool:
        return self.reason is None


@dataclass(slots=True, eq=False)
class Transfer:
    """One request on one rank. Poll the mover and look at `result`."""

    request: str
    started: float
    result: Result | None = field(default=None)

    @property
    def ended(self) -> bool:
        return self.result is not None

    def landed(self) -> Result:
        """The result, once ended. Raises TransferFailed with the reason when it did not land."""
        if self.result is None:
            raise TransferFailed(f"{self.request} has not ended")
        if self.result.reason is not None:
            raise TransferFailed(f"{self.request}: {self.result.reason}")
        return self.result
