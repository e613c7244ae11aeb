"""The doctor checks the host below the process: PCIe between GPUs and NICs, storage, clocks, pages, configuration.

Files are read below `root`, so that another machine's copy can be examined.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvmover.errors import KvmoverError
from kvmover.tools.doctor.process_checks import Finding, Status
from kvmover.transport import NET_DEVICES, read_topology

_ROOT = Path("/")

#: Clocks read without a system call; `clock` below reports the cost of others.
_FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}

#: Return value of adjtimex(2) for a clock that no daemon keeps synchronized.
_TIME_ERROR = 5
#: More than a struct timex of any architecture.
_TIMEX_BYTES = 512

#: PCI Express Base Specification, 7.7.8: the ACS capability, and its bits that send requests and completions between
#: two devices up to the root complex.
_ACS, _ACS_CONTROL, _REDIRECTS = 0x000D, 6, 0b1100
_EXTENDED, _CONFIG_BYTES = 0x100, 4096
_BRIDGE = "0x0604"


def configuration() -> Iterator[Finding]:
    """Load the configuration file and variables as every process of this environment would."""
    from kvmover.config import load

    try:
        loaded = load()
        loaded.settings.check_here()
    except KvmoverError as error:
        yield Finding("configuration", Status.PROBLEM, str(error), "`kvmover config` prints what there is to set")
        return
    given = sorted(set(loaded.origins.values()))
    settings = f"{len(loaded.origins)} setting{'s' if len(loaded.origins) > 1 else ''}"
    detail = f"{settings} from {', '.join(given)}" if given else "defaults"
    sealed = "" if loaded.settings.security.shared_key_file else "; control messages are not sealed"
    dials = "" if loaded.settings.exchange.allow else "; requests may have any host dialled (exchange.allow)"
    yield Finding("configuration", Status.OK, detail + sealed + dials)


def storage_to_gpu(root: Path = _ROOT) -> Iterator[Finding]:
    """Report nvidia-fs, for GPUDirect Storage. NIXL's GDS plugins also need cuFile, which the NIXL checks look for."""
    if not _has_gpu(root):
        return
    version = root / "proc/driver/nvidia-fs/version"
    if version.exists():
        yield Finding("gds", Status.OK, f"nvidia-fs, {_text(version) or 'version unknown'}")
    else:
        remedy = "install GPUDirect Storage and modprobe nvidia-fs; a driver with PCI P2PDMA does without"
        yield Finding("gds", Status.MISSING, "no nvidia-fs; files reach the GPU through host memory", remedy)


def peer_memory(root: Path = _ROOT) -> Iterator[Finding]:
    """Report if NICs reach GPU memory: by a module of the driver, or by dma-buf of the open kernel modules."""
    if not (_has_gpu(root) and _has_nic(root)):
        return
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).is_dir()]
    opened = "Open Kernel Module" in _text(root / "proc/driver/nvidia/version")
    if modules or opened:
        yield Finding("gpu rdma", Status.OK, modules[0] if modules else "by dma-buf of the open kernel modules")
    else:
        remedy = "modprobe nvidia-peermem, or install the open kernel modules"
        yield Finding("gpu rdma", Status.PROBLEM, "NICs cannot reach GPU memory: neither peermem nor dma-buf", remedy)


