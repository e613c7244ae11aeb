"""Compiled kernels are kept in a folder by what they were compiled from: one process compiles for all.

The folder lies in Triton's own cache, `TRITON_CACHE_DIR` or `~/.triton/cache`, and is trusted as that is.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import triton

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Code:
    """The machine code of one kernel, in blocks of `threads` with `shared_bytes` of dynamic shared memory."""

    cubin: bytes
    name: str
    threads: int
    shared_bytes: int


def folder() -> Path:
    """Returns the folder of all kept code."""
    return Path(triton.knobs.cache.dir) / "kvmover"


def find(name: str) -> Code | None:
    """Returns the code kept under a name; None if there is none, or if its bytes are not those that were kept."""
    try:
        header, _, cubin = (folder() / name).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if header[:64].decode(errors="replace") != sha256(header[64:] + cubin).hexdigest():
        log.warning("%s is damaged: its kernel is compiled again", folder() / name)
        return None
    return Code(cubin, **json.loads(header[64:]))


def keep(name: str, code: Code) -> None:
    """Keep code under a name, all of it or nothing. Raises OSError if the folder cannot be written."""
    told = {"name": code.name, "threads": code.threads, "shared_bytes": code.shared_bytes}
    header = json.dumps(told).encode()
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    written = where / f".{name}.{os.getpid()}"
    written.write_bytes(sha256(header + code.cubin).hexdigest().encode() + header + b"\n" + code.cubin)
    written.replace(where / name)
