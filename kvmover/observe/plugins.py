"""NIXL's plugins are found here, and the libraries that keep some of them from loading.

NIXL leaves a plugin that does not load out of its list, without a reason. Here each is loaded as NIXL would.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

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

#: Who brings a library, by the start of its name.
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
    """One plugin of a wheel. `missing` are the libraries the loader does not find; `error` is its own last word."""

    name: str
    loads: bool
    missing: tuple[str, ...] = ()
    error: str = ""

    @property
    def purpose(self) -> str:
        """What NIXL uses it for, in a few words."""
        return _PURPOSES.get(self.name, "unknown to kvmover")

    @property
    def remedy(self) -> str:
        """Where the missing libraries come from, as far as known."""
        if folders := sorted({str(folder) for name in self.missing for folder in _wheels_with(name)}):
            return f"add {':'.join(folders)} to LD_LIBRARY_PATH: a wheel has brought it where no loader looks"
        owners = {owner for name in self.missing for start, owner in _OWNERS.items() if name.startswith(start)}
        return f"comes with {', '.join(sorted(owners))}" if owners else ""


def _wheels_with(library: str) -> Iterator[Path]:
    """Folders of NVIDIA's wheels that have a library: nvidia/cufile/lib, nvidia/cu13/lib."""
    for site in filter(None, sys.path):
        yield from (path.parent for path in Path(site).glob(f"nvidia/*/lib/{library}"))


def plugins_of(wheel: str) -> Iterator[Plugin]:
    """Every plugin of an installed wheel, by name."""
    folder = plugin_folder(wheel)
    for path in sorted(folder.glob("libplugin_*.so")) if folder else ():
        yield examine(path)


def plugin_folder(wheel: str) -> Path | None:
    """Where the wheel's plugins are, found without importing it. NIXL_PLUGIN_DIR comes first, as it does in NIXL."""
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
    """Whether the UCX in a wheel has a module, `uct_cuda` for one; None where NIXL is to use a UCX from elsewhere."""
    folder = plugin_folder(wheel)
    modules = folder.parent.parent / f"{NIXL_WHEELS[wheel]}.libs" / "ucx" if folder else None
    if modules is None or not modules.is_dir():
        return None
    return any(modules.glob(f"lib{module}.so*"))


def examine(path: Path) -> Plugin:
    """Load one plugin in a process of its own, which may die of it, and on failure list what it misses."""
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
    """All libraries that the loader misses, where there is an ldd: a failed load names only the first."""
    tool = shutil.which("ldd")
    if not tool:
        return ()
    answer = subprocess.run([tool, str(path)], capture_output=True, text=True, timeout=_LOAD_S)
    return tuple(line.split()[0] for line in answer.stdout.splitlines() if line.endswith("not found"))


def _named(error: str) -> tuple[str, ...]:
    found = re.match(r"(\S+\.so[.\d]*): cannot open shared object file", error)
    return (found[1],) if found else ()