def near_nics(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report the NICs nearest to each GPU, by which its rank sends, and a variable that gives all ranks fewer."""
    topology = read_topology(root)
    if not (topology.gpus and _has_nic(root)):
        return
    if not topology.ports:
        detail = "no port of a NIC is active and may be opened by this user"
        yield Finding("nic a gpu", Status.MISSING, detail, "give the container /dev/infiniband; ibstat shows the ports")
        return
    near = topology.near()
    shown = "; ".join(f"{gpu} {', '.join(ports)} ({way.name})" for gpu, (way, ports) in sorted(near.items()))
    given = environ.get(NET_DEVICES, "")
    wanted = {port for _, ports in near.values() for port in ports}
    allowed = {port for port in wanted if {port, port.partition(":")[0], "all"} & {*given.split(",")}}
    if 0 < len(allowed) < len(wanted):
        detail = f"{NET_DEVICES}={given} gives the ranks of all GPUs the same; by PCIe: {shown}"
        yield Finding(
            "nic a gpu", Status.PROBLEM, detail, f"unset {NET_DEVICES}: each rank then takes the NIC of its GPU"
        )
    else:
        chosen = f"{NET_DEVICES}={given} is taken instead of: " if given else ""
        yield Finding("nic a gpu", Status.OK, chosen + shown)


def nvlink(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report the memory that crosses hosts over NVLink: arenas with a fabric handle, which needs a channel of IMEX.

    Torch allocates engines' pools without such a handle; pools of expandable segments lack even one for this host.
    """
    if not _has_gpu(root):
        return
    if (root / "dev/nvidia-caps-imex-channels/channel0").exists():
        yield Finding("nvlink", Status.OK, 'across hosts: arenas yes, with mover.exports = "arenas"; pools no')
    else:
        remedy = "on NVL72 start nvidia-imex and make a channel; on other machines there is nothing to do"
        yield Finding("nvlink", Status.MISSING, "across hosts: neither arenas nor pools, no channel of IMEX", remedy)
    chosen = [environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    if any("expandable_segments:true" in each.lower().replace(" ", "") for each in chosen):
        detail = "torch's segments expand: pools have no handle that peers of this host could map"
        yield Finding("gpu pools", Status.PROBLEM, detail, "take expandable_segments out of PYTORCH_ALLOC_CONF")


def iommu(root: Path = _ROOT) -> Iterator[Finding]:
    """Report an IOMMU that translates: it sends traffic between GPU and NIC up to the root complex and back."""
    kinds = {_text(path) for path in (root / "sys/kernel/iommu_groups").glob("*/type")}
    translating = sorted(kind for kind in kinds if kind.startswith("DMA"))
    if not kinds:
        yield Finding("iommu", Status.OK, "off, or not visible here")
    elif not translating:
        yield Finding("iommu", Status.OK, f"passes addresses through ({', '.join(sorted(kinds))})")
    else:
        matters = _has_gpu(root) and _has_nic(root)
        detail = f"translates ({', '.join(translating)}): GPU and NIC do not reach each other directly"
        remedy = "boot with iommu=pt, or turn it off in the firmware where no virtual machine needs it"
        yield Finding("iommu", Status.PROBLEM if matters else Status.MISSING, detail, remedy if matters else "")


def acs(root: Path = _ROOT) -> Iterator[Finding]:
    """Report Access Control Services of PCIe bridges, which act as a translating IOMMU, bridge by bridge."""
    bridges = [
        path.parent for path in (root / "sys/bus/pci/devices").glob("*/class") if _text(path).startswith(_BRIDGE)
    ]
    if not (bridges and _has_gpu(root) and _has_nic(root)):
        return
    found = {bridge.name: redirects(_bytes(bridge / "config")) for bridge in bridges}
    redirecting = sorted(name for name, does in found.items() if does)
    hidden = sum(does is None for does in found.values())
    if redirecting:
        names = ", ".join(redirecting[:4]) + (", ..." if len(redirecting) > 4 else "")
        remedy = "turn ACS off in the firmware, or: setpci -s BRIDGE ECAP_ACS+6.w=0"
        detail = f"{len(redirecting)} of {len(bridges)} bridges send peer traffic to the root complex: {names}"
        yield Finding("pcie acs", Status.PROBLEM, detail, remedy)
    elif hidden:
        detail = f"{hidden} of {len(bridges)} bridges do not show their settings to this user"
        yield Finding("pcie acs", Status.MISSING, detail, "run kvmover doctor as root")
    else:
        yield Finding("pcie acs", Status.OK, f"off on {len(bridges)} bridges")


def redirects(config: bytes) -> bool | None:
    """True if a bridge redirects traffic between its devices; None without its whole 4096-byte config space."""
    if len(config) < _CONFIG_BYTES:
        return None
    at = _EXTENDED
    for _ in range((_CONFIG_BYTES - _EXTENDED) // 8):  # bounded, as a corrupt list may be circular
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[at + _ACS_CONTROL : at + _ACS_CONTROL + 2], "little")
            return bool(control & _REDIRECTS)
        at = header >> 20
        if at < _EXTENDED:
            break
    return False


def clock(root: Path = _ROOT) -> Iterator[Finding]:
    """Report the clock source: every chunk and every poll reads the time several times."""
    source = _text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("", *_FAST_CLOCKS):
        yield Finding("clock", Status.OK, source or "source unknown")
    else:
        remedy = "boot with clocksource=tsc where the CPU's counter is invariant"
        yield Finding("clock", Status.PROBLEM, f"{source}: each look at the time is a system call", remedy)


def clock_is_kept() -> Iterator[Finding]:
    """Report if a daemon keeps the clock right: only logs and spans of several hosts depend on it."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _TIME_ERROR:
        remedy = "run chronyd or ntpd; logs of several hosts do not line up"
        yield Finding("time", Status.MISSING, "the kernel says that nothing keeps its clock right", remedy)
    else:
        yield Finding("time", Status.OK, "kept right" if state >= 0 else "cannot be asked")


def huge_pages(root: Path = _ROOT) -> Iterator[Finding]:
    """Report transparent huge pages: host pools of many GB are registered, pinned and copied page by page."""
    chosen = _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    shared = _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if not chosen:
        yield Finding("huge pages", Status.OK, "unknown to this kernel")
        return
    detail = f"transparent: {chosen}; in shared memory: {shared or 'unknown'}"
    if chosen == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", Status.MISSING, f"{detail}; large pools are registered in pages of 4 KiB", remedy)
    else:
        yield Finding("huge pages", Status.OK, detail)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    storage_to_gpu,
    peer_memory,
    near_nics,
    nvlink,
    iommu,
    acs,
    clock,
    clock_is_kept,
    huge_pages,
    configuration,
)


def _has_gpu(root: Path) -> bool:
    return (root / "dev/nvidia0").exists()


def _has_nic(root: Path) -> bool:
    devices = root / "sys/class/infiniband"
    return devices.is_dir() and any(devices.iterdir())


def _chosen(words: str) -> str:
    """
    >>> _chosen("always [madvise] never")
    'madvise'
    """
    return next((word[1:-1] for word in words.split() if word.startswith("[")), "")


def _text(path: Path) -> str:
    """Returns the text of a file; empty if it is absent or unreadable."""
    return _bytes(path).decode("utf-8", "replace").strip()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
