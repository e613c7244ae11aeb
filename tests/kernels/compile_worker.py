"""Compiles the row mover without a GPU, and prints what the machine code does as JSON. Run by test_compiled.py.

    compile_worker.py ARCHITECTURE all|few

The Triton is the one that comes first on PYTHONPATH. Row shapes come from regions, by the same rule as a launch's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import triton

from kvmover.kernels.launch import RowConfig, RowKind, choose
from kvmover.kernels.region import Region, Side
from kvmover.kernels.rows import RowShape, first_rows, recut, rest_rows, units_in_tile
from perf import machine_code

CPU = torch.device("cpu")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ALIGNED_ROWS = (256, 512, 1024, 2048, 1152, 656)
#: The two launches that are made where nothing was tuned: without and with a budget of SMs.
CONFIG, BUDGETED = (choose(RowKind(256, 256), sms, CPU) for sms in (None, 4))

#: Each kind of tile, word and config once.
FEW = {
    *("aligned-656B-gather", "aligned-256B-relayout-tokens", "aligned-1152B-relayout-units"),
    *("aligned-256B-scatter-units", "aligned-132B-contiguous", "aligned-256B-and-656B", "budgeted-2048B-gather"),
    *("budgeted-256B-whole-units-of-64", "budgeted-256B-rows-of-units-of-64"),
    *("budgeted-1152B-whole-units-of-16-together", "budgeted-1152B-rows-of-units-of-16-together"),
    *("word8-256B-gather", "word4-256B-relayout-units", "word2-256B-gather", "word1-256B-relayout-units"),
}


def region(
    row_bytes: int, tokens: int, misaligned: int = 0, apart: int = 2, scattered: tuple[bool, bool] = (True, False)
) -> Region:
    """7 units of `tokens` tokens, the source's `apart` rows apart and `misaligned` bytes off a multiple of 16.

    `scattered`: the sides whose units do not follow each other evenly. In a gather, the source.
    """
    sides: list[Side] = []
    for first, stride, anywhere in ((misaligned, apart * row_bytes, scattered[0]), (0, row_bytes, scattered[1])):
        memory = torch.zeros(7 * tokens * stride + first, dtype=torch.uint8)[first:]
        zero, units = np.zeros(1, np.int64), np.array([3, 0, 6, 1, 5, 4, 2] if anywhere else range(7))
        sides.append(Side.of((memory,), zero, zero, units * tokens * stride, 0, stride))
    return Region(*sides, 1, tokens, row_bytes)


def cases() -> dict[str, list[Region]]:
    """Launches by name: rows of 16-byte words and of narrower ones, in tiles of one unit, of several (`units`), and of
    several of one token each (`tokens`)."""
    full = {row: max(4, CONFIG.block_bytes // row) for row in ALIGNED_ROWS}
    both = (True, True)
    found = {f"aligned-{row}B-gather": [region(row, tokens)] for row, tokens in full.items()}
    found |= {f"aligned-{row}B-relayout-tokens": [region(row, 1, scattered=both)] for row in ALIGNED_ROWS}
    found |= {f"aligned-{row}B-relayout-units": [region(row, 3, scattered=both)] for row in (256, 1152, 656)}
    found["aligned-256B-scatter"] = [region(256, full[256], scattered=(False, True))]
    found["aligned-256B-scatter-units"] = [region(256, 3, scattered=(False, True))]
    found["aligned-1152B-copy-units"] = [region(1152, 3, scattered=(False, False))]
    found["aligned-132B-contiguous"] = [region(132, 64, apart=1)]
    found["aligned-256B-and-656B"] = [region(256, full[256]), region(656, 1, scattered=both)]
    for word in (8, 4, 2, 1):
        found[f"word{word}-256B-gather"] = [region(256, full[256], word)]
        found[f"word{word}-256B-relayout-units"] = [region(256, 3, word, scattered=both)]
    return found


def budgeted() -> dict[str, list[Region]]:
    """The same kinds of tiles, as a program takes them that has an SM to itself, and tiles of whole units: of 64 tokens
    or 16, of 24, which do not fill them, and of tokens that lie together, in powers of two and what is left: latents by
    16 and 32, 18 and 36 KiB, and rows of V3.2 by 64, 41 KiB."""
    found = {f"budgeted-256B-whole-units-of-{tokens}": [region(256, tokens)] for tokens in (64, 16, 24)}
    found["budgeted-656B-whole-units-of-24"] = [region(656, 24, scattered=(True, True))]
    found["budgeted-256B-rows-of-units-of-64"] = [region(256, 64)]
    for row, tokens in ((1152, 16), (1152, 32), (656, 64)):
        for how in ("whole-units", "rows-of-units"):
            found[f"budgeted-{row}B-{how}-of-{tokens}-together"] = [region(row, tokens, apart=1)]
    found |= {f"budgeted-{row}B-gather": [region(row, BUDGETED.block_bytes // row)] for row in (256, 2048)}
    found["budgeted-1152B-relayout-tokens"] = [region(1152, 1, scattered=(True, True))]
    found["budgeted-656B-relayout-units"] = [region(656, 3, scattered=(True, True))]
    return found


def report(name: str, regions: list[Region], config: RowConfig, architecture: int) -> dict[str, object]:
    """What the machine code of a launch says, and how many 16-byte accesses a thread should have in flight."""
    own = RowShape.of(recut(regions[0]), config.block_bytes)
    assert ("whole-units" in name) == (own.tokens > 0 and "rows-of-units" not in name)
    shapes = (own.of_any_units,) if "rows-of-units" in name else ()
    code = machine_code.of_rows(regions, config, architecture, shapes)
    memory = {"stack": code.stack_bytes, "shared": code.shared_bytes, "local": code.local_bytes, "spills": code.spills}
    return {
        "registers": code.registers,
        "memory": memory,
        "widths": code.widths(),
        "opcodes": sorted(code.opcodes),
        "integers": code.integers,
        "in_flight": code.in_flight,
        "accesses": _accesses(config, shapes[0] if shapes else own),
    }


def _accesses(config: RowConfig, own: RowShape) -> int:
    """Of 16 bytes, by each thread, for a tile."""
    nbytes, grain_bytes, rows = config.block_bytes, own.grain * own.word_bytes, own.tokens * own.grains
    if rows:
        nbytes = units_in_tile(rows, nbytes // grain_bytes) * (first_rows(rows) + rest_rows(rows)) * grain_bytes
    return nbytes // (16 * 32 * config.warps)


def main() -> None:
    architecture, wanted = int(sys.argv[1]), sys.argv[2]
    results = {
        name: report(name, regions, config, architecture)
        for config, found in ((CONFIG, cases()), (BUDGETED, budgeted()))
        for name, regions in found.items()
        if wanted == "all" or name in FEW
    }
    sys.stdout.write(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main()
