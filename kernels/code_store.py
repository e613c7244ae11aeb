"""Compiled kernels are kept in a folder by what they were compiled from: one process compiles for all.

The folder lies in Triton's own cache, `TRITON_CACHE_DIR` or `~/.triton/cache`, and is trusted as that is. A wheel
brings a folder of its own, in the package, with the code that movers start with: by whatever Triton that was compiled.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import triton

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent

#: The folder of a wheel's code. An editable install has none.
SHIPPED = _HERE / "shipped"


@dataclass(frozen=True, slots=True)
class Code:
    """The machine code of one kernel, in blocks of `threads` with `shared_bytes` of dynamic shared memory.

    `compiler`: the compiler's name and version.
    """

    cubin: bytes
    name: str
    threads: int
    shared_bytes: int
    compiler: str = f"Triton {triton.__version__}"


def folder() -> Path:
    """Returns the folder of all code that was compiled on this machine."""
    return Path(triton.knobs.cache.dir) / "kvmover"


@cache
def source() -> str:
    """Returns a hash of all device code, and of the modules whose constants it names: the files of this package."""
    told = sha256()
    for path in sorted(_HERE.glob("*.py")):
        told.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return told.hexdigest()


def find(name: str) -> Code | None:
    """Returns the code kept under a name, on this machine or by the package; None if there is none, or if its bytes are
    not those that were kept.
    """
    for where in (folder(), SHIPPED):
        try:
            header, _, cubin = (where / name).read_bytes().partition(b"\n")
        except FileNotFoundError:
            continue
        if header[:64].decode(errors="replace") == sha256(header[64:] + cubin).hexdigest():
            return Code(cubin, **json.loads(header[64:]))
        log.warning("%s is damaged: its kernel is compiled again", where / name)
    return None


def keep(name: str, code: Code, where: Path) -> None:
    """Keep code under a name in a folder, all of it or nothing. Raises OSError if the folder cannot be written."""
    told = {
        "name": code.name,
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "compiler": code.compiler,
    }
    header = json.dumps(told).encode()
    where.mkdir(parents=True, exist_ok=True)
    written = where / f".{name}.{os.getpid()}"
    written.write_bytes(sha256(header + code.cubin).hexdigest().encode() + header + b"\n" + code.cubin)
    written.replace(where / name)
