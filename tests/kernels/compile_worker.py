"""Compiles the row mover without a GPU, and prints what the machine code does as JSON. Run by test_compiled.py.

    compile_worker.py ARCHITECTURE...

The Triton is the one that comes first on PYTHONPATH. Row shapes come from regions, by the same rule as a launch's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmover.kernels import rows
from kvmover.kernels.config import RowConfig
from kvmover.kernels.region import Region, Side

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ALIGNED_ROWS = (256, 512, 1024, 2048, 1152, 656)
CONFIG = RowConfig()


def region(row_bytes: int, tokens: int, misaligned: int = 0) -> Region:
    """9 units of `tokens` tokens of one head, out of a pool that starts `misaligned` bytes past a multiple of 16."""
    nbytes = 9 * tokens * row_bytes
    sides: list[Side] = []
    for first in (misaligned, 0):
        memory = torch.zeros(nbytes + first, dtype=torch.uint8)[first:]
        zero, units = np.zeros(1, np.int64), np.arange(9) * tokens * row_bytes
        sides.append(Side((memory,), zero, zero, units, nbytes, row_bytes))
    return Region(*sides, 1, tokens, row_bytes)


def cases() -> dict[str, list[Region]]:
    """Launches by name: rows of 16-byte words in one-unit and span tiles, two shapes at once, and narrower words."""
    full = {row: CONFIG.block_bytes // row for row in ALIGNED_ROWS}
    found = {f"aligned-{row}B": [region(row, tokens)] for row, tokens in full.items()}
    found |= {f"aligned-{row}B-span": [region(row, 1)] for row in ALIGNED_ROWS}
    found["aligned-256B-and-656B-span"] = [region(256, full[256]), region(656, 1)]
    for word in (8, 4, 2, 1):
        found[f"word{word}-256B"] = [region(256, full[256], misaligned=word)]
        found[f"word{word}-256B-span"] = [region(256, 1, misaligned=word)]
    return found


def compiled(regions: list[Region], architecture: int) -> bytes:
    """The cubin of the launch of `regions`. One region is compiled in, as a launch specialises on 1."""
    launch = rows.describe(regions, CONFIG.block_bytes)
    constants = {"SHAPES": tuple(shape.constexpr for shape in launch.shapes), "BLOCK": CONFIG.block_bytes}
    if launch.regions == 1:
        constants["regions"] = 1
    signature = {"table": "*i64", "regions": "i32", "tiles": "i32", "SHAPES": "constexpr", "BLOCK": "constexpr"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(rows.move_kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    options = {"num_warps": CONFIG.warps}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["cubin"]


def report(cubin: bytes) -> dict[str, object]:
    """What the machine code of the one kernel in `cubin` says: accesses by opcode, registers and memory."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))
    return {**used, "opcodes": opcodes}


def main() -> None:
    results = {
        f"sm_{architecture}-{name}": report(compiled(regions, architecture))
        for architecture in map(int, sys.argv[1:])
        for name, regions in cases().items()
    }
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
