"""Backing: vLLM's one allocation of cache, registered once, and the pools that lie in it, which may overlap.

Groups of layers own a block by turns, so their pools are the same bytes; NIXL is told of them one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmover.engines.vllm.caches import ComponentCache
from kvmover.layout import Pool
from kvmover.transport import NixlTransport
from kvmover.transport.base import Memory
from kvmover.transport.memory import memory_of

if TYPE_CHECKING:
    import torch


class BackedTransport(NixlTransport):
    """A transport that has `backing` registered, so that what lies in it needs no registration of its own."""

    def __init__(self, name_hint: str, backing: torch.Tensor) -> None:
        super().__init__(name_hint)
        self._backing = memory_of(backing)
        super().register(self._backing)

    def register(self, memory: Memory) -> None:
        """As Transport.register, but for what lies in the backing, which is registered."""
        if not lies_in(memory, self._backing):
            super().register(memory)


def lies_in(memory: Memory, whole: Memory) -> bool:
    """Whether all of `memory` is part of `whole`, on the same device."""
    inside = whole.address <= memory.address and memory.address + memory.nbytes <= whole.address + whole.nbytes
    return inside and (memory.kind, memory.device) == (whole.kind, whole.device)


def pools_of(caches: Sequence[ComponentCache], backing: torch.Tensor) -> list[Pool]:
    """A pool a component. The memory stays the engine's."""
    first = backing.data_ptr()
    pools: list[Pool] = []
    for cache in caches:
        nbytes = cache.spec.allocation_bytes
        pools.append(Pool(cache.spec, tuple(backing[start - first :][:nbytes] for start in cache.starts)))
    return pools
