"""Staging is an arena with its memory, allocated on a GPU by the driver instead of torch, whose segments may expand.

Expandable segments have no handle that other processes can open: UCX then copies instead of mapping, 200 times slower
in a report (TensorRT-LLM#17241). Memory of the NVLink fabric has a handle even for other hosts: with such arenas packed
chunks cross hosts over NVLink, for any kind of pool (vllm#51377).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvmover.regions import BoundMemory
from kvmover.transfer.config import Exports
from kvmover.transfer.memory.arena import Arena
from kvmover.transport.base import Memory, memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Staging:
    """An arena with its memory, which lives as long as `tensor` itself: on a GPU a view does not keep it alive."""

    tensor: torch.Tensor
    memory: Memory
    arena: Arena
    bound: BoundMemory = field(init=False)

    def __post_init__(self) -> None:
        self.bound = BoundMemory((self.tensor,))

    @classmethod
    def of(cls, nbytes: int, slab_bytes: int, device: torch.device, exports: Exports) -> Staging:
        """Allocate memory for an arena of slabs. Raises RuntimeError if the device is out of memory."""
        import torch

        on_host = device.type == "cpu"
        tensor = torch.empty(nbytes, dtype=torch.uint8) if on_host else of_driver(nbytes, device, exports)
        return cls(tensor, memory_of(tensor), Arena(nbytes, slab_bytes))

    def emptied(self) -> Staging:
        """Returns the same memory without reservations, for an owner whose operations have ended."""
        return Staging(self.tensor, self.memory, Arena(self.arena.nbytes, self.arena.slab_bytes))

    def slab(self, number: int) -> Memory:
        """Returns the memory of one slab, as registered."""
        nbytes = self.arena.slab_bytes
        return replace(self.memory, address=self.memory.address + number * nbytes, nbytes=nbytes)


def of_driver(nbytes: int, device: torch.device, exports: Exports) -> torch.Tensor:
    """Returns a uint8 tensor [nbytes] on a GPU, in NVLink fabric memory if it is configured and available, else a plain
    allocation.
    """
    from kvmover.kernels import cuda_virtual
    from kvmover.kernels.cuda_driver import CudaError
    from kvmover.kernels.device_tensor import DeviceMemory

    if exports is not Exports.NONE and cuda_virtual.supports(cuda_virtual.FABRIC_SUPPORTED, device):
        try:
            found = DeviceMemory.of(device, nbytes, lambda: cuda_virtual.made(nbytes, device))
        except CudaError as error:  # this host is not set up for it: continue as without it
            log.warning("arenas on %s are not of the NVLink fabric: %s; other hosts reach them by NIC", device, error)
        else:
            return found.tensor(0, nbytes)
    return DeviceMemory.of(device, nbytes, lambda: cuda_virtual.plain(nbytes)).tensor(0, nbytes)
