"""Stand-ins for calls of the CUDA driver, compiled from NVIDIA's own declarations in the headers that Triton brings."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from compilers import OLDEST_PATH

INCLUDE = "backends/nvidia/include"

#: Of the newest supported Triton's CUDA, and of the oldest's.
HEADERS = {"newest": Path(triton.__file__).parent / INCLUDE, "oldest": OLDEST_PATH / "triton" / INCLUDE}


def fake_driver(source: str, header: str, folder: Path) -> ctypes.CDLL:
    """The stand-in of this file, by a header of `HEADERS`."""
    compiler, include = shutil.which("cc"), HEADERS[header]
    if compiler is None or not (include / "cuda.h").exists():
        pytest.skip(f"no compiler, or no {include}/cuda.h")
    library = folder / "libfake.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-I", include, Path(__file__).parent / source]
    subprocess.run([*map(str, command), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
