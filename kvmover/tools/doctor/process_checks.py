"""Each check of the doctor looks at one thing of this machine, and survives its absence.

A check changes no state: it imports, asks the system, or loads a library in a process of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kvmover.errors import how_to_install
from kvmover.observe.formats import bytes_in_words
from kvmover.transport import OLDEST_NIXL

#: Triton releases for which the tests compile the kernels.
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)

#: Free bytes of /dev/shm below which shared memory segments of NIXL and gloo run out first.
_SHARED_MEMORY_BYTES = 1 << 30

#: More than a pool's size: a limit above it counts as unlimited.
_PINNED_BYTES = 64 << 30

_RDMA = Path("/sys/class/infiniband")
_ANSWER_S = 20


class Status(StrEnum):
    """MISSING: absent, and its uses are closed. PROBLEM: present, and does not work as it should."""

    OK = "ok"
    MISSING = "missing"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check. `remedy` is empty if no action is needed."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def python() -> Iterator[Finding]:
    """Report Python's version, against the oldest supported."""
    enough = sys.version_info[:2] >= OLDEST_PYTHON
    remedy = "" if enough else f"install Python {_dotted(OLDEST_PYTHON)} or newer"
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    yield Finding("python", _ok(enough), detail, remedy)


def pytorch() -> Iterator[Finding]:
    """Report torch. It is imported, which is where a broken install shows."""
    if not find_spec("torch"):
        yield Finding("torch", Status.MISSING, "not installed", f"needed to move bytes; {how_to_install('torch')}")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = import_module("torch")
    built = f"CUDA {module.version.cuda}" if module.version.cuda else "no CUDA in this build"
    detail = f"{module.__version__}, {built}"
    if _older(module.__version__, OLDEST_TORCH):
        yield Finding("torch", Status.PROBLEM, detail, f"install torch {_dotted(OLDEST_TORCH)} or newer")
    elif _gpus() and not module.cuda.is_available():
        yield Finding("torch", Status.PROBLEM, f"{detail}: it does not see the GPU", "install a CUDA build of torch")
    else:
        yield Finding("torch", Status.OK, detail)


def triton() -> Iterator[Finding]:
    """Report Triton's version, against the tested ones. Not imported."""
    found = _version("triton")
    oldest, newest = _dotted(OLDEST_TRITON), _dotted(NEWEST_TRITON)
    if found is None:
        yield Finding("triton", Status.MISSING, "not installed", f"needed on a GPU; {how_to_install('torch')}")
    elif _older(found, OLDEST_TRITON):
        yield Finding("triton", Status.PROBLEM, f"{found} is too old", f"install triton {oldest} or newer")
    elif _older(found, (NEWEST_TRITON[0], NEWEST_TRITON[1] + 1)):
        yield Finding("triton", Status.OK, f"{found}; {oldest} to {newest} are tested")
    else:
        yield Finding("triton", Status.OK, f"{found}, newer than {newest}, the newest tested")


def c_core() -> Iterator[Finding]:
    """Report if the C core is built and used. Not imported: a core that fails to load says so in use."""
    what = "prefix tree, moves and digests on the CPU, digests of stored pages"
    if not find_spec("kvmover._core"):
        remedy = "install kvmover again where there is a C compiler: moves on the CPU take twice as long without"
        yield Finding("c core", Status.MISSING, f"Python: there was no C compiler; {what}", remedy)
    elif os.environ.get("KVMOVER_CORE") == "python":
        yield Finding("c core", Status.MISSING, f"Python: KVMOVER_CORE=python; {what}", "unset KVMOVER_CORE")
    else:
        yield Finding("c core", Status.OK, f"C: {what}")


def gpus() -> Iterator[Finding]:
    """Report name, memory, compute capability and driver of each GPU, from nvidia-smi."""
    names = _gpus()
    if names:
        yield Finding("gpu", Status.OK, "; ".join(names))
    elif Path("/dev/nvidia0").exists():
        yield Finding("gpu", Status.PROBLEM, "/dev/nvidia0 is there but nvidia-smi does not answer", "check the driver")
    else:
        yield Finding("gpu", Status.MISSING, "no NVIDIA GPU; everything runs on the CPU")


def cupy() -> Iterator[Finding]:
    """Report CuPy, which compiles the kernel of two experimental copy engines. Imported only if installed."""
    if not find_spec("cupy"):
        remedy = f"{how_to_install('cuda13')}; cuda12 for CUDA 12" if _gpus() else ""
        yield Finding(
            "cupy", Status.MISSING, "not installed; the experimental engines ring and tensor_ring need it", remedy
        )
        return
    yield Finding("cupy", Status.OK, str(import_module("cupy").__version__))


def nixl() -> Iterator[Finding]:
    """Report the installed wheels of NIXL, and each of their plugins."""
    wheels = [(wheel, found) for wheel in NIXL_WHEELS if (found := _version(wheel))]
    if not wheels:
        yield Finding("nixl", Status.MISSING, "not installed", f"needed between processes; {how_to_install('nixl')}")
    for wheel, found in wheels:
        old = _older(found, OLDEST_NIXL)
        remedy = f"install {wheel} {_dotted(OLDEST_NIXL)} or newer" if old else ""
        yield Finding(wheel, _ok(not old), found, remedy)
        for plugin in plugins_of(wheel):
            yield _plugin(wheel, plugin)


