"""Host memory for pools is allocated here: page-locked where there is a GPU, of one process or mapped by many.

A component that ranks of a node hold in common (an MLA latent, by all of TP) is kept once a node: the ranks map one
file in shared memory, and each copies its share of the pages.

With several NUMA nodes memory lies beside the GPU that it is copied to and from, by the kernel's data on the PCI
device. The policy is set for the allocating thread, so that it holds for page-locked memory too.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvmover.errors import TierError
from kvmover.fields import member
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.store import DIRECT_BYTES, replicas

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

_SYS = Path("/sys")
#: Syscall numbers of set_mempolicy, which the C library lacks.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1


def node_of(pci: str, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:17:00.0"; None on a single node or if unknown."""
    nodes = [path for path in (sys / "devices/system/node").glob("node[0-9]*") if path.is_dir()]
    place = sys / "bus/pci/devices" / pci.lower() / "numa_node"
    if len(nodes) < 2 or not place.exists():
        return None
    node = int(place.read_text())
    return node if (sys / f"devices/system/node/node{node}").is_dir() else None  # -1: the firmware does not say


def pci_of(device: torch.device) -> str | None:
    """Return a GPU's PCI address; None for host memory."""
    if device.type != "cuda":
        return None
    import torch

    about = cast(Any, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


@contextmanager
def preferring(node: int | None) -> Generator[str]:
    """Prefer `node`, while it has room, for memory that this thread touches first in here. Yields why not, or "".

    Else (EPERM, ENOSYS in a container) memory lies where the thread runs.
    """
    why = "" if node is None else _prefer(_PREFERRED, node)
    if why:
        log.warning("host memory cannot be placed on NUMA node %s: %s", node, why)
    try:
        yield why
    finally:
        if node is not None and not why:
            _prefer(_DEFAULT, None)


def _prefer(policy: int, node: int | None) -> str:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"unknown on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * 16)()  # 1024 nodes, the most kernels are built for
    if node is not None:
        words[node // 64] = 1 << node % 64
    mask = None if node is None else words
    status = libc.syscall(ctypes.c_long(number), ctypes.c_long(policy), mask, ctypes.c_ulong(1024 if mask else 0))
    return os.strerror(ctypes.get_errno()) if status else ""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of the copies of a pool: page `index` of each `count` pages in a batch.

    All `count` ranks map the file `path`, None for one rank. Raises TierError if these contradict.
    """

    index: int = 0
    count: int = 1
    path: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or (self.count > 1) != (self.path is not None):
            raise TierError(f"share {self.index} of {self.count} in {self.path}: one file where there are many")

    @classmethod
    def of(cls, component: Component, fleet: Fleet, rank: int, folder: Path) -> Share:
        """Return the share of `rank` in a fleet all on this node; `folder` holds the file, such as /dev/shm."""
        index, count = replicas(component, fleet, rank)
        if count == 1:
            return SOLE
        shard = fleet.shard(component, rank, fleet.page_tokens * fleet.cp)
        held = shard.layers.triple(), shard.heads.triple(), shard.positions.quad() if shard.positions else ()
        name = "-".join(str(number) for part in held for number in part)
        return cls(index, count, folder / f"{component.name}-{name}")

    def mine(self, place: int) -> bool:
        """Return True if this rank copies the page at `place` of a batch."""
        return place % self.count == self.index


SOLE = Share()


class Reach(Enum):
    """The processes that may map a host pool of one rank: its own, or also peers, which copy from it."""

    OWN = "own"
    PEERS = "peers"


def host_pool(spec: PoolSpec, share: Share = SOLE, near: torch.device | None = None, reach: Reach = Reach.OWN) -> Pool:
    """Return a zeroed host pool, page-locked if there is a GPU. Raises TierError if it cannot be had.

    A private pool lies on the NUMA node of the GPU `near`. A shared file stays until `unlink`, its memory until no
    process maps it.
    """
    import torch

    reach = member(Reach, reach, "reach", TierError)
    size = spec.allocation_bytes
    pinned = torch.cuda.is_available()
    if share.path is not None:
        whole = _mapped(share.path, size * spec.allocations)
        _lock(whole, pinned, str(share.path))
        return Pool(spec, tuple(whole[i * size : (i + 1) * size] for i in range(spec.allocations)))
    pci = pci_of(near) if near is not None else None
    with preferring(node_of(pci) if pci else None):
        if reach is Reach.OWN:
            return Pool(spec, tuple(_zeros(size, pinned) for _ in range(spec.allocations)))
        pool = Pool.shared(spec)
        for tensor in pool.tensors:
            _lock(tensor.zero_(), pinned, "shared memory")  # the first touch places it on the preferred node
        return pool


def _lock(memory: torch.Tensor, pinned: bool, name: str) -> None:
    import torch

    if not pinned:
        return
    runtime = cast(Any, torch.cuda.cudart())  # pyright: ignore[reportUnknownMemberType]
    status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        raise TierError(f"{name} of {memory.numel()} bytes cannot be page-locked: CUDA error {status}")


def unlink(share: Share) -> None:
    """Remove a shared file's name, once every rank has mapped it."""
    if share.path is not None:
        share.path.unlink(missing_ok=True)


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    import torch

    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, nbytes)  # every rank sets the same size; new bytes are zero
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError(f"cannot share {nbytes} bytes in {path}: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _zeros(nbytes: int, pinned: bool) -> torch.Tensor:
    """Return zeroed memory aligned for O_DIRECT; torch would round page-locked slack up to a power of two."""
    import torch

    if pinned:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    whole = torch.zeros(nbytes + DIRECT_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % DIRECT_BYTES
    return whole[first : first + nbytes]
