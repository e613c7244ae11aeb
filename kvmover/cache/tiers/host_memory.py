"""Host memory for pools comes from here: pinned where there is a GPU, of one process or mapped by many.

A component that ranks of a node hold in common (an MLA latent, by every rank of TP) is kept once a node: the ranks map
one file in shared memory, and each copies its share of the pages into and out of it.

On a machine of several NUMA nodes it lies beside the GPU that it is copied to and from. The choice is pure, from what
the kernel says of the PCI device. It is applied as the policy of the thread that allocates, so that page-locked memory,
which the driver allocates, goes there too.
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
#: Numbers of set_mempolicy: no C library has it.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1


def node_of(pci: str, sys: Path = _SYS) -> int | None:
    """The node to prefer for a PCI device such as "0000:17:00.0"; None where there is one node, or none is known."""
    nodes = [path for path in (sys / "devices/system/node").glob("node[0-9]*") if path.is_dir()]
    place = sys / "bus/pci/devices" / pci.lower() / "numa_node"
    if len(nodes) < 2 or not place.exists():
        return None
    node = int(place.read_text())
    return node if (sys / f"devices/system/node/node{node}").is_dir() else None  # -1: the firmware does not say


def pci_of(device: torch.device) -> str | None:
    """Of a GPU; None for memory of the host."""
    if device.type != "cuda":
        return None
    import torch

    about = cast(Any, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


@contextmanager
def preferring(node: int | None) -> Generator[str]:
    """Memory that this thread touches first in here comes from `node` as long as that has any. Yields why not, or "".

    A container may forbid it (EPERM, ENOSYS): the kernel then places memory where the thread runs.
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
    words = (ctypes.c_ulong * 16)()  # 1024 nodes, what kernels are built for
    if node is not None:
        words[node // 64] = 1 << node % 64
    mask = None if node is None else words
    status = libc.syscall(ctypes.c_long(number), ctypes.c_long(policy), mask, ctypes.c_ulong(1024 if mask else 0))
    return os.strerror(ctypes.get_errno()) if status else ""


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank copies of a pool that `count` ranks share: page number `index` of each `count` pages in a batch.

    The pool is the file `path` that all of them map; None where `count` is 1.
    """

    index: int = 0
    count: int = 1
    path: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or (self.count > 1) != (self.path is not None):
            raise TierError(f"share {self.index} of {self.count} in {self.path}: one file where there are many")

    @classmethod
    def of(cls, component: Component, fleet: Fleet, rank: int, folder: Path) -> Share:
        """Of a fleet whose ranks are all on this node, in a file under `folder`, /dev/shm for one.

        MLA on TP8: shares 0 to 7 of one pool, where private pools would take eight times the memory.
        """
        index, count = replicas(component, fleet, rank)
        if count == 1:
            return SOLE
        shard = fleet.shard(component, rank, fleet.page_tokens * fleet.cp)
        held = shard.layers.triple(), shard.heads.triple(), shard.positions.quad() if shard.positions else ()
        name = "-".join(str(number) for part in held for number in part)
        return cls(index, count, folder / f"{component.name}-{name}")

    def mine(self, place: int) -> bool:
        """Whether this rank copies the page at `place` of a batch: each is one rank's."""
        return place % self.count == self.index


SOLE = Share()


class Reach(Enum):
    """Who may map a pool on the host that no other rank shares: nobody else, or peers, which then copy from it."""

    OWN = "own"
    PEERS = "peers"


def host_pool(spec: PoolSpec, share: Share = SOLE, near: torch.device | None = None, reach: Reach = Reach.OWN) -> Pool:
    """A pool on the host, zeroed; page-locked where a GPU can read it. Raises TierError where it cannot be had.

    It lies on the NUMA node of the GPU `near`, if there are several; what many processes share lies where the one that
    first writes a page of it runs. A shared file stays until `unlink`; the memory until the last process that maps it
    is gone.
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
            _lock(tensor.zero_(), pinned, "shared memory")  # what is touched here lies here
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
    """Take the name of a shared file away, once every rank has mapped it: nothing is left if they all die."""
    if share.path is not None:
        share.path.unlink(missing_ok=True)


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    import torch

    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, nbytes)  # the same for all who come; what is new is zero
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError(f"cannot share {nbytes} bytes in {path}: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _zeros(nbytes: int, pinned: bool) -> torch.Tensor:
    """Memory that begins where O_DIRECT may write to it: torch alone aligns to 64 bytes, the driver to pages.

    Page-locked memory is not asked for in excess: torch rounds that up to a power of two.
    """
    import torch

    if pinned:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    whole = torch.zeros(nbytes + DIRECT_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % DIRECT_BYTES
    return whole[first : first + nbytes]