def _plugin(wheel: str, plugin: Plugin) -> Finding:
    name = f"{wheel} {plugin.name}"
    if plugin.loads:
        return Finding(name, Status.OK, f"loads; {plugin.purpose}")
    detail = f"misses {', '.join(plugin.missing)}" if plugin.missing else plugin.error
    status = Status.PROBLEM if plugin.name == "UCX" else Status.MISSING
    return Finding(name, status, f"does not load: {detail}; {plugin.purpose}", plugin.remedy)


def rdma() -> Iterator[Finding]:
    """Report the host's RDMA devices."""
    names = sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else []
    if names:
        yield Finding("ucx rdma", Status.OK, ", ".join(names))
    else:
        yield Finding("ucx rdma", Status.MISSING, "no RDMA device; between machines NIXL goes over TCP")


def cma() -> Iterator[Finding]:
    """Report if the system allows direct writes between the memories of two processes (CMA)."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) >= 2 and os.geteuid() != 0:
        remedy = "set kernel.yama.ptrace_scope to 1; until then UCX copies through shared memory"
        yield Finding("ucx cma", Status.PROBLEM, f"ptrace_scope is {scope.read_text().strip()}", remedy)
    else:
        yield Finding("ucx cma", Status.OK, "between processes of this host")


def cuda_ipc() -> Iterator[Finding]:
    """Report CUDA in UCX, which silently omits it without modules, permission or driver."""
    if not _gpus():
        return
    chosen = os.environ.get("UCX_TLS", "all")
    without = [wheel for wheel in NIXL_WHEELS if _version(wheel) and ucx_module(wheel, "uct_cuda") is False]
    if without:
        remedy = "install NIXL's own wheel, nixl-cu13 or nixl-cu12, or build UCX --with-cuda"
        yield Finding("ucx cuda", Status.PROBLEM, f"UCX of {', '.join(without)} has no CUDA module", remedy)
    elif not chosen.startswith("^") and not {"all", "cuda", "cuda_copy"} & set(chosen.split(",")):
        yield Finding("ucx cuda", Status.PROBLEM, f"UCX_TLS={chosen} leaves CUDA out", "add cuda to UCX_TLS")
    elif missing := [name for name in ("libcuda.so.1", "libnvidia-ml.so.1") if not _loads(name)]:
        remedy = "put the NVIDIA driver's libraries where the loader finds them"
        yield Finding("ucx cuda", Status.PROBLEM, f"misses {', '.join(missing)}", remedy)
    else:
        yield Finding("ucx cuda", Status.OK, "between GPUs of this host")


def settings() -> Iterator[Finding]:
    """Report the environment's UCX and NIXL variables."""
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_")))
    yield Finding("ucx settings", Status.OK, " ".join(chosen) or "none in the environment")


