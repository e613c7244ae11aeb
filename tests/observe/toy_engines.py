"""Two engines of a toy model that move real KV in this process, for those who watch movers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.transfer import Model, Mover, MoverConfig, Place, Transfer
from kvmover.transfer.result import Ending
from kvmover.transport import LoopbackNetwork, LoopbackTransport


@dataclass
class Engines:
    """A prefill rank and a decode rank in this process, and what was told of their transfers."""

    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    endings: list[Ending] = field(default_factory=list[Ending])

    def __post_init__(self) -> None:
        self.src, self.dst = self._mover("prefill"), self._mover("decode")
        self.dst.connect(self.src.card)

    def _mover(self, name: str) -> Mover:
        component, fleet = Component("attention", 2, 2, 2, 8, "bfloat16"), Fleet(page_tokens=4)
        pool = Pool.zeros(PoolSpec.dense(component, fleet.shard(component, 0, 1), 16, 4, "NHD", ()))
        config = MoverConfig(arena_bytes=1 << 16, sandbox_bytes=0)
        wire = LoopbackTransport(self.network, name)
        mover = Mover(wire, Model("toy", (component,)), Place(name, fleet, 0), [pool], config)
        mover.watch(self.endings.append)
        return mover

    def both(self, request: str) -> list[Transfer]:
        pages = [np.arange(4)]
        return [self.src.send(request, pages), self.dst.receive(request, "prefill", range(16), pages)]

    def settle(self, transfers: list[Transfer]) -> None:
        for _ in range(200):
            if all(transfer.ended for transfer in transfers):
                return
            self.src.poll()
            self.dst.poll()
        raise AssertionError("the movers are stuck")

    def move(self, request: str) -> None:
        transfers = self.both(request)
        self.settle(transfers)
        assert all(transfer.landed().landed for transfer in transfers)

    def fail(self, request: str) -> None:
        transfers = self.both(request)
        self.dst.abort(transfers[1], "nobody wants it")
        self.settle(transfers)
