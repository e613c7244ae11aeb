"""A rank's NICs are those nearest to its GPU in the machine's PCIe tree; UCX is kept from the NICs of other GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from threading import Lock

#: The variable by which UCX chooses network devices.
NET_DEVICES = "UCX_NET_DEVICES"

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_ADDRESS_BYTES = 32

_choosing = Lock()


class Distance(IntEnum):
    """The way between two PCIe devices, by the names of `nvidia-smi topo -m`.

    PIX: below one switch. PXB: over several switches. PHB: over a host bridge. NODE: between host bridges of a NUMA
    node. SYS: between NUMA nodes.
    """

    PIX = 0
    PXB = 1
    PHB = 2
    NODE = 3
    SYS = 4


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A GPU, or a port of a NIC.

    `name`: a GPU's address, `0000:1b:00.0`, or a port as UCX calls it, `mlx5_0:1`. `above`: the host bridge and the
    bridges below it that lead to the device. `numa`: its node, -1 if unknown.
    """

    name: str
    address: str
    above: tuple[str, ...]
    numa: int = -1

    def distance(self, other: PciDevice) -> tuple[Distance, int]:
        """Returns the distance, and the number of bridges on the way that are not above both."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.above, other.above, strict=False)))
        down = len(self.above) - shared, len(other.above) - shared
        if shared > 1:
            return Distance.PIX if max(down) <= 1 else Distance.PXB, sum(down)
        if shared:
            return Distance.PHB, 0
        return Distance.NODE if self.numa == other.numa else Distance.SYS, 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs of a machine, and the active ports of NICs that this process may open."""

    gpus: tuple[PciDevice, ...]
    ports: tuple[PciDevice, ...]

    def near(self) -> dict[str, tuple[Distance, tuple[str, ...]]]:
        """Returns each GPU's ports, with their distance: its nearest ones, or its share where GPUs have them in common.

        Eight GPUs with a port each below their switches have one each, four ports for eight GPUs two GPUs each, and
        eight ports for two GPUs four a GPU. GPUs that are near few ports come first, so that no port is idle.
        """
        nearest = {gpu: _nearest(gpu, self.ports) for gpu in self.gpus} if self.ports else {}
        used = dict.fromkeys(self.ports, 0)
        found: dict[str, tuple[Distance, tuple[str, ...]]] = {}
        for gpu in sorted(nearest, key=lambda each: (len(nearest[each][1]), each.address)):
            distance, ports = nearest[gpu]
            rivals = sum({*theirs} <= {*ports} for _, theirs in nearest.values())
            share = sorted(ports, key=lambda port: (used[port], port.address))[: max(1, len(ports) // rivals)]
            for port in share:
                used[port] += 1
            found[gpu.name] = distance, tuple(port.name for port in sorted(share, key=lambda port: port.address))
        return found


def _nearest(gpu: PciDevice, ports: Sequence[PciDevice]) -> tuple[Distance, tuple[PciDevice, ...]]:
    by_port = {port: gpu.distance(port) for port in ports}
    least = min(by_port.values())
    return least[0], tuple(port for port, distance in by_port.items() if distance == least)


def read_topology(root: Path = Path("/")) -> Topology:
    """Returns the topology of the machine whose /sys and /dev are below `root`."""
    gpus = [
        _device(path.name, path)
        for path in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAY)
    ]
    ports = [
        _device(f"{nic.name}:{port.name}", nic / "device")
        for nic in sorted((root / "sys/class/infiniband").glob("*"))
        if (nic / "device").exists() and _opens(nic, root)
        for port in sorted((nic / "ports").iterdir())
        if "ACTIVE" in _text(port / "state")
    ]
    # A NIC in software has no place in the tree.
    return Topology(tuple(gpus), tuple(port for port in ports if port.above))


def _device(name: str, path: Path) -> PciDevice:
    parts = path.resolve().parts
    tree = [part for part in parts if part.startswith("pci") or part.count(":") == 2]
    numa = _text(path / "numa_node")
    return PciDevice(name, parts[-1], tuple(tree[:-1]), int(numa) if numa else -1)


def _opens(nic: Path, root: Path) -> bool:
    """Returns True if this process may open the NIC: a container shows all in /sys, and its own in /dev."""
    verbs = (path.name for path in (nic / "device/infiniband_verbs").glob("uverbs*"))
    return any(os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in verbs)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def address_of_gpu(ordinal: int) -> str | None:
    """Returns the PCI address of a CUDA device of this process, or None if the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    text, device = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if driver.cuDeviceGetPCIBusId(text, _ADDRESS_BYTES, device):
        return None
    return text.value.decode().lower()


def nics_near(gpu: int) -> tuple[str, ...]:
    """Returns the ports that carry for a CUDA device of this process; () if UCX chooses among all.

    UCX chooses where UCX_NET_DEVICES is set, and where neither the driver nor /sys says enough.
    """
    if NET_DEVICES in os.environ:
        return ()
    return read_topology().near().get(address_of_gpu(gpu) or "", (Distance.SYS, ()))[1]


@contextmanager
def only(nics: Iterable[str]) -> Generator[None]:
    """Keep agents that are made in this context from all ports but `nics`; with none, UCX chooses.

    Networks without RDMA stay, for peers that have no other. The variable is set for that time alone: children of this
    process have NICs of their own.
    """
    kept = {*nics}
    others = [port.name for port in read_topology().ports if port.name not in kept] if kept else []
    with _choosing:
        if others:
            os.environ[NET_DEVICES] = "^" + ",".join(others)
        try:
            yield
        finally:
            if others:
                del os.environ[NET_DEVICES]