def page_lock() -> Iterator[Finding]:
    """Report the limit on pinned memory, which RDMA and CUDA need. Some users are exempt, so locking is tried."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "unlimited" if limit == resource.RLIM_INFINITY else f"limit {bytes_in_words(limit)}"
    if limit == resource.RLIM_INFINITY or limit >= _PINNED_BYTES:
        yield Finding("page lock", Status.OK, words)
    elif _locks(limit + mmap.PAGESIZE):
        yield Finding("page lock", Status.OK, f"{words}, which does not bind this user")
    else:
        status = Status.PROBLEM if _RDMA.is_dir() else Status.MISSING
        yield Finding(
            "page lock", status, f"{words}; RDMA registers no more than that", "raise it: ulimit -l unlimited"
        )


def shared_memory() -> Iterator[Finding]:
    """Report free bytes in /dev/shm, against 1 GiB."""
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding("shared memory", Status.MISSING, "no /dev/shm", "mount a tmpfs there")
        return
    free = shutil.disk_usage(path).free
    enough = free >= _SHARED_MEMORY_BYTES
    remedy = "" if enough else "give the container more, for example with --shm-size=1g"
    yield Finding("shared memory", _ok(enough), f"{bytes_in_words(free)} free in {path}", remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    pytorch,
    triton,
    c_core,
    gpus,
    cupy,
    nixl,
    rdma,
    cma,
    cuda_ipc,
    settings,
    page_lock,
    shared_memory,
)


def _ok(fine: object) -> Status:
    return Status.OK if fine else Status.PROBLEM


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _older(found: str, oldest: tuple[int, ...]) -> bool:
    """True if `3.6.0+git` is older than (3, 6)."""
    parts = found.split("+")[0].split(".")[: len(oldest)]
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
    return numbers < oldest


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _locks(nbytes: int) -> bool:
    """True if `nbytes` can be locked into memory; unmapping unlocks them."""
    with mmap.mmap(-1, nbytes) as memory:
        address = ctypes.addressof(held := ctypes.c_char.from_buffer(memory))
        locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
        del held
    return locked


def _gpus() -> list[str]:
    """Returns name, memory, compute capability and driver of each GPU; empty without a working nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    query = [tool, "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


#: Distributions that carry plugins, and the package that each installs.
NIXL_WHEELS = {"nixl-cu13": "nixl_cu13", "nixl-cu12": "nixl_cu12"}

_PURPOSES = {
    "AZURE_BLOB": "Azure objects",
    "GDS": "files to GPU memory",
    "GDS_MT": "files to GPU memory, many threads",
    "GPUNETIO": "RDMA posted by the GPU",
    "GUSLI": "block devices",
    "INFINIA": "DDN Infinia objects",
    "LIBFABRIC": "EFA and other fabrics",
    "OBJ": "S3 objects",
    "POSIX": "files",
    "UCX": "memory to memory",
}

#: The product that brings a library, by the start of its name.
_OWNERS = {
    "libcuda.so": "the NVIDIA driver",
    "libcudart": "the CUDA runtime",
    "libcufile": "cuFile (GPUDirect Storage) of the CUDA toolkit",
    "libcuobjclient": "cuObject of the CUDA toolkit",
    "libdoca": "NVIDIA DOCA",
    "libfabric": "libfabric",
    "libhwloc": "hwloc",
    "libred_": "the DDN Infinia client",
}

_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_LOAD_S = 30


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin of a wheel. `missing`: libraries that the loader does not find; `error`: the loader's last message."""

    name: str
    loads: bool
    missing: tuple[str, ...] = ()
    error: str = ""

    @property
    def purpose(self) -> str:
        """Returns NIXL's use of the plugin, in a few words."""
        return _PURPOSES.get(self.name, "unknown to kvmover")

    @property
    def remedy(self) -> str:
        """Returns the source of the missing libraries, as far as known, or an empty text."""
        if folders := sorted({str(folder) for name in self.missing for folder in _wheels_with(name)}):
            return f"add {':'.join(folders)} to LD_LIBRARY_PATH: a wheel has brought it where no loader looks"
        owners = {owner for name in self.missing for start, owner in _OWNERS.items() if name.startswith(start)}
        return f"comes with {', '.join(sorted(owners))}" if owners else ""


def _wheels_with(library: str) -> Iterator[Path]:
    """Returns folders of NVIDIA's wheels that have a library: nvidia/cufile/lib, nvidia/cu13/lib."""
    for site in filter(None, sys.path):
        yield from (path.parent for path in Path(site).glob(f"nvidia/*/lib/{library}"))


def plugins_of(wheel: str) -> Iterator[Plugin]:
    """Examine every plugin of an installed wheel, by name."""
    folder = plugin_folder(wheel)
    for path in sorted(folder.glob("libplugin_*.so")) if folder else ():
        yield examine(path)


def plugin_folder(wheel: str) -> Path | None:
    """Find the wheel's plugin folder without importing it. NIXL_PLUGIN_DIR comes first, as in NIXL."""
    if chosen := os.environ.get("NIXL_PLUGIN_DIR"):
        return Path(chosen)
    package = NIXL_WHEELS[wheel]
    spec = find_spec(package)
    if not spec or not spec.origin:
        return None
    site = Path(spec.origin).parent.parent
    folders = (site / f".{package}.mesonpy.libs" / "plugins", site / f"{package}.libs" / "nixl")
    return next((folder for folder in folders if folder.is_dir()), None)


def ucx_module(wheel: str, module: str) -> bool | None:
    """True if the wheel's UCX has a module, such as `uct_cuda`; None if NIXL uses a UCX from elsewhere."""
    folder = plugin_folder(wheel)
    modules = folder.parent.parent / f"{NIXL_WHEELS[wheel]}.libs" / "ucx" if folder else None
    if modules is None or not modules.is_dir():
        return None
    return any(modules.glob(f"lib{module}.so*"))


def examine(path: Path) -> Plugin:
    """Load a plugin in a process of its own, which may crash, and on failure list the missing libraries."""
    name = path.stem.removeprefix("libplugin_")
    try:
        trial = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LOAD, str(path)], capture_output=True, text=True, timeout=_LOAD_S
        )
    except subprocess.TimeoutExpired:
        return Plugin(name, False, error=f"no answer in {_LOAD_S} s")
    if trial.returncode == 0:
        return Plugin(name, True)
    words = trial.stderr.strip().splitlines()
    error = words[-1].removeprefix("OSError: ") if words else f"killed by signal {-trial.returncode}"
    return Plugin(name, False, _not_found(path) or _named(error), error)


def _not_found(path: Path) -> tuple[str, ...]:
    """Returns all libraries the loader misses, by ldd: a failed load names only the first. Empty without ldd."""
    tool = shutil.which("ldd")
    if not tool:
        return ()
    answer = subprocess.run([tool, str(path)], capture_output=True, text=True, timeout=_LOAD_S)
    return tuple(line.split()[0] for line in answer.stdout.splitlines() if line.endswith("not found"))


def _named(error: str) -> tuple[str, ...]:
    found = re.match(r"(\S+\.so[.\d]*): cannot open shared object file", error)
    return (found[1],) if found else ()
