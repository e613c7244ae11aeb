"""Assembly: the parts of a mover around an engine's pools, with all memory that peers may reach registered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvmover.layout.pool import Pool
from kvmover.transfer.arena import Arena
from kvmover.transfer.copier import Copier
from kvmover.transfer.core import Core, Staging
from kvmover.transfer.flights import Flights
from kvmover.transfer.handshake import Place, Rank
from kvmover.transfer.lane import End
from kvmover.transfer.links import Links
from kvmover.transfer.memory import allocations
from kvmover.transfer.result import MoverConfig
from kvmover.transfer.seal import sealing
from kvmover.transport.base import Transport
from kvmover.transport.memory import memory_of, union

if TYPE_CHECKING:
    import torch


def assembled(
    transport: Transport, place: Place, pools: Sequence[Pool], config: MoverConfig, clock: Callable[[], float]
) -> Core:
    """Takes two arenas and the sandbox on the pools' device; whoever has the Core keeps them alive."""
    import torch

    device = pools[0].tensors[0].device
    outgoing, incoming = (_staging(config.arena_bytes, device) for _ in range(2))
    probed = torch.zeros(config.sandbox_bytes, dtype=torch.uint8, device=device)
    sandbox = memory_of(probed) if config.sandbox_bytes else None
    memories = tuple(allocations(pool) for pool in pools)
    ours = [outgoing.memory, incoming.memory, *([sandbox] if sandbox else [])]
    for memory in union((*(memory for pool in memories for memory in pool), *ours)):
        transport.register(memory)
    specs = tuple(pool.spec for pool in pools)
    card = Rank(
        place, specs, memories, incoming.memory, outgoing.memory, transport.metadata(), socket.gethostname(), sandbox
    )
    return Core(
        transport,
        config,
        End(place.fleet, place.rank, specs),
        card,
        tuple(pools),
        Copier(device, config.sms),
        outgoing,
        incoming,
        clock,
        Links(transport, type(transport).__name__, sandbox, Flights(transport)),
        probed,
        sealing(config.keys, transport.name),
    )


def _staging(nbytes: int, device: torch.device) -> Staging:
    import torch

    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return Staging(tensor, memory_of(tensor), Arena(nbytes))
