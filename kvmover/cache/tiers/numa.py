"""Where host memory goes on a machine of several NUMA nodes: beside the GPU that it is copied to and from.

The choice is pure, from what the kernel says of the PCI device. It is applied as the policy of the thread that
allocates, so that page-locked memory, which the driver allocates, goes there too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
